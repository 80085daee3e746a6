"""A complete federation on this machine: a SuperLink, its front and some SuperNodes, encrypted, on loopback."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedalloy.core.errors import RunLocked, SpecError, nearest
from fedalloy.experiment.records import atomic
from fedalloy.flower import prefork, programs
from fedalloy.flower.admission import admit
from fedalloy.flower.bundle import bundle_hash
from fedalloy.flower.database import entries
from fedalloy.flower.flwr_cli import FlwrCli, SubmittedRun
from fedalloy.flower.knock import keep_number
from fedalloy.flower.layout import RUNNING, NodePlace, ServerPlace
from fedalloy.flower.operations import answers, front_answers
from fedalloy.flower.programs import TOKEN, DidNotStart, Program, alive, birth, end_all, free_port, wait_until
from fedalloy.flower.supervision import Deaths, HelperWatch, of_this_service

STARTUP = 180.0
"""Seconds until programs must be ready; a busy machine needs many times as long as an idle one."""
_TRIES = 5
_SERVER = ("front", "server")
"""The programs of the server, in the order in which they are ended."""


@dataclass
class LocalFederation:
    """Starts what a folder of ``fedalloy flower init`` describes, on free ports; a context manager that cleans up
    everything.

    ``with LocalFederation.of(folder, apps=(app,)) as federation: federation.run(app)``

    Its nodes run fedalloy's own app, and the ``apps`` named here, as they are when it starts. If it is ``mortal``, its
    programs are asked to end when the thread that started them ends, even by a kill (on Linux).
    """

    server: ServerPlace
    nodes: dict[str, NodePlace]
    logs: Path
    startup: float = STARTUP
    apps: tuple[Path, ...] = ()
    mortal: bool = False
    programs: dict[str, Program] = field(default_factory=dict)
    node_ids: dict[str, str] = field(default_factory=dict)
    launcher: prefork.Launcher = field(default_factory=prefork.launcher)
    cli: FlwrCli = field(init=False)
    _watches: dict[str, HelperWatch] = field(default_factory=dict)
    _deaths: dict[str, Deaths] = field(default_factory=dict)
    _token: str = field(default_factory=lambda: secrets.token_hex(8))
    _bundles: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        self._bundles = tuple(bundle_hash(app) for app in self.apps)
        self.cli = FlwrCli(self.server, {TOKEN: self._token}, self.launcher)

    @staticmethod
    def of(folder: Path, logs: Path | None = None, **settings: Any) -> LocalFederation:
        """The federation that a folder describes; logs go to ``folder/logs``."""
        server = replace(ServerPlace.read(folder / "server"), host="127.0.0.1")
        places = sorted(path.parent for path in (folder / "nodes").glob("*/node.toml"))
        if not places:
            raise SpecError(f"{folder} describes no node; write it with 'fedalloy flower init'")
        nodes = {place.name: NodePlace.read(place, trial=True) for place in places}
        return LocalFederation(server, nodes, logs or folder.absolute() / "logs", **settings)

    def __enter__(self) -> LocalFederation:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server, admit the nodes, start them, and return when all of them are online."""
        self._sweep()
        self._say_where()
        self.start_server()
        for name in self.nodes:
            self._launch_node(name)
        self.wait_online(*self.nodes)
        self._say_where()

    def start_server(self) -> None:
        """Start the SuperLink, admit the nodes, and open the front; after a restart the ports are the same."""
        known = "server" in self.programs
        for attempt in range(_TRIES):
            if not known:
                self._choose_ports()
            try:
                self._start_link()
                if self.server.secure:
                    self.register()
                    self._start_front()
                return
            except DidNotStart:
                # Another program may have taken the port since it was chosen.
                taken = any(_port_taken(self.programs[name]) for name in _SERVER if name in self.programs)
                self._stop_server()
                if attempt == _TRIES - 1 or not taken:
                    raise

    def register(self) -> None:
        """Admit exactly the nodes whose public keys are in the server's folder."""
        self.node_ids = admit(self.server, self.cli)

    def start_node(self, name: str) -> None:
        """Start one node, and return when it is online. After a kill the server takes the old one for connected for up
        to a minute, and refuses a second one with the same key: this waits until then."""
        if self.server.secure:
            noticed = f"the server noticed that {name} is gone"
            wait_until(lambda: self._status(name) != "online", noticed, self.startup)
        self._launch_node(name)
        self.wait_online(name)

    def kill_node(self, name: str) -> None:
        """Kill a node and everything it started, like a power failure."""
        self._program(name).kill()
        end_all(f"{self._token}.{name}")

    def kill_server(self) -> None:
        """Kill the server and everything it started, like a power failure."""
        self._program("server").kill()
        self.cli.close()
        self._stop_server()

    def wait_online(self, *names: str) -> None:
        """Return when these nodes are online."""
        needed = [self.programs[name] for name in ("server", *names)]
        wait_until(lambda: self._online(names), f"{', '.join(names)} went online", self.startup, needed)

    def look_after(self, say: Callable[[str], None]) -> None:
        """Start again what died of the nodes, and Flower's helpers; the end of the server is an error."""
        for name, program in list(self.programs.items()):
            if program.running:
                continue
            ended = f"{name} ended with exit code {program.process.returncode}"
            if name in _SERVER:
                raise DidNotStart(f"{ended}\n{program.complaint()}")
            self._deaths.setdefault(name, Deaths()).note(name)
            say(f"{ended}; it is started again")
            end_all(f"{self._token}.{name}", at_once=True)
            self._launch_node(name, patient=True)
        for watch in self._watches.values():
            watch.say = say
            watch.look()

    def run(self, app: Path, config: Mapping[str, str | int] | None = None) -> SubmittedRun:
        """Start a run of a Flower app."""
        return self.cli.start_run(app, config)

    def stop(self) -> None:
        """End everything, nodes first, so that they can sign off at the server."""
        self.cli.close()
        nodes = [program for name, program in self.programs.items() if name not in _SERVER]
        for program in nodes:
            program.process.terminate()
        for program in (*nodes, *(self.programs[name] for name in _SERVER if name in self.programs)):
            program.stop()
        for name in self.programs:
            end_all(f"{self._token}.{name}")
        for watch in self._watches.values():
            watch.stop()
        self.running_file.unlink(missing_ok=True)

    @property
    def running_file(self) -> Path:
        """The file with the address of this federation while it runs, for ``fedalloy flower status``."""
        return self.server.folder / RUNNING

    def _sweep(self) -> None:
        """Remove what is left of a killed session: its programs, and the server's database, which would list those
        programs as connected. The nodes' identities do not depend on it."""
        if self.running_file.exists():
            known = json.loads(self.running_file.read_text(encoding="utf-8"))
            if alive(known["pid"], known.get("born", "")):
                raise RunLocked(f"the federation in {self.server.folder} is running already (process {known['pid']})")
            for name in (*_SERVER, *known["nodes"]):
                end_all(f"{known['mark']}.{name}")
        for left in (*self.server.folder.glob("state.db*"), *(self.server.folder / "nodes").glob("*.id")):
            left.unlink()

    def _choose_ports(self) -> None:
        port = free_port()
        local = next(other for other in iter(free_port, None) if other != port)
        self.server = replace(self.server, port=port, local_port=local)

    def _start_link(self) -> None:
        self.cli.close()
        self.cli = FlwrCli(self.server, {TOKEN: self._token}, self.launcher)
        program = self._launch("server", programs.superlink(self.launcher, self.server), self.server.home)
        wait_until(lambda: answers(self.server), "the server answered", self.startup, [program])

    def _start_front(self) -> None:
        program = self._launch("front", programs.front(self.server), self.server.home)
        needed = [program, self.programs["server"]]
        wait_until(lambda: front_answers(self.server), "the front answered", self.startup, needed)

    def _stop_server(self) -> None:
        for name in _SERVER:
            if name in self.programs:
                self.programs[name].stop()
                end_all(f"{self._token}.{name}")

    def _say_where(self) -> None:
        ports = {"port": self.server.port, "local_port": self.server.link_port}
        known = {
            "pid": os.getpid(),
            "born": birth(os.getpid()),
            "mark": self._token,
            **ports,
            "nodes": list(self.nodes),
        }
        atomic.write_text(self.running_file, json.dumps(known, indent=2) + "\n")

    def _program(self, name: str) -> Program:
        if name not in self.programs:
            raise SpecError(f"'{name}' was not started; {nearest(name, self.programs)}")
        return self.programs[name]

    def _launch(self, name: str, command: list[str], home: Path) -> Program:
        announced, ours = home / "processes", name in _SERVER
        mark = {TOKEN: f"{self._token}.{name}", **HelperWatch.variables(announced)}
        mark |= of_this_service() if self.mortal else {}
        if ours:
            environment = programs.server_environment(self.launcher, self.server, mark)
        else:
            environment = programs.environment(self.launcher, home, mark)
        place, log = self.server.folder if ours else self.nodes[name].folder, self.logs / f"{name}.log"
        if name != "front":
            self._watches[name] = HelperWatch(announced, name, environment, print, log=log)
        self.programs[name] = Program.start(name, command, environment, log, place)
        return self.programs[name]

    def _launch_node(self, name: str, patient: bool = False) -> None:
        """Start a node; a ``patient`` one signs off its predecessor and asks until it is let in."""
        place = replace(self.nodes[name], port=free_port(), server=self.server.door)
        if patient and name in self.node_ids:
            keep_number(place.number_file, self.node_ids[name])
        # Keys that Flower's examples expect, so that other apps can run here too.
        share: dict[str, str | int] = {"partition-id": list(self.nodes).index(name), "num-partitions": len(self.nodes)}
        self._launch(name, programs.supernode(self.launcher, place, share, self._bundles, patient), place.home)

    def _online(self, names: tuple[str, ...]) -> bool:
        """Whether the nodes are online; without authentication they have no names, and are only counted."""
        online = {one.number for one in entries(self.server) if one.status == "online"}
        if not self.server.secure:
            return len(online) >= sum(self.programs[name].running for name in self.nodes if name in self.programs)
        return online >= {self.node_ids[name] for name in names}

    def _status(self, name: str) -> str:
        return next(one.status for one in entries(self.server) if one.number == self.node_ids[name])


def _port_taken(program: Program) -> bool:
    return "address already in use" in program.complaint().lower()
