"""q-FedAvg against its formula, its step control above all."""

from __future__ import annotations

from math import inf, nan

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedalloy.core.keys import Key
from fedalloy.core.types import Cohort, Context
from fedalloy.methods.weightings.qfedavg import QFedAvg


def cohort(delta, losses, sizes=None) -> Cohort:
    stats = {"loss_before": torch.tensor(losses, dtype=torch.float64)}
    if sizes is not None:
        stats["num_examples"] = torch.tensor(sizes, dtype=torch.float64)
    return Cohort(torch.arange(len(losses)), {"delta": {"w": torch.tensor(delta, dtype=torch.float64)}}, stats)


def weigh(rule: QFedAvg, given: Cohort, lr: float = 0.1) -> tuple[torch.Tensor, torch.Tensor]:
    found, state, info = rule.weigh(given, rule.init(10), Context(1, 10, Key.of(0), local_lr=lr))
    assert isinstance(found, torch.Tensor)
    assert state == {}
    return found, info["h"]


def test_the_step_by_hand():
    # D = (-10, -20), |D|^2 = (100, 400); h = 2 F D^2 + F^2 / 0.1 = (50 + 2.5, 800 + 10)
    found, h = weigh(QFedAvg(2.0), cohort([[1.0], [2.0]], [0.25, 1.0]))
    assert h.tolist() == pytest.approx([2 * 0.25 * 100 + 0.0625 / 0.1, 2 * 400 + 1 / 0.1])
    total = float(h.sum())
    assert found.tolist() == pytest.approx([0.0625 / 0.1 / total, 1 / 0.1 / total])


def test_samples_enter_both_sums():
    given = cohort([[1.0], [2.0]], [0.25, 1.0], [3, 1])
    found, h = weigh(QFedAvg(2.0, "samples"), given)
    total = float(3 * h[0] + h[1])
    assert found.tolist() == pytest.approx([3 * 0.0625 / 0.1 / total, 1 / 0.1 / total])
    assert QFedAvg(weights="samples").requires == {"loss_before", "num_examples"}
    assert QFedAvg().requires == {"loss_before"}


def test_without_q_it_is_the_plain_mean():
    found, _ = weigh(QFedAvg(0.0), cohort([[1.0], [-5.0], [9.0]], [0.0, 3.0, 1e8]))
    assert found.tolist() == pytest.approx([1 / 3] * 3)


def test_nobody_moved_and_a_client_that_did_not():
    found, _ = weigh(QFedAvg(1.0), cohort([[0.0], [0.0]], [1.0, 3.0]))
    assert found.tolist() == pytest.approx([0.25, 0.75])
    found, _ = weigh(QFedAvg(0.5), cohort([[0.0], [1.0]], [0.0, 1.0]))
    assert bool(found.isfinite().all())


def test_huge_powers_do_not_overflow():
    found, _ = weigh(QFedAvg(200.0), cohort([[0.0], [0.0]], [1e8, 1e4]))
    assert found.tolist() == pytest.approx([1.0, 0.0])


@pytest.mark.parametrize("lost", [nan, inf, -inf])
def test_a_loss_that_overflowed_counts_as_the_largest(lost):
    found, h = weigh(QFedAvg(1.0), cohort([[1.0], [1.0], [1.0]], [0.5, lost, 2.0]))
    same, _ = weigh(QFedAvg(1.0), cohort([[1.0], [1.0], [1.0]], [0.5, 2.0, 2.0]))
    assert found.tolist() == same.tolist()
    assert bool(h.isfinite().all())


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(-100, 100)), min_size=1, max_size=6), st.floats(0, 5))
def test_weights_are_never_negative_and_sum_to_at_most_one(clients, q):
    given = cohort([[step] for _, step in clients], [loss for loss, _ in clients])
    found, _ = weigh(QFedAvg(q), given)
    assert bool((found >= 0).all())
    assert float(found.sum()) <= 1 + 1e-9
    turned, _ = weigh(QFedAvg(q), given.take(torch.arange(len(clients)).flip(0)))
    assert turned.flip(0).tolist() == pytest.approx(found.tolist())


def test_a_longer_step_is_shortened():
    short, _ = weigh(QFedAvg(1.0), cohort([[1.0]], [1.0]))
    long, _ = weigh(QFedAvg(1.0), cohort([[10.0]], [1.0]))
    assert float(long) < float(short) < 1


def test_negative_powers_are_refused():
    with pytest.raises(ValueError, match="q must be 0 or more"):
        QFedAvg(-0.1)
