"""What an engine returns to the server: statistics, and a handle on what the clients sent, wherever it is stored.

The server asks the handle only for what the rule needs. The engine notes norms and finiteness while contributions are
made, so that checking them needs no further pass over the updates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Self

import torch
from torch import Tensor

from fedalloy.core import tree
from fedalloy.core.factors import LowRank, stored
from fedalloy.core.tree import Chunk, Tree, Weights
from fedalloy.core.wide import wide

Payload = dict[str, Tree]
"""Everything a client sends, by part."""
Stats = dict[str, Tensor]

QUESTIONS: Mapping[str, str] = {
    "norms": "the noted length of every client's part, whole and by leaf",
    "combine": "the weighted sum of a part over clients",
    "chunks": "pieces of one or several parts over parameters, a row per client",
    "rows": "what some clients sent, whole",
    "stack": "a part that is reduced by stacking",
    "cross_score": "every client's model on every client's validation part",
}
"""What a rule may ask for besides ids, statistics and templates; engines declare which of these they answer."""
EVERYTHING = frozenset(QUESTIONS)

_WIDE = (torch.float32, torch.float64)
_NEVER_NEGATIVE = frozenset({"running_var", "num_batches_tracked"})
"""Buffers of norm layers that are never negative, by the last part of their names."""


@dataclass(frozen=True)
class Notes:
    """Facts about every client's leaves, noted in one pass: one row per leaf, one column per client.

    ``squares`` are squared lengths, summed in float64 if ``exact`` (for rules that ask for norms) and otherwise in the
    leaf's dtype, which is several times faster and precise enough for a limit. ``negative`` marks leaves with negative
    numbers where a model cannot have any (a norm layer's variance and its count of batches). ``clean``: it is known
    that all are finite and none is negative.
    """

    leaves: tuple[tuple[str, str], ...]
    squares: Tensor
    finite: Tensor
    negative: Tensor
    clean: bool = field(default=False, kw_only=True)

    def norms(self, part: str, leaves: Sequence[str] | None = None) -> Tensor:
        """The length of every client's part, or of some of its leaves taken together, ``[C]``."""
        wanted = [row for row, (whose, leaf) in enumerate(self.leaves) if whose == part and _among(leaf, leaves)]
        return self.squares[wanted].sum(0).sqrt()

    def take(self, index: Tensor) -> Notes:
        """Some of the clients, by position."""
        if not self.leaves:  # nothing was sent, so the tensors are empty
            return self
        return Notes(self.leaves, self.squares[:, index], self.finite[:, index], self.negative[:, index])

    def alone_as(self, part: str, name: str) -> Notes:
        """Only one part, under another name."""
        rows = [row for row, (whose, _) in enumerate(self.leaves) if whose == part]
        leaves = tuple((name, self.leaves[row][1]) for row in rows)
        return Notes(leaves, self.squares[rows], self.finite[rows], self.negative[rows])

    def replaced(self, late: Tensor, received: Notes) -> Notes:
        """The same notes with the one column of ``received`` for clients that are ``late``."""
        received = received.arranged(self.leaves)
        pairs = ((self.squares, received.squares), (self.finite, received.finite), (self.negative, received.negative))
        return Notes(self.leaves, *(torch.where(late, new, old) for old, new in pairs))

    def arranged(self, leaves: tuple[tuple[str, str], ...]) -> Notes:
        """The same notes in the order of ``leaves``, because clients may send their leaves in different orders."""
        if self.leaves == leaves:
            return self
        rows = [self.leaves.index(leaf) for leaf in leaves]
        return Notes(leaves, self.squares[rows], self.finite[rows], self.negative[rows])

    @staticmethod
    def of(payload: Mapping[str, Mapping[str, Tensor]], *, exact: bool = True) -> Notes:
        """Note stacked parts in one pass.

        >>> Notes.of({"delta": {"w": torch.tensor([[3.0, 4.0], [0.0, torch.inf]])}}).norms("delta")
        tensor([5., inf], dtype=torch.float64)
        """
        # As `measure` and `read` in one: a round on a CPU does this for every client, and calls would be most of it.
        named = tuple((part, name) for part, leaves in payload.items() for name in leaves)
        plain = (part if type(part) is dict else stored(part) for part in payload.values())
        leaves = [leaf for part in plain for leaf in part.values()]
        if not leaves:
            return Notes((), *(torch.zeros(0, 0, dtype=kind) for kind in (torch.float64, torch.bool, torch.bool)))
        if exact:
            squares = torch.stack([_exact_squares(leaf) for leaf in leaves]).cpu()
        else:
            squares = torch.stack(_lengths(leaves)).cpu().double().square()
        return Notes(named, *_finite(squares, leaves), _negative(named, leaves, squares.shape[1]))

    @staticmethod
    def measure(payload: Mapping[str, Mapping[str, Tensor]], *, exact: bool) -> Tensor:
        """What must be known of stacked parts, ``[leaves, C]``, on their device: squared lengths, or lengths."""
        leaves = [leaf for part in payload.values() for leaf in stored(part).values()]
        if not leaves:
            return torch.zeros(0, 0, dtype=torch.float64)
        return torch.stack([_exact_squares(leaf) for leaf in leaves] if exact else _lengths(leaves))

    @staticmethod
    def read(payload: Mapping[str, Mapping[str, Tensor]], measured: Tensor, *, exact: bool) -> Notes:
        """The notes from what ``measure`` found."""
        named = tuple((part, name) for part, leaves in payload.items() for name in leaves)
        leaves = [leaf for part in payload.values() for leaf in stored(part).values()]
        squares = measured.cpu() if exact else measured.cpu().double().square()
        return Notes(named, *_finite(squares, leaves), _negative(named, leaves, squares.shape[1]))

    @staticmethod
    def alone(payload: Mapping[str, Mapping[str, Tensor]], *, exact: bool = True) -> Notes:
        """The notes of a single client's parts."""
        rows = {part: {name: leaf.unsqueeze(0) for name, leaf in leaves.items()} for part, leaves in payload.items()}
        return Notes.of(rows, exact=exact)

    @staticmethod
    def join(blocks: Sequence[Notes]) -> Notes:
        """The notes of the clients of several blocks, concatenated."""
        if len(blocks) == 1:
            return blocks[0]
        first = blocks[0].leaves
        same = [block if block.leaves == first else block.arranged(first) for block in blocks]
        squares, finite, negative = (
            torch.cat([getattr(block, name) for block in same], dim=1) for name in ("squares", "finite", "negative")
        )
        return Notes(first, squares, finite, negative)


class Contributions(ABC):
    """The contributions of a round, always sorted by id: small statistics, and access to what was sent.

    Rules get it as ``cohort``. ``answers`` names the ``QUESTIONS`` that a handle answers; any other raises. A handle is
    valid until the engine's next call: ``keep`` makes a copy that outlives it.
    """

    answers: ClassVar[frozenset[str]] = EVERYTHING
    ids: Tensor
    stats: Stats
    cross: Tensor | None
    payload: Payload
    """Everything that was sent, stacked. Reading it asks for all rows."""

    def __len__(self) -> int:
        return self.ids.shape[0]

    @property
    @abstractmethod
    def notes(self) -> Notes:
        """Lengths and finiteness, noted when the contributions were made."""

    @property
    @abstractmethod
    def parts(self) -> tuple[str, ...]:
        """The names of the parts that were sent."""

    @abstractmethod
    def template(self, part: str) -> Tree:
        """Names, shapes, dtypes and device of one client's part, without its values."""

    @abstractmethod
    def select(self, ids: Tensor) -> Self:
        """Only these clients; the rows of the others are removed, not weighted with 0."""

    @abstractmethod
    def resend(self, ids: Tensor, received: Payload) -> Self:
        """Replace these clients' contributions, and their notes, by ``received``, the parts of one client."""

    @abstractmethod
    def with_stats(self, stats: Mapping[str, Tensor]) -> Self:
        """The same contributions with further statistics."""

    @abstractmethod
    def with_cross(self, cross: Tensor) -> Self:
        """The same contributions with their cross scores, ``[C, C]``."""

    @abstractmethod
    def alone(self, part: str, name: str) -> Self:
        """Only one part, under another name: rules that guard all parts weigh each as if it were the update."""

    @abstractmethod
    def combine(self, part: str, weights: Weights) -> Tree:
        """The weighted sum of a part over clients, added in the order of their ids."""

    @abstractmethod
    def chunks(self, parts: Sequence[str]) -> Iterator[tuple[Chunk, tuple[Tensor, ...]]]:
        """``[C, n]`` pieces of the parts, for the same columns of all of them, in a fixed order. The parts must have
        the same leaves."""

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
        """The noted length of every client's part (or of some of its leaves together), ``[C]``; summed in float64 for
        rules that ask for norms or rows."""
        return self.notes.norms(part, leaves)

    def dots(self, part: str, other: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Every client's inner product with one tree, per leaf, ``[C]`` each in float64; one pass in chunks."""
        found = {name: wide(torch.zeros(len(self), device=leaf.device)) for name, leaf in other.items()}
        for chunk, (columns,) in self.chunks((part,)):
            flat = other[chunk.leaf].reshape(-1)[chunk.columns]
            # Laid out alike wherever the rows are kept: products may add up in another order otherwise.
            found[chunk.leaf] = found[chunk.leaf] + wide(columns).contiguous() @ wide(flat)
        return {name: values.cpu().double() for name, values in found.items()}


def _among(leaf: str, leaves: Sequence[str] | None) -> bool:
    return leaves is None or leaf in leaves


def _exact_squares(leaf: Tensor | LowRank) -> Tensor:
    return leaf.squares(exact=True) if isinstance(leaf, LowRank) else tree.squared_lengths(leaf.detach())


def _lengths(leaves: Sequence[Tensor | LowRank]) -> list[Tensor]:
    whole = iter(tree.matrices([leaf.detach() for leaf in leaves if not isinstance(leaf, LowRank)]))
    return [
        leaf.squares(exact=False).sqrt()
        if isinstance(leaf, LowRank)
        # Squares may overflow in float16.
        else torch.linalg.vector_norm(rows if (rows := next(whole)).dtype in _WIDE else rows.double(), dim=1)
        for leaf in leaves
    ]


def _finite(squares: Tensor, leaves: Sequence[Tensor | LowRank]) -> tuple[Tensor, Tensor]:
    """The squares, and which leaves are finite. A sum of squares is finite only if every term is; finite terms whose
    sum overflows are rare and checked again."""
    finite = squares.isfinite()
    for row in (~finite).any(1).nonzero().flatten().tolist() if not bool(finite.all()) else ():
        leaf = leaves[row]
        (whole,) = tree.matrices([leaf.whole() if isinstance(leaf, LowRank) else leaf.detach()])
        squares[row] = tree.squared_lengths(whole).cpu()
        finite[row] = whole.isfinite().all(1).cpu()
    return squares, finite


def _negative(named: Sequence[tuple[str, str]], leaves: Sequence[Tensor | LowRank], clients: int) -> Tensor:
    found = torch.zeros(len(leaves), clients, dtype=torch.bool)
    for row, ((part, name), leaf) in enumerate(zip(named, leaves, strict=True)):
        if part == "buffers" and name.rpartition(".")[2] in _NEVER_NEGATIVE and isinstance(leaf, Tensor):
            found[row] = (tree.as_rows(leaf) < 0).any(1).cpu()
    return found
