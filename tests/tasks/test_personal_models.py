"""The models of the personalisation experiments: their counts, their two blocks, and that engines can map them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

import fedalloy
from fedalloy.core import tree
from fedalloy.core.errors import SpecError
from fedalloy.core.keys import Key
from fedalloy.core.types import Block
from fedalloy.tasks.assembly import make_task
from fedalloy.tasks.datasets.base import from_clients
from fedalloy.tasks.evaluation import evaluate_clients, evaluate_models
from fedalloy.tasks.models.build import build
from fedalloy.tasks.models.recurrent import Lstm
from fedalloy.tasks.models.unbiased import ProjectedBlock
from fedalloy.tasks.objective import ModuleObjective

COUNTS = [
    ("twocnn", (3, 28, 28), 10, 722_800),
    ("vgg9", (1, 28, 28), 62, 1_718_416),
    ("vgg9", (784,), 62, 1_718_416),
    ("resnet9", (3, 32, 32), 100, 5_054_784),
    ("resnet9", (3, 32, 32), 10, 5_031_744),
    ("mobilenet", (3, 64, 64), 200, 364_480),
    ("char_lstm", (80,), 100, 821_024),
    ("sent140_lstm", (25,), 1, 1_114_368),
]
NORMED = ("resnet9", "mobilenet")
SMALL: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "twocnn": ((1, 8, 8), {"width": 6}),
    "vgg9": ((1, 16, 16), {}),
    "resnet9": ((1, 16, 16), {"norm": "group"}),
    "mobilenet": ((1, 33, 33), {"norm": "group"}),
    "char_lstm": ((5,), {"hidden": 6}),
    "sent140_lstm": ((5,), {"hidden": 6, "vocabulary": 20, "width": 3}),
}


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def examples(shape: tuple[int, ...], *counts: int) -> torch.Tensor:
    if len(shape) == 1:
        return (Key.of(1).uniform(*counts, *shape) * 19).long()
    return Key.of(1).normal(*counts, *shape, dtype=torch.float64)


@pytest.mark.parametrize(("name", "shape", "classes", "parameters"), COUNTS)
def test_parameter_counts_are_the_published_ones(name, shape, classes, parameters):
    assert count(build(name, shape, classes)) == parameters


@pytest.mark.parametrize("name", SMALL)
def test_two_blocks_without_biases(name):
    shape, settings = SMALL[name]
    model = build(name, shape, 7, **settings)
    assert [part for part, _ in model.named_children()] == ["features", "classifier"]
    assert count(model.get_submodule("classifier"))
    biased = [leaf for leaf, _ in model.named_parameters() if leaf.endswith("bias")]
    assert all("norm" in leaf for leaf in biased)
    assert bool(biased) == (name in NORMED)
    assert model(examples(shape, 3).to(torch.float32 if len(shape) > 1 else torch.int64)).shape == (3, 7)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("shared", [True, False], ids=["shared weights", "own weights"])
def test_models_train_under_vmap(name, shared):
    shape, settings = SMALL[name]
    objective = ModuleObjective(lambda: build(name, shape, 3, **settings), dtype=torch.float64)
    params = objective.init(Key.of(0))[0]
    x, y = examples(shape, 2, 4), torch.arange(4).expand(2, 4) % 3
    own = {leaf: torch.stack([value, 1.1 * value]) for leaf, value in params.items()}

    def gradient(params, x, y):
        return grad(lambda p: objective.loss(p, {}, x, y)[0])(params)

    together = vmap(gradient, in_dims=(None if shared else 0, 0, 0))(params if shared else own, x, y)
    alone = gradient(params if shared else {leaf: value[1] for leaf, value in own.items()}, x[1], y[1])
    for leaf, expected in alone.items():
        torch.testing.assert_close(together[leaf][1], expected, rtol=1e-7, atol=1e-9)
    assert all(bool(leaf.abs().sum() > 0) for name, leaf in alone.items() if "classifier" in name)


class TestLstm:
    def test_it_is_the_one_of_torch(self):
        ours, theirs = Lstm(3, 5, 2).double(), nn.LSTM(3, 5, 2, batch_first=True, bias=False).double()
        weights = {name: leaf.detach() for name, leaf in theirs.named_parameters()}
        assert {name: leaf.shape for name, leaf in ours.named_parameters()} == {
            name: leaf.shape for name, leaf in weights.items()
        }
        x = Key.of(0).normal(4, 7, 3, dtype=torch.float64)
        torch.testing.assert_close(functional_call(ours, weights, (x,)), theirs(x)[0][:, -1])
        assert float(max(leaf.detach().abs().max() for leaf in ours.parameters())) <= 5**-0.5

    def test_all_its_weights_are_one_layer(self):
        leaves = {name: leaf.detach() for name, leaf in build("char_lstm", (80,), 100, hidden=4).named_parameters()}
        assert list(tree.layers(leaves)) == ["features.embedding", "features.lstm", "classifier"]

    def test_padding_is_passed_over_and_tokens_are_folded(self):
        model = build("sent140_lstm", (4,), 1, vocabulary=10, width=3, hidden=4)
        tokens = torch.tensor([[3, 5, 0, 0]])
        with torch.no_grad():
            torch.testing.assert_close(model(tokens), model(tokens[:, :2]))
            torch.testing.assert_close(model(tokens + 9 * (tokens > 0)), model(tokens))
            assert not torch.equal(model(tokens.flip(1)[:, 1:]), model(torch.tensor([[5, 3, 0, 0]])[:, :1]))
            assert float(model(torch.zeros(1, 4, dtype=torch.int64))) == 0.0

    def test_engines_agree(self):
        rows = [((Key.of(k).uniform(6, 5) * 19).long(), torch.arange(6) % 3) for k in range(3)]
        clients = from_clients([(x.float(), y) for x, y in rows])
        task = make_task(clients, {"kind": "char_lstm", "hidden": 6, "vocabulary": 20}, dtype="float64")
        algorithm = fedalloy.algorithms.superfed_lm(start=0.0, lr=0.5, momentum=0.9, batch_size=4, epochs=2)
        ends = [fedalloy.fit(algorithm, task, rounds=3, engine=engine).model for engine in ("loop", "batched")]
        for name, leaf in ends[0].items():
            torch.testing.assert_close(ends[1][name], leaf, rtol=1e-7, atol=1e-9)


class TestNorm:
    @pytest.mark.parametrize("name", NORMED)
    def test_batch_norm_keeps_no_statistics(self, name):
        assert not list(build(name, (3, 64, 64), 10).buffers())
        assert count(build(name, (3, 64, 64), 10, norm="group")) == count(build(name, (3, 64, 64), 10))

    def test_nobodys_score_depends_on_who_else_is_scored(self):
        objective = ModuleObjective(lambda: build("resnet9", (1, 16, 16), 3), dtype=torch.float64)
        assert objective.scores_by_batch
        assert not ModuleObjective(lambda: build("resnet9", (1, 16, 16), 3, norm="group")).scores_by_batch
        model = objective.init(Key.of(0))
        x, y = examples((1, 16, 16), 10), torch.arange(10) % 3
        block = Block(x, y, torch.tensor([0, 4]), torch.tensor([4, 6]))
        both = evaluate_clients(objective, *model, block, ("loss",))["loss"]
        own = evaluate_models(objective, [model, model], block, ("loss",))["loss"]
        for client in range(2):
            alone = objective.losses(objective.outputs(*model, block.client(client).x), block.client(client).y).mean()
            assert float(both[client]) == pytest.approx(float(alone.detach()), rel=1e-9)
        assert torch.equal(both, own)

    def test_the_shortcut_is_there_in_every_block(self):
        block = ProjectedBlock(4, 4, 1, "batch")
        nn.init.zeros_(block.norm2.weight)  # type: ignore[arg-type]
        x = Key.of(0).uniform(2, 4, 6, 6)
        torch.testing.assert_close(block(x), x)
        assert ProjectedBlock(4, 8, 2, "batch")(x).shape == (2, 8, 3, 3)


@pytest.mark.parametrize(
    ("name", "shape", "settings", "said"),
    [
        ("mobilenet", (3, 32, 32), {}, "at least 33 x 33"),
        ("vgg9", (1, 8, 8), {}, "too small"),
        ("twocnn", (7,), {}, "is no image"),
        ("resnet9", (3, 32, 32), {"norm": "layer"}, "allowed: batch, group"),
        ("mobilenet", (3, 64, 64), {"norm": "grup"}, "did you mean 'group'"),
        ("char_lstm", (2, 80), {}, "reads texts"),
        ("sent140_lstm", (25,), {"vocabulary": 1}, "2 or more"),
        ("char_lstm", (80,), {"layers": 0}, "1 or more"),
    ],
)
def test_what_does_not_fit_is_told(name, shape, settings, said):
    with pytest.raises(SpecError, match=said):
        build(name, shape, 10, **settings)
