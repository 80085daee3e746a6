"""The kernel for a received model and an own one at a mixture of both (APFL) against the loop, in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedalloy.core.algorithm import Algorithm
from fedalloy.core.keys import Key
from fedalloy.engines.auto import expected
from fedalloy.engines.batched import Batched
from fedalloy.engines.kernels import fused_mixed, vmap_kernel
from fedalloy.engines.loop import run_one
from fedalloy.engines.workers import Workers
from fedalloy.methods.servers.sgd import ServerSgd
from fedalloy.methods.solvers.apfl import Apfl
from fedalloy.methods.wires.topk import TopK
from fedalloy.testing import check_engine, small_task, work
from fedalloy.testing.cases import CHANGING, FAILING, UNEVEN, EngineCase
from fedalloy.testing.comparing import copied, differences
from fedalloy.testing.toys import Lopsided
from tests.engines.rounds import context, shared_of

LOCAL: dict[str, Any] = {"lr": 0.1, "batch_size": 3, "epochs": 2}


def case(solver, rounds=CHANGING, wire=(), model="mlp"):
    return EngineCase("mixture", "", Algorithm(solver, Lopsided(), ServerSgd(), wire), small_task(model), rounds)


def agrees(engine, played):
    assert check_engine(engine, [played]) == []
    assert not getattr(engine, "_unbatchable", "")


@settings(max_examples=15, deadline=None)
@given(
    alpha=st.sampled_from([0.0, 0.3, 1.0]),
    momentum=st.sampled_from([(0.0, False), (0.8, False), (0.8, True)]),
    weight_decay=st.sampled_from([0.0, 0.2]),
    batch=st.sampled_from([1, 3, 4, None]),
    block=st.sampled_from([None, 1, 2]),
    rounds=st.sampled_from([CHANGING, UNEVEN, FAILING]),
)
def test_it_does_what_the_loop_does(alpha, momentum, weight_decay, batch, block, rounds):
    local = {**LOCAL, "batch_size": batch, "weight_decay": weight_decay, "decay": 0.5}
    local |= dict(zip(("momentum", "nesterov"), momentum, strict=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vmap_kernel, "train", lambda *_: pytest.fail("not fused"))
        agrees(Batched(block=block), case(Apfl(alpha=alpha, **local), rounds))


@pytest.mark.parametrize("model", ["mlp", "linear"])
def test_other_chains_and_wires_with_memory(model, monkeypatch):
    monkeypatch.setattr(vmap_kernel, "train", lambda *_: pytest.fail("not fused"))
    agrees(Batched(), case(Apfl(**LOCAL), UNEVEN, model=model))
    agrees(Batched(), case(Apfl(**LOCAL), wire=(TopK(0.3),), model=model))


@pytest.mark.parametrize("other", [{"optimizer": "adam"}, {"clip_norm": 1.0}, {"accumulate": 2}, {"adaptive": True}])
def test_other_settings_are_left_to_the_mapped_kernel(other):
    solver = Apfl(**LOCAL, **other)
    assert solver.fusing is None
    agrees(Batched(), case(solver))


@dataclass(frozen=True)
class Backwards(Apfl):
    """Steps uphill."""

    def step(self, carry, grad_at, draws, phase, ctx):
        return super().step(carry, grad_at, draws, phase, replace(ctx, local_lr=-ctx.local_lr))


def test_a_subclass_takes_its_own_steps(monkeypatch):
    monkeypatch.setattr(fused_mixed, "train", lambda *_: pytest.fail("not its own"))
    assert Backwards(**LOCAL).fusing is None
    agrees(Batched(), case(Backwards(**LOCAL)))


def test_a_model_with_buffers_is_left_to_the_mapped_kernel(monkeypatch):
    monkeypatch.setattr(fused_mixed, "train", lambda *_: pytest.fail("has buffers"))
    agrees(Batched(), case(Apfl(**LOCAL), model="batchnorm"))


def _unmixed(shared, own, shares, into):
    for name, leaf in shared.items():
        into[name].copy_(leaf)


FAULTS = {
    "the gradient is that of the received model": ("_mix", lambda right: _unmixed),
    "the share belongs to the other model": (
        "_mix",
        lambda right: lambda shared, own, shares, into: right(own, shared, shares, into),
    ),
    "the personal model starts anew": (
        "_own",
        lambda right: lambda leaves, memory: right({name: 0 * leaf for name, leaf in leaves.items()}, memory),
    ),
    "clients get each other's models": (
        "_own",
        lambda right: lambda leaves, memory: right({name: leaf.flip(0) for name, leaf in leaves.items()}, memory),
    ),
    "gradients pass through the own model": (
        "backward",
        lambda right: lambda *given, at=None: right(*given),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_kernel_is_noticed(monkeypatch, fault):
    name, breaks = FAULTS[fault]
    monkeypatch.setattr(fused_mixed, name, breaks(getattr(fused_mixed, name)))
    assert check_engine(Batched(), [case(Apfl(**LOCAL), UNEVEN)])


def test_auto_expects_the_batched_engine():
    played = case(Apfl(**LOCAL))
    params, buffers = played.task.objective.init(Key.of(0))
    shared = played.algorithm.init(params, 5, buffers)["shared"]
    assert expected(played.algorithm, played.task, shared, 5, 2)[0].name == "batched"


def test_workers_use_it_too(monkeypatch):
    def only_with_it(*arguments):
        assert arguments[-2].func is fused_mixed.train
        return run_one(*arguments)

    monkeypatch.setattr("fedalloy.engines.workers.run_one", only_with_it)
    engine = Workers(2)
    agrees(engine, case(Apfl(**LOCAL), FAILING))
    engine.close()


def test_it_writes_into_nothing_it_was_given():
    played = case(Apfl(**LOCAL))
    task, algorithm, now = played.task, played.algorithm, work(*range(played.task.population))
    shared = shared_of(algorithm, task)
    states = {client: algorithm.init_client(shared, Key.of(2).fold(client)) for client in now.ids.tolist()}
    given = copied({"shared": shared, "states": states})
    Batched()(algorithm, task, shared, states, now, context(algorithm, task))
    assert list(differences({"shared": shared, "states": states}, given)) == []


def test_states_are_no_views_of_what_changes():
    """A state that is kept must not move when its client trains again."""
    played = case(Apfl(**LOCAL))
    task, algorithm, now = played.task, played.algorithm, work(*range(played.task.population))
    shared, engine = shared_of(algorithm, task), Batched()
    states = {client: algorithm.init_client(shared, Key.of(2).fold(client)) for client in now.ids.tolist()}
    first = engine(algorithm, task, shared, states, now, context(algorithm, task)).states
    kept = copied(first)
    engine(algorithm, task, shared, first, now, context(algorithm, task, 2))
    assert list(differences(first, kept)) == []
    trained = kept[0]["solver"]["personal"]
    assert not all(torch.equal(leaf, shared["params"][name]) for name, leaf in trained.items())
