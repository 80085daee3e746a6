"""Weightings: how much each contribution counts, by client or by element.

Rules are frozen dataclasses that hold configuration only. Methods that are not abstract are *hooks* whose default does
nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Set
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedalloy.core.contributions import QUESTIONS
from fedalloy.core.declared import declared
from fedalloy.core.errors import AlgorithmError
from fedalloy.core.length import AnyLength
from fedalloy.core.tree import Chunk
from fedalloy.core.types import Context, Contributions, Info, State, Tree, Weights

if TYPE_CHECKING:
    from fedalloy.core.protocols import Task


class Weighting(AnyLength, ABC):
    """How much each contribution counts."""

    @declared
    def requires(self) -> frozenset[str]:
        """Statistics the rule needs from every client."""
        return frozenset({"num_examples"})

    @declared
    def reads_payload(self) -> bool:
        """Whether the rule reads the payloads; they can then be neither masked nor streamed."""
        return False

    @declared
    def reads(self) -> frozenset[str]:
        """The parts that the rule reads; solvers that do not send them are refused."""
        return frozenset({"delta"}) if self.reads_payload else frozenset()

    @declared
    def asks(self) -> frozenset[str]:
        """Which of ``core.contributions.QUESTIONS`` the rule needs; an engine that does not answer all of them is
        refused before the first round. The default is ``rows`` for a rule that reads payloads."""
        return frozenset({"rows"}) if self.reads_payload else frozenset()

    @declared
    def weight_bound(self) -> float | None:
        """The largest weight that one client can get, whatever it sends; None if there is no such bound."""
        return None

    @declared
    def needs_everyone(self) -> bool:
        """Whether the rule is defined only when the cohort is the whole population."""
        return False

    @declared
    def counts_idle(self) -> bool:
        """Whether a client that took no step (no examples, no time) counts, with its update of zero. False for rules
        that choose or count clients: its zero update could win, or take a share from the others. A client that re-sends
        the received model because its link failed is not idle."""
        return True

    @declared
    def guards_all_parts(self) -> bool:
        """Whether the rule also reduces all other averaged parts, such as buffers, so that no part contains what the
        rule leaves out: by its weights on clients or, for element-wise rules, by a separate round on every part.
        Otherwise parts are reduced as they declare."""
        return False

    def least_clients(self, population: int) -> int:
        """The smallest number of contributions that the rule is defined for; a round with fewer has no effect."""
        return 1

    def unsuited(self, task: Task) -> str | None:
        """Why a task does not suit the rule, None if it does; called before the first round if the data are in this
        process."""
        return None

    def init(self, population: int) -> State:
        """The rule's state before the first round."""
        return {}

    @abstractmethod
    def weigh(self, cohort: Contributions, state: State, ctx: Context) -> tuple[Weights, State, Info]:
        """Weights on the updates, the new state, and info for the records."""


def check_said(rule: Weighting) -> None:
    """Refuse a rule whose declarations are not sets, or that asks for something no handle answers."""
    for member in ("requires", "reads", "asks"):
        said = getattr(rule, member)
        if not isinstance(said, Set):
            raise AlgorithmError(
                f"weighting '{type(rule).__name__}' declares '{member}' as {type(said).__name__}: it must be a set of "
                f"names, as in {member} = frozenset({{'...'}})"
            )
    if unknown := rule.asks - QUESTIONS.keys():
        raise AlgorithmError(
            f"weighting '{type(rule).__name__}' asks for '{min(unknown)}', allowed in 'asks': {', '.join(QUESTIONS)}"
        )


def check_weights(rule: Weighting, weights: Weights, clients: int) -> None:
    """Refuse weights that are not one per client."""
    if isinstance(weights, Mapping) or (isinstance(weights, Tensor) and weights.dim() and len(weights) == clients):
        return
    found = f"of shape {tuple(weights.shape)}" if isinstance(weights, Tensor) else f"as {type(weights).__name__}"
    raise AlgorithmError(
        f"weighting '{type(rule).__name__}' returned weights {found}: 'weigh' must return a tensor with one weight for "
        f"each of the {clients} clients of the cohort, or a dict of such tensors by leaf"
    )


class ElementRound(ABC):
    """One round of an element-wise rule: it gets every chunk of the updates once, then returns its new state."""

    @abstractmethod
    def weigh_chunk(self, updates: Tensor, chunk: Chunk) -> Tensor:
        """``[C, n]`` weights on the ``[C, n]`` updates at ``chunk``, which must not be changed."""

    @abstractmethod
    def close(self) -> tuple[State, Info]:
        """The new state and info for the records, after the last chunk."""


class ElementWeighting(Weighting):
    """A rule with a weight for every element of every client's update.

    All weights together are as large as all updates together, so they are never in memory at once: the server opens a
    round, passes it the updates chunk by chunk, adds up the weighted chunks, and closes it. Neither the cohort nor the
    state is changed: a round writes its new state into new tensors.
    """

    @declared
    def reads_payload(self) -> bool:
        """True: weights of elements are computed from the elements."""
        return True

    @declared
    def asks(self) -> frozenset[str]:
        """Elements are read chunk by chunk."""
        return frozenset({"chunks"})

    @abstractmethod
    def open(self, cohort: Contributions, state: State, ctx: Context) -> ElementRound:
        """Start a round."""

    def weigh(self, cohort: Contributions, state: State, ctx: Context) -> tuple[Tree, State, Info]:
        """All weights at once, ``{leaf: [C, *shape]}``: for small models and for inspection."""
        like, round = cohort.template("delta"), self.open(cohort, state, ctx)
        pieces: dict[str, list[Tensor]] = {name: [leaf.new_empty(len(cohort), 0)] for name, leaf in like.items()}
        for chunk, (columns,) in cohort.chunks(("delta",)):
            pieces[chunk.leaf].append(round.weigh_chunk(columns, chunk))
        weights = {
            name: torch.cat(parts, dim=1).reshape(len(cohort), *like[name].shape) for name, parts in pieces.items()
        }
        return weights, *round.close()
