"""What the processes of a federation cost: processor time and memory, by program."""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path

from fedalloy.flower.programs import carrying

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Usage:
    """Processor seconds, and the largest memory of all processes together, in bytes. Pages that processes share count
    once in all."""

    seconds: float = 0.0
    memory: int = 0


@dataclass
class Accountant:
    """Looks at the processes of some programs, by their tokens, until it is stopped."""

    tokens: dict[str, str]
    every: float = 0.5
    usage: dict[str, Usage] = field(default_factory=dict)
    programs: dict[tuple[str, str], Usage] = field(default_factory=dict)
    _spent: dict[tuple[str, int], tuple[str, float]] = field(default_factory=dict)
    _begun: dict[tuple[str, int], float] = field(default_factory=dict)
    _over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Accountant:
        self.look()
        self._begun = {key: seconds for key, (_, seconds) in self._spent.items()}
        self.usage, self.programs = {}, {}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread:
            self._thread.join()
        self.look()
        for key, (program, seconds) in self._spent.items():
            spent = seconds - self._begun.get(key, 0.0)
            self.usage.setdefault(key[0], Usage()).seconds += spent
            self.programs.setdefault((key[0], program), Usage()).seconds += spent

    def _run(self) -> None:
        while not self._over.wait(self.every):
            self.look()

    def look(self) -> None:
        """Note what every process has spent so far, and what all hold now."""
        for name, token in self.tokens.items():
            held: dict[str, int] = {}
            for pid in carrying(token):
                with contextlib.suppress(OSError, ValueError, IndexError):
                    program = program_of(pid)
                    self._spent[name, pid] = program, seconds_of(pid)
                    held[program] = held.get(program, 0) + memory_of(pid)
            one = self.usage.setdefault(name, Usage())
            one.memory = max(one.memory, sum(held.values()))
            for program, memory in held.items():
                kept = self.programs.setdefault((name, program), Usage())
                kept.memory = max(kept.memory, memory)


def seconds_of(pid: int) -> float:
    """The processor time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def memory_of(pid: int) -> int:
    """The memory of a process; of pages that it shares, its part."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return 1024 * int(line.split()[1])
    return 0


def program_of(pid: int) -> str:
    """Which program a process is: by its name if it is a fork, else by its command line."""
    name = Path(f"/proc/{pid}/comm").read_text().strip()
    if name.startswith(("flwr-", "flower-")):
        return {"flower-superexe": "flower-superexec"}.get(name, name.removesuffix("+"))
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    known = ("flwr-serverapp", "flwr-clientapp", "flower-superexec", "flower-superlink", "flower-supernode", "front",
             "worker")  # fmt: skip
    for word in words:
        for name in known:
            if word.endswith(name):
                return name
    return words[0].rpartition("/")[2]
