"""What the driver of the engine ``ray`` knows of its workers and of the blocks of a round."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from fedalloy.core.types import Context, Work
from fedalloy.engines.cluster.packing import Packed
from fedalloy.engines.cluster.worker import BlockReport


@dataclass(frozen=True)
class WorkerShape:
    """How many workers there are, and what each of them takes."""

    count: int
    cpus: float
    gpus: float

    def at_once(self, cores: int) -> int:
        """How many can run at the same time on one machine."""
        return max(1, int(cores / self.cpus))

    def too_many(self, cores: int) -> str:
        """What more workers than that mean."""
        most, each = self.at_once(cores), f"{self.cpus:g} CPUs each"
        return (
            f"{self.count} workers of {each} share {cores} cores of this machine: more than {most} take turns, and "
            f"each needs memory; the run begins with {most}, the others join when they have started"
        )


@dataclass(eq=False)
class PoolWorker:
    """One worker: its actor, where it runs, and the blocks that it was given, in order."""

    actor: Any
    name: str = ""
    node: str = ""
    given: deque[int] = field(default_factory=deque)


@dataclass(frozen=True)
class BlockOrder:
    """One block of a round: its clients, their packed states, and how much work it is."""

    work: Work
    states: Packed
    size: float


@dataclass
class RoundOrders:
    """One call of the engine: enough to run any of its blocks again; ``deaths`` are machines, by block."""

    call: int
    shared: Any
    ctx: Context
    blocks: list[BlockOrder]
    reports: dict[int, BlockReport] = field(default_factory=dict)
    holder: dict[int, PoolWorker] = field(default_factory=dict)
    deaths: dict[int, list[str]] = field(default_factory=dict)
