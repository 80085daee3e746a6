"""Public originals turned into the files that loaders read: IDX, CIFAR's pickles, parquet of the hub, LEAF's json,
text; tables of patients, tweets and recordings are in modules of their own.

Nothing in an original is executed: pickles are read by a reader that knows three names and makes inert values of
them, and archives are read member by member, so that nothing is written but the files named here.
"""

from __future__ import annotations

import csv
import io
import json
import pickle
import struct
import tarfile
import wave
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedalloy.core.errors import DataError
from fedalloy.tasks.converting_heart import convert_heart
from fedalloy.tasks.converting_sent140 import convert_sent140
from fedalloy.tasks.converting_speech import convert_speech
from fedalloy.tasks.datasets.base import third_party
from fedalloy.tasks.unpacking import MOST_MB, Allowance, Originals, base_name, is_for_testing

Arrays = dict[str, NDArray[Any]]
Converted = Mapping[str, Arrays | bytes]
"""The files that a loader reads, as arrays or as they are written."""
_IDX_TYPES = {8: np.dtype(">u1")}
_TOO_SHORT = 400
_LARGEST = 64
_BROKEN = (
    OSError, EOFError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, MemoryError, RecursionError,
    zlib.error, tarfile.TarError, zipfile.BadZipFile, wave.Error, csv.Error, struct.error,
)  # fmt: skip
"""What readers raise for a broken file."""


def convert(dataset: str, originals: Mapping[str, Path], most_mb: float = MOST_MB) -> Converted:
    """Every file that the loader of a data set reads, from its originals by file name, which may unpack to so many
    megabytes."""
    try:
        return CONVERTERS[dataset](Originals(originals, Allowance(most_mb)))
    except DataError:
        raise
    except (*_BROKEN, pickle.UnpicklingError) as cause:
        raise DataError(
            f"{dataset}: {', '.join(originals)} cannot be converted ({type(cause).__name__}: {cause})"
        ) from cause


def read_idx(path: Path, originals: Originals) -> NDArray[Any]:
    """The array of an IDX file, compressed or not."""
    content = originals.content(path)
    zeros, kind, dimensions = struct.unpack(">HBB", content[:4])
    if zeros or kind not in _IDX_TYPES:
        raise DataError(f"{path} is not an IDX file of bytes")
    shape = struct.unpack(f">{dimensions}I", content[4 : 4 + 4 * dimensions])
    values = np.frombuffer(content, _IDX_TYPES[kind], offset=4 + 4 * dimensions)
    if values.size != int(np.prod(shape, dtype=np.int64)):
        raise DataError(f"{path} declares {shape} and holds {values.size} bytes; it is incomplete")
    return values.reshape(shape)


class InertUnpickler(pickle.Unpickler):
    """Reads plain values and numpy arrays from a pickle; any other name in it is refused, and none is called."""

    def find_class(self, module: str, name: str) -> Any:
        """Inert stand-ins for the names that an array needs."""
        known = {"_reconstruct": _Array.begin, "ndarray": _Array, "dtype": _Dtype}
        if module not in ("numpy", "numpy.core.multiarray", "numpy._core.multiarray") or name not in known:
            raise DataError(f"the pickle asks for {module}.{name}, which has no place in data; it is not read further")
        return known[name]

    def persistent_load(self, pid: Any) -> Any:
        """Refused: data have no references to elsewhere."""
        raise DataError("the pickle refers to objects outside of itself; it is not read further")


class _Dtype:
    """The type of an array, as a pickle describes it."""

    def __init__(self, code: Any, *_: Any) -> None:
        self.code = code.decode() if isinstance(code, bytes) else str(code)

    def __setstate__(self, state: Any) -> None:
        """Byte order and the like, which single bytes do not have."""


class _Array:
    """An array, as a pickle describes it."""

    values: NDArray[Any] | None = None

    @staticmethod
    def begin(*_: Any) -> _Array:
        """What ``_reconstruct`` makes: an array that is filled later."""
        return _Array()

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, by_columns, data = state
        if not isinstance(dtype, _Dtype) or dtype.code != "u1" or not isinstance(data, bytes):
            raise DataError("the pickle holds an array that is not of bytes")
        values = np.frombuffer(data, np.uint8)
        self.values = values.reshape(shape, order="F" if by_columns else "C")


def read_pickle(content: bytes) -> dict[str, Any]:
    """The dict of one of CIFAR's batches, with text keys and arrays."""
    found = InertUnpickler(io.BytesIO(content), encoding="bytes").load()
    if not isinstance(found, dict):
        raise DataError("the pickle holds no table of arrays")
    plain = {key.decode() if isinstance(key, bytes) else str(key): value for key, value in found.items()}
    return {key: value.values if isinstance(value, _Array) else value for key, value in plain.items()}


def _members(originals: Originals, path: Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The batches of a tar archive by name."""
    found = originals.archived(path, lambda name: base_name(name) in names)
    batches = {base_name(name): read_pickle(content) for name, content in found}
    missing = [name for name in names if name not in batches]
    if missing:
        raise DataError(f"{path} has no {missing[0]}; is it the archive of this data set?")
    return batches


def _cifar(originals: Originals, parts: tuple[Sequence[str], str], labels: tuple[str, str]) -> list[Arrays]:
    """Training and test images ``[N, 3, 32, 32]`` and labels, from the archive or from the hub's files."""
    archive = originals.one(".tar.gz", ".tgz")
    if archive is None:
        return [_from_hub(originals, split, "img", labels[1], 3) for split in ("train", "test")]
    batches = _members(originals, archive, [*parts[0], parts[1]])
    made = []
    for names in (parts[0], [parts[1]]):
        x = np.concatenate([np.asarray(batches[name]["data"]).reshape(-1, 3, 32, 32) for name in names])
        y = np.concatenate([np.array(batches[name][labels[0]], dtype=np.int64) for name in names])
        made.append({"x": x, "y": y})
    return made


def _cifar10(originals: Originals) -> dict[str, Arrays]:
    names = [f"data_batch_{k}" for k in range(1, 6)]
    train, test = _cifar(originals, (names, "test_batch"), ("labels", "label"))
    some, few = _of_every_class(train, 2000), _of_every_class(test, 400)
    half = (len(some["y"]) + 1) // 2
    return {
        "cifar10_train_a.npz": {name: rows[:half] for name, rows in some.items()},
        "cifar10_train_b.npz": {name: rows[half:] for name, rows in some.items()},
        "cifar10_test.npz": few,
        "cifar10_whole.npz": _whole(train, test),
    }


def _cifar100(originals: Originals) -> dict[str, Arrays]:
    return {"cifar100.npz": _whole(*_cifar(originals, (["train"], "test"), ("fine_labels", "fine_label")))}


def _whole(train: Arrays, test: Arrays) -> Arrays:
    return {f"{name}_{part}": rows[name] for part, rows in (("train", train), ("test", test)) for name in ("x", "y")}


def _of_every_class(rows: Arrays, most: int) -> Arrays:
    """The first rows of every class, in their order, with their row numbers."""
    kept = np.sort(np.concatenate([np.flatnonzero(rows["y"] == label)[:most] for label in np.unique(rows["y"])]))
    return {"x": rows["x"][kept], "y": rows["y"][kept], "index": kept.astype(np.int64)}


def _grey(prefix: str) -> Callable[[Originals], dict[str, Arrays]]:
    def converted(originals: Originals) -> dict[str, Arrays]:
        made: dict[str, Arrays] = {}
        for split, part in (("train", "train"), ("t10k", "test")):
            images, labels = originals.called(f"{split}-images"), originals.called(f"{split}-labels")
            if images is not None and labels is not None:
                x, y = read_idx(images, originals), read_idx(labels, originals)
                rows: Arrays = {"x": x.astype(np.uint8), "y": y.astype(np.int64)}
            else:
                rows = _from_hub(originals, part, "image", "label", 1)
            if rows["x"].shape[1:] != (28, 28) or len(rows["x"]) != len(rows["y"]):
                raise DataError(
                    f"{part}: {rows['x'].shape} images and {rows['y'].shape} labels; expected 28 x 28 pixels"
                )
            made[f"{prefix}_{part}.npz"] = rows
        return made

    return converted


def _femnist(originals: Originals) -> dict[str, Arrays]:
    """Characters by writer, a tenth of every writer's for testing: LEAF's own split, or the last of every ten."""
    leaf = [path for path in originals.files.values() if path.suffix == ".json"]
    if leaf:
        return {"femnist_writers.npz": _from_leaf(leaf)}
    rows = originals.table(_part(originals, "train"), ("image", "character", "writer_id"))
    writer, client = np.unique(np.array(rows["writer_id"], dtype=str), return_inverse=True)
    x, y = _pixels(rows["image"], channels=1), np.array(rows["character"], dtype=np.int64)
    held = _every_tenth(client)
    return {"femnist_writers.npz": _by_part(x, y, client.astype(np.int64), held) | {"writer": writer}}


def _from_leaf(paths: Sequence[Path]) -> Arrays:
    """LEAF's json files: users with x (numbers in [0, 1]) and y; a file with ``test`` in its name is for testing."""
    pieces: list[tuple[str, bool, Any, Any]] = []
    for path in sorted(paths):
        found = json.loads(path.read_text(encoding="utf-8"))
        for user in found["users"]:
            mine = found["user_data"][user]
            x = np.rint(np.asarray(mine["x"], dtype=np.float64).reshape(-1, 28, 28) * 255).astype(np.uint8)
            pieces.append((str(user), is_for_testing(path), x, np.asarray(mine["y"], dtype=np.int64)))
    names = sorted({user for user, *_ in pieces})
    number = {user: place for place, user in enumerate(names)}
    x, y = (np.concatenate([piece[place] for piece in pieces]) for place in (2, 3))
    sizes = [len(piece[3]) for piece in pieces]
    client = np.repeat([number[piece[0]] for piece in pieces], sizes).astype(np.int64)
    held = np.repeat([piece[1] for piece in pieces], sizes)
    held = held if held.any() else _every_tenth(client)
    return _by_part(x, y, client, held) | {"writer": np.array(names)}


def _by_part(x: Any, y: Any, client: Any, held: Any) -> Arrays:
    columns = {"x": x, "y": y, "client": client}
    return {
        f"{name}_{part}": rows[mask]
        for part, mask in (("train", ~held), ("test", held))
        for name, rows in columns.items()
    }


def _every_tenth(client: NDArray[Any]) -> NDArray[Any]:
    """The last of every ten examples of a client."""
    held = np.zeros(len(client), dtype=bool)
    for one in np.unique(client):
        held[np.flatnonzero(client == one)[9::10]] = True
    return held


def _shakespeare(originals: Originals) -> dict[str, Arrays]:
    """The roles of the plays: a block whose first line ends with a colon is a speech of that role."""
    path = next(iter(originals.files.values()))
    speeches: dict[str, list[str]] = {}
    for block in path.read_text(encoding="latin-1").replace("\r\n", "\n").split("\n\n"):
        name, _, speech = block.strip("\n").partition("\n")
        if name.endswith(":") and speech:
            speeches.setdefault(name.removesuffix(":"), []).append(speech)
    texts = {speaker: "\n".join(some).encode("latin-1") for speaker, some in speeches.items()}
    kept = {speaker: text for speaker, text in texts.items() if len(text) >= _TOO_SHORT}
    if not kept:
        raise DataError(f"{path} has no speaker with {_TOO_SHORT} characters or more; is it the text of the plays?")
    text = np.frombuffer(b"".join(kept.values()), np.uint8)
    offset = np.cumsum([0, *map(len, kept.values())], dtype=np.int64)
    return {"tinyshakespeare_roles.npz": {"text": text, "offset": offset, "role": np.array(list(kept))}}


def _questions(originals: Originals) -> dict[str, bytes]:
    """The table of medical question pairs, which the loader reads as it is."""
    content = originals.content(next(iter(originals.files.values())))
    rows = list(csv.reader(io.StringIO(content.decode("utf-8"), newline="")))
    if not rows or any(len(row) != 4 or row[3] not in ("0", "1") for row in rows):
        raise DataError("mqp: every line must have four values: doctor, question, question, 0 or 1")
    return {"mqp.csv": content}


def _from_hub(originals: Originals, split: str, image: str, label: str, channels: int) -> Arrays:
    rows = originals.table(_part(originals, split), (image, label))
    return {"x": _pixels(rows[image], channels), "y": np.array(rows[label], dtype=np.int64)}


def _pixels(values: Sequence[Any], channels: int) -> NDArray[Any]:
    """The hub's images, ``{bytes, path}``, as bytes ``[N, H, W]`` or ``[N, 3, H, W]``."""
    library = third_party("PIL.Image", "pillow", "reading images")
    mode = "L" if channels == 1 else "RGB"
    images = []
    for value in values:
        picture = library.open(io.BytesIO(value["bytes"]))
        if max(picture.size) > _LARGEST:  # known before any pixel is unpacked
            raise DataError(f"an image has {picture.size[0]} x {picture.size[1]} pixels; those of this set are small")
        images.append(np.asarray(picture.convert(mode)))
    stacked = np.stack(images)
    return stacked if channels == 1 else np.ascontiguousarray(stacked.transpose(0, 3, 1, 2))


def _part(originals: Originals, split: str) -> Path:
    found = originals.called(split, ".parquet")
    if found is None:
        raise DataError(f"there is no file for '{split}' among {', '.join(originals.files)}")
    return found


CONVERTERS: dict[str, Callable[[Originals], Converted]] = {
    "mnist": _grey("mnist"),
    "fashion_mnist": _grey("fashion_mnist"),
    "cifar10": _cifar10,
    "cifar100": _cifar100,
    "femnist": _femnist,
    "tinyshakespeare": _shakespeare,
    "mqp": _questions,
    "heart": convert_heart,
    "sent140": convert_sent140,
    "speech_commands": convert_speech,
}
"""From the originals of a data set to the files that its loader reads."""
ABOUT = {
    "femnist": "other writers than those of the recipes; without LEAF's own split, every tenth example is for testing",
    "sent140": "every tenth tweet of a user is in the part that recipes use, because LEAF's draw cannot be repeated; "
    'dataset = { kind = "sent140", whole = true } has all tweets of users with 30 or more',
    "speech_commands": "the canonical test set of Speech Commands, of which every client has its own split",
}
"""What a user of a converted set should know."""
