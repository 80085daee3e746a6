"""Replays ``aaggff_s`` and ``aaggff_d``: weights learned online from the clients' losses."""

from __future__ import annotations

from collections.abc import Iterator

from fedalloy.core.algorithm import Algorithm, ServerState, ServerStep
from fedalloy.core.errors import SpecError
from fedalloy.core.registry import register
from fedalloy.core.spec import from_spec
from fedalloy.methods.servers.sgd import ServerSgd
from fedalloy.methods.solvers.sgd import Sgd
from fedalloy.testing.vectors.cohorts import Arrived, arrive, context, serve
from fedalloy.testing.vectors.files import Values, VectorCase
from fedalloy.testing.vectors.replay import Fields, Within


@register("conform", "aaggff_s")
def aaggff_s(case: VectorCase) -> Iterator[Fields]:
    """Full participation; a case may store only some rounds, then the same losses fill the gaps."""
    algorithm = _algorithm(case, "aaggff_s", C1="C1", C2="C2", mode="mode")
    played, state = 0, None
    for inputs in case.rounds:
        arrived = _heard(case, inputs)
        for number in _until(inputs, played):
            step = _run_rounds(algorithm, state, case, arrived, number)
            played, state = number, step.state
        yield {
            "r": arrived.to_file(step.info["responses"]),
            "g": arrived.to_file(step.info["gradient"]),
            "decision_loss": step.info["decision_loss"],
            "p": Within(1e-7, arrived.to_file(step.info["p"])),
        }


@register("conform", "aaggff_d")
def aaggff_d(case: VectorCase) -> Iterator[Fields]:
    """A few clients per round; estimates, gradients and p cover the whole population."""
    algorithm = _algorithm(case, "aaggff_d", C="C", C1="C1", C2="C2", mode="mode")
    state = None
    for number, inputs in enumerate(case.rounds, 1):
        arrived = _heard(case, inputs)
        step = _run_rounds(algorithm, state, case, arrived, number)
        state = step.state
        yield {
            "r": arrived.to_file(step.info["responses"]),
            "dr": step.info["estimate"],
            "g": step.info["gradient"],
            "p": state["weighting"]["p"],
            "participant_weights": arrived.weights(step),
        }


def _until(inputs: Values, played: int) -> range:
    """The rounds to run next: one, or all up to the ``round`` that the file names."""
    last = int(inputs.get("round", played + 1))
    if last <= played:
        raise SpecError(f"{inputs.where}.round is {last}, but {played} rounds were run before it")
    return range(played + 1, last + 1)


def _algorithm(case: VectorCase, kind: str, **names: str) -> Algorithm:
    settings = {"kind": kind, "cdf": case.params["cdf"], **case.params.settings(**names)}
    return Algorithm(Sgd(), from_spec("weighting", settings), ServerSgd())


def _heard(case: VectorCase, inputs: Values) -> Arrived:
    """The losses of a round as a cohort; the model has one parameter, which does not change."""
    unmoved = {"w": [0.0], "W": [[0.0]] * len(inputs.tensor("losses", 1))}
    return arrive(case, Values({**inputs, **unmoved}, inputs.where), loss_before="losses")


def _run_rounds(
    algorithm: Algorithm, state: ServerState | None, case: VectorCase, arrived: Arrived, round: int
) -> ServerStep:
    ctx = context(case, round)
    if state is None:
        state = algorithm.init(arrived.received, ctx.population)
        first = {"p": case.init.tensor("p", 1)} if "p" in case.init else {}
        state = {**state, "weighting": {**state["weighting"], **first}}
    return serve(algorithm, state, arrived, ctx)
