"""Handles on contributions with fewer or wrong answers compared with the matrix in memory. Tests use them to show what
rules rely on, and that conformance finds mistakes of an engine's handle."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NoReturn, Self

from torch import Tensor

from fedalloy.core.contributions import Contributions, Notes
from fedalloy.core.errors import AlgorithmError
from fedalloy.core.tree import Chunk
from fedalloy.core.types import Payload, Stats, Tree, Weights


@dataclass(frozen=True)
class HandleWrapper(Contributions):
    """``inner``, with the answers that a subclass overrides."""

    inner: Contributions

    @property
    def ids(self) -> Tensor:  # type: ignore[override]
        return self.inner.ids

    @property
    def stats(self) -> Stats:  # type: ignore[override]
        return self.inner.stats

    @property
    def cross(self) -> Tensor | None:  # type: ignore[override]
        return self.inner.cross

    @property
    def payload(self) -> Payload:  # type: ignore[override]
        return self.inner.payload

    @property
    def notes(self) -> Notes:
        return self.inner.notes

    @property
    def parts(self) -> tuple[str, ...]:
        return self.inner.parts

    def template(self, part: str) -> Tree:
        return self.inner.template(part)

    def select(self, ids: Tensor) -> Self:
        return replace(self, inner=self.inner.select(ids))

    def resend(self, ids: Tensor, received: Payload) -> Self:
        return replace(self, inner=self.inner.resend(ids, received))

    def with_stats(self, stats: Mapping[str, Tensor]) -> Self:
        return replace(self, inner=self.inner.with_stats(stats))

    def with_cross(self, cross: Tensor) -> Self:
        return replace(self, inner=self.inner.with_cross(cross))

    def alone(self, part: str, name: str) -> Self:
        return replace(self, inner=self.inner.alone(part, name))

    def combine(self, part: str, weights: Weights) -> Tree:
        return self.inner.combine(part, weights)

    def chunks(self, parts: Sequence[str]) -> Iterator[tuple[Chunk, tuple[Tensor, ...]]]:
        return self.inner.chunks(parts)

    def rows(self, part: str, ids: Tensor) -> Tree:
        return self.inner.rows(part, ids)

    def stack(self, part: str) -> Tree:
        return self.inner.stack(part)

    def keep(self) -> Self:
        return replace(self, inner=self.inner.keep())


@dataclass(frozen=True)
class SumsOnly(HandleWrapper):
    """Only weighted sums over clients, as with secure aggregation; asking for more raises."""

    answers: ClassVar[frozenset[str]] = frozenset({"combine"})

    @property
    def cross(self) -> Tensor | None:  # type: ignore[override]
        return _refused("cross_score")

    @property
    def payload(self) -> Payload:  # type: ignore[override]
        return _refused("rows")

    def chunks(self, parts: Sequence[str]) -> Iterator[tuple[Chunk, tuple[Tensor, ...]]]:
        return _refused("chunks")

    def rows(self, part: str, ids: Tensor) -> Tree:
        return _refused("rows")

    def stack(self, part: str) -> Tree:
        return _refused("stack")

    def norms(self, part: str, leaves: Sequence[str] | None = None) -> Tensor:
        return _refused("norms")


@dataclass(frozen=True)
class Attendance(SumsOnly):
    """Only ids and statistics of the clients: all that ``absorb`` and ``after`` may use."""

    answers: ClassVar[frozenset[str]] = frozenset()

    def combine(self, part: str, weights: Weights) -> Tree:
        return _refused("combine")


def _refused(question: str) -> NoReturn:
    raise AlgorithmError(f"these contributions only provide weighted sums, and were asked for '{question}'")


Change = Callable[[Tensor], Tensor]
"""The change to the rows of a wrong answer, ``[C, ...]``."""


@dataclass(frozen=True)
class WrongAnswer(HandleWrapper):
    """The rows of one ``question`` are changed, so that only this answer is wrong."""

    question: str
    change: Change

    @property
    def payload(self) -> Payload:  # type: ignore[override]
        return {part: self._changed("payload", leaves) for part, leaves in self.inner.payload.items()}

    @property
    def notes(self) -> Notes:
        notes = self.inner.notes
        return replace(notes, squares=self.change(notes.squares.T).T) if self.question == "norms" else notes

    def template(self, part: str) -> Tree:
        like = self.inner.template(part)
        return {name: leaf[None] for name, leaf in like.items()} if self.question == "template" else like

    def select(self, ids: Tensor) -> Self:
        found = super().select(ids)
        return replace(found, question="combine") if self.question == "select" else found

    def resend(self, ids: Tensor, received: Payload) -> Self:
        found = super().resend(ids, received)
        return replace(found, question="combine") if self.question == "resend" else found

    def combine(self, part: str, weights: Weights) -> Tree:
        if self.question == "combine" and isinstance(weights, Tensor):
            weights = self.change(weights)
        return self.inner.combine(part, weights)

    def chunks(self, parts: Sequence[str]) -> Iterator[tuple[Chunk, tuple[Tensor, ...]]]:
        for chunk, columns in self.inner.chunks(parts):
            yield chunk, tuple(map(self.change, columns)) if self.question == "chunks" else columns

    def rows(self, part: str, ids: Tensor) -> Tree:
        return self._changed("rows", self.inner.rows(part, ids))

    def stack(self, part: str) -> Tree:
        return self._changed("stack", self.inner.stack(part))

    def keep(self) -> Self:
        return self if self.question == "keep" else super().keep()

    def _changed(self, question: str, leaves: Tree) -> Tree:
        return {name: self.change(leaf) for name, leaf in leaves.items()} if self.question == question else leaves
