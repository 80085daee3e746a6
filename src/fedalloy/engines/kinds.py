"""The kinds of local programs that engines have kernels for, and what a solver of each kind guarantees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedalloy.core.algorithm import Algorithm
from fedalloy.core.aspects import Fusing


@dataclass(frozen=True)
class PlainSgd:
    """Kind ``descent``: only gradient descent on the received model, with momentum, weight decay and the proximal term
    ``pull/2 |w - received|^2``. The solver starts from ``params``, keeps no state and sends only ``delta``.
    """

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    pull: float = 0.0


@dataclass(frozen=True)
class InterpolatedSgd:
    """Kind ``pair_descent``: only gradient descent on a federated model f and a local model l at once. It minimises the
    loss at ``(1 - share) f + share l`` plus ``pull/2 |f - received|^2 + angle cos^2(f, l)``, with momentum and weight
    decay for both. The solver's ``begin`` puts f into the carry as ``params`` and l as ``local`` (without l the share
    is 0 and only f is trained). The solver draws the shares as ``mix``, one for the model or one per layer, and its
    ``end`` reads only these two trees of the carry.
    """

    momentum: float = 0.0
    weight_decay: float = 0.0
    pull: float = 0.0
    angle: float = 0.0


def plain_sgd_of(algorithm: Algorithm) -> PlainSgd | None:
    """The settings of the clients' program if it is of kind ``descent``, otherwise None."""
    hint = algorithm.fusing
    return PlainSgd(**_numbers(hint)) if hint is not None and hint.kind == "descent" else None


def interpolated_sgd_of(algorithm: Algorithm) -> InterpolatedSgd | None:
    """The settings of the clients' program if it is of kind ``pair_descent``, otherwise None."""
    hint = algorithm.fusing
    return InterpolatedSgd(**_numbers(hint)) if hint is not None and hint.kind == "pair_descent" else None


def is_fusible(algorithm: Algorithm) -> bool:
    """Whether there is a fused kernel for the clients' program."""
    return algorithm.fusing is not None and algorithm.fusing.kind in ("descent", "pair_descent")


def _numbers(hint: Fusing) -> dict[str, Any]:
    return dict(hint.numbers)
