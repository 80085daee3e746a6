"""The faults: each one happens, lasts a while, and is healed."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from benchmarks.chaos.links import Links
from benchmarks.chaos.services import CLOCKS, NODES, SMALL_DISK, Federation, Service, processes

_FILLING = "filling"


@dataclass(order=True)
class Healing:
    """What ends a fault, and when."""

    at: float
    end: Callable[[], None] = field(compare=False)


@dataclass
class Faults:
    """Draws faults, injects them and heals them."""

    federation: Federation
    links: Links
    random: Random
    say: Callable[[str], None]
    count: Counter[str] = field(default_factory=Counter)
    healing: list[Healing] = field(default_factory=list)
    study: Path | None = None

    def one(self) -> None:
        """Inject a fault, if it can happen now."""
        kinds: dict[str, tuple[float, Callable[[], str]]] = {
            "node killed": (3, self._kill_node),
            "process of a node killed": (2, self._kill_process),
            "server app killed": (1.5, self._kill_app),
            "server killed": (0.7, self._kill_server),
            "SuperLink killed": (0.5, self._kill_link),
            "link slow to answer": (1.5, lambda: self._link(delay=self.random.choice((0.05, 0.1, 0.3)))),
            "link loses packets": (1.5, lambda: self._link(loss=self.random.choice((0.02, 0.05, 0.1)))),
            "link of little capacity": (1, lambda: self._link(rate=self.random.choice((16_000.0, 125_000.0)))),
            "link cut": (1.5, lambda: self._link(cut=True)),
            "disk of a node full": (1, lambda: self._fill(SMALL_DISK)),
            "disk of the server full": (0.5, lambda: self._fill(None)),
            "clock jumped": (1.0 if self.federation.clocks_can_jump() else 0.0, self._jump),
        }
        kind = self.random.choices(list(kinds), [chance for chance, _ in kinds.values()])[0]
        if what := kinds[kind][1]():
            self.count[kind] += 1
            self.say(f"fault: {kind}: {what}")

    def heal(self, everything: bool = False) -> None:
        """End the faults that are over, and start again what ended, as a service manager does."""
        now = time.monotonic()
        due = [one for one in self.healing if everything or one.at <= now]
        self.healing = [one for one in self.healing if one not in due]
        for one in due:
            one.end()
        for service in (self.federation.server, *self.federation.nodes):
            if not service.running and not service.killed:
                self.say(f"{service.name} ended; it is started again")
                service.start()

    def _later(self, seconds: float, end: Callable[[], None]) -> None:
        self.healing.append(Healing(time.monotonic() + seconds, end))

    def _node(self) -> int:
        return self.random.randrange(NODES)

    def _kill_node(self) -> str:
        return self._power_failure(self.federation.nodes[self._node()])

    def _kill_server(self) -> str:
        return self._power_failure(self.federation.server)

    def _power_failure(self, service: Service) -> str:
        if service.killed:
            return ""
        away = self.random.choice((1.0, 5.0, 15.0))
        service.kill()
        self._later(away, lambda: None if service.running else service.start())
        return f"{service.name}, for {away:.0f} s"

    def _kill_process(self) -> str:
        service = self.federation.nodes[self._node()]
        return self._kill_one(service, lambda line: True)

    def _kill_link(self) -> str:
        return self._kill_one(self.federation.server, lambda line: b"flower-superlink" in line)

    def _kill_one(self, service: Service, wanted: Callable[[bytes], bool]) -> str:
        found: list[int] = []
        for pid in processes(service.mark):
            with contextlib.suppress(OSError):
                if wanted(Path(f"/proc/{pid}/cmdline").read_bytes()):
                    found.append(pid)
        if service.killed or not found:
            return ""
        pid = self.random.choice(found)
        with contextlib.suppress(OSError):
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:200]
            os.kill(pid, signal.SIGKILL)
            return f"{service.name}, process {pid} ({' '.join(word.rpartition('/')[2] for word in line.split())[:60]})"
        return ""

    def _kill_app(self) -> str:
        """The process that writes the study, if it is at work."""
        if self.study is None:
            return ""
        with contextlib.suppress(OSError, ValueError, IndexError):
            pid = int((self.study / "lock").read_text().split()[0])
            if pid in list(processes(self.federation.server.mark)):
                os.kill(pid, signal.SIGKILL)
                return f"process {pid}"
        return ""

    def _link(self, **settings: float | bool) -> str:
        link, seconds = self._node(), self.random.choice((5.0, 15.0, 40.0))
        self.links.set(link, **settings)
        self._later(seconds, lambda: self.links.heal(link))
        return f"node-{link}, {settings}, for {seconds:.0f} s"

    def _fill(self, node: int | None) -> str:
        file = self.federation.disk(node) / _FILLING
        if file.exists():
            return ""
        seconds = self.random.choice((5.0, 15.0))
        with contextlib.suppress(OSError), file.open("wb", buffering=0) as disk:
            while True:
                disk.write(bytes(1 << 16))
        self._later(seconds, lambda: file.unlink(missing_ok=True))
        return f"{'runs' if node is None else f'node-{node}'}, for {seconds:.0f} s"

    def _jump(self) -> str:
        node, ahead = self.random.choice(CLOCKS), self.random.choice((-120.0, -3.0, 3.0, 20.0, 3600.0))
        seconds = self.random.choice((10.0, 30.0))
        self.federation.set_clock(node, ahead)
        self._later(seconds, lambda: self.federation.set_clock(node, 0))
        return f"node-{node}, by {ahead:+.0f} s, for {seconds:.0f} s"
