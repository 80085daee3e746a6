"""The server and the nodes of the federation: the commands that operators use, each in its namespace, and how they are
killed and started again, as a service manager would."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from torch import Tensor

from benchmarks.chaos.links import SERVER
from fedalloy.experiment.records import atomic
from fedalloy.flower.project_templates import FederationPlan, write_federation
from fedalloy.flower.protocol.tensor_messages import TensorMessage

NODES = 6
LIAR, SMALL_DISK, CLOCKS = 5, 4, (2, 3)
"""The node that lies, the one with a small disk, and those whose clocks jump."""
MARK = "FEDALLOY_CHAOS"
"""In the environment of every process, to find them all."""
FEATURES, CLASSES, PORT = 6, 3, 9092
SMALL = 8 << 20
"""Bytes of a small disk."""
ROOT = Path(__file__).resolve().parents[2]


def share(client: int) -> tuple[np.ndarray, np.ndarray]:
    """The examples of one client."""
    draw = np.random.default_rng(client)
    y = draw.integers(0, CLASSES, 40 + 10 * client)
    centres = np.random.default_rng(99).normal(size=(CLASSES, FEATURES)) + 0.5 * draw.normal(size=(CLASSES, FEATURES))
    return (centres[y] + draw.normal(size=(len(y), FEATURES))).astype(np.float32), y


def _no_number(leaf: Tensor) -> Tensor:
    return leaf * float("nan")


def _other_shape(leaf: Tensor) -> Tensor:
    return leaf.flatten()[:1]


def lies() -> tuple[np.ndarray, np.ndarray]:
    """The data of the node that lies. From here on its process sends numbers that are none, or other shapes, every
    second time; what it sends otherwise is honest."""
    from fedalloy.flower.node import answer as node

    honest, draw = vars(node)["as_records"], Random()

    def told(message: TensorMessage, **options: Any) -> Any:
        if not message.parts or draw.random() < 0.5:
            return honest(message, **options)
        change = draw.choice((_no_number, _other_shape))
        parts = {part: {name: change(leaf) for name, leaf in tree.items()} for part, tree in message.parts.items()}
        return honest(TensorMessage(message.header, parts), **options)

    setattr(node, "as_records", told)  # noqa: B010
    return share(LIAR)


def processes(mark: str) -> Iterator[int]:
    """The processes with a mark in their environment."""
    wanted = f"{MARK}={mark}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                yield int(entry.name)


@dataclass
class Service:
    """A command that is to run all the time."""

    name: str
    mark: str
    command: list[str]
    log: Path
    environment: dict[str, str]
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0
    killed: bool = False

    def start(self) -> None:
        """Start it."""
        environment = {**os.environ, **self.environment, MARK: self.mark}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self.starts, self.killed = self.starts + 1, False

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self.process is not None and self.process.poll() is None

    def kill(self) -> None:
        """Everything of it ends at once, as when the power fails."""
        self.killed = True
        for _ in range(50):
            left = list(processes(self.mark))
            if not left:
                break
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        if self.process:
            self.process.wait()

    def stop(self, patience: float = 60.0) -> bool:
        """Ask it to end, as a service manager does; whether it and all its processes were gone in time."""
        if self.running and self.process:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(patience)
        end = time.monotonic() + 10
        while (left := list(processes(self.mark))) and time.monotonic() < end:
            time.sleep(0.2)
        if left:
            self.kill()
        return not left


@dataclass
class Federation:
    """The folders, namespaces and services of the federation."""

    place: Path
    token: str
    server: Service = field(init=False)
    nodes: list[Service] = field(init=False)
    mounted: list[Path] = field(default_factory=list)

    def __post_init__(self) -> None:
        names = tuple(f"node-{number}" for number in range(NODES))
        write_federation(self.place / "fed", FederationPlan(nodes=names, host=SERVER, port=PORT))
        for number in range(NODES):
            self._configure(number)
        file = self.place / "fed" / "server" / "server.toml"
        lines = [line for line in file.read_text().splitlines() if not line.startswith("host")]
        file.write_text("\n".join([f'host = "{SERVER}"', *lines]) + "\n")
        self.server = self._service("server", 0, ["server", str(file.parent)], {})
        self.nodes = [
            self._service(name, number + 1, ["node", str(self.folder(number))], self._clock(number))
            for number, name in enumerate(names)
        ]

    @property
    def namespaces(self) -> list[str]:
        """The server's namespace and those of the nodes."""
        return [f"{self.token}-s", *(f"{self.token}-{number}" for number in range(NODES))]

    def folder(self, node: int) -> Path:
        """The folder of a node."""
        return self.place / "fed" / "nodes" / f"node-{node}"

    def disk(self, node: int | None) -> Path:
        """The small disk of a node, or that of the runs."""
        return self.place / "runs" if node is None else self.folder(node) / "store"

    def mount(self) -> None:
        """Make the small disks."""
        for place in (self.disk(None), self.disk(SMALL_DISK)):
            place.mkdir(parents=True, exist_ok=True)
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SMALL}", "tmpfs", str(place)], check=True)
            self.mounted.append(place)

    def unmount(self, keep: Path) -> None:
        """Remove the small disks; what is on them is copied first."""
        for place in self.mounted:
            shutil.copytree(place, keep / place.name, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.sock"))
            subprocess.run(["umount", "-l", str(place)], check=False)

    def set_clock(self, node: int, ahead: float) -> None:
        """Move the wall clock of a node, against the true one."""
        atomic.write_text(self.place / f"clock-{node}", f"{ahead:.0f}")

    @staticmethod
    def clocks_can_jump() -> bool:
        """Whether there is a compiler for the library that moves clocks."""
        return shutil.which("cc") is not None

    def _clock(self, node: int) -> dict[str, str]:
        if node not in CLOCKS or not self.clocks_can_jump():
            return {}
        library = self.place / "clock.so"
        source = Path(__file__).with_name("clock.c")
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
        self.set_clock(node, 0)
        return {"LD_PRELOAD": str(library), "CHAOS_CLOCK": str(self.place / f"clock-{node}")}

    def _configure(self, node: int) -> None:
        folder = self.folder(node)
        x, y = share(node)
        for place in (folder / "data", self.place / "all"):
            place.mkdir(parents=True, exist_ok=True)
            np.savez(place / f"{node}.npz", x=x, y=y)
        source = "benchmarks.chaos.services:lies" if node == LIAR else "data"
        told = {"data": f'"{source}"', "client": f'"{node}"', "threads": "1", "server": f'"{SERVER}:{PORT}"'}
        file = folder / "node.toml"
        lines = [line for line in file.read_text().splitlines() if line.partition("=")[0].strip() not in told]
        file.write_text("\n".join([*lines, *(f"{key} = {value}" for key, value in told.items())]) + "\n")

    def _service(self, name: str, namespace: int, words: list[str], extra: dict[str, str]) -> Service:
        command = ["ip", "netns", "exec", self.namespaces[namespace], sys.executable, "-m", "fedalloy", "flower"]
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        environment = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", **extra}
        (self.place / "logs").mkdir(exist_ok=True)
        log = self.place / "logs" / f"{name}.log"
        return Service(name, f"{self.token}.{name}", [*command, *words], log, environment)

    def command(self, *words: str) -> list[str]:
        """A command on the server's machine."""
        inside = ["ip", "netns", "exec", self.namespaces[0], sys.executable, "-m", "fedalloy", "flower"]
        return [*inside, *words]
