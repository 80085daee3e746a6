"""Runs that are extended afterwards: what was done only because a round was the last one is removed again.

The last round is always evaluated, mixed and kept as a snapshot. Where the schedule alone would not have done so, its
checkpoint also holds the round as it would be in a longer run: its lines in the records, and the driver's state
after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedalloy.core import aspects
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.errors import CheckpointError
from fedalloy.core.protocols import LocalSolver
from fedalloy.core.types import State
from fedalloy.experiment.config import RunConfig
from fedalloy.experiment.records import snapshots
from fedalloy.experiment.records.folder import Checkpoint, RunFolder
from fedalloy.experiment.records.stream import encode

LAST = "last"
"""The checkpoint key under which a round is kept as it would be if more rounds followed."""


@dataclass(frozen=True)
class Due:
    """What is done after a round besides training."""

    evaluate: bool
    mix: bool
    snapshot: bool


def due(config: RunConfig, solver: LocalSolver, round: int, last: bool) -> Due:
    """What is due in a round by the schedule; everything is due in the last one."""
    mix = (last or _every(config.mix_every, round)) and aspects.is_mixable(solver)
    evaluate = last or mix or _every(config.evaluate_every, round)
    return Due(evaluate, mix, config.snapshot_every is not None and (last or _every(config.snapshot_every, round)))


def _every(rounds: int | None, round: int) -> bool:
    return rounds is not None and round % rounds == 0


def kept(progress: Mapping[str, Any], row: Mapping[str, Any], clients: Iterable[Mapping[str, Any]]) -> State:
    """A round as it would be in a longer run, for its checkpoint; lines are bytes, to keep the header small."""
    return {"progress": dict(progress), "rounds": _lines([row]), "clients": _lines(clients)}


def _lines(rows: Iterable[Mapping[str, Any]]) -> torch.Tensor:
    text = "".join(f"{encode(row)}\n" for row in rows).encode("ascii")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.zeros(0, dtype=torch.uint8)


def check_length(path: Path, algorithm: Algorithm, there: int, here: int) -> None:
    """Refuse a shorter run, and a longer one whose earlier rounds would have been different."""
    if here < there:
        raise CheckpointError(
            f"{path} is a run of {there} rounds, and {here} are requested: a run can be made longer but not shorter; "
            "choose another folder"
        )
    why = algorithm.uses_length if here > there else ""
    if here > there and not why and _steps_differ(algorithm.solver, there, here):
        why = "the local step size depends on the number of rounds"
    if why:
        raise CheckpointError(
            f"{path} is a run of {there} rounds and cannot be made one of {here}, as its rounds depend on how many "
            f"there are ({why}): run again elsewhere"
        )


def _steps_differ(solver: LocalSolver, there: int, here: int) -> bool:
    return any(solver.lr_at(round, there) != solver.lr_at(round, here) for round in range(1, there + 1))


def check_last(path: Path, saved: Checkpoint, config: RunConfig, solver: LocalSolver, there: int) -> None:
    """Refuse to lengthen runs of earlier versions, which did not keep their last round as it would be otherwise."""
    was_last = saved.round == there < config.rounds and LAST not in saved.extra
    if was_last and due(config, solver, there, last=True) != due(config, solver, there, last=False):
        raise CheckpointError(
            f"{path} cannot be made longer: it was written by an earlier version, which did not keep what its last "
            "round would have been without the evaluation at the end; run again elsewhere"
        )


def reopen_last(folder: RunFolder, saved: Checkpoint) -> State:
    """Rewrite the last round's records as they would be in a longer run; returns the driver's state after it."""
    last = saved.extra[LAST]
    folder.rewind(saved, {name: last[name].numpy().tobytes() for name in ("rounds", "clients")})
    progress: State = last["progress"]
    return progress


def tidy_snapshots(folder: RunFolder, config: RunConfig, after: int) -> None:
    """Delete the samples that were kept only because a round was the last."""
    for round in snapshots.rounds(folder.path):
        if round > after or (round != config.rounds and not _every(config.snapshot_every, round)):
            snapshots.forget(folder.path, round)
