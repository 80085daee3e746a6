"""How much each contribution counts: the promise of a weighting, by client or by element.

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
        """Whether the rule looks at what was sent (then nothing can be masked or streamed)."""
        return False

    @declared
    def reads(self) -> frozenset[str]:
        """The parts that a rule looks at, so that no solver without them gets it."""
        return frozenset({"delta"}) if self.reads_payload else frozenset()

    @declared
    def asks(self) -> frozenset[str]:
        """What the rule asks the contributions for, of ``core.contributions.QUESTIONS``; an engine that does not answer
        all of it is refused before the first round. A rule that reads payloads and says nothing asks for rows."""
        return frozenset({"rows"}) if self.reads_payload else frozenset()

    @declared
    def weight_bound(self) -> float | None:
        """The largest weight one client can get whatever it sends; None when there is no such bound."""
        return None

    @declared
    def needs_everyone(self) -> bool:
        """Whether the rule is defined only when the cohort is the whole population."""
        return False

    @declared
    def counts_idle(self) -> bool:
        """Whether a client that took no step (no examples, no time) counts, with its update of zero. Not where clients
        are chosen or counted: it would win by standing still, or hold the others back. A client that re-sends the
        received model because its link failed is not idle."""
        return True

    @declared
    def guards_all_parts(self) -> bool:
        """Whether the rule's choice holds for whatever else is averaged, buffers above all, so that what it leaves out
        enters nowhere: by its weights on clients or, where it weighs elements, by a round of its own on every part.
        Otherwise parts are reduced as they declare."""
        return False

    def least_clients(self, population: int) -> int:
        """The fewest contributions that the rule is defined for; a round with fewer has no effect."""
        return 1

    def unsuited(self, task: Task) -> str | None:
        """Why a federation whose data are at hand does not suit the rule, asked before the first round; None when it
        does."""
        return None

    def init(self, population: int) -> State:
        """The rule's state before the first round."""
        return {}

    @abstractmethod
    def weigh(self, cohort: Contributions, state: State, ctx: Context) -> tuple[Weights, State, Info]:
        """Weights on the updates, the new state, and what was computed on the way."""


def check_said(rule: Weighting) -> None:
    """Refuse a rule that names what it needs in another form than as a set, or asks for what no handle answers."""
    for member in ("requires", "reads", "asks"):
        said = getattr(rule, member)
        if not isinstance(said, Set):
            raise AlgorithmError(
                f"weighting '{type(rule).__name__}' says '{member}' as {type(said).__name__}: it is a set of names, "
                f"as in {member} = frozenset({{'...'}})"
            )
    if unknown := rule.asks - QUESTIONS.keys():
        raise AlgorithmError(
            f"weighting '{type(rule).__name__}' asks for '{min(unknown)}', allowed in 'asks': {', '.join(QUESTIONS)}"
        )


def check_weights(rule: Weighting, weights: Weights, clients: int) -> None:
    """Refuse weights that are no number per client, before they are multiplied with anything."""
    if isinstance(weights, Mapping) or (isinstance(weights, Tensor) and weights.dim() and len(weights) == clients):
        return
    found = f"of shape {tuple(weights.shape)}" if isinstance(weights, Tensor) else f"as {type(weights).__name__}"
    raise AlgorithmError(
        f"weighting '{type(rule).__name__}' returned weights {found}: 'weigh' gives a tensor with one weight for each "
        f"of the {clients} clients of the cohort, or a dict of such by leaf"
    )


class ElementRound(ABC):
    """One round of an element-wise rule: shown every chunk of the updates once, then asked what it keeps."""

    @abstractmethod
    def weigh_chunk(self, updates: Tensor, chunk: Chunk) -> Tensor:
        """``[C, n]`` weights on ``[C, n]`` updates, which lie at ``chunk`` and are not to be changed."""

    @abstractmethod
    def close(self) -> tuple[State, Info]:
        """The new state and what was computed on the way, after the last chunk."""


class ElementWeighting(Weighting):
    """A rule with a weight for every element of every client's update.

    All weights together are as large as all updates together, so nobody holds them: the server opens a round,
    shows it the updates leaf chunk by leaf chunk, adds up what each chunk's weights make of them, and closes it.
    Neither the cohort nor the state is changed: a round writes what it will keep into tensors of its own.
    """

    @declared
    def reads_payload(self) -> bool:
        """Weights of elements are made from elements."""
        return True

    @declared
    def asks(self) -> frozenset[str]:
        """Elements are looked at chunk by chunk."""
        return frozenset({"chunks"})

    @abstractmethod
    def open(self, cohort: Contributions, state: State, ctx: Context) -> ElementRound:
        """Begin a round."""

    def weigh(self, cohort: Contributions, state: State, ctx: Context) -> tuple[Tree, State, Info]:
        """All weights at once, ``{leaf: [C, *shape]}``: for small models and for looking at them."""
        like, round = cohort.template("delta"), self.open(cohort, state, ctx)
        pieces: dict[str, list[Tensor]] = {name: [leaf.new_empty(len(cohort), 0)] for name, leaf in like.items()}
        for chunk, (columns,) in cohort.chunks(("delta",)):
            pieces[chunk.leaf].append(round.weigh_chunk(columns, chunk))
        weights = {
            name: torch.cat(parts, dim=1).reshape(len(cohort), *like[name].shape) for name, parts in pieces.items()
        }
        return weights, *round.close()
