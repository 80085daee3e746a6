"""Replays ``fedopt``: adaptive server steps on the average by size."""

from __future__ import annotations

from collections.abc import Iterator

from fedalloy.core import tree
from fedalloy.core.registry import register
from fedalloy.methods.published import named
from fedalloy.testing.vectors.cohorts import arrive, context, flat, serve
from fedalloy.testing.vectors.files import VectorCase
from fedalloy.testing.vectors.replay import Fields


@register("conform", "fedopt")
def fedopt(case: VectorCase) -> Iterator[Fields]:
    """``kind`` names the optimizer; its moments are the server's state."""
    names = {name: name for name in ("beta1", "beta2", "tau", "bias_correction")}
    algorithm = named(f"fed{case.params['kind']}", **case.params.settings(server_lr="lr", **names))
    state = None
    for number, inputs in enumerate(case.rounds, 1):
        arrived = arrive(case, inputs)
        step = serve(algorithm, state, arrived, context(case, number))
        state = step.state
        moments = {name: flat(state["server"][name]) for name in ("m", "v")}
        delta = flat(tree.combine(arrived.cohort.payload["delta"], step.weights))
        yield {"delta": delta, **moments, "w": flat(state["shared"]["params"])}
