"""Losses by name against torch's own, and against values computed by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional

from fedalloy import fit
from fedalloy.core import registry
from fedalloy.core.errors import SpecError
from fedalloy.tasks.assembly import make_task
from fedalloy.tasks.datasets.base import Dataset
from fedalloy.tasks.losses import choose
from fedalloy.tasks.losses.loss import name_of

DRAW = torch.Generator().manual_seed(0)
LOGITS = torch.randn(6, 5, 3, generator=DRAW, dtype=torch.float64)
WORDS = torch.randint(3, (6, 5), generator=DRAW)
WORDS[0] = WORDS[3, 2:] = -100
IMAGES = torch.randn(4, 3, 2, 2, generator=DRAW, dtype=torch.float64)
MAPS = torch.randint(3, (4, 2, 2), generator=DRAW)
MAPS[1, 0] = -100
GUESS, TRUTH = torch.randn(6, 2, generator=DRAW, dtype=torch.float64), torch.randn(6, 2, generator=DRAW).double()
MARKS = (TRUTH > 0).double()


def batch_mean(losses: Tensor, counts: Tensor | None) -> Tensor:
    return losses.mean() if counts is None else (losses * counts).sum() / counts.sum()


@pytest.mark.parametrize(
    ("loss", "outputs", "y", "wanted"),
    [
        ({"kind": "cross_entropy", "label_smoothing": 0.2}, LOGITS, WORDS,
         functional.cross_entropy(LOGITS.flatten(0, 1), WORDS.flatten(), label_smoothing=0.2)),
        ({"kind": "cross_entropy", "ignore_index": 1}, LOGITS[:, 0], WORDS[:, 0].clamp(min=0),
         functional.cross_entropy(LOGITS[:, 0], WORDS[:, 0].clamp(min=0), ignore_index=1, reduction="none").mean()),
        ("cross_entropy", IMAGES, MAPS, functional.cross_entropy(IMAGES, MAPS)),
        ({"kind": "cross_entropy", "ignore_index": 2}, IMAGES, MAPS.clamp(min=0),
         functional.cross_entropy(IMAGES, MAPS.clamp(min=0), ignore_index=2)),
        (nn.CrossEntropyLoss(ignore_index=2), IMAGES, MAPS.clamp(min=0),
         functional.cross_entropy(IMAGES, MAPS.clamp(min=0), ignore_index=2)),
        ("next_token", LOGITS, WORDS, functional.cross_entropy(LOGITS[:, :-1].flatten(0, 1), WORDS[:, 1:].flatten())),
        ("binary", GUESS, MARKS, functional.binary_cross_entropy_with_logits(GUESS, MARKS)),
        ("binary", GUESS[:, :1], MARKS[:, 0], functional.binary_cross_entropy_with_logits(GUESS[:, 0], MARKS[:, 0])),
        ("mse", GUESS, TRUTH, functional.mse_loss(GUESS, TRUTH)),
        ("l1", GUESS, TRUTH, functional.l1_loss(GUESS, TRUTH)),
        ({"kind": "huber", "delta": 0.5}, GUESS, TRUTH, functional.huber_loss(GUESS, TRUTH, delta=0.5)),
        ({"kind": "focal", "gamma": 0.0}, LOGITS, WORDS,
         functional.cross_entropy(LOGITS.flatten(0, 1), WORDS.flatten())),
        ({"kind": "focal", "gamma": 0.0}, GUESS, MARKS, functional.binary_cross_entropy_with_logits(GUESS, MARKS)),
    ],
)  # fmt: skip
def test_the_mean_over_a_batch_is_torchs(loss, outputs, y, wanted):
    rule = choose(loss)
    assert torch.allclose(batch_mean(rule.losses(outputs, y), rule.counts(y)), wanted, rtol=0, atol=1e-12)


def test_focal_by_hand():
    logits, y = torch.tensor([[0.0, 0.0], [2.0, 0.0]]).double(), torch.tensor([0, 1])
    chance = torch.softmax(logits, 1)[torch.arange(2), y]
    assert torch.allclose(choose("focal").losses(logits, y), -((1 - chance) ** 2) * chance.log(), atol=1e-12)
    p, marks = torch.sigmoid(GUESS), MARKS
    wanted = -(0.25 * marks * (1 - p) ** 2 * p.log() + 0.75 * (1 - marks) * p**2 * (1 - p).log()).mean(1)
    assert torch.allclose(choose({"kind": "focal", "alpha": 0.25}).losses(GUESS, MARKS), wanted, atol=1e-12)
    with pytest.raises(SpecError, match="leave it out for classes"):
        choose({"kind": "focal", "alpha": 0.25}).losses(logits, y)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 2.0])
def test_focal_has_a_gradient_where_nothing_is_missed(gamma):
    rule = choose({"kind": "focal", "gamma": gamma})
    for logits, y in (
        (torch.tensor([[60.0, 0.0, 0.0], [0.0, 1.0, 2.0]]), torch.tensor([0, 1])),
        (torch.tensor([-120.0, 0.5]), torch.tensor([0.0, 1.0])),
    ):
        leaf = logits.requires_grad_()
        (grad,) = torch.autograd.grad(rule.losses(leaf, y).sum(), leaf)
        assert grad.isfinite().all()
        assert float(grad[0].abs().max()) < 1e-6 < float(grad[1].abs().max())


def test_focal_of_one_logit_leaves_out_what_does_not_count():
    logits, y = IMAGES[:, :1], (MAPS > 0).long()
    y[1, 0] = -100
    rule, counted = choose("focal"), y != -100
    wanted = choose("focal").losses(logits[:, 0][counted].unsqueeze(1), y[counted])
    assert float(batch_mean(rule.losses(logits, y), rule.counts(y))) == pytest.approx(float(wanted.mean()), abs=1e-12)
    right = ((logits[:, 0] > 0) == (y > 0.5))[counted].double()
    hits = batch_mean(rule.hits(logits, y), rule.counts(y))
    assert float(hits) == pytest.approx(float(right.mean()), abs=1e-12)


def test_dice_by_hand():
    chance = IMAGES.softmax(1)
    counted = MAPS != -100
    wanted = torch.zeros(4, dtype=torch.float64)
    for image in range(4):
        for label in range(3):
            p = chance[image, label][counted[image]]
            t = (MAPS[image][counted[image]] == label).double()
            wanted[image] += (1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)) / 3
    assert torch.allclose(choose("dice").losses(IMAGES, MAPS), wanted, atol=1e-12)
    mask = (MAPS == 1).double()
    p = IMAGES[:, 0].sigmoid()
    alone = 1 - (2 * (p * mask).sum((1, 2)) + 1) / (p.sum((1, 2)) + mask.sum((1, 2)) + 1)
    assert torch.allclose(choose("dice").losses(IMAGES[:, :1], mask), alone, atol=1e-12)


def test_an_image_in_which_nothing_counts_is_left_out():
    silent = MAPS.clone()
    silent[2] = -100
    rule = choose("dice")
    counts = rule.counts(silent)
    assert counts is not None
    assert counts.tolist() == [1, 1, 0, 1]
    assert float(rule.losses(IMAGES, silent)[2]) == 0.0


@pytest.mark.parametrize(
    ("name", "outputs", "y"),
    [("cross_entropy", LOGITS, WORDS), ("cross_entropy", IMAGES, MAPS), ("focal", IMAGES, MAPS), ("dice", IMAGES, MAPS),
     ("binary", GUESS, MARKS), ("huber", GUESS, TRUTH)],
)  # fmt: skip
def test_under_vmap_the_losses_are_the_same(name, outputs, y):
    rule = choose(name)
    half = len(y) // 2
    stacked = vmap(rule.losses)(outputs.reshape(2, half, *outputs.shape[1:]), y.reshape(2, half, *y.shape[1:]))
    assert torch.allclose(stacked.flatten(), rule.losses(outputs, y), atol=1e-12)


def test_square_shapes_are_read_by_the_number_of_axes():
    """Ten classes at ten tokens: the classes are last for sequences, second for images."""
    logits, y = torch.randn(2, 4, 4).double(), torch.randint(4, (2, 4))
    assert torch.allclose(
        choose("cross_entropy").losses(logits, y).mean(), functional.cross_entropy(logits.flatten(0, 1), y.flatten())
    )
    images, maps = torch.randn(2, 4, 4, 4).double(), torch.randint(4, (2, 4, 4))
    assert torch.allclose(choose("cross_entropy").losses(images, maps).mean(), functional.cross_entropy(images, maps))


def test_outputs_that_do_not_fit_are_refused():
    with pytest.raises(SpecError, match="one more axis than the targets"):
        choose("cross_entropy").losses(torch.zeros(2, 3), torch.zeros(2, 4, dtype=torch.int64))
    with pytest.raises(SpecError, match="one output per target"):
        choose("mse").losses(torch.zeros(2, 3), torch.zeros(2, 4))


@pytest.mark.parametrize(
    "table",
    [{"kind": "cross_entropy", "label_smoothing": 1.0}, {"kind": "focal", "gamma": -1.0}, {"kind": "huber", "delta": 0},
     {"kind": "dice", "smooth": 0.0}, {"kind": "cross_entropy", "smoothing": 0.1}, {"kind": "hubber"}],
)  # fmt: skip
def test_wrong_arguments_are_refused(table):
    with pytest.raises(SpecError):
        choose(table)


def test_only_default_arguments_have_a_name():
    """Kernels for a loss by name must not be used for the same loss with other arguments."""
    assert name_of(choose("cross_entropy")) == "cross_entropy"
    assert name_of(choose({"kind": "cross_entropy", "label_smoothing": 0.1})) is None
    assert name_of(choose("next_token")) is None
    assert {"cross_entropy", "binary", "mse", "l1", "huber", "focal", "dice"} <= set(registry.names("loss"))


def test_a_loss_of_torch_trains_on_what_counts():
    """As the loss by name: pixels that are ignored are no part of the mean, and no wrong classes."""
    data = Dataset(torch.randn(8, 1, 2, 2, dtype=torch.float64), torch.randint(3, (8, 2, 2)), 3)
    data.y[:, 0] = -100
    data.y[3] = -100
    ends = []
    for loss in ("cross_entropy", nn.CrossEntropyLoss()):
        task = make_task(data, lambda: nn.Conv2d(1, 3, 1), loss=loss, clients=2, dtype="float64", test_fraction=0.0)
        ends.append(fit("fedavg", task, rounds=1, engine="loop").model)
    assert all(torch.allclose(leaf, ends[1][name], rtol=0, atol=1e-12) for name, leaf in ends[0].items())
