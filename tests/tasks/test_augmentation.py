"""Augmentation: pure functions of the client's key, the same on every engine, and never in evaluation."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedalloy import fit
from fedalloy.core.errors import FedalloyError, SpecError
from fedalloy.core.keys import Key
from fedalloy.methods.generative import fedevg
from fedalloy.methods.published import fedavg
from fedalloy.tasks.assembly import make_task
from fedalloy.tasks.augmentation import Augmentation
from fedalloy.tasks.datasets.base import Dataset
from fedalloy.tasks.features import cached_features
from fedalloy.tasks.federation import FederatedTask

DRAW = torch.tensor(7)
IMAGES = torch.arange(1, 1 + 6 * 2 * 5 * 4, dtype=torch.float64).reshape(6, 2, 5, 4)
ALL: dict[str, Any] = {"flip": "horizontal", "crop": 1, "noise": 0.1}


def applied(how: Augmentation, x: Tensor = IMAGES, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return how.apply(x, torch.zeros(len(x)) if y is None else y, DRAW, -100)


def test_a_flip_mirrors_some_images_and_leaves_the_others():
    for how, axis in ((Augmentation(flip="horizontal"), -1), (Augmentation(flip="vertical"), -2)):
        found, _ = applied(how)
        turned = [torch.equal(one, before.flip(axis)) for one, before in zip(found, IMAGES, strict=True)]
        same = [torch.equal(one, before) for one, before in zip(found, IMAGES, strict=True)]
        assert [one != other for one, other in zip(turned, same, strict=True)] == [True] * 6
        assert any(turned)
        assert any(same)


def test_a_crop_moves_every_image_by_its_own_way():
    found, _ = applied(Augmentation(crop=2))
    ways = []
    for one, before in zip(found, IMAGES, strict=True):
        padded = nn.functional.pad(before, (2, 2, 2, 2))
        fits = [(a, b) for a in range(5) for b in range(5) if torch.equal(one, padded[:, a : a + 5, b : b + 4])]
        assert len(fits) == 1
        ways += fits
    assert len(set(ways)) > 1


def test_noise_has_its_spread():
    x = torch.zeros(400, 30)
    found, _ = applied(Augmentation(noise=0.5), x)
    assert float(found.std()) == pytest.approx(0.5, rel=0.05)
    assert abs(float(found.mean())) < 0.02


def test_maps_move_with_their_images():
    y = IMAGES[:, 0].long()
    found, maps = applied(Augmentation(flip="horizontal", crop=1), IMAGES[:, :1], y)
    gone = maps == -100
    assert torch.equal(maps[~gone], found[:, 0].long()[~gone])
    assert bool((found[:, 0][gone] == 0).all())
    assert bool(gone.any())


def test_padding_at_the_end_changes_nothing():
    how = Augmentation(**ALL)
    assert torch.equal(applied(how, IMAGES[:4])[0], applied(how)[0][:4])


def task_of(**more: Any) -> FederatedTask:
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(33, 1, 6, 6, generator=draw), torch.randint(3, (33,), generator=draw)
    given: dict[str, Any] = {"dataset": Dataset(x, y, 3), "model": "logistic", "dtype": "float64", "clients": 3}
    return make_task(**{**given, **more})


@pytest.mark.parametrize("engine", ["batched", "workers"])
def test_engines_agree(engine):
    task, algorithm = task_of(augment=ALL), fedavg(lr=0.1, batch_size=4)
    options: dict[str, Any] = {"engine_options": {"processes": 1}} if engine == "workers" else {}
    one = fit(algorithm, task, rounds=2, engine="loop").model
    other = fit(algorithm, task, rounds=2, engine=engine, **options).model
    plain = fit(algorithm, task_of(), rounds=2, engine="loop").model
    assert all(torch.allclose(leaf, other[name], rtol=0, atol=1e-12) for name, leaf in one.items())
    assert any(not torch.allclose(leaf, plain[name], atol=1e-3) for name, leaf in one.items())


def test_evaluation_sees_the_examples_as_they_are():
    params, buffers = task_of().objective.init(Key.of(0))
    x = task_of().train.x
    outputs = [task.objective.outputs(params, buffers, x) for task in (task_of(), task_of(augment=ALL))]
    assert torch.equal(*outputs)


def test_a_run_is_not_resumed_with_another_augmentation(tmp_path):
    fit(fedavg(), task_of(augment=ALL), rounds=1, folder=tmp_path / "run")
    with pytest.raises(FedalloyError, match="augmentation"):
        fit(fedavg(), task_of(augment={"noise": 0.1}), rounds=2, folder=tmp_path / "run", resume=True)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"augment": {"crop": 1}, "dataset": Dataset(torch.randn(9, 4), torch.randint(2, (9,)), 2)}, "are for images"),
        ({"augment": {"crop": -1}}, "must be 0 or more"),
        ({"augment": {"rotate": 1}}, "unknown argument 'rotate'"),
        ({"augment": {"crop": 1}, "model": lambda: nn.Conv2d(1, 1, 1), "loss": "binary",
          "dataset": Dataset(torch.randn(9, 1, 4, 4), torch.randint(2, (9, 4, 4)), 2)}, "with ignore_index"),
    ],
)  # fmt: skip
def test_what_cannot_be_augmented_is_refused(more, said):
    with pytest.raises(SpecError, match=said):
        task_of(**more)


def test_what_would_not_augment_is_refused():
    with pytest.raises(SpecError, match="see the examples as they are"):
        fit(fedevg(), task_of(augment=ALL), rounds=1)
    model = nn.Sequential(OrderedDict(flat=nn.Flatten(), output=nn.Linear(36, 3)))
    with pytest.raises(SpecError, match="cannot be cached"):
        cached_features(task_of(augment={"noise": 0.1}, model=lambda: model), "flat")
