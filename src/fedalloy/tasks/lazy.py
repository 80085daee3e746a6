"""Clients whose data are read when they are needed: only a bounded part of the population is in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from fedalloy.core import inputs
from fedalloy.core.errors import DataError, SpecError
from fedalloy.core.fingerprint import VALUES, digest
from fedalloy.core.inputs import Inputs
from fedalloy.core.keys import Key
from fedalloy.core.protocols import DataPart, Objective
from fedalloy.core.showing import Shown
from fedalloy.core.types import Block, Examples
from fedalloy.tasks.client_cache import ClientCache, Parts, leaves_of
from fedalloy.tasks.datasets.base import Dataset, Standardise, bytes_beside_decimals
from fedalloy.tasks.describing import Describable
from fedalloy.tasks.examining import LabelLimits, check_examples
from fedalloy.tasks.federation import unseen_last
from fedalloy.tasks.imputing import Impute, count_gaps, without_gaps
from fedalloy.tasks.kinds import TaskKind
from fedalloy.tasks.noise import LabelNoise
from fedalloy.tasks.precision import read_as, reading_as
from fedalloy.tasks.preparing import FrameColumns, Preparation
from fedalloy.tasks.probing import ROWS
from fedalloy.tasks.splits import check_fractions, split_client, unused_share

PARTS: tuple[DataPart, ...] = ("train", "valid", "test")
CACHE_MB = 256
IN_MEMORY_MB = 512
"""Sources of more megabytes are read on demand, unless the user decides."""
_WITNESSES = 5
_JUDGES = 100
_SEARCHED = 100
_NOISE = "label noise is drawn client by client, because the data are read on demand; in memory its draws are others"
_MEGABYTE = 1 << 20


@dataclass(frozen=True, eq=False)
class LazyClients:
    """A population whose data are read client by client.

    ``read(k)`` returns a client's examples by part; the part ``""`` is split by the task's fractions. ``identity`` are
    plain values that identify the data without reading them, ``unnoticed`` says in words which change they, and the
    contents of a few clients, do not show. ``parts`` are those that clients have, where it is known without reading.
    """

    read: Callable[[int], Mapping[str, Examples]]
    population: int
    classes: int
    names: Sequence[str] | None = None
    identity: Mapping[str, Any] = field(default_factory=dict)
    unnoticed: str = "a change in the data of any other client"
    notices: tuple[str, ...] = ()
    bounds: tuple[float, float] | None = None
    impute: Impute = "none"
    encoding: Mapping[str, tuple[str, ...]] | None = None
    test: Examples | None = None
    ignore_index: int = -100
    parts: frozenset[str] | None = None
    columns: FrameColumns | None = None

    @cached_property
    def sample(self) -> Examples:
        """A few examples of the first client that has some."""
        for client in range(min(_SEARCHED, self.population)):
            for one in self.read(client).values():
                if len(one):
                    return _rows(one, slice(ROWS))
        raise DataError(f"none of the first {min(_SEARCHED, self.population)} clients has an example")

    @cached_property
    def template(self) -> Examples:
        """No examples, in the form of all."""
        return _rows(self.sample, slice(0))

    @property
    def first(self) -> Dataset:
        """The sample as a dataset, for whatever is decided by the form of the data."""
        x = self.sample.x if self.impute == "none" else without_gaps(self.sample.x)
        return Dataset(x, cast(Tensor, self.sample.y), self.classes, ignore_index=self.ignore_index)

    def __post_init__(self) -> None:
        if self.population < 1:
            raise SpecError(f"a task needs at least 1 client, not {self.population}")

    def check_valid_fraction(self, valid_fraction: float) -> None:
        """Refuse a validation share that no client would use, as far as it is known or the first clients tell."""
        if not valid_fraction:
            return
        parts, among = self.parts, ""
        if parts is None:
            parts, among = self._first_parts(), f", as the first {min(_SEARCHED, self.population)} clients have it"
        if parts and not parts & {"", "valid"}:
            raise unused_share(valid_fraction, among if self.population > _SEARCHED else "")

    def _first_parts(self) -> frozenset[str]:
        """The parts of the first clients that have examples; one that can be used ends the search."""
        found: set[str] = set()
        for client in range(min(_SEARCHED, self.population)):
            found |= {part for part, one in self.read(client).items() if len(one)}
            if found & {"", "valid"}:
                break
        return frozenset(found)

    def with_unseen_last(self, newcomers: int, key: Key) -> LazyClients:
        """The same clients, those that never take part at the end: the order that clients in memory have."""
        if not newcomers:
            return self
        order = unseen_last(self.population, newcomers, key)
        names = None if self.names is None else tuple(self.names[client] for client in order)
        return replace(self, read=lambda client: self.read(order[client]), names=names)


@dataclass(frozen=True, eq=False, repr=False)
class LazyTask(Shown, Describable):
    """A model and clients whose data are read on demand, with a cache of ``cache_mb`` megabytes.

    A client's split is the one that the same client has in a task in memory. The global test set is the source's, or
    the test parts of 100 clients drawn by key (of all clients, if there are no more). The last ``newcomers`` clients
    never take part. Label ``noise`` is drawn client by client, so that its draws are not those of a task in memory.
    """

    objective: Objective
    source: LazyClients
    key: Key
    test_fraction: float = 0.2
    valid_fraction: float = 0.0
    standardise: Standardise = "none"
    cache_mb: float = CACHE_MB
    metrics: tuple[str, ...] = ("accuracy", "loss")
    kind: TaskKind | None = None
    takes_integers: bool = True
    device: torch.device | str | None = None
    dtype: torch.dtype | None = None
    newcomers: int = 0
    noise: LabelNoise | None = None
    classifier: Objective | None = None

    def __post_init__(self) -> None:
        check_fractions(self.test_fraction, self.valid_fraction)
        if self.noise is not None:
            self._check_noise(self.noise)

    def __repr__(self) -> str:
        unseen = f" and {self.newcomers} newcomers" if self.newcomers else ""
        return f"<task of {self.population} clients{unseen}, read on demand; {self.kind or 'any targets'}>"

    def _check_noise(self, noise: LabelNoise) -> None:
        if noise.first:
            raise SpecError(
                "noise.protocol = 'public_code' changes all labels before they are given to clients, and these data "
                "are read on demand: set lazy=False, or protocol = 'paper'"
            )
        noise.apply(cast(Tensor, self.source.sample.y), self.classes, self.key)

    @property
    def population(self) -> int:
        """How many clients may take part."""
        return self.source.population - self.newcomers

    @property
    def unseen_ids(self) -> Tensor:
        """The clients that never take part."""
        return torch.arange(self.population, self.source.population)

    @property
    def classes(self) -> int:
        """The number of classes, 0 for quantities."""
        return self.source.classes

    @property
    def names(self) -> Sequence[str] | None:
        """The clients' names, if they have any."""
        return self.source.names

    @property
    def bounds(self) -> tuple[float, float] | None:
        """The declared bounds of the features."""
        return self.source.bounds if self.standardise == "none" else None

    @property
    def encoding(self) -> Mapping[str, tuple[str, ...]] | None:
        """What the numbers of encoded columns mean."""
        return self.source.encoding

    @property
    def notices(self) -> tuple[str, ...]:
        """Notices about the data, with what a resumed run cannot notice."""
        told = f"the data are read on demand, with a cache of {self.cache_mb:g} MB"
        if self.population > _WITNESSES:
            told += (
                f"; a resumed run compares what is known without reading them, and {_WITNESSES} clients: it does "
                f"not notice {self.source.unnoticed}"
            )
        noisy = () if self.noise is None else (_NOISE,)
        return (*self.source.notices, *noisy, told)

    @cached_property
    def cache(self) -> ClientCache:
        """The clients in memory."""
        return ClientCache(self.read, int(self.cache_mb * _MEGABYTE))

    def data(self, part: DataPart, ids: Tensor) -> Block:
        """The examples of some clients, joined."""
        if part not in PARTS:
            raise SpecError(f"unknown part of the data '{part}'; allowed: {', '.join(PARTS)}")
        clients = ids.tolist()
        last = self.source.population - 1
        if clients and not 0 <= min(clients) <= max(clients) <= last:
            raise DataError(f"client ids must lie in 0..{last}, got {min(clients)}..{max(clients)}")
        found = [self.cache.get(client)[part] for client in clients]
        size = torch.tensor([len(one) for one in found], dtype=torch.int64)
        found = found or [self.source.template]
        x, y = (_cat([getattr(one, name) for one in found]) for name in ("x", "y"))
        return Block(self._features(x), self._moved(y), size.cumsum(0) - size, size)

    def prefetch(self, ids: Callable[[], Tensor]) -> None:
        """Read some clients in the background, because they will be needed next."""
        self.cache.prefetch(lambda: ids().tolist())

    def read(self, client: int) -> Parts:
        """One client's parts: read, checked, split, filled and scaled."""
        parts = self._as_read(client)
        steps = self._learned(parts)
        sizes = {part: torch.tensor([len(one)]) for part, one in parts.items()}
        return {part: Examples(steps.changed(one.x, sizes[part]), one.y) for part, one in parts.items()}

    def preparation(self, clients: Sequence[int] | None = None) -> Preparation:
        """What is done to the raw rows of these clients, which are read for it."""
        steps = self._steps()
        if self.source.impute == "none" and self.standardise == "none":
            return steps
        if not clients:
            return replace(steps, per_client=True, clients=())
        strange = [client for client in clients if not 0 <= client < self.source.population]
        if strange:
            raise SpecError(f"client {strange[0]} does not exist: clients are 0 to {self.source.population - 1}")
        return Preparation.joined([self._learned(self._as_read(client)) for client in clients], clients)

    def _steps(self) -> Preparation:
        return Preparation.of(self.source.sample.x, self.source.columns).in_precision(self.dtype)

    def _learned(self, parts: Parts) -> Preparation:
        sizes, scaled = torch.tensor([len(parts["train"])]), self.standardise == "client"
        return self._steps().learn(parts["train"].x, sizes, self.source.impute, scaled)

    def _as_read(self, client: int) -> Parts:
        with reading_as(self.dtype):
            template = self.source.template
            found = {part: one if len(one) else template for part, one in self.source.read(client).items()}
        for part, one in found.items():
            self._check(client, part, one)
        return self._parts(client, found)

    def count_filled(self, ids: Tensor) -> int:
        """How many missing values of some clients are filled; they are read again, because the cache holds no gaps."""
        if self.source.impute == "none":
            return 0
        return sum(count_gaps(one.x) for client in ids.tolist() for one in self.source.read(client).values())

    @cached_property
    def global_test(self) -> Examples | None:
        """The source's test set, or the test parts of at most 100 clients."""
        if self.source.test is not None:
            return Examples(self._features(self.source.test.x), self._moved(self.source.test.y))
        count = min(_JUDGES, self.population)
        chosen = self.key.fold("witnesses").choice(self.population, count)
        block = self.data("test", chosen if count < self.population else torch.arange(count))
        return Examples(block.x, block.y) if int(block.size.sum()) else None

    def fingerprint(self) -> Mapping[str, Any]:
        """What is known about the data without reading all of them, and the contents of a few clients."""
        ids = torch.linspace(0, self.population - 1, min(_WITNESSES, self.population)).round().long().unique()
        alone = replace(self, device=None, dtype=None)
        seen = {part: digest(*leaves_of(alone.data(part, ids))) for part in PARTS}
        return {
            "clients": self.population, "names": None if self.names is None else list(self.names),
            **self.source.identity, "some clients": {part: {VALUES: value} for part, value in seen.items()},
            "global_test": None if self.source.test is None else {VALUES: digest(*leaves_of(self.source.test))},
            **self._settings_known(),
        }  # fmt: skip

    def _settings_known(self) -> dict[str, Any]:
        """Settings that change what clients see, as far as they are set."""
        found: dict[str, Any] = {"newcomers": self.newcomers} if self.newcomers else {}
        if self.noise is not None:
            found["noise"] = asdict(self.noise)
        if self.classifier is not None:
            leaves = self.classifier.init(Key.of(0))[0]
            found["classifier"] = {name: list(leaf.shape) for name, leaf in leaves.items()}
        return found

    def to(self, device: torch.device | str | None, dtype: torch.dtype | None = None) -> LazyTask:
        """The same task on another device or in another precision."""
        return replace(self, device=device, dtype=dtype or self.dtype)

    def _check(self, client: int, part: str, one: Examples) -> None:
        if not len(one):
            return
        seen = one.x if self.source.impute == "none" else without_gaps(one.x)
        names = self.names
        called = f"{client} '{names[client]}'" if names is not None else str(client)
        called = f"{called} [{part}]" if part else called
        shape, first = inputs.shape_of(one.x), inputs.shape_of(self.source.template.x)
        if shape != first:
            raise DataError(f"client {called}: examples have shape {shape}, those of the first {first}; give one shape")
        if bytes_beside_decimals(one.x, self.source.template.x):
            raise DataError(f"client {called}: features are bytes and those of the first decimals, or the reverse")
        if _is_float(one.y) != _is_float(self.source.template.y):
            raise DataError(f"client {called}: targets have decimals and those of the first do not, or the reverse")
        limits = LabelLimits(self.source.classes or None, self.source.ignore_index)
        check_examples(seen, one.y, limits, torch.zeros(len(one), dtype=torch.int64), lambda _: called)

    def _parts(self, client: int, found: Mapping[str, Examples]) -> Parts:
        """A client's parts: given, or drawn by the true labels."""
        noisy = self._noisy(client, found)
        tested = noisy if self.noise is not None and self.noise.test == "noisy" else found
        seen = {part: tested if part == "test" else noisy for part in PARTS}
        if "" not in found:
            return {part: seen[part].get(part, self.source.template) for part in PARTS}
        fractions = {"test_fraction": self.test_fraction, "valid_fraction": self.valid_fraction}
        mine = split_client(client, cast(Tensor, found[""].y), self.key, **fractions)
        return {part: _rows(seen[part][""], getattr(mine, part)) for part in PARTS}

    def _noisy(self, client: int, found: Mapping[str, Examples]) -> Mapping[str, Examples]:
        if self.noise is None:
            return found
        key = self.key.fold("noise").fold(client)
        labels = {
            part: self.noise.apply(cast(Tensor, one.y), self.classes, key.fold(part)) for part, one in found.items()
        }
        return {part: Examples(one.x, labels[part]) for part, one in found.items()}

    def _features(self, x: Inputs) -> Inputs:
        """Features on their device, as floats if the model accepts only those."""
        with reading_as(self.dtype):
            return self._moved(x if self.takes_integers else inputs.each(_as_float, x))

    def _moved(self, leaf: Inputs) -> Inputs:
        def moved(one: Tensor) -> Tensor:
            one = one.to(self.device)
            return one.to(self.dtype) if self.dtype is not None and one.is_floating_point() else one

        return inputs.each(moved, leaf)


def _rows(examples: Examples, rows: Tensor | slice) -> Examples:
    return Examples(inputs.take(examples.x, rows), inputs.take(examples.y, rows))


def _is_float(targets: Inputs) -> list[bool]:
    return [leaf.is_floating_point() for leaf in inputs.leaves(targets)]


def _as_float(leaf: Tensor) -> Tensor:
    return leaf if leaf.is_floating_point() else leaf.to(read_as())


def _cat(some: list[Inputs]) -> Inputs:
    return some[0] if len(some) == 1 else inputs.joined(some)
