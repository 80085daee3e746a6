"""The mapped kernel: any module and solver, in blocks of any size; exactly differentiable; a fallback that says so."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._pytree import tree_leaves

from fedalloy import algorithms, fit
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.applying import vmapped
from fedalloy.core.blocks import prepare
from fedalloy.core.errors import ClientError
from fedalloy.core.keys import Key
from fedalloy.core.program import run_block
from fedalloy.core.types import Tree
from fedalloy.engines.batched import Batched
from fedalloy.engines.kernels import vmap_kernel
from fedalloy.engines.loop import Loop
from fedalloy.methods.servers.sgd import ServerSgd
from fedalloy.methods.solvers.scaffold import Scaffold
from fedalloy.methods.solvers.sgd import Sgd
from fedalloy.methods.weightings.uniform import Uniform
from fedalloy.tasks.dropout import Dropout
from fedalloy.testing import HalfWithMemory, Jitter, check_engine, engine_cases, plain_case, work
from fedalloy.testing.faults import FAULTS
from fedalloy.testing.toys import Wavering
from tests.engines.rounds import context, gaps, play, shared_of, task_of

CASES = {case.name: case for case in engine_cases()}


def conv_norm() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 2, 3, stride=2, padding=1), nn.BatchNorm2d(2), nn.Tanh(), nn.Flatten(), Dropout(0.3),
        nn.Linear(8, 3),
    )  # fmt: skip


def grouped() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 2), nn.GroupNorm(2, 4), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(4, 3)
    )  # fmt: skip


MODELS = {"conv, batchnorm, dropout": conv_norm, "conv, groupnorm": grouped}
# In batches of 3 none of these leaves a batch of a single example, of which BatchNorm could make no variance.
SIZES = (5, 3, 6, 2, 8)


# ---------------------------------------------------------------------------------------------- equal to the loop


@pytest.mark.parametrize("options", [{"kernel": "mapped"}, {"block": 2}], ids=["mapped", "blocks of two"])
def test_the_conformance_suite_passes(options):
    """As registered, the engine is in the table of ``test_conformance``; here are its other faces."""
    assert check_engine(Batched(**options)) == []


@pytest.mark.parametrize("name", ["key_by_slot", "forgotten_mask", "lost_client_state", "shuffled_clients"])
def test_a_fault_planted_into_it_is_caught(name):
    seen = ("wavering steps",) if name != "shuffled_clients" else ("lopsided weights",)
    assert check_engine(FAULTS[name](Batched()), [CASES[case] for case in seen])


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("solver", [Sgd(lr=0.2, batch_size=3, epochs=2), Scaffold(lr=0.2, batch_size=3)])
def test_any_module_gives_what_the_loop_gives(model, solver):
    task = task_of(MODELS[model], SIZES, (1, 4, 4))
    algorithm = Algorithm(solver, Uniform(), ServerSgd(), (Jitter(), HalfWithMemory()))
    now = work(0, 1, 2, 3, 4, epochs=(1, 2, -1, 0, 1), active=(True, True, True, True, False))
    expected = play(Loop(), algorithm, task, now)
    for block in (None, 2, 1):
        assert gaps(play(Batched(block=block), algorithm, task, now), expected) == []


@settings(max_examples=25)
@given(
    st.lists(st.integers(1, 7), min_size=1, max_size=5),
    st.integers(1, 4),
    st.sampled_from([2, 3, None]),
    st.integers(0, 10**6),
)
def test_blocks_and_ragged_clients_do_not_matter(sizes, block, batch, seed):
    task = task_of(lambda: nn.Sequential(nn.Linear(4, 3), Dropout(0.4), nn.Linear(3, 3)), tuple(sizes))
    algorithm = Algorithm(Wavering(batch_size=batch or 7), Uniform(), ServerSgd(), (HalfWithMemory(),))
    draws = Key.of(seed).uniform(len(sizes), 2)
    epochs, active = tuple((draws[:, 0] * 4).long().tolist()), tuple((draws[:, 1] < 0.8).tolist())
    now = work(*range(len(sizes)), epochs=epochs, active=active)
    expected = play(Loop(), algorithm, task, now)
    assert gaps(play(Batched(block=block), algorithm, task, now), expected) == []


def test_a_memory_budget_makes_blocks():
    engine, task = Batched(memory_mb=0.0005), task_of(lambda: nn.Linear(4, 3))
    algorithm = algorithms.scaffold(batch_size=2)
    shared = shared_of(algorithm, task)
    states = {client: algorithm.init_client(shared, Key.of(2)) for client in range(4)}
    assert engine._most(algorithm, task.objective, shared, states) == 1
    assert Batched(memory_mb=1.0)._most(algorithm, task.objective, shared, states) > 100
    assert gaps(play(engine, algorithm, task), play(Loop(), algorithm, task)) == []


def test_a_frozen_base_counts_for_the_activations_of_every_client():
    def adapted():
        base = nn.Sequential(nn.Linear(4, 1000), nn.Linear(1000, 3)).requires_grad_(False)
        return nn.Sequential(nn.Linear(4, 4), base)

    task, algorithm = task_of(adapted), algorithms.fedavg()
    most = Batched(memory_mb=1.0)._most(algorithm, task.objective, shared_of(algorithm, task), {})
    assert 10 < most < 40, "8,003 frozen numbers a client, not only 20 trained ones"


# ---------------------------------------------------------------------------------------------- gradients


def meta_loss(params: Tree, algorithm: Algorithm, task, now) -> torch.Tensor:
    """A function of the received model that goes through every local step of every client."""
    shared = {**shared_of(algorithm, task), "params": params}
    ctx = context(algorithm, task)
    block = prepare(algorithm, now, task.data("train", now.ids), shared, ctx)
    states = {client: algorithm.init_client(shared, Key.of(2)) for client in now.ids.tolist()}
    payload = run_block(algorithm, task.objective, shared, states, block, ctx, vmap_kernel.train, vmapped).payload
    weights = torch.linspace(0.5, 1.5, len(now), dtype=torch.float64)
    moved = [leaf.flatten(1).square().sum(1) @ weights for leaf in payload["delta"].values()]
    return torch.stack(moved).sum() + sum((params[name] ** 3).sum() for name in params)


@pytest.mark.parametrize("solver", [Sgd(lr=0.5, batch_size=2, epochs=2, momentum=0.5), Sgd(lr=0.5, batch_size=3)])
def test_gradients_through_local_training_are_exact(solver):
    """Central differences see the second derivatives of the local losses; a first-order shortcut would not."""
    task = task_of(lambda: nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 3)), (3, 4, 2), (2,))
    algorithm, now = Algorithm(solver, Uniform(), ServerSgd()), work(0, 1, 2, epochs=(1, 2, 1))
    params = {name: leaf.requires_grad_() for name, leaf in task.objective.init(Key.of(1))[0].items()}
    grads = torch.autograd.grad(meta_loss(params, algorithm, task, now), list(params.values()))
    with torch.no_grad():
        for (name, leaf), found in zip(params.items(), grads, strict=True):
            for place in range(leaf.numel()):
                nudge = torch.zeros_like(leaf)
                nudge.view(-1)[place] = 1e-5
                up, down = (meta_loss({**params, name: leaf + sign * nudge}, algorithm, task, now) for sign in (1, -1))
                assert float((up - down) / 2e-5) == pytest.approx(float(found.view(-1)[place]), rel=1e-6, abs=1e-8)


def test_the_engine_itself_leaves_no_gradients():
    task, algorithm = task_of(conv_norm, SIZES, (1, 4, 4)), algorithms.fedavg(batch_size=3)
    outcome = play(Batched(), algorithm, task)
    assert not any(leaf.requires_grad for part in outcome.cohort.payload.values() for leaf in part.values())


# ---------------------------------------------------------------------------------------------- falling back


@dataclass(frozen=True)
class Branches(Sgd):
    """Looks at a number and then decides: nothing that can be done for many clients at once."""

    def step(self, carry, grad_at, draws, phase, ctx):
        if float(next(iter(carry["params"].values())).sum()) > 1e9:
            return carry
        return super().step(carry, grad_at, draws, phase, ctx)

    @property
    def descent(self):
        return None


def test_what_cannot_be_batched_runs_in_the_loop_after_one_warning():
    task = task_of(lambda: nn.Linear(4, 3))
    algorithm, engine = Algorithm(Branches(batch_size=2), Uniform(), ServerSgd()), Batched()
    with pytest.warns(RuntimeWarning, match="cannot be batched, continuing with the loop engine: ") as heard:
        first = play(engine, algorithm, task)
    assert len(heard) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = play(engine, algorithm, task, round=2)
    assert gaps(first, play(Loop(), algorithm, task), 0.0) == []
    assert gaps(second, play(Loop(), algorithm, task, round=2), 0.0) == []


def test_what_cannot_be_batched_in_one_run_is_no_reason_in_the_next(monkeypatch):
    """The loop would take its place without a word, as if it had been told before."""
    task, engine = task_of(lambda: nn.Linear(4, 3)), Batched(kernel="mapped")
    with pytest.warns(RuntimeWarning, match="cannot be batched"):
        fit(Algorithm(Branches(batch_size=2), Uniform(), ServerSgd()), task, rounds=1, engine=engine)
    assert engine._unbatchable, "what the run found can be looked up"
    monkeypatch.setattr("fedalloy.engines.batched.loop_like", lambda *_: pytest.fail("not batched"))
    assert fit(algorithms.fedavg(batch_size=2), task, rounds=1, engine=engine).status == "finished"
    assert not engine._unbatchable


def test_a_clients_state_does_not_keep_those_of_its_block_in_memory():
    """With a few clients of each round left, all blocks would stay: several times what the states take."""
    task = task_of(lambda: nn.Sequential(nn.Linear(4, 600), nn.ReLU(), nn.Linear(600, 3)))
    for algorithm in (algorithms.ditto(batch_size=3), algorithms.superfed_mm(start=0), algorithms.scaffold()):
        outcome = play(Batched(), algorithm, task)
        large = [leaf for leaf in tree_leaves(outcome.states) if leaf.numel() >= 1024]
        assert large
        assert all(leaf.untyped_storage().nbytes() == leaf.nbytes for leaf in large)


@pytest.mark.parametrize("kernel", ["best", "mapped"])
def test_a_clients_own_error_comes_back_with_its_name(kernel):
    @dataclass(frozen=True)
    class Breaks(Sgd):
        def step(self, carry, grad_at, draws, phase, ctx):
            raise FloatingPointError("too far")

        @property
        def descent(self):
            return None

    algorithm = Algorithm(Breaks(batch_size=4), Uniform(), ServerSgd())
    with pytest.raises(ClientError) as caught:
        play(Batched(kernel=kernel), algorithm, task_of(lambda: nn.Linear(4, 3)), work(1, 2), round=5)
    error = caught.value
    assert (error.client, error.round, error.stage) == (1, 5, "step 1 of 1")
    assert isinstance(error.cause, FloatingPointError)


def test_a_kernel_that_was_asked_for_and_does_not_fit_is_told():
    case = plain_case()
    algorithm = algorithms.fedavg(batch_size=3, clip_norm=1.0)
    with pytest.warns(RuntimeWarning, match="kernel 'fused' needs a chain of linear layers"):
        play(Batched(kernel="fused"), algorithm, case.task)
