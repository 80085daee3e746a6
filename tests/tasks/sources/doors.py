"""The same clients through every door of ``fedalloy.task``: as values, as files, and by functions that recipes name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

SIZES = (8, 12, 21)
NAMES = ("north", "south", "west")
WORDS = ("fever", "cough", "rash", "pain")


def clients() -> list[tuple[np.ndarray, np.ndarray]]:
    """Features that float32 holds exactly in any text, and two classes."""
    rng = np.random.default_rng(7)
    pairs = []
    for size in SIZES:
        x = (rng.integers(-40, 40, (size, 3)) / 8).astype(np.float32)
        pairs.append((x, (x.sum(1) > 0).astype(np.int64)))
    return pairs


def split(valid: bool = True) -> list[dict[str, Any]]:
    """The clients with parts of their own."""
    found = []
    for x, y in clients():
        cut = len(y) - 5
        rows = {"train": slice(cut), "valid": slice(cut, cut + 2), "test": slice(cut + 2, None)}
        rows = rows if valid else {"train": slice(cut), "test": slice(cut, None)}
        found.append({part: (x[some], y[some]) for part, some in rows.items()})
    return found


def rows() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All rows in a mixed order, with the client of each; a client's rows keep their order."""
    x, y = (np.concatenate([pair[i] for pair in clients()]) for i in (0, 1))
    owner = np.repeat(NAMES, SIZES)
    places = np.argsort(np.concatenate([np.linspace(0, 1, size) for size in SIZES]), kind="stable")
    return x[places], y[places], owner[places]


def table() -> dict[str, list]:
    """The rows as columns."""
    x, y, owner = rows()
    return {**columns(x, y), "hospital": owner.tolist()}


def columns(x: np.ndarray, y: np.ndarray) -> dict[str, list]:
    return {"a": x[:, 0].tolist(), "b": x[:, 1].tolist(), "c": x[:, 2].tolist(), "y": y.tolist()}


def split_table() -> dict[str, list]:
    """The rows of all parts as columns, with a column that says which part."""
    found: dict[str, list] = {name: [] for name in ("a", "b", "c", "y", "hospital", "part")}
    for name, parts in zip(NAMES, split(), strict=True):
        for part, (x, y) in parts.items():
            more = {**columns(x, y), "hospital": [name] * len(y), "part": [part] * len(y)}
            for column, values in more.items():
                found[column] += values
    return found


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


# ---------------------------------------------------------------------------------- functions that recipes name


def client(number: int):
    return clients()[number]


def everyone() -> list:
    return clients()


def mapping() -> dict:
    return dict(zip(NAMES, clients(), strict=True))


def tuples() -> list:
    return [tuple(parts.values()) for parts in split()]


def pairs_of_parts() -> list:
    return [tuple(parts.values()) for parts in split(valid=False)]


def parts_of_client(number: int) -> dict:
    return split()[number]


def arrays() -> tuple:
    return rows()[:2]


def ids() -> np.ndarray:
    return rows()[2]


def id_of(example: Any) -> str:
    """The client of an example, found by its features."""
    x, _, owner = rows()
    return str(owner[int(np.flatnonzero((x == np.asarray(example[0])).all(1))[0])])


def frame():
    import pandas

    return pandas.DataFrame(table())


def split_frame():
    import pandas

    return pandas.DataFrame(split_table())


def polars_frame():
    import polars

    return polars.DataFrame(table())


def frames() -> dict:
    import pandas

    return {name: pandas.DataFrame(columns(x, y)) for name, (x, y) in zip(NAMES, clients(), strict=True)}


def split_frames() -> list:
    import pandas

    return [{part: pandas.DataFrame(columns(*pair)) for part, pair in parts.items()} for parts in split()]


def hub():
    import datasets

    return datasets.Dataset.from_dict(table())


def plain_hub():
    return hub().remove_columns("hospital")


def split_hub():
    import datasets

    return datasets.Dataset.from_dict(split_table())


def hub_dict():
    import datasets

    return datasets.DatasetDict(train=hub())


# ------------------------------------------------------------------------------------------- categories, texts, images


def people() -> dict[str, list]:
    """A table with a column of categories and labels in words."""
    found = table()
    sex = [("m", "f")[int(value > 0)] for value in found["b"]]
    ill = [("no", "yes")[label] for label in found["y"]]
    return {"a": found["a"], "sex": sex, "ill": ill, "hospital": found["hospital"]}


PEOPLE = {"label": "ill", "classes": ["no", "yes"], "categorical": {"sex": ["f", "m"]}}


def encoded_people() -> list[tuple[np.ndarray, np.ndarray]]:
    """What the columns mean, written by hand: the number, then one column for f and one for m."""
    made = []
    for x, y in clients():
        flags = (x[:, 1] > 0).astype(np.float32)
        made.append((np.stack([x[:, 0], flags, 1 - flags], axis=1), y))
    return made


def people_frame():
    import pandas

    return pandas.DataFrame(people())


def texts_hub():
    import datasets

    found = table()
    said = [f"{WORDS[int(a) % 4]} and {WORDS[int(b) % 4]}" for a, b in zip(found["a"], found["b"], strict=True)]
    return datasets.Dataset.from_dict({"text": said, "label": found["y"], "hospital": found["hospital"]})


def tokens(texts: list[str]) -> list[list[int]]:
    """A tokenising function: the places of two known words."""
    return [[WORDS.index(word) for word in text.split(" and ")] for text in texts]


def encoded_texts() -> list[tuple[np.ndarray, np.ndarray]]:
    return [(np.stack([x[:, 0].astype(int) % 4, x[:, 1].astype(int) % 4], axis=1), y) for x, y in clients()]


def pixels() -> list[tuple[np.ndarray, np.ndarray]]:
    """Bytes ``[N, 4, 5, 3]`` of every client's images, by class."""
    rng = np.random.default_rng(3)
    return [(rng.integers(0, 256, (size, 4, 5, 3), dtype=np.uint8), np.sort(np.arange(size) % 2)) for size in SIZES]


def images() -> list[tuple[np.ndarray, np.ndarray]]:
    return [(x.transpose(0, 3, 1, 2).astype(np.float32) / 255, y) for x, y in pixels()]


def images_hub():
    import datasets
    from PIL import Image

    found: dict[str, list] = {"image": [], "label": [], "hospital": []}
    for name, (x, y) in zip(NAMES, pixels(), strict=True):
        found["image"] += [Image.fromarray(one) for one in x]
        found["label"] += y.tolist()
        found["hospital"] += [name] * len(y)
    kinds = {
        "image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"]),
        "hospital": datasets.Value("string"),
    }  # fmt: skip
    return datasets.Dataset.from_dict(found, features=datasets.Features(kinds))


# ----------------------------------------------------------------------------------------------------------- folders


def write_pair(kind: str, place: Path, x: np.ndarray, y: np.ndarray) -> None:
    """One file or folder; ``place`` has no suffix."""
    if kind == "npz":
        np.savez(place.with_suffix(".npz"), x=x, y=y)
    elif kind == "npy":
        place.mkdir()
        np.save(place / "x.npy", x)
        np.save(place / "y.npy", y)
    else:
        import pandas

        write_frame(kind, place, pandas.DataFrame(columns(x, y)))


def write_frame(kind: str, place: Path, made: Any) -> None:
    if kind == "csv":
        made.to_csv(place.with_suffix(".csv"), index=False)
    else:
        made.to_parquet(place.with_suffix(".parquet"))


def write_folder(kind: str, folder: Path) -> Path:
    """One file or folder per client."""
    for name, (x, y) in zip(NAMES, clients(), strict=True):
        write_pair(kind, folder / name, x, y)
    return folder


def write_parts(kind: str, folder: Path) -> Path:
    """One folder per client, with a file or folder per part."""
    for name, parts in zip(NAMES, split(), strict=True):
        (folder / name).mkdir()
        for part, (x, y) in parts.items():
            write_pair(kind, folder / name / part, x, y)
    return folder


def write_people(kind: str, folder: Path) -> Path:
    """A table per client, with a schema that says what columns mean."""
    for name, part in people_frame().groupby("hospital"):
        write_frame(kind, folder / str(name), part.assign(note="x"))
    (folder / "schema.toml").write_text(
        'label = "ill"\nclasses = ["no", "yes"]\nignore = ["note", "hospital"]\n[categorical]\nsex = ["f", "m"]\n'
    )
    return folder


def write_images(folder: Path, schema: bool = False) -> Path:
    """One folder per client, with one folder of images per class."""
    from PIL import Image

    for name, (x, y) in zip(NAMES, pixels(), strict=True):
        for number, (one, label) in enumerate(zip(x, y, strict=True)):
            place = folder / name / ("cat", "dog")[label]
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(one).save(place / f"{number:03}.png")
    if schema:
        (folder / "schema.toml").write_text('classes = ["cat", "dog"]\n')
    return folder
