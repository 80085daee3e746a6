"""Is anybody else using the processor? Read from ``/proc``, in seconds of processor time."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

_TICK = os.sysconf("SC_CLK_TCK")
IDLE = 0.05
"""The machine is idle if its cores are used for less than this share of the time."""
DISTURBED = 0.05
"""A turn is disturbed if other processes used more than this share of one core."""


def busy_seconds() -> float:
    """Processor time of all processes since the machine was started, time stolen by other machines included."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9])
    return (user + nice + system + irq + softirq + steal) / _TICK


def seconds_of(process: int) -> float:
    """Processor time of a process, of its children and of those that have ended."""
    table = _processes()
    return sum(table[one][1] for one in _descendants(process, table)) / _TICK


def wait_until_idle(limit: float, look: float = 0.5) -> bool:
    """Wait until nobody uses the processor, at most ``limit`` seconds; false if it is still busy then."""
    give_up = time.monotonic() + limit
    while True:
        before = busy_seconds()
        time.sleep(look)
        if busy_seconds() - before < IDLE * look * (os.cpu_count() or 1):
            return True
        if time.monotonic() > give_up:
            return False


def describe() -> dict[str, object]:
    """The machine in words: processor, cores and memory."""
    names = [line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": names[0] if names else platform.machine(),
        "cores": os.cpu_count(),
        "memory_gb": round(pages / 1e9),
        "python": platform.python_version(),
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def _processes() -> dict[int, tuple[int, int]]:
    """The parent of every process, and its processor time with that of its ended children, in ticks."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        found[int(folder.name)] = int(fields[1]), sum(map(int, fields[11:15]))
    return found


def _descendants(process: int, table: dict[int, tuple[int, int]]) -> set[int]:
    found = {process} & table.keys()
    while more := {one for one, (parent, _) in table.items() if parent in found} - found:
        found |= more
    return found
