"""An operator's day: a federation of real processes, operated by the commands that the pages describe alone."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from fedalloy.cli.app import app
from fedalloy.experiment.records import atomic, toml
from fedalloy.experiment.records.reading import is_run, read_run
from fedalloy.flower.layout import NodePlace
from fedalloy.flower.node_service import NodeProcesses
from fedalloy.flower.pki import make_node_key, public_half
from fedalloy.flower.programs import TOKEN, Program, carrying, end_all, free_port, wait_until
from fedalloy.flower.service_log import ServiceLog
from fedalloy.flower.signals import EndRequest
from fedalloy.flower.status import look
from tests.flower import shares

LIMIT = 600.0
GATED = "north"


class Day:
    """The folders of a federation, the commands that run, and what they say."""

    def __init__(self, folder: Path, names: tuple[str, ...], seats: int, rounds: int) -> None:
        self.folder, self.rounds = folder, rounds
        self.server, self.run, self.recipe = folder / "fed" / "server", folder / "runs" / "study", folder / "study.toml"
        self.port = free_port()
        self.command("init", folder / "fed", "--names", ",".join(names), "--port", self.port)
        file = self.server / "server.toml"
        file.write_text(file.read_text().replace(f"local_port = {self.port + 1}", f"local_port = {free_port()}"))
        self.programs: dict[str, Program] = {}
        self.mark = f"day-{folder.name}-{self.port}"
        for number, name in enumerate(names):
            self.equip(name, number)
        engine = {"kind": "flower", "deadline": 60.0, "minimum": 2 if seats > 2 else 1, "wait": LIMIT}
        study = {**shares.tables(seats), "algorithm": {"name": "scaffold"}, "engine": engine}
        self.recipe.write_text(
            toml.dumps({**study, "run": {"rounds": rounds, "seeds": [5]}, "evaluate": {"every": 99}})
        )

    def node(self, name: str) -> Path:
        return self.folder / "fed" / "nodes" / name

    def equip(self, name: str, number: int) -> None:
        """What a site does with its folder: name its data, and choose a port."""
        shares.write_share(self.node(name) / "data", number)
        data = "tests.flower.gates:data" if name == GATED else "data"
        self.configure(name, data=data, port=free_port(), client=str(number), threads=1)

    def configure(self, name: str, **values: Any) -> None:
        file = self.node(name) / "node.toml"
        kept = [line for line in file.read_text().splitlines() if line.partition("=")[0].strip() not in values]
        file.write_text("\n".join([*kept, *(f"{key} = {json.dumps(value)}" for key, value in values.items())]) + "\n")

    def command(self, *words: object, code: int | None = 0) -> str:
        """A command that ends by itself; what it says."""
        done = CliRunner().invoke(app, ["flower", *map(str, words)])
        assert code is None or done.exit_code == code, f"{words}: {done.output}"
        assert "Traceback" not in done.output
        return done.output

    def start(self, name: str, *words: object) -> Program:
        """A command that goes on, in a process of its own."""
        line = [sys.executable, "-m", "fedalloy", "flower", *map(str, words)]
        environment = {**os.environ, TOKEN: self.mark}
        self.programs[name] = Program.start(name, line, environment, self.folder / "logs" / f"{name}.log", self.folder)
        return self.programs[name]

    def start_server(self) -> None:
        before = self.said("server").count("the server is ready")
        server = self.start("server", "server", self.server)
        wait_until(lambda: self.said("server").count("the server is ready") > before, "it was ready", LIMIT, [server])

    def start_nodes(self, *names: str) -> None:
        before = {name: self.joined(name) for name in names}
        for name in names:
            self.start(name, "node", self.node(name))
        wait_until(lambda: all(self.joined(name) > before[name] for name in names), f"{names} joined", LIMIT)
        self.wait_connected(*names)

    def start_study(self) -> None:
        self.start("study", "run", self.server, self.recipe, "-o", self.run)

    def kill(self, name: str) -> None:
        """Like a power failure: the command of a node and everything that it started."""
        self.programs[name].kill()
        end_all(self.token(name), at_once=True)

    def kill_helpers(self, name: str) -> None:
        """All processes of a node but its command and Flower's node itself."""
        command = self.programs[name].process.pid
        for pid in list(carrying(self.token(name))):
            with contextlib.suppress(OSError):
                status = Path(f"/proc/{pid}/status").read_text()
                if f"PPid:\t{command}\n" not in status:  # its child is Flower's node, of which the others are forks
                    os.kill(pid, signal.SIGKILL)

    def token(self, name: str) -> str:
        return NodeProcesses(NodePlace.read(self.node(name)), ServiceLog(), EndRequest()).token

    def kill_server(self) -> None:
        self.programs["server"].kill()
        for pid in self.of_server():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def of_server(self, word: bytes = b"") -> list[int]:
        """The processes that the server's command started: SuperLink, front and helper. The apps of runs, which go on
        when a SuperLink dies, are not among them."""
        found = []
        for pid in carrying(self.mark):
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_bytes()
                ours = b"flower-superlink" in line or b"fedalloy.flower.front" in line or b"flower-superexec" in line
                found += [pid] if ours and str(self.server).encode() in _about(pid, line) and word in line else []
        return found

    @property
    def sites(self) -> list[str]:
        return sorted(path.parent.name for path in (self.folder / "fed" / "nodes").glob("*/node.toml"))

    def said(self, name: str) -> str:
        log = self.folder / "logs" / f"{name}.log"
        return log.read_text(errors="replace") if log.exists() else ""

    def joined(self, name: str) -> int:
        """How often a node was let in: for a minute a killed one counts as connected."""
        return self.said(name).count("SuperNode ID:")

    def states(self) -> dict[str, str]:
        """What ``status`` says about every node."""
        server = look(self.server).server
        return {node.name: node.state for node in server.nodes if node.name} if server else {}

    def wait_connected(self, *names: str) -> None:
        wait_until(lambda: all(self.states().get(name) == "connected" for name in names), f"{names} joined", LIMIT)

    def round(self) -> int:
        return read_run(self.run).last_round if is_run(self.run) else 0

    def let(self, round: int) -> None:
        """Let the study go on to the end of a round, and stand still in the next one."""
        atomic.write_text(self.node(GATED) / "gate", str(round))

    def wait_round(self, round: int) -> None:
        wait_until(lambda: self.round() >= round, f"round {round} was over", LIMIT, [self.programs["server"]])

    def wait_answered(self, name: str, round: int) -> None:
        """Return when a site has sent its part of a round in which the study stands still."""

        def sent() -> bool:
            return "Sent successfully" in self.said(name).partition(f"ROUND {round}]")[2]

        wait_until(sent, f"{name} answered round {round}", LIMIT, [self.programs[name]])

    def rotate(self, name: str) -> None:
        """A site makes a new key pair, and the coordinator gets its public half."""
        private = self.node(name) / "node.key"
        for file in (private, public_half(private)):
            file.unlink()
        make_node_key(private, name)
        before = self.joined(name)
        assert name in self.command("rotate", self.server, name, public_half(private))
        if self.programs[name].running:  # it is refused, and asks again with the key that lies there now
            wait_until(lambda: self.joined(name) > before, f"{name} joined with its new key", LIMIT)

    def admit(self, name: str, like: str, number: int) -> None:
        """A new site gets a folder like that of another one, makes its own key, and is admitted."""
        kept = shutil.ignore_patterns("node.key*", "store", "data", "flwr", "gate", "held")
        shutil.copytree(self.node(like), self.node(name), ignore=kept)
        make_node_key(self.node(name) / "node.key", name)
        self.equip(name, number)
        assert name in self.command("admit", self.server, name, self.node(name) / "node.key.pub")

    def finish(self) -> str:
        """Let the study end; what its command says."""
        self.let(self.rounds + 1)
        study = self.programs["study"]
        assert study.process.wait(LIMIT) == 0, self.said("study")
        return self.said("study")

    def end(self) -> None:
        """SIGTERM ends every command, with all its processes."""
        for name in (*self.sites, "server"):
            if name in self.programs and self.programs[name].running:
                self.programs[name].process.terminate()
        for name in (*self.sites, "server"):
            if name in self.programs:
                assert self.programs[name].process.wait(LIMIT) == 0, self.said(name)
        wait_until(lambda: not list(carrying(self.mark)), "everything ended", LIMIT)

    def logs(self) -> dict[str, str]:
        """Everything that any process has written."""
        files = [*self.folder.rglob("*.log"), *self.folder.rglob("federation.log")]
        return {str(file.relative_to(self.folder)): file.read_text(errors="replace") for file in files}


def _about(pid: int, line: bytes) -> bytes:
    """Where a process belongs: its command line and its environment."""
    with contextlib.suppress(OSError):
        return line + Path(f"/proc/{pid}/environ").read_bytes()
    return line


@contextlib.contextmanager
def day(folder: Path, names: tuple[str, ...], seats: int, rounds: int) -> Iterator[Day]:
    """A day, at whose end nothing is left."""
    one = Day(folder, names, seats, rounds)
    try:
        yield one
    finally:
        for program in one.programs.values():
            if program.running:
                program.kill()
        for name in one.sites:
            if name in one.programs:
                one.kill(name)
        end_all(one.mark, at_once=True)
