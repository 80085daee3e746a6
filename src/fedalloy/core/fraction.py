"""Fractions of counts, without binary rounding errors."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_EXACT, _NEAR = 1e-15, 1e-9


def fraction_of(count: int, fraction: float) -> float:
    """``fraction * count``; a product that is a whole or a half number up to rounding errors becomes that number, so
    that rounding it gives the same result as in decimal arithmetic.

    >>> int(0.29 * 100), int(fraction_of(100, 0.29)), 0.58 * 100 < 58, fraction_of(100, 0.58)
    (28, 29, True, 58.0)
    >>> fraction_of(7, 0.3)
    2.1
    """
    product = fraction * count
    near = round(2 * product) / 2
    return near if math.isclose(product, near, rel_tol=_EXACT, abs_tol=_NEAR) else product


def fractions_of(counts: Tensor, fraction: float) -> Tensor:
    """The same for many counts at once, in float64."""
    product = counts.double() * fraction
    near = (2 * product).round() / 2
    return torch.where((product - near).abs() <= _NEAR + _EXACT * product.abs(), near, product)
