"""The data of a federation: in memory, or drawn on demand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from fedalloy.core import inputs
from fedalloy.core.errors import DataError, SpecError, nearest
from fedalloy.core.inputs import Inputs
from fedalloy.core.keys import Key
from fedalloy.core.native.numbers import places
from fedalloy.core.protocols import DataPart, Objective
from fedalloy.core.showing import Shown
from fedalloy.core.types import Block, Examples
from fedalloy.tasks.datasets.base import Dataset, Standardise
from fedalloy.tasks.describing import Describable
from fedalloy.tasks.imputing import count_gaps
from fedalloy.tasks.kinds import TaskKind
from fedalloy.tasks.noise import LabelNoise
from fedalloy.tasks.partitions.base import Partition
from fedalloy.tasks.partitions.manifest import Manifest, SplitRecord
from fedalloy.tasks.preparing import Preparation
from fedalloy.tasks.source import TaskSource
from fedalloy.tasks.splits import check_fractions, part_sizes, split

_PARTS = ("train", "valid", "test")
_WITNESSES = 100


@dataclass(frozen=True, eq=False, repr=False)
class Pool:
    """The examples of all clients in one tensor: client k owns rows ``start[k] .. start[k] + size[k]``."""

    x: Inputs
    y: Inputs
    start: Tensor
    size: Tensor

    def __repr__(self) -> str:
        return f"<pool of {len(self.size)} clients, {int(self.size.sum())} examples>"

    @staticmethod
    def gather(x: Inputs, y: Inputs, hands: Sequence[Tensor]) -> Pool:
        """Copy every client's rows next to each other, once."""
        size = torch.tensor([len(rows) for rows in hands], dtype=torch.int64)
        order = torch.cat(list(hands))
        return Pool(inputs.take(x, order), inputs.take(y, order), size.cumsum(0) - size, size)

    def block(self, ids: Tensor) -> Block:
        """Some clients; the examples themselves are not copied."""
        ids = ids.cpu()
        if (found := places(ids, self.start, self.size)) is not None:
            return Block(self.x, self.y, *found)
        if len(ids):
            low, high = (int(end) for end in torch.aminmax(ids))
            if low < 0 or high >= len(self.size):
                raise DataError(f"client ids must lie in 0..{len(self.size) - 1}, got {low}..{high}")
        return Block(self.x, self.y, self.start[ids], self.size[ids])

    def everyone(self) -> Block:
        """All clients, in order of their ids."""
        return Block(self.x, self.y, self.start, self.size)

    def to(self, device: torch.device | str | None, dtype: torch.dtype | None = None) -> Pool:
        """The pool on another device; ``dtype`` changes features and real-valued targets. Starts and sizes stay on the
        CPU, where plans are made."""
        x, y = _moved(Examples(self.x, self.y), device, dtype)
        return Pool(x, y, self.start, self.size)


@dataclass(frozen=True, eq=False, repr=False)
class FederatedTask(Shown, Describable):
    """A model and clients whose data are in memory, one pool per part.

    ``kind`` says what the targets are (None: unknown), ``classes`` how many classes they have.
    ``metrics`` are the usual ones for the data, the most important one first. ``bounds`` are the declared lowest and
    highest value of the features. The last ``newcomers`` clients are not part of the population: they are never
    sampled or weighted, but ``data`` accepts their ids. ``classifier`` is the model that is trained on synthetic
    samples, if it is not ``objective``. ``notices`` are texts about the data, which a run shows to the user.
    ``encoding`` says what the numbers of encoded columns mean, ``filled`` how many values every client lacked,
    ``prepared`` what was done to raw rows.
    ``source`` is how :func:`fedalloy.task` made it, where a recipe can say it; a changed copy has none.
    """

    objective: Objective
    train: Pool
    valid: Pool
    test: Pool
    manifest: Manifest
    global_test: Examples | None = None
    names: tuple[str, ...] | None = None
    metrics: tuple[str, ...] = ("accuracy", "loss")
    newcomers: int = 0
    kind: TaskKind | None = None
    classes: int = 0
    classifier: Objective | None = None
    bounds: tuple[float, float] | None = None
    notices: tuple[str, ...] = ()
    encoding: Mapping[str, tuple[str, ...]] | None = None
    filled: tuple[int, ...] = ()
    prepared: Preparation = field(default_factory=Preparation)
    source: TaskSource | None = field(default=None, init=False, repr=False)

    def __repr__(self) -> str:
        sizes = {part: int(pool.size.sum()) for part, pool in self.pools.items()}
        told = ", ".join(f"{size} {part}" for part, size in sizes.items() if size)
        unseen = f" and {self.newcomers} newcomers" if self.newcomers else ""
        return f"<task of {self.population} clients{unseen}: {told} examples; {self.kind or 'any targets'}>"

    def count_filled(self, ids: Tensor) -> int:
        """How many missing values of some clients are filled."""
        return sum(self.filled[client] for client in ids.tolist()) if self.filled else 0

    def preparation(self, clients: Sequence[int] | None = None) -> Preparation:
        """What was done to the raw rows of all clients."""
        return self.prepared

    @property
    def population(self) -> int:
        """How many clients may take part."""
        return len(self.train.size) - self.newcomers

    @property
    def pools(self) -> dict[DataPart, Block]:
        """All clients' examples by part."""
        return {"train": self.train.everyone(), "valid": self.valid.everyone(), "test": self.test.everyone()}

    @property
    def unseen_ids(self) -> Tensor:
        """The clients that never take part."""
        return torch.arange(self.population, len(self.train.size))

    def data(self, part: DataPart, ids: Tensor) -> Block:
        """The examples of some clients, without copying."""
        return self._pool(part).block(ids)

    def everyone(self, part: DataPart) -> Block:
        """The examples of all clients that may take part, without copying."""
        return self._pool(part).block(torch.arange(self.population))

    def to(self, device: torch.device | str | None, dtype: torch.dtype | None = None) -> FederatedTask:
        """The same task on another device or in another precision."""
        train, valid, test = (pool.to(device, dtype) for pool in (self.train, self.valid, self.test))
        common = None if self.global_test is None else Examples(*_moved(self.global_test, device, dtype))
        return replace(self, train=train, valid=valid, test=test, global_test=common)

    def _pool(self, part: DataPart) -> Pool:
        _check_part(part)
        return {"train": self.train, "valid": self.valid, "test": self.test}[part]


def federate(
    dataset: Dataset,
    partition: Partition,
    clients: int | None,
    objective: Objective,
    *,
    test_fraction: float = 0.2,
    valid_fraction: float = 0.0,
    standardise: Standardise = "none",
    noise: LabelNoise | None = None,
    newcomers: int = 0,
    key: Key,
) -> FederatedTask:
    """Distribute a dataset to clients and split each client's examples.

    ``clients`` may be None if the rule defines the number. The global test set is the one that comes with the data,
    else the test parts of all clients that take part. ``newcomers`` of the clients, drawn by key, get the last ids and
    never take part. ``standardise = "client"`` then scales every client's features by the mean and standard deviation
    of its own training part; its other parts and other clients are not used.
    """
    true = dataset.y
    seen = true if noise is None else noise.apply(true, dataset.classes, key.fold("noise"))
    dataset = replace(dataset, y=seen) if noise and noise.first else dataset
    assignment = _assignment(dataset, partition, clients, key.fold("partition"))
    assignment = [assignment[client] for client in unseen_last(len(assignment), newcomers, key.fold("newcomers"))]
    fractions = {"test_fraction": test_fraction, "valid_fraction": valid_fraction}
    parts = split(assignment, dataset.y, key, **fractions, held_out=dataset.held_out, part=dataset.part)
    labels = {"train": seen, "valid": seen, "test": seen if noise and noise.test == "noisy" else dataset.y}
    rows = {part: [getattr(client, part) for client in parts] for part in _PARTS}
    pools = [Pool.gather(dataset.x, labels[part], rows[part]) for part in _PARTS]
    filled = () if dataset.impute == "none" else _gaps(dataset.x, assignment)
    steps = _preparation(dataset, standardise).learn(pools[0].x, pools[0].size, dataset.impute, standardise == "client")
    train, valid, test = (replace(pool, x=steps.changed(pool.x, pool.size)) for pool in pools)
    dealt = SplitRecord.of(true, rows["train"], rows["test"], dataset.test is not None)
    manifest = Manifest.of(assignment, dataset.y, dataset.classes, dealt)
    common = dataset.test or _union(test, len(assignment) - newcomers)
    names = _names(dataset, assignment)
    return FederatedTask(
        objective, train, valid, test, manifest, common, names, newcomers=newcomers, notices=dataset.notices,
        classes=dataset.classes,
        encoding=dataset.encoding, filled=filled, prepared=steps,
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class GeneratedTask(Describable):
    """A model and any number of clients whose data are drawn on demand, so memory does not grow with the population.

    ``make(ids, key)`` is a pure function that draws a block for some clients, each from its own key
    (``key.each(ids)``). The last rows of a client are its test part, those before them its validation part.
    """

    objective: Objective
    population: int
    make: Callable[[Tensor, Key], Block]
    key: Key
    test_fraction: float = 0.2
    valid_fraction: float = 0.0
    device: torch.device | str | None = None
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        check_fractions(self.test_fraction, self.valid_fraction)
        if self.population < 1:
            raise SpecError(f"a task needs at least 1 client, not {self.population}")

    def data(self, part: DataPart, ids: Tensor) -> Block:
        """Draw the examples of some clients; the same clients get the same examples every time."""
        _check_part(part)
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.population:
            raise DataError(f"client ids must lie in 0..{self.population - 1}, got {int(ids.min())}..{int(ids.max())}")
        drawn = self.make(ids.to(self.device), self.key)
        x, y = _moved(Examples(drawn.x, drawn.y), self.device, self.dtype)
        sizes = part_sizes(drawn.size, self.test_fraction, self.valid_fraction)
        before = sum((sizes[i] for i in range(_PARTS.index(part))), start=drawn.start)
        return Block(x, y, before, sizes[_PARTS.index(part)])

    def everyone(self, part: DataPart) -> Block:
        """All clients at once: only sensible for small populations."""
        return self.data(part, torch.arange(self.population))

    @cached_property
    def global_test(self) -> Examples | None:
        """The test parts of at most 100 clients, drawn once, as a sample of the population's."""
        ids = self.key.fold("witnesses").choice(self.population, min(_WITNESSES, self.population))
        block = self.data("test", ids)
        rows = [block.client(row) for row in range(len(ids))]
        union = Examples(inputs.joined([row.x for row in rows]), inputs.joined([row.y for row in rows]))
        return union if len(union) else None

    def to(self, device: torch.device | str | None, dtype: torch.dtype | None = None) -> GeneratedTask:
        """The same task drawn on another device or in another precision."""
        return replace(self, device=device, dtype=dtype)


def _assignment(dataset: Dataset, partition: Partition, clients: int | None, key: Key) -> list[Tensor]:
    count = clients if clients is not None else partition.clients_for(dataset.owner)
    if count is None:
        raise SpecError(f"partition {type(partition).__name__} does not define the number of clients: give 'clients'")
    assignment = partition.assign(dataset.y, count, key, dataset.owner)
    if not any(len(rows) for rows in assignment):
        raise DataError(f"partition {type(partition).__name__} gives no client an example; use another rule")
    return assignment


def unseen_last(clients: int, newcomers: int, key: Key) -> list[int]:
    """All clients, with those drawn as unseen at the end; the others keep their order."""
    if not 0 <= newcomers < clients:
        raise SpecError(
            f"newcomers = {newcomers} of {clients} clients: allowed are 0 to {clients - 1}, so that somebody takes part"
        )
    late = set(key.choice(clients, newcomers).tolist())
    return sorted(range(clients), key=lambda client: client in late)


def _union(test: Pool, clients: int) -> Examples | None:
    """The test parts of the first clients, which are contiguous, as one set."""
    count = int(test.size[:clients].sum())
    return Block(test.x, test.y, torch.tensor([0]), torch.tensor([count])).client(0) if count else None


def _preparation(dataset: Dataset, standardise: Standardise) -> Preparation:
    """What is done to everybody's rows alike."""
    if standardise == "client" and dataset.test is not None:
        raise SpecError(
            "standardise = 'client' has no scale for the common test set of these data, which is no client's: "
            "leave it out (or 'none')"
        )
    return Preparation.of(dataset.x, dataset.columns)


def _gaps(x: Inputs, assignment: Sequence[Tensor]) -> tuple[int, ...]:
    """How many values every client lacks."""
    return tuple(count_gaps(inputs.take(x, rows)) for rows in assignment)


def _names(dataset: Dataset, assignment: Sequence[Tensor]) -> tuple[str, ...] | None:
    """The natural names, if every client is exactly one natural client."""
    if dataset.names is None or dataset.owner is None:
        return None
    owners = [dataset.owner[rows].unique().tolist() for rows in assignment]
    pure = all(len(owner) == 1 and owner[0] >= 0 for owner in owners)
    distinct = len({tuple(owner) for owner in owners}) == len(owners)
    return tuple(dataset.names[owner[0]] for owner in owners) if pure and distinct else None


def _moved(examples: Examples, device: torch.device | str | None, dtype: torch.dtype | None) -> tuple[Inputs, Inputs]:
    """Features and targets on a device; class numbers keep their type."""

    def moved(leaf: Tensor) -> Tensor:
        leaf = leaf.to(device)
        return leaf.to(dtype) if dtype is not None and leaf.is_floating_point() else leaf

    return inputs.each(moved, examples.x), inputs.each(moved, examples.y)


def _check_part(part: str) -> None:
    if part not in _PARTS:
        raise SpecError(f"unknown part of the data '{part}': {nearest(part, _PARTS)}")
