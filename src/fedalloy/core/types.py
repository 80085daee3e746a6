"""Values that the packages exchange: parts, plans, work, data blocks, contributions, cohorts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import Tensor

from fedalloy.core import inputs, renamed, tree
from fedalloy.core.contributions import Contributions, Notes, Payload, Stats
from fedalloy.core.factors import LowRank, stored
from fedalloy.core.inputs import Inputs
from fedalloy.core.keys import Key
from fedalloy.core.names import NO_NAMES, Names
from fedalloy.core.tree import Chunk, Tree, Weights

State = dict[str, Any]
"""Nested dicts whose leaves are tensors and plain scalars."""
Shared = dict[str, Tree]
"""The parts every client receives: ``params``, ``buffers``, ``control``, ``samples``, ..."""
Carry = dict[str, Any]
"""What a client's program passes from step to step: nested dicts of tensors."""
DataPart = Literal["train", "valid", "test"]
Info = dict[str, Tensor]

__all__ = [
    "Block",
    "Carry",
    "Cohort",
    "Context",
    "Contribution",
    "Contributions",
    "DataPart",
    "DataSpec",
    "Examples",
    "Info",
    "Part",
    "Payload",
    "Plan",
    "Shared",
    "State",
    "Stats",
    "Tree",
    "Weights",
    "Work",
]  # fmt: skip


@dataclass(frozen=True)
class Part:
    """One part that a client sends, and how the server reduces it over clients.

    ``reduce``: ``weighted`` by the weighting rule, plain ``mean``, by ``samples``, or kept as a ``stack``; a ``sum`` is
    returned to the caller of the round (``ServerStep.sums``) and does not enter the server's state.
    ``like``: the shared part with the same names and shapes (used to check contributions), except for the leaves in
    ``without``, which stay at the client. ``neutral`` fills the part for a client that did not deliver (an update of 0,
    a factor of 1).
    """

    reduce: Literal["weighted", "mean", "samples", "stack", "sum"] = "weighted"
    like: str = "params"
    without: Names = NO_NAMES
    neutral: float = 0.0

    def template(self, shared: Mapping[str, Tree]) -> Tree:
        """A tree of the names, shapes and dtypes that are sent."""
        leaves = shared.get(self.like, {})
        return self.without.split(leaves)[1] if self.without else leaves


@dataclass(frozen=True)
class Plan:
    """Which examples enter which local step, for a block of clients.

    ``index`` and ``mask`` are ``[C, S, B]``: positions in the client's training part, and whether the slot is
    used. ``phase`` is ``[C, S]``. A step whose mask is empty is not taken: the carry does not change. A client's empty
    steps come after its others.
    """

    index: Tensor
    mask: Tensor
    phase: Tensor

    @property
    def steps(self) -> Tensor:
        """How many steps each client takes, ``[C]``."""
        return self.mask.any(-1).sum(-1)


@dataclass(frozen=True)
class Work:
    """What the devices of a cohort do in one round.

    ``epochs`` overrides the solver's number unless it is -1. A client that is not ``active`` plans its work, but its
    link fails: it re-sends the received model (a zero update).
    """

    ids: Tensor
    epochs: Tensor
    active: Tensor

    @cached_property
    def clients(self) -> list[int]:
        """The ids as numbers."""
        return self.ids.tolist()

    @cached_property
    def all_active(self) -> bool:
        """Whether every link works."""
        return bool(self.active.all())

    @cached_property
    def ascending(self) -> bool:
        """Whether the ids are in ascending order, without repetition."""
        return bool((self.ids[1:] > self.ids[:-1]).all())

    @staticmethod
    def undisturbed(ids: Tensor) -> Work:
        """Work for ``ids``, which must be in ascending order, with the solver's epochs and all links working."""
        work = Work(ids, *_defaults(len(ids)))
        work.__dict__.update(all_active=True, ascending=True)
        return work

    @staticmethod
    def of(ids: Tensor, epochs: Tensor | None = None, active: Tensor | None = None) -> Work:
        """Work for ``ids`` (sorted here); by default with the solver's epochs and all links working."""
        order = slice(None) if bool((ids[1:] >= ids[:-1]).all()) else ids.argsort()
        epochs = torch.full_like(ids, -1) if epochs is None else epochs[order]
        active = torch.ones_like(ids, dtype=torch.bool) if active is None else active[order]
        return Work(ids[order], epochs, active)

    def __len__(self) -> int:
        return self.ids.shape[0]

    def rows(self, index: Tensor | slice) -> Work:
        """Part of the cohort."""
        return Work(self.ids[index], self.epochs[index], self.active[index])


def _defaults(clients: int) -> tuple[Tensor, Tensor]:
    """Epochs and links of undisturbed work, the same in every round; made again if somebody wrote into them."""
    if torch.is_inference_mode_enabled():  # where writes are not counted
        return _kept_defaults.__wrapped__(clients)
    epochs, active = _kept_defaults(clients)
    if epochs._version or active._version:
        _kept_defaults.cache_clear()
        return _kept_defaults(clients)
    return epochs, active


@lru_cache(8)
def _kept_defaults(clients: int) -> tuple[Tensor, Tensor]:
    return torch.tensor([-1]).repeat(clients), torch.tensor([True]).repeat(clients)


@dataclass(frozen=True)
class Examples:
    """One client's examples, or a common pool; ``x`` and ``y`` are tensors, or dicts of tensors for models with several
    inputs."""

    x: Inputs
    y: Inputs

    def __len__(self) -> int:
        return inputs.length(self.y)


@dataclass(frozen=True)
class DataSpec:
    """The form of a task's data: shape and dtype of one example, the model's number of outputs, the range of a client's
    features, the ``bounds`` declared for the data (None: not declared), a seed of the run for the server's draws, and
    whether the model can be trained on one example ``alone`` (BatchNorm over vectors cannot). Examples of several
    tensors have an empty ``shape``, and ``shapes`` in the form of the examples."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    outputs: int
    low: float
    high: float
    bounds: tuple[float, float] | None = None
    seed: int = 0
    alone: bool = True
    shapes: Any = None


@dataclass(frozen=True)
class Block:
    """The examples of several clients inside one pool: client ``c`` owns rows ``start[c] .. start[c]+size[c]``."""

    x: Inputs
    y: Inputs
    start: Tensor
    size: Tensor

    def __repr__(self) -> str:
        return f"<{int(self.size.sum())} examples of {len(self.size)} clients>"

    @staticmethod
    def of(examples: Examples) -> Block:
        """The block of one client."""
        return Block(examples.x, examples.y, torch.tensor([0]), torch.tensor([len(examples)]))

    def client(self, row: int) -> Examples:
        """A view of one client's examples."""
        begin = int(self.start[row])
        end = begin + int(self.size[row])
        rows = slice(begin, end)
        return Examples(inputs.take(self.x, rows), inputs.take(self.y, rows))


@dataclass(frozen=True)
class Context:
    """Information about the round for every rule: read-only, the same for all clients.

    ``round`` counts from 1; ``local_lr`` is the local step size of this round; ``absent`` are the ids of clients that
    were expected but sent nothing.
    """

    round: int
    population: int
    key: Key
    local_lr: float = 1.0
    rounds: int | None = None
    absent: tuple[int, ...] = ()


@dataclass(frozen=True)
class Contribution:
    """The result of one client: what it sends, its statistics, the state it keeps, and the notes about it."""

    payload: Payload
    stats: dict[str, float]
    state: State
    notes: Notes | None = None


@dataclass(frozen=True)
class Cohort(Contributions):
    """The contributions of a round in this process's memory: ``payload`` leaves have a leading client axis. No copies
    are made; differentiable; always sorted by id.

    ``cross`` is ``[C, C]``, the accuracy of the model of client i on the validation part of client j, for rules
    that require ``cross_score``. ``noted`` are the engine's notes; without them they are computed here.
    """

    ids: Tensor
    payload: Payload
    stats: Stats = field(default_factory=dict)
    cross: Tensor | None = None
    noted: Notes | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.noted is None:
            object.__setattr__(self, "noted", Notes.of(self.payload))

    @property
    def notes(self) -> Notes:
        assert self.noted is not None
        return self.noted

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.payload)

    def template(self, part: str) -> Tree:
        return {name: _formed(leaf) for name, leaf in stored(self.payload[part]).items()}

    def select(self, ids: Tensor) -> Cohort:
        return self.take(torch.isin(self.ids, ids).nonzero().flatten())

    def take(self, index: Tensor) -> Cohort:
        """Some clients of the cohort, by position."""
        payload = {part: tree.rows(leaves, index) for part, leaves in self.payload.items()}
        stats = {name: values[index] for name, values in self.stats.items()}
        cross = None if self.cross is None else self.cross[index][:, index]
        return Cohort(self.ids[index], payload, stats, cross, self.notes.take(index))

    def resend(self, ids: Tensor, received: Payload) -> Self:
        late = torch.isin(self.ids, ids)

        def instead(leaf: Tensor, given: Tensor) -> Tensor:
            return torch.where(late.to(leaf.device).reshape(-1, *[1] * (leaf.dim() - 1)), given.to(leaf), leaf)

        payload = {part: tree.map_leaves(instead, leaves, received[part]) for part, leaves in self.payload.items()}
        instead_of = Notes.alone({part: received[part] for part in self.payload})
        return replace(self, payload=payload, noted=self.notes.replaced(late, instead_of))

    def with_stats(self, stats: Mapping[str, Tensor]) -> Cohort:
        return Cohort(self.ids, self.payload, {**self.stats, **stats}, self.cross, self.noted)

    def with_cross(self, cross: Tensor) -> Cohort:
        return replace(self, cross=cross)

    def with_payload(self, payload: Payload) -> Self:
        """The same clients with another payload."""
        return replace(self, payload=payload, noted=None)

    def alone(self, part: str, name: str) -> Self:
        return replace(self, payload={name: self.payload[part]}, noted=self.notes.alone_as(part, name))

    def combine(self, part: str, weights: Weights) -> Tree:
        return tree.combine(self.payload[part], weights)

    def chunks(self, parts: Sequence[str]) -> Iterator[tuple[Chunk, tuple[Tensor, ...]]]:
        trees = [self.payload[part] for part in parts]
        for chunk, columns in tree.chunks(trees[0]):
            others = (tree.as_rows(leaves[chunk.leaf])[:, chunk.columns] for leaves in trees[1:])
            yield chunk, (columns, *others)

    def rows(self, part: str, ids: Tensor) -> Tree:
        place = {client: row for row, client in enumerate(self.ids.tolist())}
        rows = torch.tensor([place[client] for client in ids.tolist()], dtype=torch.int64)  # maybe none
        return tree.rows(self.payload[part], rows)

    def stack(self, part: str) -> Tree:
        return self.payload[part]

    def keep(self) -> Cohort:
        return replace(
            self, payload={part: tree.map_leaves(Tensor.clone, leaves) for part, leaves in self.payload.items()}
        )

    @staticmethod
    def gather(ids: list[int], contributions: list[Contribution]) -> Cohort:
        """Stack single contributions, sorted by id."""
        order = sorted(range(len(ids)), key=ids.__getitem__)
        chosen = [contributions[i] for i in order]
        parts = chosen[0].payload.keys() if chosen else ()
        stats = chosen[0].stats.keys() if chosen else ()
        notes = [one.notes for one in chosen if one.notes is not None]
        return Cohort(
            torch.tensor([ids[i] for i in order], dtype=torch.int64),
            {part: tree.stack([c.payload[part] for c in chosen]) for part in parts},
            {name: torch.tensor([c.stats[name] for c in chosen], dtype=torch.float64) for name in stats},
            noted=Notes.join(notes) if notes and len(notes) == len(chosen) else None,
        )


def _formed(leaf: Tensor | LowRank) -> Tensor:
    if isinstance(leaf, LowRank):
        return leaf.left.new_empty(()).expand(leaf.one.shape)
    return leaf.new_empty(()).expand(leaf.shape[1:])


if not TYPE_CHECKING:  # old names, kept for one version
    __getattr__ = renamed.old_names(__name__, {"Facts": "DataSpec"})
