"""What writers do that tests kill: what the driver does. One takes the lock, goes back to the last good checkpoint, and
continues. Not a test itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fedalloy.core.protocols import ClientStore
from fedalloy.experiment.records.disk_store import DiskStore
from fedalloy.experiment.records.folder import RunFolder
from fedalloy.experiment.records.store import MemoryStore

ROUNDS = 300
EVERY = 3


def server_after(round: int) -> dict[str, Any]:
    """A state that is a function of the round, so that any checkpoint can be checked."""
    return {"params": {"w": torch.arange(200.0) * round}, "weighting": {"seen": round}}


def rows_of(round: int) -> dict[str, dict[str, Any]]:
    ids = [round % 5, round % 5 + 7]
    return {
        "rounds": {"round": round, "ids": ids, "weights": torch.tensor([1 / round, 0.5]), "train_loss": 1 / round},
        "clients": {"round": round, "split": "test", "ids": ids, "accuracy": [round / 7, float("nan")]},
        "timings": {"round": round, "seconds": 0.25},
    }


def client_after(round: int) -> dict[str, Any]:
    return {"solver": {"seen": torch.tensor(round), "model": torch.arange(3000.0) * round}}


def make_store(kind: str, folder: RunFolder) -> ClientStore:
    return DiskStore(folder.clients) if kind == "disk" else MemoryStore()


def write_run(kind: str, path: Path, rounds: int = ROUNDS) -> None:
    """Run to the end from wherever the folder stands."""
    folder = RunFolder.open(path)
    with folder.lock():
        last = folder.latest()
        folder.rewind(last)
        store = make_store(kind, folder)
        store.restore(last.round if last else 0, last.clients if last else {})
        for round in range(last.round + 1 if last else 1, rounds + 1):
            for stream, row in rows_of(round).items():
                folder.append(stream, row)  # type: ignore[arg-type]
            store.put(round, {round % 5: client_after(round), 7 * round % 11: client_after(round)})
            if round % EVERY == 0:
                folder.checkpoint(round, server_after(round), store.commit(round), {"clock": round / 8})
            elif round % 2:
                folder.flush()  # so that a kill finds rows beyond the checkpoint on disk
        folder.set_status("finished", rounds)
