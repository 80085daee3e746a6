"""Examples that are read row by row: torch datasets, and a stream that is written to disk once."""

from __future__ import annotations

import os
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedalloy.core import inputs
from fedalloy.core.errors import DataError
from fedalloy.core.keys import Key
from fedalloy.core.own_code import own_code
from fedalloy.core.types import Examples
from fedalloy.tasks import locate
from fedalloy.tasks.datasets.base import Dataset, as_pair, counted_classes
from fedalloy.tasks.lazy import LazyClients
from fedalloy.tasks.partitions.base import Partition
from fedalloy.tasks.partitions.natural import Natural
from fedalloy.tasks.sources.client_data import PARTS, Pair, stack_rows

_AT_ONCE = 4096


class RowReader(ABC):
    """Examples by row number; nothing is kept in memory."""

    @abstractmethod
    def __len__(self) -> int:
        """How many rows there are."""

    @abstractmethod
    def read(self, rows: Sequence[int]) -> Pair:
        """Some rows as arrays, in this order."""

    def labels(self) -> Tensor:
        """The labels of all rows; by default every row is read once for them."""
        pieces = [self.examples(piece).y for piece in _pieces(len(self))]
        return torch.cat([piece if isinstance(piece, Tensor) else _no_labels() for piece in pieces])

    def examples(self, rows: Sequence[int]) -> Examples:
        """Some rows as tensors."""
        return Examples(*as_pair(*self.read(rows), "the data"))

    def row_bytes(self) -> int:
        """The size of the first row in memory."""
        one = self.examples([0])
        return inputs.bytes_each(one.x) + inputs.bytes_each(one.y)


@dataclass(frozen=True, eq=False)
class DatasetRows(RowReader):
    """The rows of a torch map-style ``Dataset``."""

    dataset: Any

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, rows: Sequence[int]) -> Pair:
        with own_code("the Dataset", DataError):
            found = [self.dataset[int(row)] for row in rows]
        return stack_rows(found, "the Dataset")


@dataclass(eq=False)
class Spool(RowReader):
    """Rows of one shape in two temporary files, which vanish when the process ends."""

    files: tuple[IO[bytes], IO[bytes]]
    forms: list[tuple[np.dtype[Any], tuple[int, ...]]]
    rows: int
    _alone: Lock = field(default_factory=Lock, repr=False)

    def __post_init__(self) -> None:
        for file in self.files:
            weakref.finalize(self, file.close)

    def __len__(self) -> int:
        return self.rows

    def add(self, example: Any) -> None:
        """Write one more pair (x, y), which must have the form of the first."""
        pair = [np.asarray(one[0]) for one in _arrays(example)]
        self.forms = self.forms or [(one.dtype, one.shape) for one in pair]
        _check_form(self.forms, pair, self.rows)
        for file, one in zip(self.files, pair, strict=True):
            file.write(one.tobytes())
        self.rows += 1

    def read(self, rows: Sequence[int]) -> Pair:
        return self._column(0, rows), self._column(1, rows)

    def labels(self) -> Tensor:
        """The labels alone: features are not read."""
        y = self._column(1, range(self.rows))
        return as_pair(np.zeros((len(y), 0), np.float32), y, "the data")[1]

    def _column(self, which: int, rows: Sequence[int]) -> NDArray[Any]:
        dtype, shape = self.forms[which]
        size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        found = bytearray()
        for begin, count in _runs(rows):
            found += self._read_at(self.files[which], count * size, begin * size)
        return np.frombuffer(found, dtype).reshape(len(rows), *shape)

    def _read_at(self, file: IO[bytes], size: int, offset: int) -> bytes:
        """Threads and forks share the position of a file, so it is not used where the system can read without it."""
        if not hasattr(os, "pread"):  # Windows
            with self._alone:
                file.seek(offset)
                return file.read(size)
        found = bytearray()
        while len(found) < size and (piece := os.pread(file.fileno(), size - len(found), offset + len(found))):
            found += piece  # one call reads at most 2 GB
        return bytes(found)


@dataclass(frozen=True, eq=False)
class LazyRows:
    """Rows that are read on demand, before they are given to clients: with an ``owner`` each, or to be partitioned."""

    reader: RowReader
    classes: int | None = None
    owner: Tensor | None = None
    names: tuple[str, ...] | None = None
    notices: tuple[str, ...] = ()
    part: Tensor | None = None
    test: Examples | None = None
    encoding: Mapping[str, tuple[str, ...]] | None = None
    unnoticed: str = "a change in the rows of any other client"

    def deal(self, rule: Partition, clients: int, key: Key) -> LazyClients:
        """The clients: the owners' rows, or those that a partition gives them (``key`` as in ``federate``)."""
        labels, names = None, self.names
        natural = isinstance(rule, Natural) and self.owner is not None
        if natural and self.owner is not None and clients == len(self.owner.unique()) == int(self.owner.max()) + 1:
            order, size = self.owner.argsort(stable=True), torch.bincount(self.owner)
        else:
            labels = self.owner if natural else self.reader.labels()
            assert labels is not None
            hands = rule.assign(labels, clients, key.fold("partition"), self.owner)
            order, size = torch.cat(hands), torch.tensor([len(hand) for hand in hands])
            names, labels = self._names_of(hands), None if natural else labels
        classes = self.classes if self.classes is not None else _classes(labels, self.reader)
        start = size.cumsum(0) - size

        def read(client: int) -> Mapping[str, Examples]:
            return self._parts(order[int(start[client]) : int(start[client] + size[client])])

        identity = {"rows": len(self.reader), "order": order, "sizes": size, "part": self.part}
        return LazyClients(
            read, len(size), classes, names, identity, self.unnoticed, notices=self.notices,
            encoding=self.encoding, test=self.test, parts=self._known_parts(),
        )  # fmt: skip

    def _names_of(self, hands: Sequence[Tensor]) -> tuple[str, ...] | None:
        """The natural names, if every client is exactly one natural client."""
        if self.names is None or self.owner is None:
            return None
        owners = [tuple(self.owner[rows].unique().tolist()) for rows in hands]
        single = all(len(owner) == 1 for owner in owners) and len({*owners}) == len(owners)
        return tuple(self.names[owner[0]] for owner in owners) if single else None

    def _known_parts(self) -> frozenset[str]:
        if self.part is None:
            return frozenset({""})
        return frozenset(PARTS[number] for number in self.part.unique().tolist())

    def _parts(self, rows: Tensor) -> dict[str, Examples]:
        if self.part is None:
            return {"": self.reader.examples(rows.tolist())}
        chosen = {name: rows[self.part[rows] == number].tolist() for number, name in enumerate(PARTS)}
        return {name: self.reader.examples(some) for name, some in chosen.items() if some}

    def in_memory(self) -> Dataset:
        """All rows as a dataset in memory."""
        made = self.reader.examples(range(len(self.reader)))
        assert isinstance(made.y, Tensor)
        classes = self.classes if self.classes is not None else _classes(made.y, self.reader)
        return Dataset(
            made.x, made.y, classes, self.owner, test=self.test, names=self.names, notices=self.notices,
            part=self.part, encoding=self.encoding,
        )  # fmt: skip

    def total_bytes(self) -> int:
        """The size of all rows in memory."""
        return len(self.reader) * self.reader.row_bytes()


def spool(stream: Iterable[Any], ids: Callable[[Any], Any] | None = None) -> tuple[Spool, list[Any], tuple[str, ...]]:
    """Write a stream of pairs (x, y) to disk, row by row; ``ids`` gives the client of an example."""
    folder, clients = locate.cache_folder(), []
    folder.mkdir(parents=True, exist_ok=True)
    files = tempfile.TemporaryFile(dir=folder), tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (kept open)
    made = Spool(files, [], 0)
    try:
        for example in _examples(stream):
            if ids is not None:
                with own_code("the function that gives an example's client", DataError):
                    clients.append(ids(example))
            made.add(example)
        size = sum(file.tell() for file in files)
        for file in files:
            file.flush()
    except OSError as error:
        raise DataError(f"the iterable cannot be written to {folder}: {error}; XDG_CACHE_HOME names another") from error
    if not len(made):
        raise DataError("the iterable has no rows")
    told = f"the iterable was read once: {len(made)} rows ({size / 1e6:.1f} MB) are in temporary files in {folder}"
    return made, clients, (told,)


def _examples(stream: Iterable[Any]) -> Iterator[Any]:
    with own_code("the iterable", DataError):
        yield from stream


def _arrays(example: Any) -> Iterator[NDArray[Any]]:
    for one in stack_rows([example], "the iterable"):
        if isinstance(one, Mapping | tuple):
            raise DataError("the iterable gives several features per example; give one array, or a map-style Dataset")
        yield one.numpy() if isinstance(one, Tensor) else one


def _check_form(forms: Any, pair: Sequence[NDArray[Any]], row: int) -> None:
    for (dtype, shape), one, what in zip(forms, pair, ("features", "target"), strict=True):
        if one.dtype != dtype or one.shape != shape:
            raise DataError(
                f"row {row} of the iterable has {what} of type {one.dtype} and shape {one.shape}, the first row "
                f"{dtype} and {shape}; all rows must be alike"
            )


def _runs(rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Consecutive rows as (first, count), so that they are read together."""
    if isinstance(rows, range):
        if len(rows):
            yield rows.start, len(rows)
        return
    begin = count = 0
    for row in rows:
        if count and row == begin + count:
            count += 1
            continue
        if count:
            yield begin, count
        begin, count = row, 1
    if count:
        yield begin, count


def _pieces(rows: int) -> Iterator[range]:
    for begin in range(0, rows, _AT_ONCE):
        yield range(begin, min(begin + _AT_ONCE, rows))


def _classes(labels: Tensor | None, reader: RowReader) -> int:
    labels = reader.labels() if labels is None else labels
    return 0 if labels.is_floating_point() else counted_classes(labels)


def _no_labels() -> Tensor:
    raise DataError("targets by name cannot be partitioned; give client ids instead")
