"""Losses of the user's own: reduced ones are recognised, and what is no loss per example is refused before round 1."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from fedalloy import fit
from fedalloy.algorithms import fedavg
from fedalloy.core.errors import SpecError
from fedalloy.tasks.assembly import make_task
from fedalloy.tasks.datasets.base import Dataset
from fedalloy.tasks.losses import choose

OUTPUTS = torch.tensor([[0.5], [2.0], [-1.0]])
Y = torch.tensor([1.0, 2.0, 3.0])
LOGITS, LABELS = torch.tensor([[0.0, 1.0], [2.0, 0.0]]), torch.tensor([1, 1])


@pytest.mark.parametrize(
    "loss", [nn.L1Loss(), nn.L1Loss(reduction="none"), nn.MSELoss(), nn.SmoothL1Loss(), nn.HuberLoss()]
)
def test_a_reduced_loss_of_torch_counts_every_example_by_itself(loss):
    plain = copy.copy(loss)
    plain.reduction = "none"
    losses = choose(loss).losses(OUTPUTS, Y)
    assert losses.tolist() == plain(OUTPUTS.flatten(), Y).tolist()


def test_class_weights_scale_their_examples():
    weighted = choose(nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0]))).losses(LOGITS, LABELS)
    assert torch.allclose(weighted, 5 * functional.cross_entropy(LOGITS, LABELS, reduction="none"))


def test_the_users_own_object_is_not_changed():
    loss = nn.L1Loss()
    choose(loss)
    assert loss.reduction == "mean"


def test_several_values_for_an_example_are_averaged():
    assert choose(nn.L1Loss()).losses(torch.zeros(2, 3), torch.ones(2, 3)).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("loss", [nn.L1Loss(reduction="sum"), nn.KLDivLoss(reduction="batchmean"), nn.L1Loss, 3])
def test_what_cannot_be_undone_is_refused(loss: Any):
    with pytest.raises(SpecError, match=r"reduction='none'|unknown loss '3'"):
        choose(loss)


def regression() -> Dataset:
    x = torch.arange(40.0).reshape(20, 2) / 10
    return Dataset(x, x.sum(1), 0)


def test_a_reduced_loss_trains_as_the_built_in_one():
    def losses(loss: Any) -> list[float]:
        task = make_task(regression(), "logistic", clients=2, loss=loss)
        done = fit(fedavg(lr=0.01), task, rounds=2, metrics=("loss",), target_metric="loss", engine="loop")
        return [row["train_loss"] for row in done.rounds()]

    assert losses(nn.MSELoss()) == pytest.approx(losses("mse"))


@pytest.mark.parametrize(
    "loss",
    [
        lambda outputs, y: functional.l1_loss(outputs.flatten(), y),
        lambda outputs, y: (outputs - y).abs(),  # [N, 1] against [N]: everyone with everyone
        lambda outputs, y: 1.0,
    ],
)
def test_a_function_that_reduces_is_refused_before_round_1(loss):
    task = make_task(regression(), "logistic", clients=2, loss=loss)
    with pytest.raises(SpecError, match="it must return one value per example"):
        fit(fedavg(), task, rounds=1)


def test_a_model_that_does_not_fit_the_data_is_refused_before_round_1():
    task = make_task("digits", lambda: nn.Linear(3, 10), clients=2)
    with pytest.raises(SpecError, match=r"does not accept an example with features of shape \(64,\)"):
        fit(fedavg(), task, rounds=1)
