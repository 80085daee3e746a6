"""Public originals turned into the files that loaders read: IDX, CIFAR's pickles, parquet of the hub, LEAF's json,
text.

Nothing in an original is executed: pickles are read by a reader that knows three names and makes inert values of
them, and archives are read member by member, so that nothing is written but the files named here.
"""

from __future__ import annotations

import gzip
import io
import json
import pickle
import struct
import tarfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedalloy.core.errors import DataError
from fedalloy.tasks.datasets.base import third_party

Arrays = dict[str, NDArray[Any]]
_IDX_TYPES = {8: np.dtype(">u1")}
_TOO_SHORT = 400
_BROKEN = (
    OSError, EOFError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, MemoryError, RecursionError,
    zlib.error, tarfile.TarError, struct.error,
)  # fmt: skip
"""What readers raise for a broken file."""


def convert(dataset: str, originals: Mapping[str, Path]) -> dict[str, Arrays]:
    """The arrays of every file that the loader of a data set reads, from its originals by file name."""
    try:
        return CONVERTERS[dataset](originals)
    except DataError:
        raise
    except (*_BROKEN, pickle.UnpicklingError) as cause:
        raise DataError(
            f"{dataset}: {', '.join(originals)} cannot be converted ({type(cause).__name__}: {cause})"
        ) from cause


def read_idx(path: Path) -> NDArray[Any]:
    """The array of an IDX file, compressed or not."""
    content = path.read_bytes()
    content = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
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


def _members(path: Path, names: Sequence[str]) -> list[dict[str, Any]]:
    """Some members of a tar archive; they are read in memory, and nothing is extracted."""
    with tarfile.open(path) as archive:
        there = {Path(one.name).name: one for one in archive.getmembers() if one.isfile()}
        missing = [name for name in names if name not in there]
        if missing:
            raise DataError(f"{path} has no {missing[0]}; it holds {', '.join(sorted(there)[:10])}")
        streams = [archive.extractfile(there[name]) for name in names]
        return [read_pickle(stream.read()) for stream in streams if stream is not None]


def _cifar(originals: Mapping[str, Path], dataset: str, parts: tuple[Sequence[str], str], label: str) -> list[Arrays]:
    """Training and test images ``[N, 3, 32, 32]`` and labels, from the archive or from the hub's files."""
    archive = _one(originals, ".tar.gz", ".tgz")
    if archive is None:
        return [_from_hub(_part(originals, split), "img", label, channels=3) for split in ("train", "test")]
    batches = [_members(archive, names) for names in (list(parts[0]), [parts[1]])]
    made = []
    for some in batches:
        x = np.concatenate([np.asarray(batch["data"]).reshape(-1, 3, 32, 32) for batch in some])
        y = np.concatenate([np.array(batch[label], dtype=np.int64) for batch in some])
        made.append({"x": x, "y": y})
    return made


def _cifar10(originals: Mapping[str, Path]) -> dict[str, Arrays]:
    label = "labels" if _one(originals, ".tar.gz", ".tgz") else "label"
    train, test = _cifar(originals, "cifar10", ([f"data_batch_{k}" for k in range(1, 6)], "test_batch"), label)
    some, few = _of_every_class(train, 2000), _of_every_class(test, 400)
    half = (len(some["y"]) + 1) // 2
    return {
        "cifar10_train_a.npz": {name: rows[:half] for name, rows in some.items()},
        "cifar10_train_b.npz": {name: rows[half:] for name, rows in some.items()},
        "cifar10_test.npz": few,
        "cifar10_whole.npz": _whole(train, test),
    }


def _cifar100(originals: Mapping[str, Path]) -> dict[str, Arrays]:
    label = "fine_labels" if _one(originals, ".tar.gz", ".tgz") else "fine_label"
    return {"cifar100.npz": _whole(*_cifar(originals, "cifar100", (["train"], "test"), label))}


def _whole(train: Arrays, test: Arrays) -> Arrays:
    return {f"{name}_{part}": rows[name] for part, rows in (("train", train), ("test", test)) for name in ("x", "y")}


def _of_every_class(rows: Arrays, most: int) -> Arrays:
    """The first rows of every class, in their order, with their row numbers."""
    kept = np.sort(np.concatenate([np.flatnonzero(rows["y"] == label)[:most] for label in np.unique(rows["y"])]))
    return {"x": rows["x"][kept], "y": rows["y"][kept], "index": kept.astype(np.int64)}


def _grey(prefix: str) -> Callable[[Mapping[str, Path]], dict[str, Arrays]]:
    def converted(originals: Mapping[str, Path]) -> dict[str, Arrays]:
        made: dict[str, Arrays] = {}
        for split, part in (("train", "train"), ("t10k", "test")):
            images = next((path for name, path in originals.items() if f"{split}-images" in name), None)
            labels = next((path for name, path in originals.items() if f"{split}-labels" in name), None)
            if images is not None and labels is not None:
                rows: Arrays = {"x": read_idx(images).astype(np.uint8), "y": read_idx(labels).astype(np.int64)}
            else:
                rows = _from_hub(_part(originals, part), "image", "label")
            if rows["x"].shape[1:] != (28, 28) or len(rows["x"]) != len(rows["y"]):
                raise DataError(
                    f"{part}: {rows['x'].shape} images and {rows['y'].shape} labels; expected 28 x 28 pixels"
                )
            made[f"{prefix}_{part}.npz"] = rows
        return made

    return converted


def _femnist(originals: Mapping[str, Path]) -> dict[str, Arrays]:
    """Characters by writer, a tenth of every writer's for testing: LEAF's own split, or the last of every ten."""
    leaf = [path for path in originals.values() if path.suffix == ".json"]
    if leaf:
        return {"femnist_writers.npz": _from_leaf(leaf)}
    rows = _table(_part(originals, "train"), ("image", "character", "writer_id"))
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
            pieces.append((str(user), "test" in path.name, x, np.asarray(mine["y"], dtype=np.int64)))
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


def _shakespeare(originals: Mapping[str, Path]) -> dict[str, Arrays]:
    """The roles of the plays: a block whose first line ends with a colon is a speech of that role."""
    path = next(iter(originals.values()))
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


def _from_hub(path: Path, image: str, label: str, channels: int = 1) -> Arrays:
    rows = _table(path, (image, label))
    return {"x": _pixels(rows[image], channels), "y": np.array(rows[label], dtype=np.int64)}


def _table(path: Path, names: Sequence[str]) -> dict[str, list[Any]]:
    parquet = third_party("pyarrow.parquet", "pyarrow", "reading files of the hub")
    table = parquet.read_table(path, columns=list(names))
    return {name: table.column(name).to_pylist() for name in names}


def _pixels(values: Sequence[Any], channels: int) -> NDArray[Any]:
    """The hub's images, ``{bytes, path}``, as bytes ``[N, H, W]`` or ``[N, 3, H, W]``."""
    library = third_party("PIL.Image", "pillow", "reading images")
    mode = "L" if channels == 1 else "RGB"
    images = [np.asarray(library.open(io.BytesIO(value["bytes"])).convert(mode)) for value in values]
    stacked = np.stack(images)
    return stacked if channels == 1 else np.ascontiguousarray(stacked.transpose(0, 3, 1, 2))


def _one(originals: Mapping[str, Path], *endings: str) -> Path | None:
    return next((path for name, path in originals.items() if name.endswith(endings)), None)


def _part(originals: Mapping[str, Path], split: str) -> Path:
    found = next((path for name, path in originals.items() if split in name and name.endswith(".parquet")), None)
    if found is None:
        raise DataError(f"there is no file for '{split}' among {', '.join(originals)}")
    return found


CONVERTERS: dict[str, Callable[[Mapping[str, Path]], dict[str, Arrays]]] = {
    "mnist": _grey("mnist"),
    "fashion_mnist": _grey("fashion_mnist"),
    "cifar10": _cifar10,
    "cifar100": _cifar100,
    "femnist": _femnist,
    "tinyshakespeare": _shakespeare,
}
"""The data sets whose originals are converted; files of others are read as they are, or as their hint says."""
