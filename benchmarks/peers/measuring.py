"""One workload: all peers loaded side by side, then in turns, with equal work checked first."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.environments import Peer
from benchmarks.peers.taking_turns import PeerFailed, Running, Turn
from benchmarks.workloads import LR, Workload, task_of
from fedalloy.core.keys import Key

UNEQUAL = 0.1
"""Equal work moves the model equally far, up to the peers' own draws of clients and batches."""
CHECKED = {"W1": 10, "W2": 5, "W3": 2, "W4": 5}
"""Rounds after which the models are compared."""


@dataclass
class Found:
    """What is known about one peer on one workload."""

    version: str = ""
    moved: float = 0.0
    threads: int | None = None
    turns: list[Turn] = field(default_factory=list)
    error: str = ""

    @contextmanager
    def errors(self) -> Iterator[None]:
        """A peer that fails is out, with its error; the others go on."""
        try:
            yield
        except (PeerFailed, OSError) as error:
            self.error = str(error)

    @property
    def quiet(self) -> list[Turn]:
        """The undisturbed turns, or all if there is none."""
        return [turn for turn in self.turns if not turn.disturbed] or self.turns

    def summary(self) -> dict[str, Any]:
        if self.error:
            return {"version": self.version, "error": self.error}
        rounds = [1e3 * second for turn in self.quiet for second in turn.seconds]
        low, middle, high = statistics.quantiles(rounds, n=4, method="inclusive")
        return {
            "version": self.version, "threads": self.threads, "moved": self.moved, "ms": middle, "ms_low": low,
            "ms_high": high, "rounds": len(rounds), "repeats_ms": [1e3 * middle_of(turn) for turn in self.turns],
            "disturbed": [turn.disturbed for turn in self.turns],
            "others": [round(turn.others, 3) for turn in self.turns],
        }  # fmt: skip


def middle_of(turn: Turn) -> float:
    return statistics.median(turn.seconds)


def write(load: Workload, folder: Path) -> None:
    """The data and the initial model of a workload, for every peer the same."""
    task = task_of(load)
    initial = task.objective.init(Key.of(0).fold("model"))[0]
    folder.mkdir(parents=True)
    np.save(folder / "x.npy", task.train.x.numpy())
    np.save(folder / "y.npy", task.train.y.numpy())
    arrays: dict[str, Any] = {name: leaf.numpy() for name, leaf in initial.items()}
    np.savez(folder / "initial.npz", **arrays)
    numbers = {name: getattr(load, name) for name in ("name", "clients", "examples", "batch", "cohort")}
    (folder / "workload.json").write_text(json.dumps({**numbers, "lr": LR}))


def measure(
    load: Workload, peers: tuple[Peer, ...], folder: Path, repeats: int, seconds: float, limit: float, patience: float
) -> dict[str, Any]:
    """All peers on one workload; ``seconds`` is the length of a turn."""
    write(load, folder)
    found = {peer: Found() for peer in peers}
    rounds: dict[Peer, int] = {}
    with running(peers, folder, limit) as started:
        for peer, process in started.items():
            with found[peer].errors():
                found[peer].version, found[peer].moved = process.ready(), process.check(CHECKED[load.name])
        _compare(found)
        for peer, process in _well(started, found):
            with found[peer].errors():
                found[peer].threads, rounds[peer] = _fitted_turn(process, seconds)
        for repeat in range(repeats):
            order = _well(started, found)
            first = repeat % max(1, len(order))
            for peer, process in order[first:] + order[:first]:
                with found[peer].errors():
                    found[peer].turns.append(process.turn(rounds[peer], patience))
    told = {peer.name: one.summary() for peer, one in found.items()}
    return {"what": load.what, "checked_rounds": CHECKED[load.name], "runs": told, "ratios": ratios(found)}


@contextmanager
def running(peers: tuple[Peer, ...], folder: Path, limit: float) -> Iterator[dict[Peer, Running]]:
    """All peers' processes; they load at the same time, because nothing is measured yet."""
    started = {peer: Running(peer, folder, limit) for peer in peers}
    try:
        yield started
    finally:
        for process in started.values():
            process.close()


def _well(started: dict[Peer, Running], found: dict[Peer, Found]) -> list[tuple[Peer, Running]]:
    """The peers without an error; the others are ended, so that they disturb nobody."""
    for peer, process in started.items():
        if found[peer].error:
            process.close()
    return [(peer, process) for peer, process in started.items() if not found[peer].error]


def _compare(found: dict[Peer, Found]) -> None:
    """Refuse the times of a peer that did other work."""
    ours = next(one for peer, one in found.items() if peer.name == "fedalloy")
    right = ours.moved
    for one in found.values():
        if ours.error and not one.error:
            one.error = "not measured, because fedalloy failed"
        elif not one.error and abs(one.moved / right - 1) > UNEQUAL:
            one.error = f"unequal work: the model moved by {one.moved:.4g} instead of {right:.4g}"


def _fitted_turn(process: Running, seconds: float) -> tuple[int | None, int]:
    """The better number of threads, where it can be chosen, and how many rounds fill a turn."""
    choices: list[int | None] = [*sorted({1, os.cpu_count() or 1})] if process.peer.threads else [None]
    took: dict[int | None, float] = {}
    for threads in choices:
        if threads is not None:
            process.threads(threads)
        took[threads] = min(process.turn(2, 0.0).seconds)
    best = min(took, key=took.__getitem__)
    if best is not None:
        process.threads(best)
    return best, max(2, min(500, round(seconds / took[best])))


def ratios(found: dict[Peer, Found]) -> dict[str, dict[str, float]]:
    """How many times as long every peer takes as fedalloy, repeat by repeat: the median and the quartiles."""
    ours = next(one for peer, one in found.items() if peer.name == "fedalloy")
    told = {}
    for peer, one in found.items():
        if one is ours or one.error or ours.error:
            continue
        pairs = list(zip(one.turns, ours.turns, strict=True))
        quiet = [pair for pair in pairs if not any(turn.disturbed for turn in pair)] or pairs
        values = [middle_of(theirs) / middle_of(mine) for theirs, mine in quiet]
        low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
        told[peer.name] = {"ratio": middle, "low": low, "high": high, "repeats": len(values)}
    return told
