"""A model that checkpoints activations is trained as if it did not, on every engine."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils import checkpoint

import fedalloy
from fedalloy.tasks.checkpointing import PlainCheckpoints
from fedalloy.tasks.datasets.base import Dataset

X = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
DATA = Dataset(X, (X[:, 0] > 0).long(), 2)


class Network(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Tanh()), nn.Linear(8, 2)
        self.reentrant = reentrant

    def forward(self, x):
        if self.reentrant is None:
            return self.head(self.body(x))
        return self.head(checkpoint.checkpoint(self.body, x, use_reentrant=self.reentrant))


def trained(reentrant, engine):
    torch.manual_seed(3)
    task = fedalloy.task(DATA, model=Network(reentrant), clients=3, dtype="float64")
    return fedalloy.fit(fedalloy.algorithms.fedavg(lr=0.5, batch_size=4), task, rounds=2, engine=engine).model


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("engine", ["loop", "batched"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_change_nothing_but_memory(reentrant, engine):
    with pytest.warns(RuntimeWarning, match="checkpoints activations"):
        found = trained(reentrant, engine)
    expected = trained(None, "loop")
    assert all(torch.allclose(found[name], leaf, rtol=0, atol=1e-12) for name, leaf in expected.items())


def test_torchs_checkpoints_are_back_after_a_call_also_after_one_that_fails():
    before = checkpoint.CheckpointFunction, checkpoint._checkpoint_without_reentrant_generator
    with pytest.raises(ZeroDivisionError), PlainCheckpoints(), PlainCheckpoints():
        checkpoint.checkpoint(lambda x: 1 / 0, X, use_reentrant=False)
    assert before == (checkpoint.CheckpointFunction, checkpoint._checkpoint_without_reentrant_generator)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing", "ignore:.*gradient_checkpointing_enable")
def test_transformers_gradient_checkpointing_changes_nothing():
    transformers = pytest.importorskip("transformers", reason="needs the extra 'huggingface'")
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8, "vocab_size": 20}
    tokens = torch.randint(2, 20, (18, 5), generator=torch.Generator().manual_seed(0))

    def model(checkpoints):
        torch.manual_seed(3)
        config = transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=1, pad_token_id=0)
        made = transformers.GPT2LMHeadModel(config)
        if checkpoints:
            made.gradient_checkpointing_enable()
        return fedalloy.task(
            Dataset(tokens, tokens, 20), model=made, clients=3, loss="next_token", kind="tokens", dtype="float64"
        )

    algorithm = fedalloy.algorithms.fedavg(lr=0.5, batch_size=4)
    with pytest.warns(RuntimeWarning, match="checkpoints activations"):
        found = fedalloy.fit(algorithm, model(True), rounds=1, engine="loop").model
    expected = fedalloy.fit(algorithm, model(False), rounds=1, engine="loop").model
    assert all(torch.allclose(found[name], leaf, rtol=0, atol=1e-12) for name, leaf in expected.items())
