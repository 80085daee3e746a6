"""Weights from the angle between a client's update and the average one: FedAdp and FedLayerWise as one rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import pi
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedalloy.core import tree
from fedalloy.core.protocols import Weighting
from fedalloy.core.registry import register
from fedalloy.core.search import Range
from fedalloy.core.types import Context, Contributions, Info, State, Weights
from fedalloy.methods.weightings.mirror import tilted


@register("weighting", "angles", aliases=("fedadp", "fedlayerwise"), search={"alpha": Range(1.0, 20.0, log=True)})
@dataclass(frozen=True)
class Angles(Weighting):
    """``p_k`` proportional to ``n_k exp(f(theta_k))``, ``f(theta) = alpha (1 - exp(-exp(-alpha (theta - 1))))``.

    ``theta_k`` is the angle in radians between the update of client k and the average by data size, as a running mean
    over the rounds in which the client took part: ``theta_k <- ((c_k - 1) theta_k + angle) / c_k`` with its own count
    ``c_k``. ``level = "client"`` is FedAdp (Wu and Wang 2021, arXiv:2012.00661); with ``"layer"`` every module (weight
    and bias together) has its own angles and weights, as in FedLayerWise; with ``"leaf"`` every tensor has.

    Corrections: the papers divide by the round number, which under partial participation shrinks the angles of absent
    clients; the printed layer-wise cosine uses norms of the loss instead of norms of gradients, and its average uses
    the models before training. Cosines are clipped to [-1, 1]; an update of length zero gets a right angle.
    A client that took no step is left out: it has no direction, and a right angle would stay in its running mean.
    When to use it: skewed labels, where a few clients pull across the common direction. ``f`` is flat below about half
    a radian, so weights differ from FedAvg's only for larger angles.

    >>> from fedalloy.core.types import Cohort
    >>> delta = {"w": torch.tensor([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0]])}
    >>> cohort = Cohort(torch.arange(3), {"delta": delta}, {"num_examples": torch.ones(3)})
    >>> rule = Angles()
    >>> rule.weigh(cohort, rule.init(3), None)[0]
    tensor([0.4983, 0.4983, 0.0034], dtype=torch.float64)
    """

    reads_payload: ClassVar[bool] = True
    asks: ClassVar[frozenset[str]] = frozenset({"norms", "combine", "chunks"})
    weight_bound: ClassVar[float | None] = 1.0
    counts_idle: ClassVar[bool] = False

    level: Literal["client", "layer", "leaf"] = "client"
    alpha: float = 5.0

    def __post_init__(self) -> None:
        if self.alpha <= 0:
            raise ValueError(f"alpha must be above 0, got {self.alpha}")

    def init(self, population: int) -> State:
        """Angles are added under the name of their layer (the whole model: ``""``) in the first round."""
        return {"count": torch.zeros(population, dtype=torch.float64), "angle": {}}

    def weigh(self, cohort: Contributions, state: State, ctx: Context) -> tuple[Weights, State, Info]:
        like, sizes, ids = cohort.template("delta"), cohort.stats["num_examples"].double(), cohort.ids
        shares = sizes / sizes.sum().clamp(min=1e-12)
        count = state["count"].index_add(0, ids, torch.ones_like(shares))
        instant = angles_to_mean(cohort, shares, tree.groups(like, self.level))
        past = {group: state["angle"].get(group, torch.zeros_like(count))[ids] for group in instant}
        smoothed = {group: ((count[ids] - 1) * past[group] + now) / count[ids] for group, now in instant.items()}
        kept = {
            group: state["angle"].get(group, torch.zeros_like(count)).index_copy(0, ids, angle)
            for group, angle in smoothed.items()
        }
        weights = {group: tilted(sizes, steepness(angle, self.alpha)) for group, angle in smoothed.items()}
        info = {**_named("instant_angle", instant), **_named("smoothed_angle", smoothed)}
        return tree.spread(weights, like, self.level), {"count": count, "angle": kept}, info


def angles_to_mean(
    cohort: Contributions, shares: Tensor, groups: Mapping[str, Sequence[str]], part: str = "delta"
) -> dict[str, Tensor]:
    """The angles ``[C]`` in radians between every client's leaves and their average by ``shares``, per group of leaves.

    >>> from fedalloy.core.types import Cohort
    >>> cohort = Cohort(torch.arange(2), {"delta": {"w": torch.tensor([[1.0, 0.0], [0.0, 0.0]])}})
    >>> angles_to_mean(cohort, torch.tensor([0.5, 0.5]), {"": ["w"]})
    {'': tensor([0.0000, 1.5708], dtype=torch.float64)}
    """
    mean = cohort.combine(part, shares)
    products, found = cohort.dots(part, mean), {}
    for group, leaves in groups.items():
        lengths = cohort.norms(part, leaves) * tree.norm({name: mean[name] for name in leaves}).cpu()
        cosines = torch.stack([products[name] for name in leaves]).sum(0) / lengths
        found[group] = torch.where(lengths > 0, cosines.clamp(-1, 1).arccos(), pi / 2)
    return found


def steepness(angle: Tensor, alpha: float) -> Tensor:
    """FedAdp's Gompertz function: ``alpha`` for small angles, 0 for large ones."""
    return alpha * (1 - (-(-alpha * (angle - 1)).exp()).exp())


def _named(name: str, by_group: dict[str, Tensor]) -> Info:
    return {f"{name}.{group}" if group else name: value for group, value in by_group.items()}
