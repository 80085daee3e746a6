"""Wrong labels in a task: how many, whose, and that the rest stays as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedalloy.core.errors import SpecError
from fedalloy.experiment.recipe import parse, resolve
from fedalloy.tasks.assembly import make_task
from fedalloy.tasks.datasets.base import Dataset
from fedalloy.tasks.federation import FederatedTask
from fedalloy.tasks.noise import LabelNoise

CLASSES, ROWS = 5, 2000
Y = torch.arange(ROWS) % CLASSES
# The feature is the number of the example, so that a client's labels can be compared with the true ones.
DATA = Dataset(torch.arange(ROWS).float().unsqueeze(1), Y, CLASSES, test=None)


def task(noise=None, **settings):
    return make_task(DATA, "logistic", clients=8, noise=noise, valid_fraction=0.1, **settings)


def wrong(pool):
    """Which labels of a part differ from the truth, and by how many classes."""
    true = Y[pool.x.flatten().long()]
    return (pool.y - true) % CLASSES


@pytest.mark.parametrize(("kind", "ratio"), [("pair", 0.1), ("pair", 0.4), ("symmetric", 0.2), ("symmetric", 0.6)])
def test_training_labels_are_wrong_as_often_as_said_and_test_labels_are_true(kind, ratio):
    made = task({"kind": kind, "ratio": ratio})
    moved = torch.cat([wrong(made.train), wrong(made.valid)])
    assert float((moved > 0).double().mean()) == pytest.approx(ratio, abs=0.05)
    assert set(moved.tolist()) == ({0, 1} if kind == "pair" else set(range(CLASSES)))
    assert not bool(wrong(made.test).any())
    assert not bool((made.global_test.y - Y[made.global_test.x.flatten().long()]).any())
    assert bool((wrong(made.valid) > 0).any())


def test_noise_changes_labels_alone():
    clean, noisy = task(), task({"kind": "pair", "ratio": 0.4})
    assert clean.manifest.digest == noisy.manifest.digest
    for part in ("train", "valid", "test"):
        assert torch.equal(getattr(clean, part).x, getattr(noisy, part).x)
    assert torch.equal(noisy.train.y, task({"kind": "pair", "ratio": 0.4}).train.y)
    assert not torch.equal(noisy.train.y, task({"kind": "pair", "ratio": 0.4}, seed=1).train.y)


def test_test_labels_are_noisy_on_request():
    made = task({"kind": "pair", "ratio": 0.4, "test": "noisy"})
    assert float((wrong(made.test) > 0).double().mean()) == pytest.approx(0.4, abs=0.1)


@pytest.mark.parametrize(("said", "really"), [("pair", set(range(CLASSES))), ("symmetric", {0, 1})])
def test_the_public_code_swaps_the_kinds_and_corrupts_before_dealing(said, really):
    made = task({"kind": said, "ratio": 0.4, "protocol": "public_code"})
    assert set(wrong(made.train).tolist()) == set(wrong(made.test).tolist()) == really
    assert float((wrong(made.test) > 0).double().mean()) == pytest.approx(0.4, abs=0.1)


def test_the_public_code_deals_by_the_noisy_labels():
    settings: dict[str, Any] = {"partition": {"kind": "classes", "per_client": 1}, "clients": 5}
    noise = {"kind": "symmetric", "ratio": 0.4}
    by_truth = make_task(DATA, "logistic", noise=noise, **settings)
    by_noise = make_task(DATA, "logistic", noise={**noise, "protocol": "public_code"}, **settings)
    assert [len(by_truth.train.block(torch.tensor([k])).client(0).y.unique()) for k in range(5)] == [5] * 5
    assert [len(by_noise.train.block(torch.tensor([k])).client(0).y.unique()) for k in range(5)] == [1] * 5


def test_a_global_test_set_that_comes_with_the_data_stays_clean():
    from fedalloy.core.types import Examples

    data = Dataset(DATA.x, DATA.y, CLASSES, test=Examples(DATA.x[:50], DATA.y[:50]))
    for protocol in ("paper", "public_code"):
        made = make_task(data, "logistic", clients=4, noise={"kind": "pair", "ratio": 0.9, "protocol": protocol})
        assert made.global_test is not None
        assert torch.equal(made.global_test.y, Y[:50])


def test_a_recipe_says_it():
    recipe = {"partition": {"clients": 3}, "noise": {"kind": "pair", "ratio": 0.4}}
    experiment = resolve(parse(recipe))
    assert experiment.resolved["noise"] == {"kind": "pair", "ratio": 0.4, "test": "clean", "protocol": "paper"}
    noisy, clean = experiment.task(), resolve(parse({"partition": {"clients": 3}})).task()
    assert isinstance(noisy, FederatedTask)
    assert isinstance(clean, FederatedTask)
    changed = float((noisy.train.y != clean.train.y).double().mean())
    assert changed == pytest.approx(0.4, abs=0.05)
    assert torch.equal(noisy.test.y, clean.test.y)


@pytest.mark.parametrize(
    ("noise", "said"),
    [
        ({"kind": "pairs", "ratio": 0.1}, "did you mean 'pair'"),
        ({"kind": "pair", "ratio": 1.5}, r"values in \[0, 1\]"),
        ({"kind": "pair", "ratio": 0.1, "protocol": "code"}, "protocol"),
        ({"kind": "pair", "rate": 0.1}, "did you mean 'ratio'"),
    ],
)
def test_wrong_noise_is_refused(noise, said):
    with pytest.raises(SpecError, match=said):
        task(noise)


def test_numbers_have_no_label_noise():
    numbers = Dataset(torch.rand(40, 2), torch.rand(40), 0)
    with pytest.raises(SpecError, match="one class number per example"):
        make_task(numbers, clients=2, noise=LabelNoise("pair", 0.1))
