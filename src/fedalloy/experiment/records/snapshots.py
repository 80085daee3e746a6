"""Synthetic samples after some of a run's rounds, kept in its folder: ``synthetic/round-000050.safetensors``."""

from __future__ import annotations

import re
from pathlib import Path

from torch import Tensor

from fedalloy.core.errors import CheckpointError
from fedalloy.experiment.records import atomic, checkpoint

FOLDER = "synthetic"
_NAME = re.compile(r"round-(\d+)\.safetensors")


def save(run: Path, round: int, x: Tensor, y: Tensor) -> Path:
    """Keep the samples of a round; the same round gives the same file, so a resumed run may write it again."""
    folder = run / FOLDER
    atomic.make_folder(folder)
    for leftover in atomic.leftovers(folder):
        leftover.unlink(missing_ok=True)
    path = folder / f"round-{round:06d}.safetensors"
    checkpoint.save(path, {"round": round, "x": x.detach().cpu().contiguous(), "y": y.detach().cpu().contiguous()})
    return path


def forget(run: Path, round: int) -> None:
    """Remove the samples of a round."""
    (run / FOLDER / f"round-{round:06d}.safetensors").unlink(missing_ok=True)


def rounds(run: Path) -> list[int]:
    """The rounds whose samples a run has kept, ascending."""
    folder = run / FOLDER
    found = (_NAME.fullmatch(path.name) for path in folder.iterdir()) if folder.is_dir() else ()
    return sorted(int(match[1]) for match in found if match)


def load(run: Path, round: int) -> tuple[Tensor, Tensor]:
    """The samples of one round."""
    known = rounds(run)
    if round not in known:
        kept = f"kept are {', '.join(map(str, known))}" if known else "it kept none"
        raise CheckpointError(
            f"{run} has no samples of round {round}: {kept}; snapshots = N in [evaluate] keeps some every N rounds"
        )
    state = checkpoint.load(run / FOLDER / f"round-{round:06d}.safetensors")
    return state["x"], state["y"]
