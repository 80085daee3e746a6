"""The compiled steps of a federated and a local model, and how many clients fit into the cache."""

from __future__ import annotations

import pytest
import torch

from fedalloy.core import native
from fedalloy.core.keys import Key
from fedalloy.engines.auto import expected
from fedalloy.engines.batched import Batched
from fedalloy.engines.kernels import fused_interpolated, fused_pair
from fedalloy.methods.solvers.superfed import SuPerFed
from fedalloy.testing import check_engine
from fedalloy.testing.cases import UNEVEN
from tests.engines.fused_cases import LOCAL, agrees, case
from tests.engines.kernels import compiled, needs_compiler, widths

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
