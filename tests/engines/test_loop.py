"""The loop engine: order, keys, errors, misfits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from fedalloy import algorithms
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.errors import ClientError
from fedalloy.core.keys import Key
from fedalloy.core.protocols import Outcome, Wire
from fedalloy.core.types import Context, Plan
from fedalloy.engines.batched import Batched
from fedalloy.engines.loop import Loop
from fedalloy.methods.servers.sgd import ServerSgd
from fedalloy.methods.solvers.sgd import Sgd
from fedalloy.methods.weightings.uniform import Uniform
from fedalloy.testing import Jitter, small_task, work
from fedalloy.testing.comparing import differences
from tests.engines.rounds import play

TASK = small_task("dropout")


def call(algorithm: Algorithm, *ids: int, round: int = 1, task=TASK) -> Outcome:
    params, buffers = task.objective.init(Key.of(1))
    shared = algorithm.init(params, task.population, buffers)["shared"]
    ctx = Context(round, task.population, Key.of(3).fold("round", round), local_lr=0.1)
    states = {client: algorithm.init_client(shared, Key.of(2).fold(client)) for client in ids}
    return Loop()(algorithm, task, shared, states, work(*ids), ctx)


WIRED = replace(algorithms.scaffold(batch_size=3), wire=(Jitter(),))


def test_a_client_does_the_same_whoever_else_is_there():
    together = call(WIRED, 0, 2, 3, 4)
    for client in (0, 2, 3, 4):
        alone = call(WIRED, client)
        one = together.cohort.select(torch.tensor([client]))
        assert list(differences(vars(one), vars(alone.cohort))) == []
        assert list(differences(together.states[client], alone.states[client])) == []


def test_clients_and_rounds_draw_differently():
    same = small_task(sizes=(6, 6))
    twins = replace(same, block=replace(same.block, start=torch.tensor([0, 0])))
    outcome = call(WIRED, 0, 1, task=twins)
    one, other = outcome.cohort.payload["delta"]["output.bias"]
    assert not torch.allclose(one, other)
    later = call(WIRED, 0, 1, round=2, task=twins)
    assert not torch.allclose(one, later.cohort.payload["delta"]["output.bias"][0])


def test_the_cohort_is_sorted_by_id():
    assert call(WIRED, 4, 0, 3).cohort.ids.tolist() == [0, 3, 4]


def test_an_error_names_client_round_and_stage():
    @dataclass(frozen=True)
    class Breaks(Sgd):
        def step(self, carry, grad_at, draws, phase, ctx):
            if float(carry["params"]["output.bias"].sum()) and ctx.round == 7:
                raise FloatingPointError("too far")
            return super().step(carry, grad_at, draws, phase, ctx)

    with pytest.raises(ClientError) as caught:
        call(Algorithm(Breaks(), Uniform(), ServerSgd()), 2, 3, round=7)
    assert (caught.value.client, caught.value.round, caught.value.stage) == (2, 7, "step 1 of 1")
    assert str(caught.value) == "client 2 failed in round 7 at stage 'step 1 of 1': FloatingPointError: too far"


@dataclass(frozen=True)
class Trims(Wire):
    """Forgets a leaf for some clients: those whose jitter is large."""

    def draws(self, shared, keys):
        return {"number": keys.uniform(dtype=torch.float64)}

    def encode(self, payload, mine, draws):
        if float(draws["number"]) < 0.5:
            return payload, mine
        return {"delta": {name: leaf for name, leaf in payload["delta"].items() if name != "output.bias"}}, mine


def test_a_misfit_is_a_failure_of_that_client_alone():
    outcome = call(replace(algorithms.fedavg(), wire=(Trims(),)), 0, 1, 2, 3, 4)
    failed = set(outcome.failures)
    assert failed
    assert failed < {0, 1, 2, 3, 4}
    assert set(outcome.failures.values()) == {"part 'delta' lacks output.bias"}
    assert set(outcome.cohort.ids.tolist()) == set(outcome.states) == {0, 1, 2, 3, 4} - failed


def test_the_engine_leaves_no_gradients_behind():
    outcome = call(WIRED, 1, 2)
    assert not any(leaf.requires_grad for part in outcome.cohort.payload.values() for leaf in part.values())
    assert torch.is_grad_enabled()


@dataclass(frozen=True)
class LateSteps(Sgd):
    """Trains from the second step on."""

    def plan(self, sizes, epochs, keys):
        made = super().plan(sizes, epochs, keys)
        mask = made.mask.clone()
        mask[:, 0] = False
        return Plan(made.index, mask, made.phase)


@pytest.mark.parametrize("engine", [Loop(), Batched()], ids=["loop", "batched"])
def test_a_plan_whose_steps_come_late_is_refused(engine):
    """Engines take as many steps as are used, from the first on: the last ones would be left out."""
    algorithm = Algorithm(LateSteps(batch_size=1), Uniform(), ServerSgd())
    with pytest.raises(ClientError, match=r"stage 'plan'.*put a client's empty steps last"):
        play(engine, algorithm, TASK, work(0, 2))
