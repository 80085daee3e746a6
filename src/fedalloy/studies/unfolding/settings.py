"""How a table is learned: plain values, checked on creation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedalloy.core.arguments import checked
from fedalloy.core.errors import SpecError


@checked("unfold")
@dataclass(frozen=True)
class Learning:
    """Outer Adam on the summed losses of all rounds.

    ``gradient``: ``first_order`` treats the clients' updates as constants (their models move with the received one),
    ``exact`` differentiates the local steps too. ``parametrisation``: ``theta^2 / sum theta^2``, or a softmax of theta.
    ``level``: a weight for every client, or for every layer of every client. ``loss``: that of the task, or the
    squared error of the softmax against the label as one-hot (``mse``). ``final``: whether the model after the last
    round is scored as well; without it the last row learns nothing. ``initial``: one model for all iterations, the one
    that a run with the same seed begins with, or a new one in each. ``fraction``: of every client's examples.
    ``smoothness`` times ``sum_t |Theta[t+1] - Theta[t]|^2`` is added to the loss. ``patience``: stop when the
    validation loss has not improved for this many evaluations, one every ``check_every`` iterations. The best table is
    kept.

    >>> Learning(gradient="second")
    Traceback (most recent call last):
    fedalloy.core.errors.SpecError: unfold.gradient: 'second' is not allowed; allowed: exact, first_order
    """

    iterations: int = 400
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    gradient: Literal["first_order", "exact"] = "first_order"
    parametrisation: Literal["square", "softmax"] = "square"
    level: Literal["client", "layer"] = "client"
    loss: Literal["task", "mse"] = "task"
    final: bool = True
    initial: Literal["fixed", "fresh"] = "fixed"
    fraction: float = 1.0
    smoothness: float = 0.0
    patience: int | None = None
    check_every: int = 10

    def __post_init__(self) -> None:
        _check("iterations", self.iterations, self.iterations >= 1, "1 or more")
        _check("lr", self.lr, self.lr > 0, "above 0")
        _check("betas", self.betas, all(0 <= beta < 1 for beta in self.betas), "two numbers in [0, 1)")
        _check("fraction", self.fraction, 0 < self.fraction <= 1, "above 0 and at most 1")
        _check("smoothness", self.smoothness, self.smoothness >= 0, "0 or more")
        _check("patience", self.patience, self.patience is None or self.patience >= 1, "1 or more, or none")
        _check("check_every", self.check_every, self.check_every >= 1, "1 or more")


def _check(name: str, value: object, fine: bool, allowed: str) -> None:
    if not fine:
        raise SpecError(f"unfold.{name} is {value}; allowed: {allowed}")
