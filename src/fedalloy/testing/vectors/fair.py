"""Replays ``fair``: every method on the same inputs; only AFL has state between rounds."""

from __future__ import annotations

from collections.abc import Iterator

from fedalloy.core.algorithm import Algorithm, ServerState
from fedalloy.core.registry import register
from fedalloy.core.types import Context
from fedalloy.methods.servers.sgd import ServerSgd
from fedalloy.methods.solvers.sgd import Sgd
from fedalloy.methods.weightings.afl import Afl
from fedalloy.methods.weightings.mgda import FedMgda
from fedalloy.methods.weightings.qfedavg import QFedAvg
from fedalloy.testing.vectors.cohorts import Arrived, arrive, context, flat, serve
from fedalloy.testing.vectors.files import VectorCase
from fedalloy.testing.vectors.replay import Fields, Within


@register("conform", "fair")
def fair(case: VectorCase) -> Iterator[Fields]:
    """The file's ``lr`` is the local step."""
    climbing, state = Algorithm(Sgd(), Afl(case.params["afl_step"]), ServerSgd()), None
    for number, inputs in enumerate(case.rounds, 1):
        arrived = arrive(case, inputs, loss_before="losses")
        ctx = context(case, number, case.params["lr"])
        step = serve(climbing, state or _start(climbing, case, arrived, ctx), arrived, ctx)
        state = step.state
        afl = {"afl": state["weighting"]["lambda"], "afl_w": flat(state["shared"]["params"])}
        yield {**afl, **qfedavg(case, arrived, ctx), **fedmgda(case, arrived, ctx)}


def qfedavg(case: VectorCase, arrived: Arrived, ctx: Context) -> Fields:
    """Clients have equal weights, or weights by examples; the step-size control is recorded for each of them."""
    plain, weighted = (
        serve(Algorithm(Sgd(), QFedAvg(case.params["q"], weights), ServerSgd()), None, arrived, ctx)
        for weights in ("uniform", "samples")
    )
    return {
        "qfedavg_h": arrived.to_file(plain.info["h"]),
        "qfedavg_w": flat(plain.state["shared"]["params"]),
        "qfedavg_weighted_w": flat(weighted.state["shared"]["params"]),
    }


def fedmgda(case: VectorCase, arrived: Arrived, ctx: Context) -> Fields:
    """Lambda near equal shares, and near the shares of examples; both are solutions of a quadratic program."""
    fields: dict[str, Within] = {}
    for name, prior in (("fedmgda", "uniform"), ("fedmgda_prior", "samples")):
        rule = FedMgda(case.params["eps"], "samples" if prior == "samples" else "uniform")
        server = ServerSgd(**case.params.settings(lr="server_lr"))
        step = serve(Algorithm(Sgd(), rule, server), None, arrived, ctx)
        fields[f"{name}_lambda"] = Within(1e-7, arrived.to_file(step.info["lambda"]))
        fields[f"{name}_w"] = Within(1e-7, flat(step.state["shared"]["params"]))
    return fields


def _start(algorithm: Algorithm, case: VectorCase, arrived: Arrived, ctx: Context) -> ServerState:
    """The state before the first round, with the file's first lambda."""
    state = algorithm.init(arrived.received, ctx.population)
    return {**state, "weighting": {"lambda": case.init.tensor("afl", 1)}} if "afl" in case.init else state
