"""Replays ``size_and_loss``: client weights from data sizes, losses and scores."""

from __future__ import annotations

from collections.abc import Iterator

from fedalloy.core.algorithm import Algorithm, ServerState
from fedalloy.core.registry import register
from fedalloy.core.spec import Spec, from_spec
from fedalloy.methods.servers.sgd import ServerSgd
from fedalloy.methods.solvers.sgd import Sgd
from fedalloy.testing.vectors.cohorts import arrive, context, flat, serve
from fedalloy.testing.vectors.files import Values, VectorCase
from fedalloy.testing.vectors.replay import Fields


def weightings(params: Values) -> dict[str, Spec]:
    """The weighting behind each field ``weights.NAME``; a line per rule, with its settings from the file."""
    return {
        "fedavg": {"kind": "samples"},
        "dr": {"kind": "dr", **params.settings(q="q")},
        "term": {"kind": "term", **params.settings(tilt="tilt")},
        "propfair": {"kind": "propfair", **params.settings(M="M", gap="propfair_eps")},
        "qffl": {"kind": "qffl", **params.settings(q="q")},
        "fedboosting": {"kind": "boosting"},
    }


@register("conform", "size_and_loss")
def size_and_loss(case: VectorCase) -> Iterator[Fields]:
    """Every weighting in the file, on the same inputs, each with its own state."""
    wanted = {name: spec for name, spec in weightings(case.params).items() if _asked(case, name)}
    algorithms = {name: Algorithm(Sgd(), from_spec("weighting", spec), ServerSgd()) for name, spec in wanted.items()}
    states: dict[str, ServerState] = {}
    for number, inputs in enumerate(case.rounds, 1):
        ctx = context(case, number)
        arrived = arrive(case, inputs, loss_before="losses", accuracy_after="train_scores")
        steps = {name: serve(rule, states.get(name), arrived, ctx) for name, rule in algorithms.items()}
        states = {name: step.state for name, step in steps.items()}
        models = {f"{name}_w": flat(state["shared"]["params"]) for name, state in states.items()}
        yield {"weights": {name: arrived.weights(step) for name, step in steps.items()}, **models}


def _asked(case: VectorCase, name: str) -> bool:
    return not case.wanted.isdisjoint({f"weights.{name}", f"{name}_w"})
