"""A weight for every element, from running moments: EWWA-FL (Hu et al. 2023, arXiv:2404.15919)."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedalloy.core.moments import Kind, check_moments, second_moment
from fedalloy.core.protocols import ElementRound, ElementWeighting
from fedalloy.core.registry import register
from fedalloy.core.search import Range
from fedalloy.core.tree import Chunk
from fedalloy.core.types import Context, Contributions, Info, State
from fedalloy.methods.weightings.scratch import Scratch

# The public code adds this so that no client's share is zero.
_LEAST_SHARE = 1e-8
# The state's name for the one pair of moments of mode "official".
_EVERYONE = "everyone"


@register("weighting", "ewwa", search={"lr": Range(0.1, 10.0, log=True)})
@dataclass(frozen=True)
class Ewwa(ElementWeighting):
    """``P_k = softmax_k s_k`` for every element, with ``s = lr sqrt(1 - beta2^r) / (1 - beta1^r) m / (sqrt(v) + eps)``.

    ``m`` and ``v`` are moments of ``g = w - w_k``, zero at first: ``m <- beta1 m + (1 - beta1) g``, ``v`` by the
    ``optimizer``. Scores are signed, as published: a large positive element counts for more than a large negative one.

    Corrections: the printed algorithms compute ``v`` from the last ``m`` (here: from the last ``v``) and have the signs
    of Yogi wrong; they give moments no client index, here every client has its own, kept while it is absent, and ``r``
    counts how often it took part. ``mode="official"`` does what the public code does: one pair of moments for all
    clients, updated client after client in the order of their ids, and shares proportional to
    ``log(s - min s + 1) + 1e-8``, with the minimum over all clients and elements.

    A client that took no step is left out: the softmax would give it a share, and it has no update for its moments.
    If the moments of a round take more than ``in_memory_mb``, they are mapped to unnamed files in the folder
    ``scratch`` (default: the system's temporary folder).
    When to use it: a few clients that always take part and for which different parameters matter.

    >>> from fedalloy.core.types import Cohort
    >>> from fedalloy.core.keys import Key
    >>> cohort = Cohort(torch.arange(2), {"delta": {"w": torch.tensor([[1.0, 0.0], [-1.0, 0.0]])}})
    >>> weights, _, _ = Ewwa().weigh(cohort, Ewwa().init(2), Context(1, 2, Key.of(0)))
    >>> weights["w"]
    tensor([[0.1192, 0.5000],
            [0.8808, 0.5000]])
    """

    requires: ClassVar[frozenset[str]] = frozenset()
    counts_idle: ClassVar[bool] = False

    optimizer: Kind = "adam"
    mode: Literal["paper", "official"] = "paper"
    lr: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    in_memory_mb: float = 1024.0
    scratch: str | None = None

    def __post_init__(self) -> None:
        check_moments(self.beta1, self.beta2, lr=self.lr, eps=self.eps)
        if not self.in_memory_mb >= 0:
            raise ValueError(f"in_memory_mb must be 0 or more, got {self.in_memory_mb}")

    def init(self, population: int) -> State:
        return {"moments": {}, "counts": {}}

    def open(self, cohort: Contributions, state: State, ctx: Context) -> ElementRound:
        return _OwnMoments(self, cohort, state) if self.mode == "paper" else _OnePair(self, cohort, state)

    def step(self, m: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """Both moments after the update ``g``."""
        return self.beta1 * m + (1 - self.beta1) * g, second_moment(self.optimizer, v, g, self.beta2)

    def scale(self, count: int) -> float:
        """The factor on the moments' ratio after ``count`` updates: step size and bias correction."""
        return self.lr * sqrt(1 - self.beta2**count) / (1 - self.beta1**count)


class _Moments:
    """The pairs of moments a round reads, and the new ones it writes; a pair is ``[2, d]``, leaves sorted by name."""

    def __init__(self, rule: Ewwa, owners: list[str], updates: dict[str, Tensor], state: State) -> None:
        self._state, self.owners = state, owners
        self._begin, total = {}, 0
        for name in sorted(updates):
            self._begin[name] = total
            total += updates[name].numel()
        dtype = next(iter(updates.values())).dtype
        size = len(owners) * 2 * total * dtype.itemsize
        scratch = Scratch(size > rule.in_memory_mb * 1e6, rule.scratch)
        self._old = [state["moments"].get(owner) for owner in owners]
        self._new = [scratch.empty((2, total), dtype) for _ in owners]
        self.counts = {owner: state["counts"].get(owner, 0) + 1 for owner in owners}

    def read(self, chunk: Chunk, like: Tensor) -> tuple[Tensor, Tensor]:
        """Both moments before the round, a row per owner; zero for owners without any yet."""
        place = self._place(chunk)
        pair = like.new_zeros(2, len(self._old), place.stop - place.start)
        for row, kept in enumerate(self._old):
            if kept is not None:
                pair[:, row].copy_(kept[:, place])
        return pair[0], pair[1]

    def write(self, chunk: Chunk, m: Tensor, v: Tensor) -> None:
        """Store both moments after the round."""
        place = self._place(chunk)
        for row, pair in enumerate(self._new):
            pair[0, place].copy_(m[row])
            pair[1, place].copy_(v[row])

    def kept(self) -> State:
        """The state with the new pairs; absent clients keep their old ones."""
        moments = {**self._state["moments"], **dict(zip(self.owners, self._new, strict=True))}
        return {"moments": moments, "counts": {**self._state["counts"], **self.counts}}

    def _place(self, chunk: Chunk) -> slice:
        begin = self._begin[chunk.leaf]
        return slice(begin + chunk.columns.start, begin + chunk.columns.stop)


class _OwnMoments(ElementRound):
    """The paper, corrected: moments per client, a softmax over clients."""

    def __init__(self, rule: Ewwa, cohort: Contributions, state: State) -> None:
        self._rule = rule
        self._moments = _Moments(rule, [str(client) for client in cohort.ids.tolist()], cohort.template("delta"), state)
        self._scales = [rule.scale(count) for count in self._moments.counts.values()]

    def weigh_chunk(self, updates: Tensor, chunk: Chunk) -> Tensor:
        m, v = self._rule.step(*self._moments.read(chunk, updates), -updates)
        self._moments.write(chunk, m, v)
        scales = updates.new_tensor(self._scales).unsqueeze(1)
        return torch.softmax(scales * m / (v.sqrt() + self._rule.eps), dim=0)

    def close(self) -> tuple[State, Info]:
        counts = torch.tensor(list(self._moments.counts.values()), dtype=torch.float64)
        return self._moments.kept(), {"participations": counts}


class _OnePair(ElementRound):
    """The public code: one pair of moments that every client updates in turn, shares proportional to a logarithm.

    The smallest score must be known before the first weight, so the updates are read twice.
    """

    def __init__(self, rule: Ewwa, cohort: Contributions, state: State) -> None:
        self._rule = rule
        self._moments = _Moments(rule, [_EVERYONE], cohort.template("delta"), state)
        self._scale = rule.scale(self._moments.counts[_EVERYONE])
        looks = (self._first_look(columns, chunk) for chunk, (columns,) in cohort.chunks(("delta",)))
        self._least = min(looks, default=0.0)

    def weigh_chunk(self, updates: Tensor, chunk: Chunk) -> Tensor:
        shares = (self._scores(updates, chunk)[0] - (self._least - 1)).log() + _LEAST_SHARE
        return shares / shares.sum(0)

    def close(self) -> tuple[State, Info]:
        return self._moments.kept(), {"least_score": torch.tensor(self._least, dtype=torch.float64)}

    def _first_look(self, updates: Tensor, chunk: Chunk) -> float:
        scores, m, v = self._scores(updates, chunk)
        self._moments.write(chunk, m, v)
        return float(scores.min())

    def _scores(self, updates: Tensor, chunk: Chunk) -> tuple[Tensor, Tensor, Tensor]:
        """The score of every client, and the moments after the last client."""
        m, v = self._moments.read(chunk, updates)
        scores = []
        for update in updates:
            m, v = self._rule.step(m, v, -update.unsqueeze(0))
            scores.append(self._scale * m / (v.sqrt() + self._rule.eps))
        return torch.cat(scores), m, v
