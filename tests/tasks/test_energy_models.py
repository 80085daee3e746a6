"""Models for energies: their sizes, the norm of their last layer, and that they can be mapped over clients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call, grad, vmap

from fedalloy.core.keys import Key
from fedalloy.tasks.models.build import build
from fedalloy.tasks.models.energy import SpectralLinear, spectral_norm


@pytest.mark.parametrize(
    ("shape", "classes", "count"),
    [
        ((1, 32, 32), 10, 4_979_914),
        ((1, 28, 28), 10, 4_979_914),
        ((3, 32, 32), 10, 4_981_066),
        ((3, 64, 64), 7, 5_128_519),
        ((1, 64, 64), 11, 5_258_443),
    ],
)
def test_resnet10_has_the_published_number_of_parameters(shape, classes, count):
    with torch.device("meta"):
        model = build("resnet10", shape, classes)
    assert sum(leaf.numel() for leaf in model.parameters()) == count
    assert not list(model.buffers())


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 10), st.integers(1, 40), st.integers(0, 2**20))
def test_the_largest_singular_value(rows, columns, seed):
    weight = Key.of(seed).normal(rows, columns, dtype=torch.float64)
    assert torch.allclose(spectral_norm(weight), torch.linalg.matrix_norm(weight, 2), rtol=1e-4)


def test_the_norm_is_finite_for_no_weight_and_for_equal_singular_values():
    assert bool(grad(spectral_norm)(torch.zeros(3, 5)).isfinite().all())
    assert float(spectral_norm(torch.eye(4))) == pytest.approx(1.0)
    slope = grad(spectral_norm)(torch.diag(torch.tensor([3.0, 1.0])))
    assert torch.allclose(slope, torch.tensor([[1.0, 0.0], [0.0, 0.0]]), atol=1e-5)


def test_the_last_layer_never_stretches():
    layer = SpectralLinear(6, 4)
    with torch.no_grad():
        layer.weight.mul_(50.0)
        step = layer(torch.eye(6)) - layer.bias
    assert float(torch.linalg.matrix_norm(step, 2)) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize(
    ("name", "shape", "settings"),
    [("resnet10", (1, 8, 8), {}), ("energy_cnn", (64,), {"width": 4}), ("energy_mlp", (5,), {"hidden": (6,)})],
)
def test_input_gradients_under_vmap_are_those_of_each_client(name, shape, settings):
    model: nn.Module = build(name, shape, 3, **settings).double()
    leaves = {leaf: value.detach() for leaf, value in model.named_parameters()}
    stacked = {leaf: torch.stack([value, 0.5 * value + 0.01]) for leaf, value in leaves.items()}
    x = Key.of(1).uniform(2, 3, *shape, dtype=torch.float64)

    def slope(params, images):
        return grad(lambda z: functional_call(model, params, (z,))[:, 1].sum())(images)

    together = vmap(slope)(stacked, x)
    alone = slope({leaf: value[1] for leaf, value in stacked.items()}, x[1])
    assert together.shape == x.shape
    assert torch.allclose(together[1], alone, atol=1e-9)
