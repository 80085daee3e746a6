"""What a task does to raw rows before its model gets them, so that the same can be done to further rows.

A frame's columns become numbers in the same way for everybody. Missing values are filled and features standardised by
each client's own training part, so those two steps need to know whose rows they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fedalloy.core import inputs
from fedalloy.core.errors import DataError, SpecError
from fedalloy.core.inputs import Inputs
from fedalloy.tasks.imputing import Impute, Imputer
from fedalloy.tasks.standardise import Scaler

Leaves = Mapping[str, Tensor]
"""Tensors ``[K, ...]``, one row per client, by the path of the feature (``""`` where there is one tensor only)."""
_STEPS = ("fill", "centre", "spread")
_DECIMALS = {"float32": torch.float32, "float64": torch.float64}
"""The types in which decimals are read: that of the task."""


@dataclass(frozen=True)
class FrameColumns:
    """How the columns of a frame become numbers: the features in their order, the values of encoded ones, and whether
    each value gets a column of its own."""

    features: tuple[str, ...]
    values: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    encoding: Literal["one_hot", "codes"] = "one_hot"

    @property
    def width(self) -> int:
        """How many numbers a row becomes."""
        one_hot = self.encoding == "one_hot"
        return sum(len(self.values[name]) if one_hot and name in self.values else 1 for name in self.features)


@dataclass(frozen=True, eq=False)
class Preparation:
    """What was done to raw rows: ``columns`` of frames became numbers, gaps were filled with ``fill``, features were
    standardised by ``centre`` and ``spread``. ``clients`` are those that the rows of these tensors belong to (None:
    clients 0, 1, ...). ``per_client`` says that some step needs a client, also where nobody's values are known here.
    ``dims`` is the number of axes of one example, ``types`` the type of the features as they came, by path.
    ``unknown`` says in words what cannot be repeated on other rows.
    """

    columns: FrameColumns | None = None
    fill: Leaves = field(default_factory=dict)
    centre: Leaves = field(default_factory=dict)
    spread: Leaves = field(default_factory=dict)
    clients: tuple[int, ...] | None = None
    per_client: bool = False
    dims: Mapping[str, int] = field(default_factory=dict)
    types: Mapping[str, str] = field(default_factory=dict)
    unknown: str = ""

    @staticmethod
    def of(x: Inputs, columns: FrameColumns | None = None) -> Preparation:
        """A preparation without steps per client, for rows like ``x``."""
        leaves = dict(named(x))
        dims = {path: leaf.dim() - 1 for path, leaf in leaves.items()}
        return Preparation(columns, dims=dims, types={path: _type(leaf) for path, leaf in leaves.items()})

    def of_types(self, x: Inputs) -> Preparation:
        """The same for rows of the types of ``x``."""
        return replace(self, types=Preparation.of(x).types)

    def in_precision(self, dtype: torch.dtype | None) -> Preparation:
        """The same for a task that reads decimals in this precision, whatever the rows that were looked at had."""
        kind = "float64" if dtype == torch.float64 else "float32"
        return replace(self, types={path: kind if one in _DECIMALS else one for path, one in self.types.items()})

    @property
    def precision(self) -> torch.dtype:
        """The type in which decimals are read."""
        return torch.float64 if "float64" in self.types.values() else torch.float32

    def learn(self, x: Inputs, sizes: Tensor, impute: Impute, standardise: bool) -> Preparation:
        """The same with what all clients' training rows say; they are sorted by client, ``sizes[0]`` are client 0's."""
        made = replace(self, per_client=self.per_client or impute != "none" or standardise)
        if impute != "none":
            floats = {path: leaf for path, leaf in named(x) if leaf.is_floating_point()}
            fill = {path: Imputer.learn(leaf, sizes, impute).fill for path, leaf in floats.items()}
            made = replace(made, fill=fill)
        if not standardise:
            return made
        scales = {path: Scaler.learn(leaf, sizes) for path, leaf in named(made.changed(x, sizes))}
        centre = {path: one.centre for path, one in scales.items()}
        return replace(made, centre=centre, spread={path: one.spread for path, one in scales.items()})

    def changed(self, x: Inputs, sizes: Tensor) -> Inputs:
        """Any part of all clients' rows, sorted by client, filled and standardised."""

        def changed(path: str, leaf: Tensor) -> Tensor:
            leaf = Imputer(self.fill[path]).apply(leaf, sizes) if path in self.fill else leaf
            scaled = path in self.centre
            return Scaler(self.centre[path], self.spread[path]).apply(leaf, sizes) if scaled else leaf

        return by_path(changed, x) if self.fill or self.centre else x

    def only(self, places: Sequence[int], clients: Sequence[int]) -> Preparation:
        """That of some clients, which are at these places."""
        rows = torch.tensor(list(places), dtype=torch.int64)
        kept: dict[str, Any] = {
            step: {path: leaf[rows] for path, leaf in getattr(self, step).items()} for step in _STEPS
        }
        return replace(self, clients=tuple(clients), **kept)

    def of_clients(self, clients: Sequence[int]) -> Preparation:
        """That of some clients."""
        return self.only([self._place(client) for client in clients], clients)

    @staticmethod
    def joined(some: Sequence[Preparation], clients: Sequence[int]) -> Preparation:
        """Those of single clients, as one."""
        steps: dict[str, Any] = {
            step: {path: torch.cat([getattr(one, step)[path] for one in some]) for path in getattr(some[0], step)}
            for step in _STEPS
        }
        return replace(some[0], clients=tuple(clients), **steps)

    def apply(self, x: Inputs, client: int | None) -> Inputs:
        """Numbers of a client's raw rows as the model gets them."""
        if self.unknown:
            raise SpecError(f"{self.unknown}; give rows as the model gets them: prepared=True")
        if self.per_client and client is None:
            raise SpecError(
                "the task fills gaps or standardises features by each client's own training part: say whose rows these "
                "are (rows_of=3), or that they are prepared already (prepared=True)"
            )
        self._check(x)
        x = by_path(self._as_read, x)
        if client is None or not self.per_client:
            return x
        return self.of_clients([client]).changed(x, torch.tensor([inputs.length(x)]))

    @property
    def known(self) -> Sequence[int]:
        """The clients whose values are known; none where no step needs a client."""
        first = next(iter(self._tensors().values()), ())
        return self.clients if self.clients is not None else range(len(first))

    def _place(self, client: int) -> int:
        known = self.known
        if client not in known:
            told = f"clients are 0 to {len(known) - 1}" if isinstance(known, range) else f"known are {_listed(known)}"
            raise SpecError(f"it is not known how rows of client {client} are prepared: {told}")
        return known.index(client)

    def _as_read(self, path: str, leaf: Tensor) -> Tensor:
        """A feature in the type in which the task read it, as far as further steps depend on it."""
        kind = self.types.get(path, "")
        decimals = kind in _DECIMALS and not leaf.is_floating_point()
        needed = decimals or path in self.centre or path in self.fill
        return leaf.to(_DECIMALS.get(kind, torch.float32)) if needed else leaf

    def _check(self, x: Inputs) -> None:
        """Refuse rows that cannot be those of the task: other features, axes or types, or gaps that nobody fills."""
        found = dict(named(x))
        if self.dims and found.keys() != self.dims.keys():
            raise DataError(f"the rows have {_features(found)}, those of the task {_features(self.dims)}")
        for path, leaf in found.items():
            called = f"x['{path}']" if path else "x"
            if self.dims and leaf.dim() - 1 != self.dims[path]:
                raise DataError(
                    f"{called} has shape {tuple(leaf.shape)}: the first axis must be the rows, and an example of the "
                    f"task has {self.dims[path]} more (for one row alone, x[None])"
                )
            self._check_shape(path, leaf, called)
            if leaf.dtype == torch.uint8 and self.types.get(path) in _DECIMALS:
                raise DataError(
                    f"{called} has bytes (uint8), and the task was made of decimals: scale it as you did for the task"
                )
            if leaf.is_floating_point() and path not in self.fill and bool(leaf.isnan().any()):
                raise DataError(f"{called} has missing values (NaN), and the task fills none: fill them first")
            if leaf.is_floating_point() and bool(leaf.isinf().any()):
                raise DataError(f"{called} has infinite values: replace them, or leave these rows out")
        inputs.one_length(x)

    def _check_shape(self, path: str, leaf: Tensor, called: str) -> None:
        """Refuse rows of another width than what is known of the task's: one column would be taken for all of them."""
        known = [step[path].shape[1:] for step in (self.fill, self.centre) if path in step]
        if self.columns is not None and not known:
            known = [torch.Size([self.columns.width])]
        if known and leaf.shape[1:] != known[0]:
            encoded = "; give a frame to have its columns encoded" if self.columns and self.columns.values else ""
            raise DataError(
                f"{called} has rows of shape {tuple(leaf.shape[1:])}, an example of the task has shape "
                f"{tuple(known[0])}{encoded}"
            )

    def told(self) -> dict[str, Any]:
        """Everything but tensors, as JSON has it."""
        columns = None if self.columns is None else asdict(self.columns)
        plain = {name: getattr(self, name) for name in ("clients", "per_client", "unknown")}
        return {"columns": columns, "dims": dict(self.dims), "types": dict(self.types), **plain}

    def _tensors(self) -> dict[str, Tensor]:
        return {f"{step}:{path}": leaf for step in _STEPS for path, leaf in getattr(self, step).items()}

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by step and path, as a file has them."""
        return {name: leaf.cpu() for name, leaf in self._tensors().items()}

    @staticmethod
    def read(told: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Preparation:
        """What :meth:`told` and :meth:`tensors` said."""
        given, columns = dict(told), told["columns"]
        if columns is not None:
            values = {name: tuple(some) for name, some in columns["values"].items()}
            given["columns"] = FrameColumns(tuple(columns["features"]), values, columns["encoding"])
        given["clients"] = None if told["clients"] is None else tuple(told["clients"])
        steps: dict[str, Any] = {step: {} for step in _STEPS}
        for name, leaf in tensors.items():
            step, _, path = name.partition(":")
            steps[step][path] = leaf
        if told["per_client"] and told["clients"] != [] and not tensors:
            raise ValueError("the values of its clients are missing")
        return Preparation(**given, **steps)


def named(x: Inputs, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor with its path.

    >>> [path for path, _ in named({"a": torch.zeros(1), "b": (torch.zeros(1), torch.zeros(1))})]
    ['a', 'b.0', 'b.1']
    """
    if isinstance(x, Tensor):
        yield path, x
        return
    for name, one in x.items() if isinstance(x, Mapping) else enumerate(x):
        yield from named(one, f"{path}.{name}" if path else str(name))


def by_path(change: Any, x: Inputs, path: str = "") -> Inputs:
    """The same features, each tensor changed by a function of its path and itself."""
    if isinstance(x, Tensor):
        return change(path, x)
    inside = {
        name: f"{path}.{name}" if path else str(name) for name in (x if isinstance(x, Mapping) else range(len(x)))
    }
    made = {name: by_path(change, x[name], one) for name, one in inside.items()}
    return made if isinstance(x, Mapping) else tuple(made.values())


def _type(leaf: Tensor) -> str:
    kind = str(leaf.dtype).removeprefix("torch.")
    return "float32" if leaf.is_floating_point() and kind not in _DECIMALS else kind


def _features(paths: Mapping[str, Any]) -> str:
    return "one array of features" if "" in paths else f"the features {', '.join(sorted(paths))}"


def _listed(clients: Sequence[int]) -> str:
    told = ", ".join(map(str, clients[:10])) or "none"
    return f"{told} and {len(clients) - 10} more" if len(clients) > 10 else told
