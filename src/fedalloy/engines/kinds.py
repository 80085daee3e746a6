"""The kinds of local programs that engines have kernels for, and what a solver of such a kind promises."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedalloy.core import aspects
from fedalloy.core.solver import LocalSolver


@dataclass(frozen=True)
class Descent:
    """Kind ``descent``: nothing but gradient descent on the received model, with momentum, weight decay and a pull
    towards the received model. The solver starts from ``params``, keeps no state and sends ``delta`` alone.
    """

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    pull: float = 0.0


@dataclass(frozen=True)
class PairDescent:
    """Kind ``pair_descent``: nothing but gradient descent on a federated model f and a local model l at once, by the
    loss at ``(1 - share) f + share l`` plus ``pull/2 |f - received|^2 + angle cos^2(f, l)``, with momentum and weight
    decay in both. The solver's carry begins with f as ``params`` and l as ``local`` (without l the share is 0 and
    nothing but f is trained), it draws the shares as ``mix``, one for the model or one per layer, and its ``end`` reads
    only these two trees of the carry.
    """

    momentum: float = 0.0
    weight_decay: float = 0.0
    pull: float = 0.0
    angle: float = 0.0


def descent_of(solver: LocalSolver) -> Descent | None:
    """The solver as plain descent, if it is nothing else."""
    numbers = _numbers(solver, "descent")
    return None if numbers is None else Descent(**numbers)


def pair_descent_of(solver: LocalSolver) -> PairDescent | None:
    """The solver as descent on two models at once, if it is nothing else."""
    numbers = _numbers(solver, "pair_descent")
    return None if numbers is None else PairDescent(**numbers)


def _numbers(solver: LocalSolver, kind: str) -> dict[str, Any] | None:
    hint = aspects.fusing(solver)
    return dict(hint.numbers) if hint is not None and hint.kind == kind else None
