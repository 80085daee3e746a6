"""Losses turned into bounded responses by a cumulative distribution function (AAggFF, Hahn et al. 2024,
arXiv:2405.20821)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedalloy.core.arguments import checked
from fedalloy.core.errors import RoundRefused

CdfName = Literal["weibull", "frechet", "gumbel", "exponential", "logistic", "normal"]
Variant = Literal["exact", "affine_erfc", "erfc"]

# The parameters of each family with their defaults, which put the mean loss (1) near the middle of the curve.
_ASSUMED: Mapping[CdfName, Mapping[str, float]] = {
    "weibull": {"scale": 1.0, "shape": 2.0},
    "frechet": {"scale": 1.0, "shape": 1.0},
    "gumbel": {"location": 1.0, "scale": 1.0},
    "exponential": {"scale": 1.0},
    "logistic": {"location": 1.0, "scale": 1.0},
    "normal": {"location": 1.0, "scale": 1.0},
}
_STANDARD: Mapping[CdfName, Callable[[Tensor], Tensor]] = {
    "weibull": lambda z: -torch.expm1(-z),
    "frechet": lambda z: torch.exp(-1 / z),
    "gumbel": lambda z: torch.exp(-torch.exp(-z)),
    "exponential": lambda z: -torch.expm1(-z),
    "logistic": torch.sigmoid,
    "normal": torch.special.ndtr,
}


@checked("cdf")
@dataclass(frozen=True)
class Cdf:
    """One of six cumulative distribution functions, applied to a loss divided by the mean loss.

    ==============  ================================================  =========================
    kind            formula                                           default
    ==============  ================================================  =========================
    weibull         ``1 - exp(-(x / scale)^shape)``                   scale 1, shape 2
    frechet         ``exp(-(x / scale)^-shape)``                      scale 1, shape 1
    gumbel          ``exp(-exp(-(x - location) / scale))``            location 1, scale 1
    exponential     ``1 - exp(-x / scale)``                           scale 1
    logistic        ``1 / (1 + exp(-(x - location) / scale))``        location 1, scale 1
    normal          ``(1 + erf((x - location) / scale / sqrt 2)) / 2``  location 1, scale 1
    ==============  ================================================  =========================

    ``variant`` is for comparisons with published numbers: the public code of AAggFF uses erfc instead of erf, which
    *decreases* with the loss, from 1.5 to 0.5 (``affine_erfc``) or from 2 to 0 (``erfc``, its plug-in versions).

    >>> Cdf("logistic")(torch.tensor([1.0]))
    tensor([0.5000])
    """

    kind: CdfName = "weibull"
    location: float | None = None
    scale: float | None = None
    shape: float | None = None
    variant: Variant = "exact"

    def __post_init__(self) -> None:
        assumed = _ASSUMED[self.kind]
        for name in ("location", "scale", "shape"):
            _check(self.kind, name, getattr(self, name), assumed)
        if self.variant != "exact" and self.kind != "normal":
            raise ValueError(f"variant '{self.variant}' belongs to the normal cdf, not to '{self.kind}'")

    def __call__(self, x: Tensor) -> Tensor:
        """The function's value at ``x``, elementwise."""
        given = {name: getattr(self, name) for name in ("location", "scale", "shape")}
        known = {name: value if given[name] is None else given[name] for name, value in _ASSUMED[self.kind].items()}
        if "location" in known:
            z = (x - known["location"]) / known["scale"]
        else:
            z = (x.clamp(min=0) / known["scale"]).pow(known.get("shape", 1.0))
        if self.variant == "exact":
            return _STANDARD[self.kind](z)
        outer = torch.erfc(z / math.sqrt(2))
        return outer if self.variant == "erfc" else (1 + outer) / 2


def respond(losses: Tensor, cdf: CdfName | Cdf, low: float, high: float) -> Tensor:
    """``r_k = C1 + (C2 - C1) CDF(F_k / mean F)``, in float64; if all losses are zero, the ratio is 1.

    >>> respond(torch.tensor([1.0, 1.0, 4.0]), "exponential", 0.0, 0.5)
    tensor([0.1967, 0.1967, 0.4323], dtype=torch.float64)
    """
    if not low < high:
        raise RoundRefused(f"responses need C1 below C2, but C1 is {low:g} and C2 is {high:g}: lower C1 or set C2")
    curve = cdf if isinstance(cdf, Cdf) else Cdf(cdf)
    return low + (high - low) * curve(relative(losses.double()))


def relative(losses: Tensor) -> Tensor:
    """Losses divided by their mean; 1 for everyone when the mean is zero."""
    mean = losses.mean()
    return losses / mean if bool(mean > 0) else torch.ones_like(losses)


def _check(kind: str, name: str, value: float | None, assumed: Mapping[str, float]) -> None:
    if value is None:
        return
    if name not in assumed:
        raise ValueError(f"the {kind} cdf has no {name}; it has: {', '.join(assumed)}")
    if not math.isfinite(value) or (name != "location" and value <= 0):
        allowed = "finite" if name == "location" else "a finite number above 0"
        raise ValueError(f"{name} of the {kind} cdf must be {allowed}, got {value}")
