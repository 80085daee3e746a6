"""Metrics by name against scikit-learn, torchmetrics and values by hand; clients with one class, no examples, ties."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torchmetrics.classification as reference
from sklearn import metrics as sklearn
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics.text import Perplexity as ReferencePerplexity

from fedalloy import fit
from fedalloy.core import registry
from fedalloy.core.errors import SpecError
from fedalloy.methods.published import fedavg
from fedalloy.tasks.assembly import make_task
from fedalloy.tasks.datasets.base import Dataset
from fedalloy.tasks.losses.loss import choose as choose_loss
from fedalloy.tasks.metrics.direction import higher_is_better
from fedalloy.tasks.metrics.metric import check_metrics, choose, over_all
from fedalloy.tasks.metrics.own import own_metric, packed, unpacked
from fedalloy.tasks.objective import ModuleObjective

DRAW = torch.Generator().manual_seed(3)
CLIENTS = 4
OWNER = torch.tensor([0] * 30 + [1] * 25 + [3] * 20)
"""Client 2 has no examples."""
N = len(OWNER)
LOGITS, LABELS = torch.randn(N, 4, generator=DRAW).double().round(decimals=1), torch.randint(4, (N,), generator=DRAW)
MARK_LOGITS = torch.randn(N, 3, generator=DRAW).double().round(decimals=1)
MARKS = (torch.rand(N, 3, generator=DRAW) > 0.6).double()
GUESS, TRUTH = torch.randn(N, 2, generator=DRAW).double(), torch.randn(N, 2, generator=DRAW).double()
IMAGES, MAPS = torch.randn(N, 3, 4, 4, generator=DRAW).double(), torch.randint(3, (N, 4, 4), generator=DRAW)
MAPS[::2, 0] = -100
TOKENS, WORDS = torch.randn(N, 5, 4, generator=DRAW).double(), torch.randint(4, (N, 5), generator=DRAW)
WORDS[::3, 2:] = -100


def scores(name: str, outputs: Tensor, y: Tensor, loss: Any = "cross_entropy", owner: Tensor = OWNER) -> list[float]:
    """The metric of every client, read in two pieces as an evaluation does."""
    objective, metric = ModuleObjective(lambda: nn.Linear(1, 1), loss), choose([name])[name]
    pieces = [metric.evidence(objective, outputs[half], y[half]) for half in (slice(0, 31), slice(31, None))]
    return metric.score(torch.cat(pieces).to(torch.float64), owner, CLIENTS).tolist()


def check(name: str, outputs: Tensor, y: Tensor, wanted: Any, loss: Any = "cross_entropy") -> None:
    """scikit-learn computes in float64, torchmetrics in float32."""
    found, within = scores(name, outputs, y, loss), 2e-6 if isinstance(wanted, nn.Module) else 1e-9
    assert math.isnan(found[2])
    for client in (0, 1, 3):
        mine = client == OWNER
        assert found[client] == pytest.approx(float(wanted(outputs[mine], y[mine])), abs=within), client


CLASSES: dict[str, tuple[Any, Any]] = {
    "f1_macro": (lambda o, y: sklearn.f1_score(y, o.argmax(1), average="macro"),
                 reference.MulticlassF1Score(4, average="macro")),
    "f1_micro": (lambda o, y: sklearn.f1_score(y, o.argmax(1), average="micro"),
                 reference.MulticlassF1Score(4, average="micro")),
    "precision": (lambda o, y: sklearn.precision_score(y, o.argmax(1), average="macro", zero_division=0),
                  reference.MulticlassPrecision(4, average="macro")),
    "recall": (lambda o, y: sklearn.recall_score(y, o.argmax(1), average="macro", zero_division=0),
               reference.MulticlassRecall(4, average="macro")),
    "accuracy": (lambda o, y: sklearn.accuracy_score(y, o.argmax(1)), reference.MulticlassAccuracy(4, average="micro")),
    "auroc": (lambda o, y: sklearn.roc_auc_score(y, o.softmax(1), multi_class="ovr"), reference.MulticlassAUROC(4)),
    "average_precision": (
        lambda o, y: sklearn.average_precision_score(functional.one_hot(y, 4), o.softmax(1), average="macro"),
        reference.MulticlassAveragePrecision(4),
    ),
    "ece": (reference.MulticlassCalibrationError(4, n_bins=15), None),
    "top3": (lambda o, y: sklearn.top_k_accuracy_score(y, o + torch.arange(4) * -1e-9, k=3), None),
}  # fmt: skip


@pytest.mark.parametrize("name", CLASSES)
def test_classes(name):
    for wanted in CLASSES[name]:
        if wanted is not None:
            check(name, LOGITS, LABELS, wanted)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("f1_macro", lambda o, y: sklearn.f1_score(y, o > 0, average="macro", zero_division=0)),
        ("f1_micro", lambda o, y: sklearn.f1_score(y, o > 0, average="micro")),
        ("precision", lambda o, y: sklearn.precision_score(y, o > 0, average="macro", zero_division=0)),
        ("recall", lambda o, y: sklearn.recall_score(y, o > 0, average="macro", zero_division=0)),
        ("auroc", lambda o, y: sklearn.roc_auc_score(y, o, average="macro")),
        ("average_precision", lambda o, y: sklearn.average_precision_score(y, o, average="macro")),
        ("accuracy", lambda o, y: ((o > 0) == (y > 0)).double().mean()),
    ],
)
def test_several_labels(name, wanted):
    check(name, MARK_LOGITS, MARKS, wanted, "binary")


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("f1_macro", lambda o, y: sklearn.f1_score(y, o > 0, average="macro")),
        ("auroc", lambda o, y: sklearn.roc_auc_score(y, o)),
        ("average_precision", lambda o, y: sklearn.average_precision_score(y, o)),
    ],
)
def test_one_logit(name, wanted):
    check(name, MARK_LOGITS[:, :1], MARKS[:, 0], lambda o, y: wanted(o[:, 0], y), "binary")


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("mae", sklearn.mean_absolute_error), ("mse", sklearn.mean_squared_error), ("r2", sklearn.r2_score)],
)
def test_quantities(name, wanted):
    check(name, GUESS, TRUTH, lambda o, y: wanted(y, o), "mse")
    check(name, GUESS[:, :1], TRUTH[:, 0], lambda o, y: wanted(y, o[:, 0]), "l1")


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("iou", reference.MulticlassJaccardIndex(3, ignore_index=-100)),
        ("dice", reference.MulticlassF1Score(3, average="macro", ignore_index=-100)),
        ("f1_micro", reference.MulticlassF1Score(3, average="micro", ignore_index=-100)),
        ("accuracy", reference.MulticlassAccuracy(3, average="micro", ignore_index=-100)),
    ],
)
def test_maps(name, wanted):
    check(name, IMAGES, MAPS, wanted)


def test_maps_of_one_class():
    mask = (MAPS == 1).double()
    check("iou", IMAGES[:, :1], mask, lambda o, y: sklearn.jaccard_score(y.flatten(), (o > 0).flatten()), "dice")


@pytest.mark.parametrize("loss", ["cross_entropy", {"kind": "cross_entropy", "label_smoothing": 0.3}, "focal"])
def test_perplexity_is_that_of_the_plain_loss(loss):
    check("perplexity", TOKENS, WORDS, ReferencePerplexity(ignore_index=-100), loss)


def test_top_k_of_tokens():
    def wanted(outputs: Tensor, y: Tensor) -> float:
        flat, labels = outputs.flatten(0, 1), y.flatten()
        return sklearn.top_k_accuracy_score(labels[labels >= 0], flat[labels >= 0], k=2, labels=range(4))

    check("top2", TOKENS, WORDS, wanted)
    shifted = scores("top2", TOKENS, WORDS, "next_token")
    plain = scores("top2", TOKENS[:, :-1], WORDS[:, 1:])
    assert shifted[:2] == pytest.approx(plain[:2])


def test_one_class_only():
    """A client with examples of a single class has no AUROC; its F1 is that of the classes it has or is told."""
    one = torch.ones_like(LABELS)
    assert all(math.isnan(value) for value in scores("auroc", LOGITS[:, :2], one))
    found = scores("f1_macro", LOGITS, one)
    mine = OWNER == 0
    assert found[0] == pytest.approx(sklearn.f1_score(one[mine], LOGITS[mine].argmax(1), average="macro"))
    nobody = torch.zeros_like(MARKS)
    assert all(math.isnan(value) for value in scores("average_precision", MARK_LOGITS, nobody, "binary"))
    assert math.isnan(scores("r2", GUESS, torch.ones_like(TRUTH), "mse")[0])


@pytest.mark.parametrize("target", [0.1, 123.456])
def test_equal_targets_have_no_r2_however_their_mean_is_rounded(target):
    """The mean of 0.1 and its copies is not 0.1, and R2 was -1e17 for such a client."""
    found = scores("r2", GUESS, torch.full_like(TRUTH, target), "mse")
    assert all(math.isnan(value) for value in found)


def test_equal_scores():
    """All scores equal: a coin, and for average precision the share of positives."""
    flat = torch.zeros(N, 1).double()
    assert scores("auroc", flat, MARKS[:, 0], "binary")[0] == 0.5
    share = float(MARKS[OWNER == 0, 0].mean())
    assert scores("average_precision", flat, MARKS[:, 0], "binary")[0] == pytest.approx(share)


def test_every_metric_has_its_direction():
    down = {"loss", "mae", "mse", "perplexity", "ece"}
    up = {"accuracy", "top5", "f1_macro", "f1_micro", "precision", "recall", "auroc", "average_precision", "r2", "dice"}
    assert {name for name in down | up | {"iou"} if higher_is_better(name) is False} == down
    assert {name for name in down | up | {"iou"} if higher_is_better(name) is True} == up | {"iou"}


@pytest.fixture
def forget():
    """Metrics that a test registers are forgotten after it."""
    before = dict(registry._rules["metric"])
    yield
    registry._rules["metric"].clear()
    registry._rules["metric"].update(before)


def far(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs - y).abs().mean(1)


def test_own_metrics_are_used_by_their_name(forget):
    own_metric("far", far, higher_is_better=False, per="example")
    own_metric("far_at_once", lambda o, y: float(far(o, y).mean()), higher_is_better=False)
    own_metric("kappa", reference.MulticlassCohenKappa(4), higher_is_better=True)
    check("far", GUESS, TRUTH, lambda o, y: far(o, y).mean(), "mse")
    assert scores("far_at_once", GUESS, TRUTH, "mse")[:2] == pytest.approx(scores("far", GUESS, TRUTH, "mse")[:2])
    check("kappa", LOGITS, LABELS, reference.MulticlassCohenKappa(4))
    assert higher_is_better("kappa") is True
    task = make_task(Dataset(TRUTH.float(), GUESS.float(), 0), "logistic", clients=2)
    done = fit(fedavg(), task, rounds=1, metrics=("far_at_once", "mae"), target_metric="far_at_once")
    assert done.last()["mean"] == pytest.approx(done.last("mae")["mean"], rel=1e-5)


def test_an_own_metric_that_fails_says_so(forget):
    own_metric("broken", lambda o, y: o.reshape(-1, 7, 11, 13), higher_is_better=True)
    own_metric("short", lambda o, y: o[:1, 0], higher_is_better=True, per="example")
    with pytest.raises(SpecError, match="metric 'broken'"):
        scores("broken", GUESS, TRUTH)
    with pytest.raises(SpecError, match="one value for each"):
        scores("short", GUESS, TRUTH)
    with pytest.raises(SpecError, match="no values per example"):
        own_metric("kappa", reference.MulticlassCohenKappa(4), higher_is_better=True, per="example")


def test_an_own_metric_is_per_client_or_per_example():
    with pytest.raises(SpecError, match="metric 'far': per is 'batch'; allowed: client, example"):
        own_metric("far", far, higher_is_better=False, per="batch")  # type: ignore[arg-type]


def test_outputs_and_targets_survive_packing():
    for outputs, y in ((IMAGES, MAPS), (GUESS, TRUTH), (LOGITS, LABELS)):
        again = unpacked(packed(outputs, y))
        assert torch.equal(again[0], outputs)
        assert torch.equal(again[1], y)
        assert again[1].dtype == y.dtype


@pytest.mark.parametrize(("name", "kind"), [("ece", "segmentation"), ("ece_batch", "tokens"), ("mce", "multilabel")])
def test_calibration_of_other_targets_is_refused(name, kind):
    with pytest.raises(SpecError, match=f"metric '{name}' is for tasks of the kind classification"):
        check_metrics([name], kind)


@pytest.mark.parametrize("name", ["accuracy", "loss", "perplexity", "top3"])
def test_scores_of_clients_give_that_of_all_tokens(name):
    draw = torch.Generator().manual_seed(1)
    outputs, y = torch.randn(9, 5, 7, generator=draw), torch.randint(0, 7, (9, 5), generator=draw)
    y[torch.rand(9, 5, generator=draw) < 0.5] = -100
    objective = ModuleObjective(nn.Identity, "cross_entropy")
    metric, owner = choose([name])[name], torch.tensor([0, 0, 1, 1, 1, 1, 2, 2, 2])
    evidence = metric.evidence(objective, outputs, y).double()
    counts = objective.counts(y)
    assert counts is not None
    sizes = torch.zeros(4).index_add(0, owner, counts.float())  # the last client has no examples
    whole = float(metric.score(evidence, torch.zeros_like(owner), 1))
    assert over_all(metric, metric.score(evidence, owner, 4), sizes) == pytest.approx(whole)


def test_a_score_that_needs_everything_at_one_place_is_not_made_up():
    scores, sizes = torch.tensor([0.5, 0.7]), torch.tensor([3.0, 4.0])
    assert over_all(choose(["auroc"])["auroc"], scores, sizes) is None
    accuracy = choose(["accuracy"])["accuracy"]
    assert over_all(accuracy, torch.tensor([0.5, torch.nan]), sizes) is None
    assert over_all(accuracy, scores, torch.tensor([3.0, torch.nan])) is None


@pytest.mark.parametrize("loss", ["cross_entropy", "next_token", {"kind": "model", "scored_by": "next_token"}])
@pytest.mark.parametrize("name", ["f1_macro", "f1_micro", "precision", "recall", "ece", "mce", "top3"])
def test_metrics_of_tokens_are_those_of_the_tokens_that_count(name, loss):
    objective, metric = ModuleObjective(nn.Identity, choose_loss(loss)), choose([name])[name]
    found = metric.score(metric.evidence(objective, TOKENS, WORDS).double(), OWNER, CLIENTS)
    shift = 0 if loss == "cross_entropy" else 1
    logits, y = TOKENS[:, : 5 - shift], WORDS[:, shift:]
    counted, owner = y != -100, OWNER.unsqueeze(1).expand_as(y)
    plain = ModuleObjective(nn.Identity, "cross_entropy")
    wanted = metric.score(metric.evidence(plain, logits[counted], y[counted]).double(), owner[counted], CLIENTS)
    torch.testing.assert_close(found, wanted, equal_nan=True)
    assert bool(found[2].isnan())


def test_the_words_of_a_language_are_not_counted_one_by_one():
    objective, metric = ModuleObjective(nn.Identity, "cross_entropy"), choose(["f1_macro"])["f1_macro"]
    with pytest.raises(SpecError, match="choose accuracy"):
        metric.evidence(objective, torch.zeros(2, 3, 1001), torch.zeros(2, 3, dtype=torch.int64))
