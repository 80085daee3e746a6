"""A device without float64, as Apple's GPUs are: sums are added up in float32, and what needs more says so."""

from __future__ import annotations

import pytest
import torch

import fedalloy
from fedalloy.core import wide
from fedalloy.core.errors import SpecError
from fedalloy.experiment.placement import told_about_float64


@pytest.fixture
def narrow(monkeypatch):
    """The CPU counts as a device without float64."""
    monkeypatch.setattr(wide, "_WITHOUT_FLOAT64", ("cpu",))


def test_sums_are_added_up_in_float32(narrow):
    assert wide.wide(torch.ones(2)).dtype == torch.float32


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_a_run_gives_nearly_the_same(engine, monkeypatch):
    task = fedalloy.task("synthetic", clients=4)
    exact = fedalloy.fit("fedavg", task, rounds=2, engine=engine).model
    monkeypatch.setattr(wide, "_WITHOUT_FLOAT64", ("cpu",))
    for name, leaf in fedalloy.fit("fedavg", task, rounds=2, engine=engine).model.items():
        torch.testing.assert_close(leaf, exact[name])


def test_a_task_in_float64_is_refused(narrow):
    with pytest.raises(SpecError, match="'cpu' has no float64: use dtype float32"):
        fedalloy.task("synthetic", clients=4, dtype="float64", device="cpu")


def test_what_torch_refuses_is_said_in_words(narrow):
    with (
        pytest.raises(SpecError, match="has no float64, which a part of this run"),
        told_about_float64("cpu"),
    ):
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
    with pytest.raises(TypeError, match="other"), told_about_float64("cpu"):
        raise TypeError("some other mistake")
