"""Replays ``fedcams``: compressed updates with error feedback into AMSGrad at the server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fedalloy.core import tree
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.registry import register
from fedalloy.core.types import Cohort, State, Tree
from fedalloy.methods.published import named
from fedalloy.testing.vectors.cohorts import arrive, context, flat, serve
from fedalloy.testing.vectors.files import VectorCase
from fedalloy.testing.vectors.replay import Fields


@register("conform", "fedcams")
def fedcams(case: VectorCase) -> Iterator[Fields]:
    """Every client encodes its update with its own memory; ``compressor = none`` is FedAMS."""
    algorithm, state = _algorithm(case), None
    memories: dict[int, State] = {}
    for number, inputs in enumerate(case.rounds, 1):
        ctx, arrived = context(case, number), arrive(case, inputs)
        cohort, memories = _encode(algorithm, arrived.cohort, arrived.received, memories)
        state = serve(algorithm, state, replace(arrived, cohort=cohort), ctx).state
        yield {
            "sent": arrived.to_file(flat(cohort.payload["delta"])),
            "errors": {str(client): flat(kept["residual"]) for client, kept in memories.items()},
            "vhat": flat(state["server"]["vhat"]),
            "w": flat(state["shared"]["params"]),
        }


def _algorithm(case: VectorCase) -> Algorithm:
    names = {name: name for name in ("option", "beta1", "beta2", "eps", "vhat0", "bias_correction")}
    settings = case.params.settings(server_lr="lr", **names)
    compressor = case.params["compressor"]
    if compressor == "none":
        return named("fedams", **settings)
    ratio = case.params.settings(ratio="ratio") if compressor == "topk" else {}
    return named("fedcams", compressor={"sign": "scaled_sign"}.get(compressor, compressor), **ratio, **settings)


def _encode(
    algorithm: Algorithm, cohort: Cohort, received: Tree, memories: dict[int, State]
) -> tuple[Cohort, dict[int, State]]:
    """The client half of the wire, client by client; absent clients keep their memory."""
    sent, memories = [], dict(memories)
    for row, client in enumerate(cohort.ids.tolist()):
        payload = {"delta": tree.rows(cohort.payload["delta"], row)}
        memories.setdefault(client, {"residual": tree.zeros_like(received)})
        for wire in algorithm.wire:
            payload, memories[client] = wire.encode(payload, memories[client], {})
        sent.append(payload["delta"])
    return cohort.with_payload({"delta": tree.stack(sent)}), memories
