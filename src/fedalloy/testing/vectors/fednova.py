"""Replays ``fednova``: normalised averaging for plain, momentum and proximal local steps."""

from __future__ import annotations

from collections.abc import Iterator

from fedalloy.core import aspects
from fedalloy.core.registry import register
from fedalloy.methods.published import named
from fedalloy.testing.vectors.cohorts import arrive, context, flat, serve
from fedalloy.testing.vectors.files import VectorCase
from fedalloy.testing.vectors.replay import Fields


@register("conform", "fednova")
def fednova(case: VectorCase) -> Iterator[Fields]:
    """The solver provides the effective length of ``tau`` steps; with a step of 1 the file's ``prox`` is ``eta mu``."""
    algorithm = named("fednova", lr=1.0, **case.params.settings(mu="prox", momentum="momentum", server_lr="server_lr"))
    state = None
    for number, inputs in enumerate(case.rounds, 1):
        ctx, arrived = context(case, number), arrive(case, inputs)
        lengths = aspects.describe(algorithm.solver, arrived.to_cohort(inputs.tensor("tau", 1)), ctx)
        step = serve(algorithm, state, arrived.knowing(lengths), ctx)
        state = step.state
        yield {
            "a_norm": arrived.to_file(step.info["a_norm"]),
            "tau_eff": step.info["tau_eff"],
            "w": flat(state["shared"]["params"]),
        }
