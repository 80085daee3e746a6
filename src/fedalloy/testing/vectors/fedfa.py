"""Replays ``fedfa``: weights from accuracy and participation, then the server's momentum."""

from __future__ import annotations

from collections.abc import Iterator

from fedalloy.core import tree
from fedalloy.core.registry import register
from fedalloy.methods.published import named
from fedalloy.testing.vectors.cohorts import arrive, context, flat, serve
from fedalloy.testing.vectors.files import VectorCase
from fedalloy.testing.vectors.replay import Fields

SETTINGS = {
    "alpha": "alpha",
    "beta": "beta",
    "c": "c",
    "period": "b",
    "gamma": "gamma_server",
    "server_lr": "server_lr",
}


@register("conform", "fedfa")
def fedfa(case: VectorCase) -> Iterator[Fields]:
    """The file's momentum points from the average to the model; the server's state points the other way."""
    algorithm, state = named("fedfa", **case.params.settings(**SETTINGS)), None
    for number, inputs in enumerate(case.rounds, 1):
        arrived = arrive(case, inputs, accuracy_after="acc")
        step = serve(algorithm, state, arrived, context(case, number))
        state = step.state
        yield {
            "weights": arrived.weights(step),
            "average": flat(tree.add(arrived.received, tree.combine(arrived.cohort.payload["delta"], step.weights))),
            "momentum": -flat(state["server"]["momentum"]),
            "w": flat(state["shared"]["params"]),
        }
