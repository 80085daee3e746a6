"""Batches of sequences cut to a few lengths: the same in every engine, and only padding is cut off."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedalloy
from fedalloy.core.errors import CheckpointError, SpecError
from fedalloy.engines.batched import Batched
from fedalloy.tasks.datasets.base import Dataset
from fedalloy.tasks.federation import FederatedTask

SIZES, LENGTH, WORDS = (9, 7, 10), 8, 20
SEEN: list[tuple[int, ...]] = []


class Reader(nn.Module):
    """The mean of the words that are no padding, with dropout of every word; targets are classes or the words."""

    def __init__(self, dropout: float = 0.2, norm: bool = False, each: bool = False) -> None:
        super().__init__()
        self.words, self.drop, self.each = nn.Embedding(WORDS, 6), nn.Dropout(dropout), each
        self.norm = nn.BatchNorm1d(6) if norm else nn.Identity()
        self.head = nn.Linear(6, WORDS if each else 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, weight: Tensor) -> Tensor:
        """The scores, weighted by a number of every example."""
        SEEN.append((*input_ids.shape, attention_mask.shape[1]))
        words = self.drop(self.words(input_ids)) * attention_mask.unsqueeze(2)
        mean = words.sum(1) / attention_mask.sum(1, keepdim=True)
        scores: Tensor = self.head(words if self.each else self.norm(mean * weight.sum(1, keepdim=True)))
        return scores


def data(each: bool = False) -> Dataset:
    draw, count = torch.Generator().manual_seed(0), sum(SIZES)
    real = torch.arange(LENGTH) < torch.randint(1, LENGTH + 1, (count, 1), generator=draw)
    tokens = torch.where(real, torch.randint(1, WORDS, (count, LENGTH), generator=draw), 0)
    x = {"input_ids": tokens, "attention_mask": real.long(), "weight": torch.rand(count, 2, generator=draw)}
    y = torch.where(real, tokens, -100) if each else tokens[:, 0] % 3
    return Dataset(x, y, WORDS if each else 3, torch.repeat_interleave(torch.tensor(SIZES)))


def task(buckets: Any = (3, 5), each: bool = False, **model: Any) -> FederatedTask:
    made = fedalloy.task(
        data(each), model=lambda: Reader(each=each, **model), test_fraction=0.0, dtype="float64", buckets=buckets
    )
    assert isinstance(made, FederatedTask)
    return made


def trained(given: FederatedTask, engine: Any) -> dict[str, Tensor]:
    how = fedalloy.algorithms.fedavg(lr=0.5, batch_size=2, momentum=0.5)
    return fedalloy.fit(how, given, rounds=2, engine=engine).model


def far(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(float((leaf - other[name]).abs().max()) for name, leaf in one.items())


@pytest.mark.parametrize("model", [{}, {"norm": True}, {"each": True}], ids=["padded", "whole batches", "tokens"])
def test_engines_agree_and_call_the_model_with_the_buckets(model):
    made, engine = task(**model), Batched()
    SEEN.clear()
    expected = trained(made, "loop")
    assert {seen[1] for seen in SEEN} == {3, 5, LENGTH}
    assert all(seen[1] == seen[2] for seen in SEEN)
    assert far(trained(made, engine), expected) < 1e-12
    assert not engine._unbatchable
    assert far(trained(made, "workers"), expected) < 1e-12
    assert far(trained(task(None, **model), "loop"), expected) > 1e-6  # other lengths have other dropout masks


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_without_dropout_only_padding_is_cut_off(engine):
    assert far(trained(task(dropout=0.0), engine), trained(task(None, dropout=0.0), engine)) < 1e-12


def test_what_cannot_be_cut_is_refused():
    with pytest.raises(SpecError, match="ascending"):
        task((5, 3))
    with pytest.raises(SpecError, match="'attention_mask'"):
        fedalloy.task("digits", model=lambda: nn.Linear(64, 10), buckets=(8,))


def test_buckets_belong_to_a_run(tmp_path):
    how: dict[str, Any] = {"folder": tmp_path / "run", "engine": "loop"}
    fedalloy.fit("fedavg", task(), rounds=1, **how)
    with pytest.raises(CheckpointError, match="buckets"):
        fedalloy.fit("fedavg", task((4,)), rounds=2, resume=True, **how)
