"""The compiled kernel for one linear layer whose gradients every client shifts (SCAFFOLD) against the loop."""

from __future__ import annotations

import pytest
import torch

from fedalloy.core import native
from fedalloy.engines.batched import Batched
from fedalloy.engines.kernels import fused_logistic
from fedalloy.methods.solvers.scaffold import Scaffold
from fedalloy.testing import check_engine
from fedalloy.testing.cases import UNEVEN
from tests.engines.fused_cases import LOCAL, agrees, case
from tests.engines.kernels import compiled, needs_compiler, widths


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    return native.library() or compiled(tmp_path_factory.mktemp("kernels"), every_width=True)


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
