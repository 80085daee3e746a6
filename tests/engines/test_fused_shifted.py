"""The kernel for descent whose gradients every client shifts by a tree of its own (SCAFFOLD) against the loop, in
float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedalloy.core import native
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.keys import Key
from fedalloy.engines.batched import Batched
from fedalloy.engines.kernels import fused_logistic, fused_shifted, vmap_kernel
from fedalloy.engines.kernels.fused import Memory
from fedalloy.methods.servers.sgd import ServerSgd
from fedalloy.methods.solvers.scaffold import Scaffold
from fedalloy.methods.wires.topk import TopK
from fedalloy.testing import check_engine, small_task, work
from fedalloy.testing.cases import CHANGING, FAILING, UNEVEN, EngineCase
from fedalloy.testing.comparing import copied, differences
from fedalloy.testing.toys import Lopsided
from tests.engines.kernels import compiled, needs_compiler, widths
from tests.engines.rounds import context, shared_of

LOCAL: dict[str, Any] = {"lr": 0.1, "batch_size": 3, "epochs": 2}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    return native.library() or compiled(tmp_path_factory.mktemp("kernels"), every_width=True)


def case(solver, rounds=CHANGING, wire=(), model="mlp"):
    """Several rounds: in the first one all control variates are zero."""
    return EngineCase("shifted", "", Algorithm(solver, Lopsided(), ServerSgd(), wire), small_task(model), rounds)


def agrees(engine, played):
    assert check_engine(engine, [played]) == []
    assert not getattr(engine, "_unbatchable", "")


@settings(max_examples=15, deadline=None)
@given(
    momentum=st.sampled_from([0.0, 0.8]),
    weight_decay=st.sampled_from([0.0, 0.2]),
    batch=st.sampled_from([1, 3, 4, None]),
    block=st.sampled_from([None, 1, 2]),
    rounds=st.sampled_from([CHANGING, UNEVEN, FAILING]),
    model=st.sampled_from(["mlp", "linear"]),
)
def test_it_does_what_the_loop_does(momentum, weight_decay, batch, block, rounds, model):
    local = {**LOCAL, "batch_size": batch, "weight_decay": weight_decay, "momentum": momentum, "decay": 0.5}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vmap_kernel, "train", lambda *_: pytest.fail("not fused"))
        agrees(Batched(block=block), case(Scaffold(**local), rounds, model=model))


@needs_compiler
@pytest.mark.parametrize("width", widths())
@pytest.mark.parametrize("momentum", [0.0, 0.8])
def test_one_linear_layer_takes_the_compiled_kernel(width, momentum, kernels, monkeypatch):
    used = []

    def noted(*given):
        used.append(right(*given))
        return used[-1]

    right = fused_logistic.train
    monkeypatch.setattr(fused_logistic, "train", noted)
    monkeypatch.setattr(fused_logistic, "library", lambda: kernels)
    monkeypatch.setattr(fused_logistic, "_NAMES", {torch.float64: f"steps_double_{width}"})
    agrees(Batched(), case(Scaffold(momentum=momentum, weight_decay=0.2, **LOCAL), UNEVEN, model="linear"))
    assert used
    assert None not in used


@pytest.mark.parametrize("model", ["mlp", "linear"])
def test_without_compiled_kernels_and_with_wires(model, monkeypatch):
    monkeypatch.setattr(vmap_kernel, "train", lambda *_: pytest.fail("not fused"))
    agrees(Batched(), case(Scaffold(**LOCAL), wire=(TopK(0.3),), model=model))
    monkeypatch.setattr(fused_logistic, "library", lambda: None)
    agrees(Batched(), case(Scaffold(**LOCAL), UNEVEN, model=model))


@pytest.mark.parametrize("other", [{"precision": "bf16"}])
def test_other_settings_are_left_to_the_mapped_kernel(other):
    assert Scaffold(**LOCAL, **other).fusing is None


@dataclass(frozen=True)
class Backwards(Scaffold):
    """Steps uphill."""

    def step(self, carry, grad_at, draws, phase, ctx):
        return super().step(carry, grad_at, draws, phase, replace(ctx, local_lr=-ctx.local_lr))


def test_a_subclass_takes_its_own_steps(monkeypatch):
    monkeypatch.setattr(fused_shifted, "train", lambda *_: pytest.fail("not its own"))
    assert Backwards(**LOCAL).fusing is None
    agrees(Batched(), case(Backwards(**LOCAL)))


def test_a_model_with_buffers_is_left_to_the_mapped_kernel(monkeypatch):
    monkeypatch.setattr(fused_shifted, "train", lambda *_: pytest.fail("has buffers"))
    agrees(Batched(), case(Scaffold(**LOCAL), model="batchnorm"))


PLANTED = {
    "weights are not shifted": ("a[i * wide + j] -= shift[i * width + d + j];", ";"),
    "the bias is not shifted": ("moved -= bias_shift[k];", ";"),
    "all have the shift of the first": ("job->shift + (client * job->classes + k)", "job->shift + (k)"),
    "the shift does not know the step size": ("padded + d] = job->lr * row[d];", "padded + d] = row[d];"),
}


@needs_compiler
@pytest.mark.parametrize("fault", PLANTED)
def test_every_fault_planted_in_the_compiled_kernel_is_seen(fault, tmp_path, monkeypatch):
    broken = compiled(tmp_path, *PLANTED[fault])
    monkeypatch.setattr(fused_logistic, "library", lambda: broken)
    assert check_engine(Batched(), [case(Scaffold(**LOCAL), UNEVEN, model="linear")])


@pytest.mark.parametrize("momentum", [0.0, 0.8])
def test_a_kernel_that_forgets_the_shift_is_noticed(momentum, monkeypatch):
    monkeypatch.setattr(fused_shifted, "Memory", lambda received, model, velocity, _: Memory(received, model, velocity))
    assert check_engine(Batched(), [case(Scaffold(momentum=momentum, **LOCAL), UNEVEN)])


def test_it_writes_into_nothing_it_was_given():
    for model in ("mlp", "linear"):
        played = case(Scaffold(**LOCAL), model=model)
        task, algorithm, now = played.task, played.algorithm, work(*range(played.task.population))
        shared = shared_of(algorithm, task)
        states = {client: algorithm.init_client(shared, Key.of(2).fold(client)) for client in now.ids.tolist()}
        given = copied({"shared": shared, "states": states})
        Batched()(algorithm, task, shared, states, now, context(algorithm, task))
        assert list(differences({"shared": shared, "states": states}, given)) == []
