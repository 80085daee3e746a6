"""The kernel for a federated and a local model against the loop, in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedalloy.core import native
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.keys import Key
from fedalloy.engines.auto import expected
from fedalloy.engines.batched import Batched
from fedalloy.engines.kernels import fused_interpolated, fused_pair, vmap_kernel
from fedalloy.engines.loop import run_one
from fedalloy.engines.workers import Workers
from fedalloy.methods.servers.sgd import ServerSgd
from fedalloy.methods.solvers.superfed import SuPerFed
from fedalloy.methods.wires.topk import TopK
from fedalloy.tasks.models.linear import twonn
from fedalloy.tasks.objective import ModuleObjective
from fedalloy.testing import check_engine, small_task
from fedalloy.testing.cases import CHANGING, FAILING, UNEVEN, EngineCase
from fedalloy.testing.problems import CLASSES, INPUTS
from fedalloy.testing.toys import Lopsided
from tests.engines.kernels import compiled, needs_compiler, widths

LOCAL: dict[str, Any] = {"lr": 0.1, "batch_size": 3, "epochs": 2}


def case(solver, rounds=CHANGING, wire=(), model="mlp"):
    task = small_task() if model == "twonn" else small_task(model)
    if model == "twonn":
        task = replace(task, objective=ModuleObjective(lambda: twonn(INPUTS, CLASSES, 5), dtype=torch.float64))
    return EngineCase("a mixture", "", Algorithm(solver, Lopsided(), ServerSgd(), wire), task, rounds)


@pytest.fixture
def only_fused(monkeypatch):
    """Whatever does not go through the kernel fails; no engine survives this kind of error by falling back."""
    monkeypatch.setattr(vmap_kernel, "train", lambda *_: pytest.fail("not fused"))


def agrees(engine, played):
    assert check_engine(engine, [played]) == []
    assert not getattr(engine, "_unbatchable", "")


@settings(max_examples=24, deadline=None)
@given(
    mu=st.sampled_from([0.0, 0.4]),
    nu=st.sampled_from([0.0, 1.5]),
    mixing=st.sampled_from(["model", "layer"]),
    start=st.sampled_from([0, 2, 3, 99]),
    momentum=st.sampled_from([0.0, 0.8]),
    weight_decay=st.sampled_from([0.0, 0.2]),
    batch=st.sampled_from([1, 3, 4, None]),
    block=st.sampled_from([None, 1, 2]),
    rounds=st.sampled_from([CHANGING, UNEVEN, FAILING]),
    native_steps=st.booleans(),
)
def test_it_does_what_the_loop_does(mu, nu, mixing, start, momentum, weight_decay, batch, block, rounds, native_steps):
    local = {**LOCAL, "momentum": momentum, "weight_decay": weight_decay, "batch_size": batch, "decay": 0.5}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vmap_kernel, "train", lambda *_: pytest.fail("not fused"))
        if not native_steps:
            patch.setattr(fused_pair, "library", lambda: None)
        agrees(Batched(block=block), case(SuPerFed(mu, nu, mixing, start, **local), rounds))


@pytest.mark.parametrize("model", ["mlp", "linear", "twonn"])
@pytest.mark.usefixtures("only_fused")
def test_other_chains_and_wires_with_memory(model):
    agrees(Batched(), case(SuPerFed(start=0, **LOCAL), model=model))
    agrees(Batched(), case(SuPerFed(start=0, **LOCAL), wire=(TopK(0.3),), model=model))


def test_workers_use_it_too(monkeypatch, only_fused):
    def only_with_it(*arguments):
        assert arguments[-2].func is fused_interpolated.train
        return run_one(*arguments)

    monkeypatch.setattr("fedalloy.engines.workers.run_one", only_with_it)
    engine = Workers(2)
    agrees(engine, case(SuPerFed(start=2, momentum=0.5, **LOCAL), FAILING))
    engine.close()


@pytest.mark.parametrize("other", [{"optimizer": "adam"}, {"momentum": 0.5, "nesterov": True}])
def test_other_optimizers_are_left_to_the_mapped_kernel(other):
    solver = SuPerFed(start=0, **LOCAL, **other)
    assert solver.fusing is None
    agrees(Batched(), case(solver))


def test_a_model_with_buffers_is_left_to_the_mapped_kernel(monkeypatch):
    monkeypatch.setattr(fused_interpolated, "train", lambda *_: pytest.fail("has buffers"))
    agrees(Batched(), case(SuPerFed(start=0, **LOCAL), model="batchnorm"))


FAULTS = {
    "no momentum": ("_gather", lambda right: lambda v, m, one, *rest: right(v.mul_(0), m, one, *rest)),
    "the angle is forgotten": (
        "_angle",
        lambda right: lambda f, own, nu: tuple(0 * part for part in right(f, own, nu)),
    ),
    "not mixed": ("_mix", lambda right: lambda memory, share, spans: right(memory, 0 * share, spans)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_kernel_is_noticed(monkeypatch, fault):
    name, breaks = FAULTS[fault]
    monkeypatch.setattr(fused_pair, "library", lambda: None)
    monkeypatch.setattr(fused_interpolated, name, breaks(getattr(fused_interpolated, name)))
    assert check_engine(Batched(), [case(SuPerFed(0.4, 1.5, start=0, momentum=0.8, **LOCAL))])


COMPILED_FAULTS = {
    "no momentum": ("NAME(vector) p = momentum * OF(u) +", "NAME(vector) p ="),
    "the angle is that of the first step": ("dots[i] = sums[i];", ";"),
    "not mixed again": ("OF(mixed) = a + next * (b - a);", ""),
    "the last columns stay": ("f[at] = a -= lr * u[at];", ""),
}


@needs_compiler
@pytest.mark.parametrize("fault", COMPILED_FAULTS)
def test_a_fault_in_the_compiled_steps_is_noticed(monkeypatch, tmp_path, fault):
    library = compiled(tmp_path, *COMPILED_FAULTS[fault], source="pair.c")
    monkeypatch.setattr(fused_pair, "library", lambda: library)
    assert check_engine(Batched(), [case(SuPerFed(0.4, 1.5, start=0, momentum=0.8, **LOCAL))])


@needs_compiler
@pytest.mark.parametrize("width", widths())
def test_compiled_steps_of_every_width(monkeypatch, tmp_path_factory, width):
    library = native.library() or compiled(tmp_path_factory.mktemp("kernels"), every_width=True)
    monkeypatch.setattr(fused_pair, "library", lambda: library)
    monkeypatch.setattr(fused_pair, "_NAMES", {torch.float64: f"pair_double_{width}"})
    agrees(Batched(), case(SuPerFed(0.4, 1.5, "layer", start=0, momentum=0.8, **LOCAL), UNEVEN))


def test_a_block_holds_what_fits_into_the_cache():
    assert fused_interpolated.clients_in_cache({"w": torch.zeros(238_800)}) == 1
    assert fused_interpolated.clients_in_cache({"w": torch.zeros(100)}) > 1000


def test_auto_expects_workers_where_few_clients_fit(monkeypatch):
    played = case(SuPerFed(start=0, **LOCAL))
    params, buffers = played.task.objective.init(Key.of(0))
    shared = played.algorithm.init(params, 5, buffers)["shared"]
    monkeypatch.setattr(fused_interpolated, "clients_in_cache", lambda _: 1)
    assert [one.name for one in expected(played.algorithm, played.task, shared, 5, 2)] == ["workers", "batched"]
    monkeypatch.setattr(fused_interpolated, "clients_in_cache", lambda _: 100)
    assert expected(played.algorithm, played.task, shared, 5, 2)[0].name == "batched"
