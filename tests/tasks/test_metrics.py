import json
import math
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedalloy.core import registry
from fedalloy.core.errors import DataError, RegistryError, SpecError
from fedalloy.core.keys import Key
from fedalloy.tasks.metrics import summary
from fedalloy.tasks.metrics.averages import TopKAccuracy, topk_hits
from fedalloy.tasks.metrics.frechet import frechet_distance
from fedalloy.tasks.metrics.metric import Metric, choose
from fedalloy.tasks.metrics.ranking import auroc
from fedalloy.tasks.noise import corrupt, transition
from fedalloy.tasks.objective import ModuleObjective

VECTORS = Path(__file__).resolve().parents[1] / "vectors" / "metrics.json"
CASES = json.loads(VECTORS.read_text())["cases"]
MODEL_CASES = [case for case in CASES if "fractions" in case["params"]]
NOISE_CASES = [case for case in CASES if "noise" in case["params"]]
TOLERANCE = 1e-9


def tensor(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def pooled(metric: Metric, outputs: Tensor, y: Tensor) -> float:
    """A metric over everything as one set, without a model around it."""
    objective = ModuleObjective(lambda: torch.nn.Linear(1, 1), "cross_entropy")
    evidence = metric.evidence(objective, outputs, y).double()
    return float(metric.score(evidence, torch.zeros(len(y), dtype=torch.int64), 1))


@pytest.mark.parametrize("case", MODEL_CASES)
def test_golden_metrics(case):
    inputs, expected = case["rounds"][0]["inputs"], case["rounds"][0]["expected"]
    logits, labels = tensor(inputs["logits"]), torch.tensor(inputs["labels"])
    bins = case["params"]["bins"]
    ece, mce = (registry.find("metric", name)(bins=bins) for name in ("ece", "mce"))
    scores, sizes = tensor(inputs["client_scores"]), torch.tensor(inputs["client_counts"])
    fractions = case["params"]["fractions"]
    binary = torch.tensor(inputs["binary_labels"])
    got: dict[str, Any] = {
        "ece": pooled(ece, logits, labels),
        "mce": pooled(mce, logits, labels),
        "top1": pooled(choose(["accuracy"])["accuracy"], logits, labels),
        "top3": pooled(choose(["top3"])["top3"], logits, labels),
        "auroc": pooled(choose(["auroc"])["auroc"], tensor(inputs["binary_scores"]), binary),
        "gini": summary.gini(scores),
        "tails": [[summary.worst(scores, f), summary.best(scores, f)] for f in fractions],
        "tails_weighted": [[summary.worst(scores, f, sizes), summary.best(scores, f, sizes)] for f in fractions],
        "parity_gap": summary.parity_gap(scores),
        "parity_gap_10": summary.parity_gap(scores, 0.1),
        "fid": frechet_distance(tensor(inputs["features_a"]), tensor(inputs["features_b"])),
    }
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=0, atol=TOLERANCE, err_msg=name)


@pytest.mark.parametrize("case", NOISE_CASES, ids=lambda case: str(case["params"]))
def test_golden_noise(case):
    matrix = transition(case["params"]["noise"], case["params"]["classes"], case["params"]["ratio"])
    expected = tensor(case["rounds"][0]["expected"]["matrix"])
    torch.testing.assert_close(matrix, expected, rtol=0, atol=TOLERANCE)


def test_vectors_cover_all_conventions():
    assert len(MODEL_CASES) == 3
    assert len(NOISE_CASES) == 6


def test_noise_errors_name_the_choices():
    with pytest.raises(SpecError, match="did you mean 'symmetric'"):
        transition("symetric", 4, 0.1)
    with pytest.raises(SpecError, match=r"ratio is in \[0, 1\]"):
        transition("pair", 4, 1.5)


def test_corrupt_follows_the_matrix_and_the_key():
    labels = torch.arange(4).repeat(5000)
    matrix = transition("pair", 4, 0.3)
    noisy = corrupt(labels, matrix, Key.of(1))
    assert torch.equal(noisy, corrupt(labels, matrix, Key.of(1)))
    assert torch.equal(noisy[:100], corrupt(labels[:100], matrix, Key.of(1)))
    assert not torch.equal(noisy, corrupt(labels, matrix, Key.of(2)))
    counts = torch.stack([torch.bincount(noisy[labels == c], minlength=4) for c in range(4)]) / 5000
    torch.testing.assert_close(counts.double(), matrix, rtol=0, atol=0.03)
    assert torch.equal(corrupt(labels, transition("pair", 4, 0.0), Key.of(1)), labels)
    assert torch.equal(corrupt(labels, transition("pair", 4, 1.0), Key.of(1)), (labels + 1) % 4)


def pairwise(scores: Tensor, labels: Tensor) -> float:
    """The definition: every positive against every negative, ties count one half."""
    positive, negative = scores[labels > 0], scores[labels == 0]
    wins = (positive[:, None] > negative).double() + 0.5 * (positive[:, None] == negative).double()
    return float(wins.mean())


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(-2, 2), st.integers(0, 1)), min_size=1, max_size=40),
)
def test_auroc_of_many_clients_is_the_pairwise_one(rows):
    owner, scores, labels = (torch.tensor(column) for column in zip(*sorted(rows, key=lambda row: row[0]), strict=True))
    got = auroc(scores.double(), labels, owner, 4)
    for client in range(4):
        mine = owner == client
        both = len(set(labels[mine].tolist())) == 2
        expected = pairwise(scores[mine], labels[mine]) if both else math.nan
        assert float(got[client]) == pytest.approx(expected, abs=1e-12, nan_ok=True)


def test_auroc_of_a_diverged_model_is_no_number():
    assert auroc(torch.tensor([torch.nan, 1.0]), torch.tensor([1, 0]), torch.zeros(2).long(), 1).isnan().all()


def test_auroc_reads_two_logits():
    logits = torch.tensor([[0.0, 2.0], [1.0, 0.0], [0.0, 0.5]])
    assert pooled(choose(["auroc"])["auroc"], logits, torch.tensor([1, 0, 0])) == 1.0


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 6))
def test_topk_is_the_stable_order(seed, k):
    outputs = torch.randint(0, 3, (20, 5), generator=torch.Generator().manual_seed(seed)).double()
    y = torch.randint(0, 5, (20,), generator=torch.Generator().manual_seed(seed + 1))
    leading = outputs.argsort(dim=1, descending=True, stable=True)[:, :k]
    assert torch.equal(topk_hits(outputs, y, k), (leading == y[:, None]).any(1).double())


def test_topk_does_not_reward_numbers_that_are_none():
    assert topk_hits(torch.full((1, 3), torch.nan), torch.tensor([1]), 2).item() == 0.0


def test_calibration_bins_are_open_below_and_closed_above():
    """Confidence exactly on an edge belongs to the lower bin: 0.5 with two bins is in (0, 0.5]."""
    metric = registry.find("metric", "mce")(bins=2)
    evidence = tensor([[0.5, 1.0], [0.5, 1.0], [0.75, 0.0]])
    assert float(metric.score(evidence, torch.zeros(3).long(), 1)) == 0.75
    ece = registry.find("metric", "ece")(bins=2)
    assert float(ece.score(evidence, torch.zeros(3).long(), 1)) == pytest.approx((1.0 + 0.75) / 3)


def test_choose_finds_generic_topk_and_helps_with_spelling():
    assert choose(["top7"])["top7"] == TopKAccuracy(7)
    assert choose(["top3"])["top3"] == TopKAccuracy(3)
    own = {"mine": TopKAccuracy(2)}
    assert choose(own) == own
    with pytest.raises(RegistryError, match="did you mean 'accuracy'"):
        choose(["acuracy"])
    with pytest.raises(SpecError, match="k is 0"):
        choose(["top0"])


def test_every_registered_metric_is_a_metric():
    for name in registry.names("metric"):
        assert isinstance(registry.find("metric", name)(), Metric), name


def test_variance_is_of_percentages_divided_by_n():
    values = [0.1, 0.5, 0.8]
    assert summary.variance(tensor(values)) == pytest.approx(np.var(100 * np.array(values)), abs=1e-9)


def test_summaries_skip_and_count_clients_without_a_value():
    values, sizes = tensor([0.2, math.nan, 0.8, 0.4]), torch.tensor([1, 100, 3, 2])
    known, kept = tensor([0.2, 0.8, 0.4]), torch.tensor([1, 3, 2])
    result = summary.summarise(values, sizes, fraction=0.34)
    assert result.pop("skipped") == 1.0
    expected = summary.summarise(known, kept, fraction=0.34)
    expected.pop("skipped")
    assert result == expected
    assert result["mean"] == pytest.approx((0.2 + 2.4 + 0.8) / 6)


def test_nobody_has_a_value():
    result = summary.summarise(tensor([math.nan, math.nan]))
    assert result.pop("skipped") == 2.0
    assert all(math.isnan(value) for value in result.values())


@pytest.mark.parametrize(("count", "fraction", "members"), [(100, 0.29, 29), (5, 0.1, 1), (30, 0.1, 3), (4, 1.0, 4)])
def test_tails_have_the_exact_number_of_members(count, fraction, members):
    values = torch.arange(count, dtype=torch.float64)
    assert summary.worst(values, fraction) == pytest.approx((members - 1) / 2)
    assert summary.best(values, fraction) == pytest.approx(count - 1 - (members - 1) / 2)


def test_summary_refuses_what_makes_no_sense():
    with pytest.raises(SpecError, match="10 %"):
        summary.worst(tensor([0.1]), 10)
    with pytest.raises(SpecError, match="one size per client"):
        summary.mean(tensor([0.1, 0.2]), torch.tensor([3]))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=30), st.floats(0.1, 10.0))
def test_gini_is_scale_free_and_the_mean_difference(values, scale):
    x = np.array(values)
    got = summary.gini(tensor(values))
    assert 0.0 <= got + 1e-12 < 1.0
    if x.sum() > 1e-6:
        assert got == pytest.approx(np.abs(x[:, None] - x).sum() / (2 * len(x) * x.sum()), abs=1e-9)
        assert got == pytest.approx(summary.gini(scale * tensor(values)), abs=1e-9)


def test_frechet_is_zero_for_the_same_cloud_and_refuses_misfits():
    cloud = Key.of(3).normal(50, 6, dtype=torch.float64)
    assert frechet_distance(cloud, cloud) == pytest.approx(0.0, abs=1e-9)
    with pytest.raises(DataError, match="two matrices"):
        frechet_distance(cloud, cloud[:, :3])


@pytest.mark.parametrize(("name", "whole"), [("ece_batch", "ece"), ("mce_batch", "mce")])
def test_calibration_by_batches_is_the_mean_over_tens_in_turn(name, whole):
    key, sizes = Key.of(8), [23, 0, 10, 4]
    evidence = torch.stack([key.uniform(37, dtype=torch.float64), (key.fold("hit").bits(37) & 1).double()], 1)
    owner = torch.repeat_interleave(torch.tensor(sizes))
    found = choose([name])[name].score(evidence, owner, len(sizes))
    plain = choose([whole])[whole]
    for client, part in enumerate(evidence.split(sizes)):
        if not len(part):
            assert bool(found[client].isnan())
            continue
        batches = [plain.score(ten, torch.zeros(len(ten), dtype=torch.int64), 1) for ten in part.split(10)]
        assert float(found[client]) == pytest.approx(float(torch.cat(batches).mean()), abs=1e-12)
    assert float(found[0]) > float(plain.score(evidence[:23], owner[:23], 1))


@pytest.mark.parametrize("higher", [True, False, None])
def test_a_summary_says_what_its_parts_say_and_sorts_once_per_tail(higher, monkeypatch):
    values, sizes = torch.tensor([0.5, torch.nan, 0.25, 1.0, 0.75]), torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    sort = Mock(side_effect=torch.Tensor.argsort)
    monkeypatch.setattr(torch.Tensor, "argsort", lambda *given, **named: sort(*given, **named))
    told = summary.summarise(values, sizes, 0.5, higher)
    assert sort.call_count == 2
    expected = {
        "worst": summary.worst(values, 0.5, sizes), "best": summary.best(values, 0.5, sizes),
        "parity_gap": summary.parity_gap(values, 0.5, sizes), **summary.served(values, higher, 0.5, sizes),
    }  # fmt: skip
    assert {name: told[name] for name in expected} == expected
    assert ("worst_served" in told) is (higher is not None)
