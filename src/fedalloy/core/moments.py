"""The running second moment of updates in its published forms; used by servers and weightings."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

Kind = Literal["adam", "adagrad", "yogi"]


def second_moment(kind: Kind, v: Tensor, update: Tensor, beta2: float) -> Tensor:
    """``v`` after the update ``u``.

    Adam ``beta2 v + (1 - beta2) u^2`` (Kingma and Ba 2015, arXiv:1412.6980); Adagrad ``v + u^2`` (Duchi et al. 2011);
    Yogi ``v - (1 - beta2) u^2 sign(v - u^2)`` (Zaheer et al. 2018).

    >>> import torch
    >>> second_moment("yogi", torch.tensor([4.0, 0.0]), torch.tensor([1.0, 1.0]), 0.9)
    tensor([3.9000, 0.1000])
    """
    square = update * update
    if kind == "adam":
        return beta2 * v + (1 - beta2) * square
    if kind == "adagrad":
        return v + square
    return v - (1 - beta2) * square * (v - square).sign()


def check_moments(beta1: float, beta2: float, **positive: float) -> None:
    """Refuse decay rates outside [0, 1) and other settings that are not above 0."""
    for name, beta in {"beta1": beta1, "beta2": beta2}.items():
        if not 0 <= beta < 1:
            raise ValueError(f"{name} must lie in [0, 1), got {beta}")
    for name, value in positive.items():
        if not value > 0:
            raise ValueError(f"{name} must be above 0, got {value}")
