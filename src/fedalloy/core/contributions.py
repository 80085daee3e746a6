"""What an engine hands to the server: statistics, and a handle on what the clients sent, wherever that lies.

The server asks the handle for what the rule needs and for no more. Norms and finiteness are noted by the engine while
contributions are made, so that checking them needs no further pass over the updates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from fedalloy.core import tree
from fedalloy.core.tree import Chunk, Tree, Weights

Payload = dict[str, Tree]
"""What is sent, by part."""
Stats = dict[str, Tensor]

QUESTIONS: Mapping[str, str] = {
    "norms": "the noted length of every client's part, whole and by leaf",
    "combine": "the weighted sum of a part over clients",
    "chunks": "pieces of one or several parts over parameters, a row per client",
    "rows": "what some clients sent, whole",
    "stack": "a part that is reduced by stacking",
    "cross_score": "every client's model on every client's validation part",
}
"""What a rule may ask besides ids, statistics and templates; engines say which of these they answer."""
EVERYTHING = frozenset(QUESTIONS)

_NEVER_NEGATIVE = frozenset({"running_var", "num_batches_tracked"})
"""Buffers of norm layers, by the last part of their names."""


@dataclass(frozen=True)
class Notes:
    """What is known of every client's leaves without reading them again: one row per leaf, one column per client.

    ``squares`` are squared lengths, summed in float64 where they are ``exact`` (for rules that ask for norms) and
    otherwise in the leaf's own precision, which is several times faster and good enough for a limit. ``negative`` marks
    leaves with a number below 0 that no model can have there (a norm layer's variance and its count of batches).
    """

    leaves: tuple[tuple[str, str], ...]
    squares: Tensor
    finite: Tensor
    negative: Tensor

    def norms(self, part: str, leaves: Sequence[str] | None = None) -> Tensor:
        """The length of every client's part, or of some of its leaves together, ``[C]``."""
        wanted = [row for row, (whose, leaf) in enumerate(self.leaves) if whose == part and _among(leaf, leaves)]
        return self.squares[wanted].sum(0).sqrt()

    def take(self, index: Tensor) -> Notes:
        """Some of the clients, by position."""
        if not self.leaves:  # nothing is sent, so nothing is known of anybody
            return self
        return Notes(self.leaves, self.squares[:, index], self.finite[:, index], self.negative[:, index])

    def alone_as(self, part: str, name: str) -> Notes:
        """Nothing but one part, called by another name."""
        rows = [row for row, (whose, _) in enumerate(self.leaves) if whose == part]
        leaves = tuple((name, self.leaves[row][1]) for row in rows)
        return Notes(leaves, self.squares[rows], self.finite[rows], self.negative[rows])

    def replaced(self, late: Tensor, received: Notes) -> Notes:
        """The notes in which those who are ``late`` have the one column of ``received``."""
        received = received.arranged(self.leaves)
        pairs = ((self.squares, received.squares), (self.finite, received.finite), (self.negative, received.negative))
        return Notes(self.leaves, *(torch.where(late, new, old) for old, new in pairs))

    def arranged(self, leaves: tuple[tuple[str, str], ...]) -> Notes:
        """The same notes in the order of ``leaves``: whoever sends may name its leaves in an order of its own."""
        if self.leaves == leaves:
            return self
        rows = [self.leaves.index(leaf) for leaf in leaves]
        return Notes(leaves, self.squares[rows], self.finite[rows], self.negative[rows])

    @staticmethod
    def of(payload: Mapping[str, Mapping[str, Tensor]], *, exact: bool = True) -> Notes:
        """One pass over stacked parts.

        >>> Notes.of({"delta": {"w": torch.tensor([[3.0, 4.0], [0.0, torch.inf]])}}).norms("delta")
        tensor([5., inf], dtype=torch.float64)
        """
        named = tuple((part, name) for part, leaves in payload.items() for name in leaves)
        leaves = tree.matrices([payload[part][name].detach() for part, name in named])
        if not leaves:
            return Notes((), *(torch.zeros(0, 0, dtype=kind) for kind in (torch.float64, torch.bool, torch.bool)))
        if exact:
            squares = torch.stack([tree.squared_lengths(leaf) for leaf in leaves]).cpu()
        else:  # float16 is too narrow for a square
            wide = (leaf if leaf.dtype in (torch.float32, torch.float64) else leaf.double() for leaf in leaves)
            squares = torch.stack([torch.linalg.vector_norm(leaf, dim=1) for leaf in wide]).cpu().double().square()
        return Notes(named, *_finite(squares, leaves), _negative(named, leaves))

    @staticmethod
    def alone(payload: Mapping[str, Mapping[str, Tensor]], *, exact: bool = True) -> Notes:
        """The notes of a single client's parts."""
        rows = {part: {name: leaf.unsqueeze(0) for name, leaf in leaves.items()} for part, leaves in payload.items()}
        return Notes.of(rows, exact=exact)

    @staticmethod
    def join(blocks: Sequence[Notes]) -> Notes:
        """The clients of several blocks beside each other."""
        if len(blocks) == 1:
            return blocks[0]
        first = blocks[0].leaves
        same = [block if block.leaves == first else block.arranged(first) for block in blocks]
        squares, finite, negative = (
            torch.cat([getattr(block, name) for block in same], dim=1) for name in ("squares", "finite", "negative")
        )
        return Notes(first, squares, finite, negative)


class Contributions(ABC):
    """The contributions of a round, always sorted by id: small statistics, and answers about what was sent.

    Rules see it as ``cohort``. ``answers`` names the ``QUESTIONS`` that a handle answers; asking another raises. A
    handle is valid until the engine's next call: ``keep`` copies what must outlive it.
    """

    answers: ClassVar[frozenset[str]] = EVERYTHING
    ids: Tensor
    stats: Stats
    cross: Tensor | None
    payload: Payload
    """Everything that was sent, stacked: to touch it is to ask for all rows."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    @abstractmethod
    def notes(self) -> Notes:
        """Lengths and finiteness, noted when the contributions were made."""

    @property
    @abstractmethod
    def parts(self) -> tuple[str, ...]:
        """The names of what was sent."""

    @abstractmethod
    def template(self, part: str) -> Tree:
        """Names, shapes, dtypes and device of one client's part, without its numbers."""

    @abstractmethod
    def select(self, ids: Tensor) -> Self:
        """Only these clients; the rows of the others are gone, not weighted with 0."""

    @abstractmethod
    def resend(self, ids: Tensor, received: Payload) -> Self:
        """These clients' contributions replaced by ``received``, one client's parts, the notes too."""

    @abstractmethod
    def with_stats(self, stats: Mapping[str, Tensor]) -> Self:
        """The same contributions, knowing more of the clients."""

    @abstractmethod
    def with_cross(self, cross: Tensor) -> Self:
        """The same contributions with their cross scores, ``[C, C]``."""

    @abstractmethod
    def alone(self, part: str, name: str) -> Self:
        """Nothing but one part, called by another name: rules that guard every part weigh each as if it were one."""

    @abstractmethod
    def combine(self, part: str, weights: Weights) -> Tree:
        """Every client's part times its weight, summed over clients in the order of their ids."""

    @abstractmethod
    def chunks(self, parts: Sequence[str]) -> Iterator[tuple[Chunk, tuple[Tensor, ...]]]:
        """``[C, n]`` pieces of the parts, which have the same leaves, in step and in a fixed order."""

    @abstractmethod
    def rows(self, part: str, ids: Tensor) -> Tree:
        """What some clients sent, stacked in the order of ``ids``."""

    @abstractmethod
    def stack(self, part: str) -> Tree:
        """All clients' rows of a part that is reduced by stacking."""

    @abstractmethod
    def keep(self) -> Contributions:
        """A copy that outlives the engine's next call."""

    def norms(self, part: str, leaves: Sequence[str] | None = None) -> Tensor:
        """The noted length of every client's part (or of some of its leaves together), ``[C]``: to float64's precision
        for rules that ask for norms or rows."""
        return self.notes.norms(part, leaves)

    def dots(self, part: str, other: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Every client's inner product with one tree, leaf by leaf, ``[C]`` each in float64: one pass in chunks."""
        found = {name: torch.zeros(len(self), dtype=torch.float64, device=leaf.device) for name, leaf in other.items()}
        for chunk, (columns,) in self.chunks((part,)):
            flat = other[chunk.leaf].reshape(-1)[chunk.columns]
            found[chunk.leaf] = found[chunk.leaf] + columns.double() @ flat.double()
        return {name: values.cpu() for name, values in found.items()}


def _among(leaf: str, leaves: Sequence[str] | None) -> bool:
    return leaves is None or leaf in leaves


def _finite(squares: Tensor, leaves: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The squares, and which leaves are finite. A sum of squares is finite only if every term is; the rare overflow of
    finite terms is looked at again."""
    finite = squares.isfinite()
    for row in (~finite).any(1).nonzero().flatten().tolist() if not bool(finite.all()) else ():
        squares[row] = tree.squared_lengths(leaves[row]).cpu()
        finite[row] = leaves[row].isfinite().all(1).cpu()
    return squares, finite


def _negative(named: Sequence[tuple[str, str]], leaves: Sequence[Tensor]) -> Tensor:
    found = torch.zeros(len(leaves), len(leaves[0]), dtype=torch.bool)
    for row, (part, name) in enumerate(named):
        if part == "buffers" and name.rpartition(".")[2] in _NEVER_NEGATIVE:
            found[row] = (leaves[row] < 0).any(1).cpu()
    return found
