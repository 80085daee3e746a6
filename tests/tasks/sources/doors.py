"""The same three clients through every door of ``fedalloy.task``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

SIZES = (8, 12, 21)
NAMES = ("north", "south", "west")


def clients() -> list[tuple[np.ndarray, np.ndarray]]:
    """Features that float32 holds exactly in any text, and two classes."""
    rng = np.random.default_rng(7)
    pairs = []
    for size in SIZES:
        x = (rng.integers(-40, 40, (size, 3)) / 8).astype(np.float32)
        pairs.append((x, (x.sum(1) > 0).astype(np.int64)))
    return pairs


def rows() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All rows in a mixed order, with the client of each; a client's rows keep their order."""
    x, y = (np.concatenate([pair[i] for pair in clients()]) for i in (0, 1))
    ids = np.repeat(NAMES, SIZES)
    places = np.argsort(np.concatenate([np.linspace(0, 1, size) for size in SIZES]), kind="stable")
    return x[places], y[places], ids[places]


def table() -> dict[str, list]:
    """The rows as columns."""
    x, y, ids = rows()
    return {
        "a": x[:, 0].tolist(),
        "b": x[:, 1].tolist(),
        "c": x[:, 2].tolist(),
        "hospital": ids.tolist(),
        "y": y.tolist(),
    }


class Rows(torch.utils.data.Dataset):
    """A map-style dataset."""

    def __init__(self) -> None:
        self.x, self.y, _ = rows()

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, row: int) -> tuple[np.ndarray, int]:
        return self.x[row], int(self.y[row])


class Stream(torch.utils.data.IterableDataset):
    """The same rows, one after the other, and how often they were asked for."""

    passes = 0

    def __iter__(self):
        Stream.passes += 1
        x, y, _ = rows()
        yield from ((torch.from_numpy(x[row]), int(y[row])) for row in range(len(y)))


class Shelf(dict):
    """A mapping that is not a plain dict: read on demand."""


def client(number: int):
    """One client, for a recipe that names this function."""
    return clients()[number]


def everyone() -> list:
    """All clients, for a recipe that names this function."""
    return clients()


def frame():
    """A frame, for a recipe that names this function."""
    import pandas

    return pandas.DataFrame(table())


def write_folder(kind: str, folder: Path) -> Path:
    """One file or folder per client."""
    for name, (x, y) in zip(NAMES, clients(), strict=True):
        if kind == "npz":
            np.savez(folder / f"{name}.npz", x=x, y=y)
        elif kind == "npy":
            (folder / name).mkdir()
            np.save(folder / name / "x.npy", x)
            np.save(folder / name / "y.npy", y)
        else:
            import pandas

            made = pandas.DataFrame({"a": x[:, 0], "b": x[:, 1], "c": x[:, 2], "y": y})
            made.to_csv(folder / f"{name}.csv", index=False) if kind == "csv" else made.to_parquet(
                folder / f"{name}.parquet"
            )
    return folder
