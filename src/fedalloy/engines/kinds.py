"""The kinds of local programs that engines have kernels for, and what a solver of each kind guarantees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedalloy.core.algorithm import Algorithm


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


@dataclass(frozen=True)
class TwoPhaseSgd:
    """Kind ``two_phase_descent``: in phase 0 gradient descent on the received model, in phase 1 on a model of the
    client's own, with the proximal term ``pull/2 |v - received|^2``; both with the same momentum and weight decay. The
    solver keeps its own model as ``personal`` in its state, and its ``end`` reads ``params`` and
    ``personal["params"]`` of the carry only.
    """

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    pull: float = 0.0


@dataclass(frozen=True)
class MixedSgd:
    """Kind ``mixed_descent``: gradient descent on the received model and, in the same steps, on a model of the client's
    own along ``share`` times the gradient at ``(1 - share) received + share own``, all three from before the step;
    both with the same momentum and weight decay. The solver keeps its own model as ``personal`` and the share as
    ``alpha`` in its state, and its ``end`` reads ``params``, ``personal`` and ``alpha`` of the carry only.
    """

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0


@dataclass(frozen=True)
class ShiftedSgd:
    """Kind ``shifted_descent``: gradient descent on the received model, where each client adds a tree of its own, the
    same in all steps of a round, to every gradient; with momentum and weight decay. The solver's ``begin`` puts the
    tree into the carry as ``shift``, and its ``end`` reads ``params`` of the carry only.
    """

    momentum: float = 0.0
    weight_decay: float = 0.0


Setting = PlainSgd | InterpolatedSgd | TwoPhaseSgd | MixedSgd | ShiftedSgd


def plain_sgd_of(algorithm: Algorithm) -> PlainSgd | None:
    """The settings of the clients' program if it is of kind ``descent``, otherwise None."""
    found = setting_of(algorithm)
    return found if isinstance(found, PlainSgd) else None


def interpolated_sgd_of(algorithm: Algorithm) -> InterpolatedSgd | None:
    """The settings of the clients' program if it is of kind ``pair_descent``, otherwise None."""
    found = setting_of(algorithm)
    return found if isinstance(found, InterpolatedSgd) else None


def two_phase_sgd_of(algorithm: Algorithm) -> TwoPhaseSgd | None:
    """The settings of the clients' program if it is of kind ``two_phase_descent``, otherwise None."""
    found = setting_of(algorithm)
    return found if isinstance(found, TwoPhaseSgd) else None


def mixed_sgd_of(algorithm: Algorithm) -> MixedSgd | None:
    """The settings of the clients' program if it is of kind ``mixed_descent``, otherwise None."""
    found = setting_of(algorithm)
    return found if isinstance(found, MixedSgd) else None


def shifted_sgd_of(algorithm: Algorithm) -> ShiftedSgd | None:
    """The settings of the clients' program if it is of kind ``shifted_descent``, otherwise None."""
    found = setting_of(algorithm)
    return found if isinstance(found, ShiftedSgd) else None


def is_fusible(algorithm: Algorithm) -> bool:
    """Whether there is a fused kernel for the clients' program."""
    return setting_of(algorithm) is not None


_KINDS: dict[str, Any] = {
    "descent": PlainSgd, "pair_descent": InterpolatedSgd, "two_phase_descent": TwoPhaseSgd, "mixed_descent": MixedSgd,
    "shifted_descent": ShiftedSgd,
}  # fmt: skip


def setting_of(algorithm: Algorithm) -> Setting | None:
    """The settings of the clients' program if there is a kind for it, otherwise None. Read once per algorithm, which is
    frozen, and kept with it as its traits are."""
    kept = algorithm.__dict__
    if "_fused_setting" not in kept:
        hint = algorithm.fusing
        kept["_fused_setting"] = _KINDS[hint.kind](**hint.numbers) if hint is not None and hint.kind in _KINDS else None
    found: Setting | None = kept["_fused_setting"]
    return found
