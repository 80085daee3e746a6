"""Small data for federations: who needs them makes them, so that nodes are quick to start and nothing is shared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

FEATURES, CLASSES = 6, 3
SIZES = (40, 70, 55, 40, 40, 40)


def share(client: int) -> tuple[Any, Any]:
    """The examples of one client: three classes around centres that are a little off from client to client."""
    draw = np.random.default_rng(client)
    y = draw.integers(0, CLASSES, SIZES[client])
    centres = np.random.default_rng(99).normal(size=(CLASSES, FEATURES)) + 0.5 * draw.normal(size=(CLASSES, FEATURES))
    return (centres[y] + draw.normal(size=(len(y), FEATURES))).astype(np.float32), y


def write_share(folder: Path, client: int) -> None:
    """The folder of a node."""
    x, y = share(client)
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / f"{client}.npz", x=x, y=y)


def tables(clients: int) -> dict[str, Any]:
    """The tables of a recipe for such nodes."""
    return {
        "task": {
            "dataset": {"kind": "nodes", "shape": [FEATURES], "classes": CLASSES},
            "model": {"kind": "mlp", "hidden": [8]},
            "valid_fraction": 0.1,
        },
        "partition": {"clients": clients},
    }


def simulation(folder: Path, clients: int) -> dict[str, Any]:
    """The tables that simulate the same clients."""
    for client in range(clients):
        write_share(folder, client)
    made = tables(clients)
    return {"task": {**made["task"], "dataset": {"kind": "folder", "path": str(folder)}}, "partition": {}}
