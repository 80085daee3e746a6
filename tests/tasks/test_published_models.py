"""The models the methods were shown on: their counts, layer by layer, and that engines can map them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import grad, vmap

from fedalloy.core.errors import SpecError
from fedalloy.core.keys import Key
from fedalloy.tasks.models.build import build
from fedalloy.tasks.models.resnet import ResidualBlock
from fedalloy.tasks.objective import ModuleObjective

COUNTS = [
    ("lenet", (3, 32, 32), 10, {}, 15_826),
    ("lenet", (784,), 10, {}, 15_826),
    ("lenet", (1, 28, 28), 10, {}, 15_826),
    ("resnet20", (3, 32, 32), 10, {}, 269_722),
    ("resnet20", (3, 32, 32), 100, {}, 275_572),
    ("resnet32", (3, 32, 32), 10, {}, 464_154),
    ("resnet32", (3, 32, 32), 100, {}, 470_004),
    ("resnet20", (3, 32, 32), 10, {"norm": "group"}, 269_722),
    ("resnet32", (3, 32, 32), 100, {"norm": "group"}, 470_004),
    ("keyword_cnn", (1, 49, 40), 12, {}, 27_628),
    ("keyword_cnn", (49, 40), 12, {}, 27_628),
    ("text_pair", (2, 48), 1, {}, 139_393),
    ("text_pair", (2, 9), 1, {"vocabulary": 10, "width": 2, "hidden": 3}, 20 + 27 + 4),
]


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("name", "shape", "classes", "settings", "parameters"), COUNTS)
def test_parameter_counts(name, shape, classes, settings, parameters):
    assert count(build(name, shape, classes, **settings)) == parameters


def test_lenet_is_made_of_the_published_layers():
    model = build("lenet", (3, 32, 32), 10)
    assert [count(layer) for layer in model.children() if count(layer)] == [912, 3_612, 3_612, 7_690]
    assert sum(isinstance(layer, nn.Sigmoid) for layer in model.children()) == 3


def test_lenet_frames_grey_images_and_repeats_their_values():
    grey = Key.of(0).uniform(2, 1, 28, 28)
    seen = build("lenet", (784,), 10).get_submodule("image")(grey.reshape(2, 784))
    assert seen.shape == (2, 3, 32, 32)
    for colour in range(3):
        assert torch.equal(seen[:, colour, 2:30, 2:30], grey[:, 0])
    assert float(seen.sum()) == pytest.approx(3 * float(grey.sum()), rel=1e-5)
    colours = Key.of(1).uniform(2, 3, 32, 32)
    assert torch.equal(build("lenet", (3, 32, 32), 10).get_submodule("image")(colours), colours)


def test_lenet_starts_within_its_spread():
    drawn = build("lenet", (3, 32, 32), 10, spread=0.25).parameters()
    leaves = torch.cat([leaf.detach().flatten() for leaf in drawn])
    assert 0.24 < float(leaves.abs().max()) <= 0.25
    untouched = build("lenet", (3, 32, 32), 10, spread=None).get_parameter("output.weight")
    assert float(untouched.detach().abs().max()) < 0.04


def test_the_shortcut_takes_every_second_pixel_and_adds_empty_channels():
    block = ResidualBlock(2, 4, 2, "batch").eval()
    nn.init.zeros_(block.conv2.weight)  # what is left is the shortcut
    x = Key.of(0).uniform(1, 2, 6, 6)
    with torch.no_grad():
        said = block(x)
    assert said.shape == (1, 4, 3, 3)
    assert torch.equal(said[:, 1:3], x[:, :, ::2, ::2])
    assert not said[:, [0, 3]].any()


def test_group_norm_has_no_statistics_to_exchange():
    assert not list(build("resnet20", (3, 32, 32), 10, norm="group").buffers())
    assert len(list(build("resnet20", (3, 32, 32), 10).buffers())) == 19 * 3


def test_padding_and_folding_of_tokens():
    model = build("text_pair", (2, 4), 1, vocabulary=10, width=3).eval()
    tokens = torch.tensor([[[3, 5, 0, 0], [7, 0, 0, 0]]])
    with torch.no_grad():
        longer = torch.cat([tokens, torch.zeros(1, 2, 3, dtype=torch.int64)], 2)
        torch.testing.assert_close(model(longer), model(tokens))
        torch.testing.assert_close(model(tokens + 9 * (tokens > 0)), model(tokens))
        assert not torch.equal(model(tokens + (tokens > 0)), model(tokens))
        assert bool(model(torch.zeros(1, 2, 4, dtype=torch.int64)).isfinite().all())


def test_the_head_of_the_keyword_network_sees_bands_but_no_moments():
    pool = build("keyword_cnn", (1, 49, 40), 12).get_submodule("pool")
    x = Key.of(0).normal(2, 3, 7, 5)
    assert pool(x).shape == (2, 15)
    torch.testing.assert_close(pool(x), pool(x.roll(2, dims=2)))
    assert not torch.allclose(pool(x), pool(x.roll(2, dims=3)))


MAPPED = [
    ("lenet", (256,), {}),
    ("resnet20", (1, 8, 8), {"norm": "group"}),
    ("resnet20", (1, 8, 8), {}),
    ("keyword_cnn", (1, 12, 10), {}),
    ("text_pair", (2, 5), {"vocabulary": 20}),
]


@pytest.mark.parametrize(("name", "shape", "settings"), MAPPED)
def test_models_train_under_vmap(name, shape, settings):
    objective = ModuleObjective(lambda: build(name, shape, 3, **settings), dtype=torch.float64)
    params, buffers = objective.init(Key.of(0))
    x, y = Key.of(1).normal(2, 4, *shape, dtype=torch.float64), torch.arange(4).expand(2, 4) % 3
    x = (x.abs() * 9).long() if name == "text_pair" else x

    def gradient(x, y):
        return grad(lambda p: objective.loss(p, buffers, x, y)[0])(params)

    together, alone = vmap(gradient)(x, y), gradient(x[1], y[1])
    for leaf, expected in alone.items():
        torch.testing.assert_close(together[leaf][1], expected, rtol=1e-7, atol=1e-9)
    assert any(bool(leaf.abs().sum() > 0) for leaf in alone.values())


@pytest.mark.parametrize(
    ("name", "shape", "settings", "said"),
    [
        ("lenet", (3, 64, 64), {}, "at most 32 x 32"),
        ("lenet", (2, 28, 28), {}, "grey or colour"),
        ("lenet", (784,), {"spread": 0.0}, "positive number"),
        ("resnet20", (3, 32, 32), {"norm": "layer"}, "allowed: batch, group"),
        ("text_pair", (48,), {}, "pairs of texts"),
        ("text_pair", (2, 48), {"vocabulary": 1}, "2 or more"),
        ("keyword_cnn", (7,), {}, "is no image"),
    ],
)
def test_what_does_not_fit_is_told(name, shape, settings, said):
    with pytest.raises(SpecError, match=said):
        build(name, shape, 10, **settings)
