"""Replays ``ewwa``: shares of clients element by element, and the model they make."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from fedalloy.core.registry import register
from fedalloy.methods.published import named
from fedalloy.testing.vectors.cohorts import arrive, context, flat, serve
from fedalloy.testing.vectors.files import VectorCase
from fedalloy.testing.vectors.replay import Fields


@register("conform", "ewwa")
def ewwa(case: VectorCase) -> Iterator[Fields]:
    """The server never holds all shares at once, so they are computed by the same rule with the same state."""
    names = {name: name for name in ("mode", "server_lr", "beta1", "beta2", "eps")}
    algorithm = named("ewwa", **case.params.settings(kind="optimiser", score_lr="lr", **names))
    state = None
    for number, inputs in enumerate(case.rounds, 1):
        ctx, arrived = context(case, number), arrive(case, inputs)
        before = state["weighting"] if state else algorithm.weighting.init(ctx.population)
        shares, _, _ = algorithm.weighting.weigh(arrived.cohort, before, ctx)
        assert not isinstance(shares, Tensor)
        state = serve(algorithm, state, arrived, ctx).state
        yield {"proportions": arrived.to_file(flat(shares)), "w": flat(state["shared"]["params"])}
