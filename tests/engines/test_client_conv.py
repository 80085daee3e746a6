"""Convolutions of many clients: the plain functions against torch's own, Triton's kernels against the plain functions.

Triton's interpreter runs the kernels on a CPU: ``TRITON_INTERPRET=1``, with Triton installed.
"""

from __future__ import annotations

import os
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map

from fedalloy.core.program import BlockTraining, TrainingResult
from fedalloy.engines.batched import Batched
from fedalloy.engines.batches import dropout_keys, padded_batches
from fedalloy.engines.kernels import client_conv, conv_graphs, conv_kernel, conv_ops, cuda_graphs, tracing
from fedalloy.engines.kernels.client_conv import After, DrawnImages
from fedalloy.engines.kernels.conv_chain import ProductStage, Window
from fedalloy.engines.kernels.conv_kernel import ConvSgd, FactoredLayer
from fedalloy.engines.kinds import PlainSgd
from fedalloy.engines.loop import Loop
from tests.engines.rounds import gaps, play, task_of
from tests.engines.test_conv_sgd import CHAINS, METHODS, dense_heavy, task

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
SHAPES = {  # clients, batch, image, outputs, kernel, stride, padding
    "plain": (2, 3, (6, 8, 4), 8, (3, 3), (1, 1), (0, 0)),
    "padded": (3, 2, (8, 6, 16), 5, (3, 3), (1, 1), (1, 1)),
    "strided": (1, 3, (9, 7, 3), 16, (2, 3), (2, 1), (1, 0)),
    "far apart": (2, 2, (9, 8, 32), 32, (3, 2), (2, 2), (0, 1)),
    "points": (2, 1, (5, 6, 17), 4, (1, 1), (2, 2), (0, 0)),
}
ACTIVATIONS = {"": lambda x: x, "relu": torch.relu, "tanh": torch.tanh, "sigmoid": torch.sigmoid}


class Case:
    """Random images, weights and gradients of one shape, and what torch makes of them, client by client."""

    def __init__(self, name: str, pool: bool = False) -> None:
        clients, batch, image, outputs, kernel, stride, padding = SHAPES[name]
        window = Window(kernel, stride, padding)
        self.stage = ProductStage("w", "b", (*window.over(image), outputs), image, window, None)
        drawn = torch.Generator().manual_seed(len(name))
        random = lambda *shape: torch.randn(*shape, generator=drawn, dtype=torch.float64)  # noqa: E731
        height, width, channels = image
        examples, rows = random(7, channels, height, width), torch.randint(0, 7, (clients, batch), generator=drawn)
        self.first = examples[rows].clone().requires_grad_()
        self.images: Any = self.first.detach().permute(0, 1, 3, 4, 2).contiguous()
        if pool:
            self.images = DrawnImages(examples, rows, torch.float64)
        self.leaf, self.bias = random(clients, outputs, channels, *kernel).requires_grad_(), random(clients, outputs)
        rows_of = self.leaf.detach().permute(0, 1, 3, 4, 2).flatten(2)
        self.weight = functional.pad(rows_of, (0, self.stage.extra))
        self.out = torch.stack([
            functional.conv2d(x, w, b, stride, padding)
            for x, w, b in zip(self.first, self.leaf, self.bias, strict=True)
        ])  # fmt: skip
        self.grad = random(*self.out.permute(0, 1, 3, 4, 2).shape)
        self.batch = batch

    @property
    def flat(self) -> Tensor:
        """The gradient as kernels read it."""
        return self.grad.flatten(1, 3)

    def by_autograd(self) -> tuple[Tensor, Tensor]:
        """The gradients of images and weights, with channels last."""
        back = self.grad.permute(0, 1, 4, 2, 3)
        images, weights = torch.autograd.grad(self.out, (self.first, self.leaf), back)
        return images.permute(0, 1, 3, 4, 2), weights.permute(0, 1, 3, 4, 2).flatten(2)


def close(found: Tensor, right: Tensor) -> bool:
    """Equal up to rounding in float64."""
    return found.shape == right.shape and torch.allclose(found, right, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_results_and_gradients_are_torchs(name, pool):
    case = Case(name, pool)
    out, chosen = client_conv.convolve(case.stage, case.images, case.weight, After(case.bias), "float32")
    assert chosen is None
    assert close(out, case.out.detach().permute(0, 1, 3, 4, 2))
    images, weights = case.by_autograd()
    inputs = case.stage.inputs
    if not pool:
        by_input = client_conv.by_input(case.stage, case.batch, case.flat, case.weight, "float32", None, "")
        assert close(by_input, images)
    by_weight, by_bias = client_conv.by_weight(case.stage, case.images, case.flat, "float32")
    assert close(by_weight[:, :, :inputs], weights)
    assert close(by_bias, case.flat.sum(1))
    moved, bias = case.weight.clone(), case.bias.clone()
    client_conv.into_weight(case.stage, case.images, case.flat, moved, bias, "float32")
    assert close(moved[:, :, :inputs], case.weight[:, :, :inputs] - weights)
    assert close(bias, case.bias - case.flat.sum(1))


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_bias_activation_and_pooling_in_one_are_torchs(act):
    case = Case("plain")
    before = case.out.detach().clone().requires_grad_()
    right = functional.max_pool2d(ACTIVATIONS[act](before).flatten(0, 1), 2).unflatten(0, before.shape[:2])
    value, chosen = client_conv.convolve(case.stage, case.images, case.weight, After(case.bias, act, True), "float32")
    assert close(value, right.detach().permute(0, 1, 3, 4, 2))
    assert chosen is not None
    factor = torch.arange(1.0, 1 + right.numel(), dtype=torch.float64).reshape(right.shape)
    (expected,) = torch.autograd.grad((right * factor).sum(), before)
    grad = factor.permute(0, 1, 3, 4, 2).contiguous()
    back = client_conv.unpool(case.stage, grad, value, chosen, act, "float32")
    assert close(back, expected.permute(0, 1, 3, 4, 2).flatten(1, 3))


@pytest.mark.parametrize("act", ["relu", "tanh", "sigmoid"])
def test_the_activation_before_is_undone(act):
    case = Case("padded")
    raw = torch.linspace(-2, 2, case.images.numel(), dtype=torch.float64).reshape(case.images.shape).requires_grad_()
    value = ACTIVATIONS[act](raw)
    (right,) = torch.autograd.grad(value, raw, case.by_autograd()[0])
    given = case.stage, case.batch, case.flat, case.weight
    assert close(client_conv.by_input(*given, "float32", value.detach(), act), right)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("chain", CHAINS)
def test_a_round_without_stored_patches_is_the_loops(chain, method, monkeypatch):
    monkeypatch.setattr(conv_graphs, "has_kernels", lambda device: True)
    engine, algorithm, data = Batched(kernel="fused"), METHODS[method], task(chain)
    assert gaps(play(engine, algorithm, data), play(Loop(), algorithm, data)) == []


def test_factors_without_stored_patches(monkeypatch):
    monkeypatch.setattr(conv_graphs, "has_kernels", lambda device: True)
    data, algorithm = dense_heavy(), METHODS["plain"]
    found, right = play(Batched(kernel="fused"), algorithm, data), play(Loop(), algorithm, data)
    assert torch.allclose(found.cohort.norms("delta"), right.cohort.norms("delta"), rtol=1e-9)
    assert gaps(found, right) == []


FAULTS = {
    "another place of a window": ("unpool", lambda real: lambda s, g, p, at, *rest: real(s, g, p, 3 - at, *rest)),
    "images' gradient one row too low": ("by_input", lambda real: lambda *given: real(*given).roll(1, 2)),
    "bias kept": ("into_weight", lambda real: lambda s, x, g, w, bias, p: real(s, x, g, w, None, p)),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, monkeypatch):
    name, wrong = FAULTS[fault]
    monkeypatch.setattr(conv_graphs, "has_kernels", lambda device: True)
    monkeypatch.setattr(client_conv, name, wrong(getattr(client_conv, name)))
    data, algorithm = task("two convolutions"), METHODS["plain"]
    assert gaps(play(Batched(kernel="fused"), algorithm, data), play(Loop(), algorithm, data)) != []


def test_rounding_to_tf32_is_to_the_nearest():
    value = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    found = client_conv.rounded(value, "tf32")
    assert float(((found - value) / value).abs().max()) <= 2**-11
    assert ((found.view(torch.int32) & 0x1FFF) == 0).all()
    assert client_conv.rounded(value, "float32") is value


def normed() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU(), nn.Conv2d(4, 4, 3, stride=2), nn.GroupNorm(1, 4),
        nn.Tanh(), nn.Flatten(), nn.Linear(16, 3),
    )  # fmt: skip


def traced(training: BlockTraining) -> TrainingResult:
    """All steps of a block by the traced step of all clients, uncompiled."""
    block, carry, buffers = training.block, training.carry, training.buffers
    loss = torch.zeros(len(block), 2, dtype=torch.float64)
    for step, (x, y) in enumerate(padded_batches(block)):
        values = {
            "x": x, "y": y, "mask": block.mask[step], "phase": block.plan.phase[:, step],
            "dropout": dropout_keys(block)[:, step], "inputs": {n: v[:, step] for n, v in block.draws.items()},
            "carry": carry, "buffers": buffers, "lr": torch.tensor(training.ctx.local_lr, dtype=torch.float64),
        }  # fmt: skip
        static = tree_map(lambda leaf: leaf.clone().contiguous(), values)
        whole = block.full[step] and block.running[step] == len(block)
        given = training.algorithm, training.objective, training.ctx, static, whole
        cuda_graphs.compiled_step(*given, "float32", compiles=False)()
        carry, buffers = static["carry"], static["buffers"]
    return TrainingResult(carry, buffers, loss)


@pytest.mark.parametrize("method", ["momentum", "prox"])
def test_traced_steps_of_many_clients_are_the_loops(method, monkeypatch):
    asked: list[Any] = []

    def suit(x: Tensor) -> bool:
        asked.append(x.shape)
        return True

    monkeypatch.setattr(conv_ops, "suit", suit)
    data, algorithm, engine = task_of(normed, (5, 3, 6, 1), (2, 6, 6)), METHODS[method], Batched(kernel="mapped")
    monkeypatch.setattr(engine, "_kernel", lambda *_: traced)
    found, right = play(engine, algorithm, data), play(Loop(), algorithm, data)
    apart = max(
        float((found.cohort.payload["delta"][n] - v).abs().max()) for n, v in right.cohort.payload["delta"].items()
    )
    assert apart < 1e-10
    assert asked


def test_a_compiled_step_that_computes_something_else_is_not_used(monkeypatch):
    step = tracing.trace(lambda values: {"w": values["w"] * 2}, {"w": torch.ones(3)})
    wrong = replace(step, call=lambda w: [w * 3])
    for made, used in ((wrong, step), (replace(step, call=lambda w: [w + w]), None)):
        monkeypatch.setattr(tracing.TracedStep, "compiled", lambda self, made=made: made)
        leaves = [torch.ones(3)]
        if used is step:
            with pytest.warns(RuntimeWarning, match="something else"):
                assert tracing.or_uncompiled(step, leaves) is step
        else:
            assert tracing.or_uncompiled(step, leaves) is made
        assert torch.equal(leaves[0], torch.ones(3))


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton and TRITON_INTERPRET=1")
@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_kernels_are_the_plain_functions(name, pool, monkeypatch):
    case = Case(name, pool)
    even = case.stage.shape[0] % 2 == 0 and case.stage.shape[1] % 2 == 0

    def everything() -> list[Tensor]:
        value, chosen = client_conv.convolve(
            case.stage, case.images, case.weight, After(case.bias, "tanh", even), "float32"
        )
        found = [value, *client_conv.by_weight(case.stage, case.images, case.flat, "float32")]
        if chosen is not None:
            found += [chosen, client_conv.unpool(case.stage, value, value, chosen, "tanh", "float32")]
        if not pool:
            given = case.stage, case.batch, case.flat, case.weight
            found.append(client_conv.by_input(*given, "float32", case.images, "sigmoid"))
        one, other = case.flat.transpose(1, 2).contiguous(), case.flat.transpose(1, 2).contiguous() * 2
        found.append(client_conv.inner_products(one, other, "float32"))
        client_conv.subtract_product(found[-1].clone(), other, one)
        return [*found, one]

    by_kernels = everything()
    monkeypatch.setattr(client_conv, "has_kernels", lambda device: False)
    assert all(close(one.double(), other.double()) for one, other in zip(by_kernels, everything(), strict=True))


def factored_errors() -> tuple[float, float]:
    """The relative errors of a factored layer's results and gradients in tf32 where its factors' products cancel:
    inputs are alike and positive, and what the output gradients of all examples have in common is little."""
    drawn = torch.Generator().manual_seed(5)
    random = lambda *shape: torch.randn(*shape, generator=drawn, dtype=torch.float64)  # noqa: E731
    rounded = lambda value: client_conv.rounded(value.float(), "tf32").double()  # noqa: E731
    weight, inputs, now = rounded(random(8, 96)), rounded(2 + 0.1 * random(1, 20, 96)), rounded(random(1, 4, 96))
    common = random(1, 20, 8)
    grads, given = common - common.mean(1, keepdim=True), rounded(1 + 0.1 * random(1, 4, 8))
    moved = weight - grads[0].T @ inputs[0]
    kernel = ConvSgd((), "cross_entropy", PlainSgd(), "tf32", tracing.Fuser(False), implicit=True)
    layer = FactoredLayer(kernel, weight.float(), 1, 20)
    layer.move(inputs.float(), grads.float())
    pairs = [
        (layer.forward(kernel, (now + 2).float()), rounded(now + 2) @ moved.T),
        (layer.back(kernel, given.float()), given @ moved),
    ]
    one, other = (float((found - right).norm() / right.norm()) for found, right in pairs)
    return one, other


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton and TRITON_INTERPRET=1")
def test_products_of_factors_are_nearly_exact(monkeypatch):
    assert max(factored_errors()) < 2e-4
    right = client_conv.subtract_product
    wrong = lambda left, *rest: right(client_conv.rounded(left, "tf32"), *rest)  # noqa: E731
    monkeypatch.setattr(conv_kernel, "subtract_product", wrong)
    assert min(factored_errors()) > 2e-4


def test_on_a_cpu_factors_are_not_rounded(monkeypatch):
    monkeypatch.setattr(client_conv, "has_kernels", lambda device: False)
    monkeypatch.setattr(conv_kernel, "has_kernels", lambda device: False)
    kernel = ConvSgd((), "cross_entropy", PlainSgd(), "tf32", tracing.Fuser(False))
    value = torch.tensor([1 + 2**-20])
    assert torch.equal(kernel.nearest(value), value)
    monkeypatch.setattr(conv_kernel, "has_kernels", lambda device: True)
    assert kernel.nearest(value).item() == 1
    assert replace(kernel, precision="bf16").nearest(value).dtype == torch.bfloat16


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton and TRITON_INTERPRET=1")
def test_an_activation_is_undone_in_full_precision():
    """1 - tanh(x)^2 in bf16 has no correct digit where tanh is near 1."""
    stage = ProductStage("w", None, (2, 2, 3), (2, 2, 3), Window((1, 1), (1, 1), (0, 0)), None)
    pooled = torch.linspace(0.9, 0.99, 6).reshape(1, 2, 1, 1, 3).bfloat16()
    grad, chosen = torch.ones_like(pooled), torch.zeros_like(pooled, dtype=torch.int8)
    found = client_conv.unpool(stage, grad, pooled, chosen, "tanh", "bf16").reshape(1, 2, 2, 2, 3)[:, :, 0, 0]
    right = (1 - pooled.double() ** 2)[:, :, 0, 0]
    assert float(((found.double() - right) / right).abs().max()) <= 2**-7  # the interpreter cuts off what is stored
