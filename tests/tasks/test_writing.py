"""Models that change something while they are called: refused, warned about, or run on whole batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedalloy
from fedalloy.core.errors import SpecError
from fedalloy.engines.batched import Batched
from fedalloy.tasks.datasets.base import Dataset

SIZES = (9, 7, 10)
OWNER = torch.repeat_interleave(torch.tensor(SIZES))
DRAW = torch.Generator().manual_seed(0)
X, Y = torch.randn(sum(SIZES), 6, 5, generator=DRAW), torch.randint(0, 3, (sum(SIZES),), generator=DRAW)


class Head(nn.Module):
    """Something before a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.calls = nn.Linear(30, 3), 0

    def before(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.before(x).flatten(1))
        return scores


class Clamped(Head):
    def before(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.head.weight.clamp_(-0.05, 0.05)
        return x


class Replaced(Head):
    def before(self, x: Tensor) -> Tensor:
        self.head.weight.data = self.head.weight.data / 2
        return x


class Counting(Head):
    def before(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


class Remembering(Head):
    """A hidden state that goes on in the next call, of another client."""

    state: Any = 0.0

    def before(self, x: Tensor) -> Tensor:
        made = x + self.state
        self.state = made.detach().mean(0)
        return made


class Caching(Head):
    """What is computed in the first call and used in the others does no harm."""

    table: Any = None

    def before(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.linspace(-1, 1, 5, dtype=x.dtype)
        made: Tensor = x + self.table
        return made


class Frequencies(Head):
    """Gradients of words are divided by how often they are in the batch; a padding row would count."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(4, 5, scale_grad_by_freq=True)

    def before(self, x: Tensor) -> Tensor:
        made: Tensor = self.words((x[:, :, 0] > 0).long())
        return made


class Normed(Head):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(6, track_running_stats=True)

    def before(self, x: Tensor) -> Tensor:
        made: Tensor = self.norm(x)
        return made


def task(model: Any) -> Any:
    return fedalloy.task(Dataset(X, Y, 3, OWNER), model=model, test_fraction=0.0, dtype="float64")


@pytest.mark.parametrize("model", [Clamped, Replaced])
def test_a_model_that_writes_its_parameters_is_refused(model):
    with pytest.raises(SpecError, match=r"changes its parameter 'head\.weight'"):
        task(model)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_embeddings_that_write_their_weights_are_refused(kind):
    with pytest.raises(SpecError, match="max_norm"):
        task(nn.Sequential(kind(9, 8, max_norm=1.0), nn.Flatten(), nn.Linear(8, 3)))


def test_a_model_that_counts_is_warned_about():
    with pytest.warns(RuntimeWarning, match="attribute 'calls'"):
        task(Counting)


def test_a_model_that_keeps_a_state_between_calls_is_warned_about(recwarn):
    with pytest.warns(RuntimeWarning, match="keeps something between calls"):
        task(Remembering)
    recwarn.clear()
    task(Caching)
    assert not [one for one in recwarn if one.category is RuntimeWarning]


@pytest.mark.parametrize("model", [Normed, Frequencies])
def test_statistics_of_rows_are_taken_of_whole_batches(model):
    given, engine = task(model), Batched()
    assert given.objective.needs_full_batches
    algorithm = fedalloy.algorithms.fedavg(lr=0.1, batch_size=4)
    one, other = (fedalloy.fit(algorithm, given, rounds=2, engine=by).model for by in ("loop", engine))
    assert not engine._unbatchable
    assert max(float((leaf - other[name]).abs().max()) for name, leaf in one.items()) < 1e-12
