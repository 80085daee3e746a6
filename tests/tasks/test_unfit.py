"""Models that cannot be trained as they are: each is refused before anything runs, with what to give instead."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fedalloy
from fedalloy.core.errors import SpecError
from fedalloy.core.keys import Key
from fedalloy.tasks.assembly import make_task
from fedalloy.tasks.datasets.base import Dataset

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
DATA = Dataset(X, (X[:, 0] > 0).long(), 2)


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 2, dtype=torch.complex64))

    def forward(self, x):
        return (x.to(self.weight.dtype) @ self.weight).real


class Around(nn.Module):
    """A part of a model that cannot be trained."""

    def __init__(self):
        super().__init__()
        self.inside = nn.DataParallel(nn.Linear(4, 2))

    def forward(self, x):
        return self.inside(x)


def compiled():
    return torch.compile(nn.Linear(4, 2), backend="eager")


def masked():
    """Pruned by a hook, which a copy of the parameter does not have."""
    model = nn.Linear(4, 2)
    model.weight.register_hook(lambda grad: grad * torch.tensor([1.0, 1.0, 0.0, 0.0]))
    return model


def gathering():
    model = nn.Linear(4, 2)
    model.weight.register_post_accumulate_grad_hook(lambda leaf: None)
    return model


def old_spectral_norm():
    return nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 4)), nn.Linear(4, 2))


def old_weight_norm():
    with pytest.warns(FutureWarning):
        return nn.utils.weight_norm(nn.Linear(4, 2))


@pytest.mark.parametrize(("model", "words"), [
    (masked, "'weight' has a hook for its gradient"),
    (gathering, "'weight' has a hook for its gradient"),
    (old_spectral_norm, r"part '0' has torch's old spectral_norm.*parametrizations\.spectral_norm"),
    (old_weight_norm, r"the model has torch's old weight_norm.*parametrizations\.weight_norm"),
    (compiled, "compiled by torch.compile.*before torch.compile"),
    (lambda: nn.DataParallel(nn.Linear(4, 2)), r"nn\.DataParallel.*its '\.module'"),
    (Around, r"the model's part 'inside' is wrapped in nn\.DataParallel"),
    (Complex, "'weight' is complex.*view_as_real"),
    (lambda: 3, "must return an nn.Module"),
    (nn.Linear, r"Linear needs the arguments in_features, out_features.*lambda: Linear\(\.\.\.\)"),
    (torch.zeros(3), "model is a Tensor: give an nn.Module"),
])  # fmt: skip
def test_a_model_that_cannot_be_trained_is_refused_in_words(model, words):
    with pytest.raises(SpecError, match=words):
        make_task(DATA, model, clients=2)
    if callable(model) and model not in (nn.Linear,) and isinstance(built := model(), nn.Module):
        with pytest.raises(SpecError, match=words):
            make_task(DATA, built, clients=2)


def test_a_model_without_parameters_can_be_scored_and_not_trained():
    task = make_task(DATA, lambda: nn.Softmax(dim=1), clients=2)
    with pytest.raises(SpecError, match="the model has no parameters"):
        fedalloy.fit("fedavg", task, rounds=1)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_a_script_module_is_refused():
    with pytest.raises(SpecError, match="ScriptModule"):
        make_task(DATA, torch.jit.script(nn.Linear(4, 2)), clients=2)


def test_a_function_that_returns_one_module_every_time_is_no_function_that_builds_one():
    module = nn.Linear(4, 2)
    task = make_task(DATA, lambda: module, clients=2)
    with pytest.raises(SpecError, match=r"returns the same module every time.*give the module itself"):
        task.objective.init(Key.of(0))


def test_a_built_model_in_float64_is_not_rounded_in_silence():
    with pytest.warns(UserWarning, match="in float64 and the task in float32"):
        make_task(DATA, nn.Linear(4, 2).double(), clients=2)
    task = make_task(DATA, nn.Linear(4, 2).double(), clients=2, dtype="float64")  # a warning would fail the test
    assert task.objective.init(Key.of(0))[0]["weight"].dtype == torch.float64


def test_an_unknown_unit_is_refused():
    with pytest.raises(SpecError, match="unit 'tokens': allowed: examples, targets"):
        fedalloy.task(DATA, model=lambda: nn.Linear(4, 2), clients=2, unit="tokens")  # type: ignore[arg-type]


class Decoder(nn.Module):
    """Fails on the data as they are, as an encoder-decoder does without inputs for its decoder."""

    def __init__(self):
        super().__init__()
        self.dropout, self.output = nn.Dropout(0.1), nn.Linear(4, 2)

    def forward(self, x, decoder=None):
        if decoder is None:
            raise ValueError("inputs of the decoder are missing")
        return self.output(self.dropout(x))


def test_a_model_that_fails_on_the_data_says_so_before_the_first_round():
    task = make_task(DATA, Decoder, clients=2)
    with pytest.raises(SpecError, match=r"does not accept an example.*inputs of the decoder are missing"):
        fedalloy.fit("fedavg", task, rounds=1)
