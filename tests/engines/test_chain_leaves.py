"""Layers with other leaves than their class makes, and losses that an objective gets later, are not fused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from fedalloy import algorithms
from fedalloy.engines.batched import Batched, dense_of, stages_for
from fedalloy.engines.kernels.layer_chain import chain_of
from fedalloy.engines.loop import Loop
from tests.engines.rounds import gaps, play, shared_of, task_of


def warm(layer: nn.Module) -> nn.Module:
    """With a leaf that no output depends on; weight decay changes it all the same."""
    layer.temperature = nn.Parameter(torch.ones(5))
    return layer


def with_one_bias(layer: nn.Linear) -> nn.Linear:
    layer.bias = nn.Parameter(torch.zeros(1))
    return layer


ODD: dict[str, Callable[[], nn.Module]] = {
    "a further leaf": lambda: warm(nn.Linear(4, 3)),
    "a further leaf inside": lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), warm(nn.Linear(5, 3))),
    "one bias for all outputs": lambda: with_one_bias(nn.Linear(4, 3)),
    "one bias for all units": lambda: nn.Sequential(with_one_bias(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3)),
}


@pytest.mark.parametrize("kind", ODD)
def test_layers_with_other_leaves_are_no_chain(kind):
    task, algorithm = task_of(ODD[kind]), algorithms.fedavg(lr=0.3, batch_size=2, weight_decay=0.1)
    # Asked first, because a kernel would read and write past the end of a short bias.
    assert dense_of(task.objective, shared_of(algorithm, task)) is None
    assert gaps(play(Batched(), algorithm, task), play(Loop(), algorithm, task)) == []


@pytest.mark.parametrize("odd", [False, True])
def test_convolutions_with_other_leaves_are_no_chain(odd):
    def model() -> nn.Module:
        first = nn.Conv2d(1, 2, 3)
        return nn.Sequential(warm(first) if odd else first, nn.Flatten(), nn.Linear(8, 3))

    task = task_of(model, shape=(1, 4, 4))
    assert (chain_of(task.objective, shared_of(algorithms.fedavg(), task)["params"]) is None) is odd


@pytest.mark.parametrize(
    "factory", [lambda: nn.Linear(4, 3), lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))]
)
def test_a_loss_that_replaces_the_objectives_between_two_runs_is_trained(factory):
    task, algorithm = task_of(factory), algorithms.fedavg(lr=0.3, batch_size=2)
    play(Batched(), algorithm, task)
    ordinary = task.objective.loss

    def trebled(*given, **named):
        loss, buffers = ordinary(*given, **named)
        return 3 * loss, buffers

    task.objective.loss = trebled  # type: ignore[method-assign]
    assert gaps(play(Batched(), algorithm, task), play(Loop(), algorithm, task)) == []


def test_stages_of_a_loss_that_was_replaced_are_not_used():
    task = task_of(lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)), shape=(1, 4, 4))
    shared = shared_of(algorithms.fedavg(), task)
    assert stages_for(task.objective, shared, task.block) is not None
    task.objective.loss = task.objective.loss  # type: ignore[method-assign]
    assert stages_for(task.objective, shared, task.block) is None
