"""The kernel for descent in two phases (Ditto) against the loop, in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fedalloy
from fedalloy import algorithms
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.keys import Key
from fedalloy.engines.auto import expected
from fedalloy.engines.batched import Batched
from fedalloy.engines.kernels import fused_phases, vmap_kernel
from fedalloy.engines.loop import run_one
from fedalloy.engines.workers import Workers
from fedalloy.methods.servers.sgd import ServerSgd
from fedalloy.methods.solvers.ditto import Ditto
from fedalloy.methods.wires.topk import TopK
from fedalloy.tasks.datasets.base import Dataset
from fedalloy.testing import check_engine, small_task, work
from fedalloy.testing.cases import CHANGING, FAILING, UNEVEN, EngineCase
from fedalloy.testing.comparing import copied, differences
from fedalloy.testing.toys import Lopsided
from tests.engines.rounds import context, shared_of

LOCAL: dict[str, Any] = {"lr": 0.1, "batch_size": 3, "epochs": 2}


def case(solver, rounds=CHANGING, wire=(), model="mlp"):
    return EngineCase("two phases", "", Algorithm(solver, Lopsided(), ServerSgd(), wire), small_task(model), rounds)


def agrees(engine, played):
    assert check_engine(engine, [played]) == []
    assert not getattr(engine, "_unbatchable", "")


@settings(max_examples=15, deadline=None)
@given(
    lam=st.sampled_from([0.0, 0.7]),
    personal_epochs=st.sampled_from([0, 1, 3]),
    momentum=st.sampled_from([(0.0, False), (0.8, False), (0.8, True)]),
    weight_decay=st.sampled_from([0.0, 0.2]),
    batch=st.sampled_from([1, 3, 4, None]),
    block=st.sampled_from([None, 1, 2]),
    rounds=st.sampled_from([CHANGING, UNEVEN, FAILING]),
)
def test_it_does_what_the_loop_does(lam, personal_epochs, momentum, weight_decay, batch, block, rounds):
    local = {**LOCAL, "batch_size": batch, "weight_decay": weight_decay, "decay": 0.5}
    local |= dict(zip(("momentum", "nesterov"), momentum, strict=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vmap_kernel, "train", lambda *_: pytest.fail("not fused"))
        agrees(Batched(block=block), case(Ditto(lam=lam, personal_epochs=personal_epochs, **local), rounds))


@pytest.mark.parametrize("model", ["mlp", "linear"])
def test_other_chains_and_wires_with_memory(model, monkeypatch):
    monkeypatch.setattr(vmap_kernel, "train", lambda *_: pytest.fail("not fused"))
    agrees(Batched(), case(Ditto(**LOCAL), UNEVEN, model=model))
    agrees(Batched(), case(Ditto(**LOCAL), wire=(TopK(0.3),), model=model))


@pytest.mark.parametrize("other", [{"optimizer": "adam"}, {"clip_norm": 1.0}, {"accumulate": 2}])
def test_other_settings_are_left_to_the_mapped_kernel(other):
    solver = Ditto(**LOCAL, **other)
    assert solver.fusing is None
    agrees(Batched(), case(solver))


@dataclass(frozen=True)
class Backwards(Ditto):
    """Steps uphill."""

    def step(self, carry, grad_at, draws, phase, ctx):
        return super().step(carry, grad_at, draws, phase, replace(ctx, local_lr=-ctx.local_lr))


def test_a_subclass_takes_its_own_steps(monkeypatch):
    monkeypatch.setattr(fused_phases, "train", lambda *_: pytest.fail("not its own"))
    assert Backwards(**LOCAL).fusing is None
    agrees(Batched(), case(Backwards(**LOCAL)))


def test_a_model_with_buffers_is_left_to_the_mapped_kernel(monkeypatch):
    monkeypatch.setattr(fused_phases, "train", lambda *_: pytest.fail("has buffers"))
    agrees(Batched(), case(Ditto(**LOCAL), model="batchnorm"))


FAULTS = {
    "the pull is forgotten": (
        "walk",
        lambda right: lambda layers, loss, sgd, *rest: right(layers, loss, type(sgd)(), *rest),
    ),
    "the personal model starts anew": (
        "_copied",
        lambda right: lambda leaves, order: {name: 0 * leaf for name, leaf in right(leaves, order).items()},
    ),
    "clients get each other's models": ("_back", lambda right: lambda model, order: model),
    "the phases are exchanged": ("_of_phase", lambda right: lambda plan, which: right(plan, 1 - which)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_kernel_is_noticed(monkeypatch, fault):
    name, breaks = FAULTS[fault]
    monkeypatch.setattr(fused_phases, name, breaks(getattr(fused_phases, name)))
    assert check_engine(Batched(), [case(Ditto(lam=0.7, personal_epochs=1, **LOCAL), UNEVEN)])


def test_auto_expects_the_batched_engine():
    played = case(Ditto(**LOCAL))
    params, buffers = played.task.objective.init(Key.of(0))
    shared = played.algorithm.init(params, 5, buffers)["shared"]
    assert expected(played.algorithm, played.task, shared, 5, 2)[0].name == "batched"


def test_workers_use_it_too(monkeypatch):
    def only_with_it(*arguments):
        assert arguments[-2].func is fused_phases.train
        return run_one(*arguments)

    monkeypatch.setattr("fedalloy.engines.workers.run_one", only_with_it)
    engine = Workers(2)
    agrees(engine, case(Ditto(**LOCAL), FAILING))
    engine.close()


def test_workers_leave_several_targets_to_the_plain_kernel():
    """As the batched engine does: the fused kernels have one target per example."""
    labels = (Key.of(5).uniform(20, 4) < 0.5).float()
    task = fedalloy.task(
        Dataset(Key.of(6).normal(20, 3), labels, 0), model=lambda: nn.Linear(3, 4), kind="multilabel", clients=3,
        dtype="float64",
    )  # fmt: skip
    for method in (algorithms.ditto, algorithms.apfl, algorithms.superfed_mm):
        one, other = (fedalloy.fit(method(lr=0.1), task, rounds=1, engine=by).model for by in ("loop", "workers"))
        assert max(float((leaf - other[name]).abs().max()) for name, leaf in one.items()) <= 1e-9


def test_it_writes_into_nothing_it_was_given():
    played = case(Ditto(**LOCAL))
    task, algorithm, now = played.task, played.algorithm, work(*range(played.task.population))
    shared = shared_of(algorithm, task)
    states = {client: algorithm.init_client(shared, Key.of(2).fold(client)) for client in now.ids.tolist()}
    given = copied({"shared": shared, "states": states})
    Batched()(algorithm, task, shared, states, now, context(algorithm, task))
    assert list(differences({"shared": shared, "states": states}, given)) == []
