"""Replays ``deep_unfolding``: the gradient of a table through all rounds of quadratic clients, in both orders."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fedalloy.core.keys import Key
from fedalloy.core.registry import register
from fedalloy.testing.vectors.cohorts import Quadratics, flat, split
from fedalloy.testing.vectors.files import VectorCase
from fedalloy.testing.vectors.replay import Fields


@register("conform", "deep_unfolding")
def deep_unfolding(case: VectorCase) -> Iterator[Fields]:
    """One outer iteration per round of the file; its theta is the result of the file's previous step."""
    from fedalloy.methods.published import named
    from fedalloy.studies.unfolding.gradient import outer_gradient
    from fedalloy.studies.unfolding.settings import Learning
    from fedalloy.studies.unfolding.shares import shares_of
    from fedalloy.studies.unfolding.unrolled import UnrolledProblem
    from fedalloy.tasks.devices import DeviceProfile

    params = case.params
    task = Quadratics(params.tensor("A", 3), params.tensor("c", 2))
    learning = Learning(
        gradient="first_order" if params.get("first_order", True) else "exact",
        final=bool(params.get("evaluate_final", True)),
    )
    steps = tuple(int(count) for count in params["steps"])
    algorithm = named("fedavg", lr=params["lr"], batch_size=None)
    theta, w = case.init.tensor("theta", 2), split(case.init.tensor("w", 1))
    for inputs in case.rounds:
        theta = inputs.tensor("theta", 2) if "theta" in inputs else theta
        problem = UnrolledProblem(algorithm, task, len(theta), DeviceProfile(epochs=steps), learning)
        found = outer_gradient(problem, theta, w, {}, Key.of(0))
        yield {
            "weights": shares_of(theta, learning.parametrisation),
            "loss": torch.tensor(found.loss, dtype=torch.float64),
            "grad": found.by_theta,
            "final_w": flat(found.params),
        }
        theta = theta - params["outer_lr"] * found.by_theta
