"""Convolutions as matrix products: torch's own numbers, forwards and backwards, alone and for many clients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from fedalloy.engines.kernels import im2col
from fedalloy.engines.kernels.im2col import ConvolutionsAsProducts, convolve

CLIENTS = 3
pairs = st.tuples(st.integers(1, 3), st.integers(1, 3))


@st.composite
def convolutions(draw):
    """Images, weights, biases, stride and padding such that the kernel fits into the padded image."""
    inputs, outputs, batch = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 2))
    kernel, stride = draw(pairs), draw(pairs)
    padding = draw(st.tuples(st.integers(0, 2), st.integers(0, 2)))
    size = tuple(side + draw(st.integers(0, 4)) for side in kernel)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(CLIENTS, *shape, generator=generator, dtype=torch.float64)

    return normal(batch, inputs, *size), normal(outputs, inputs, *kernel), normal(outputs), stride, padding


def loss_of(convolution, stride, padding):
    return lambda weight, bias, x: (convolution(x, weight, bias, stride, padding) ** 3).sum()


@settings(max_examples=60)
@given(convolutions())
def test_values_and_gradients_under_vmap_are_torchs(given):
    x, weight, bias, stride, padding = given
    expected = vmap(lambda a, b, c: functional.conv2d(a, b, c, stride, padding))(x, weight, bias)
    found = vmap(lambda a, b, c: convolve(a, b, c, stride, padding))(x, weight, bias)
    assert torch.allclose(found, expected, rtol=0, atol=1e-10)
    for wanted in ((0, 1, 2), (0, 1), (2,)):
        theirs = vmap(grad(loss_of(functional.conv2d, stride, padding), argnums=wanted))(weight, bias, x)
        ours = vmap(grad(loss_of(convolve, stride, padding), argnums=wanted))(weight, bias, x)
        for one, other in zip(ours, theirs, strict=True):
            assert torch.allclose(one, other, rtol=1e-10, atol=1e-9)


FAULTS = {
    "images are turned": ("_forward", lambda right: lambda x, *rest: right(x.flip(-1), *rest)),
    "weights get the gradient of other images": (
        "_by_weight",
        lambda right: lambda out_grad, x, *rest: right(out_grad, x.flip(0), *rest),
    ),
    "images get another gradient": ("_by_input", lambda right: lambda *given: 2 * right(*given)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(CLIENTS, *shape, generator=generator, dtype=torch.float64)
        for shape in ((2, 2, 5, 5), (3, 2, 2, 2), (3,))
    )

    def agree():
        both = [
            vmap(grad(loss_of(kind, (1, 1), (1, 1)), argnums=(0, 2)))(weight, bias, x)
            for kind in (convolve, functional.conv2d)
        ]
        return all(torch.allclose(one, other) for one, other in zip(*both, strict=True))

    assert agree()
    name, breaks = FAULTS[fault]
    monkeypatch.setattr(im2col, name, breaks(getattr(im2col, name)))
    assert not agree()


@settings(max_examples=15)
@given(convolutions())
def test_one_client_alone_has_the_same_gradients(given):
    x, weight, bias, stride, padding = (part[0] if isinstance(part, torch.Tensor) else part for part in given)
    theirs = grad(loss_of(functional.conv2d, stride, padding), argnums=(0, 1, 2))(weight, bias, x)
    ours = grad(loss_of(convolve, stride, padding), argnums=(0, 1, 2))(weight, bias, x)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-9)


@pytest.mark.parametrize("shared", ["x", "weight"])
def test_what_all_clients_share_need_not_be_repeated(shared):
    x, weight = torch.randn(2, 2, 5, 5, dtype=torch.float64), torch.randn(3, 4, 2, 3, 3, dtype=torch.float64)
    if shared == "weight":
        x, weight = torch.randn(3, 2, 2, 5, 5, dtype=torch.float64), weight[0]
    dims = (None, 0) if shared == "x" else (0, None)
    found = vmap(lambda a, b: convolve(a, b), in_dims=dims)(x, weight)
    assert torch.allclose(found, vmap(functional.conv2d, in_dims=dims)(x, weight), rtol=0, atol=1e-10)


@settings(max_examples=25)
@given(convolutions())
def test_a_frozen_layer_below_what_is_trained_passes_its_gradient(given):
    x, weight, _, stride, padding = given

    def loss(convolution):
        return lambda scale, images: (convolution(images * scale, weight[0], None, stride, padding) ** 3).sum()

    scale = torch.ones(CLIENTS, 1, *x.shape[2:], dtype=torch.float64)
    theirs, ours = (vmap(grad(loss(one)))(scale, x) for one in (functional.conv2d, convolve))
    assert torch.allclose(ours, theirs, rtol=1e-10, atol=1e-9)


def test_second_derivatives_are_refused_and_not_silently_wrong():
    x, weight = torch.randn(1, 1, 4, 4, dtype=torch.float64), torch.randn(1, 1, 2, 2, dtype=torch.float64)
    with pytest.raises(Exception, match="backward"):
        grad(lambda w: grad(lambda v: (convolve(x, v) ** 3).sum())(w).sum())(weight)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(2, 4, 3, stride=2, padding=1),
        nn.Conv2d(2, 4, 3, bias=False),
        nn.Conv2d(2, 4, 3, groups=2),
        nn.Conv2d(2, 4, 2, dilation=2),
        nn.Conv2d(2, 4, 3, padding="same"),
        nn.Conv2d(2, 4, 3, padding=1, padding_mode="reflect"),
    ],
    ids=["plain", "no bias", "groups", "dilation", "padding by name", "reflecting"],
)
def test_modules_use_it_unknowingly_and_what_it_does_not_know_is_left_to_torch(layer):
    module = nn.Sequential(layer, nn.Tanh()).double()
    params = {name: leaf.detach() for name, leaf in module.named_parameters()}
    x = torch.randn(2, 2, 6, 6, dtype=torch.float64)

    def loss(leaves):
        return functional_call(module, leaves, (x,)).square().sum()

    expected = grad(loss)(params)
    with ConvolutionsAsProducts():
        found = grad(loss)(params)
    assert all(torch.allclose(found[name], expected[name], rtol=1e-10, atol=1e-10) for name in params)
