"""The quality of a synthetic set: distances with known answers, planted leaks, matched counts, bytes."""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedalloy import algorithms
from fedalloy.core.errors import DataError, SpecError
from fedalloy.core.keys import Key
from fedalloy.core.types import Examples
from fedalloy.experiment.config import RunConfig
from fedalloy.experiment.driver import run
from fedalloy.methods.classifier import ClassifierTraining
from fedalloy.methods.wires.topk import TopK
from fedalloy.studies.synthetic.features import features_of_file, features_of_real
from fedalloy.studies.synthetic.leakage import copies, leakage, nearest
from fedalloy.studies.synthetic.quality import matched, quality, samples_of, wire_bytes
from fedalloy.tasks.assembly import make_task
from fedalloy.tasks.datasets.base import Dataset
from fedalloy.tasks.metrics.frechet import frechet_distance

QUICK = ClassifierTraining(epochs=30, lr=0.05, per_class=10)


def cloud(seed, count, width=6, classes=2):
    """Rows around one point per class."""
    key = Key.of(seed)
    y = torch.arange(count) % classes
    return Examples(key.fold("x").normal(count, width) + 3.0 * y.unsqueeze(1), y)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 999), width=st.integers(1, 5))
def test_frechet_distance_of_gaussians_has_its_closed_form(seed, width):
    """For commuting covariances it is ``|m1 - m2|^2 + sum (s1 - s2)^2``; whitened clouds have them exactly."""
    key, count = Key.of(seed), 50
    raw = key.fold("raw").normal(count, width, dtype=torch.float64)
    raw = raw - raw.mean(0)
    white = raw @ torch.linalg.inv(torch.linalg.cholesky(raw.T @ raw / (count - 1))).T
    spreads = 0.2 + key.fold("spreads").uniform(2, width, dtype=torch.float64)
    means = key.fold("means").normal(2, width, dtype=torch.float64)
    turn = torch.linalg.qr(key.fold("turn").normal(width, width, dtype=torch.float64))[0]
    one, other = (white * spread @ turn + mean for spread, mean in zip(spreads, means, strict=True))
    expected = float((means[0] - means[1]).square().sum() + (spreads[0] - spreads[1]).square().sum())
    assert frechet_distance(one, other) == pytest.approx(expected, abs=1e-8)


def test_nearest_over_chunks():
    rows, among = cloud(1, 300).x, cloud(2, 40).x
    expected = [float((among - row).square().mean(1).sqrt().min()) for row in rows]
    assert nearest(rows, among).tolist() == pytest.approx(expected, abs=1e-5)


def test_an_honest_generator_is_not_suspected():
    train, held_out, fresh = cloud(1, 400), cloud(2, 300), cloud(3, 200)
    found = leakage(fresh.x, train, held_out, Key.of(0))
    assert not found.suspicious
    assert found.membership_auc == pytest.approx(0.5, abs=0.06)
    assert found.closer_to_train == pytest.approx(0.5, abs=0.12)
    assert found.compared == 300
    assert found.copies <= 8


@pytest.mark.parametrize("noise", [0.0, 1e-3])
def test_planted_copies_of_the_training_data_are_caught(noise):
    train, held_out = cloud(1, 400), cloud(2, 300)
    stolen = train.x[:200] + noise * Key.of(9).normal(200, 6)
    found = leakage(stolen, train, held_out, Key.of(0))
    assert found.suspicious
    assert found.membership_auc > 0.6
    assert found.copies == 200
    assert found.closer_to_train > 0.6
    assert found.to_train < found.to_held_out


def test_a_few_copies_among_honest_examples_are_counted():
    train, held_out = cloud(1, 400), cloud(2, 300)
    mixed = torch.cat([cloud(3, 100).x, train.x[:20]])
    found = leakage(mixed, train, held_out, Key.of(0))
    assert found.copies >= 20
    assert found.suspicious


def test_copies_are_looked_for_among_all_training_examples():
    train, held_out = cloud(1, 4000), cloud(2, 50)
    # With 50 held-out examples only 50 members are compared; the stolen one is found all the same.
    assert leakage(train.x[3999:], train, held_out, Key.of(0)).copies == 1
    assert copies(held_out.x + 100, train.x, held_out.x) == 0


def test_the_margin_is_that_of_chance():
    """Three standard errors of the AUC under chance: the formula against simulation."""
    truth = torch.cat([torch.ones(60), torch.zeros(60)])
    from fedalloy.tasks.metrics.ranking import auroc

    drawn = [
        float(auroc(Key.of(seed).uniform(120), truth, torch.zeros(120, dtype=torch.int64), 1)[0]) for seed in range(600)
    ]
    spread = torch.tensor(drawn).std()
    found = leakage(cloud(3, 50).x, cloud(1, 60), cloud(2, 60), Key.of(0))
    assert found.margin / 3 == pytest.approx(float(spread), rel=0.15)
    assert found.margin == pytest.approx(3 * math.sqrt(121 / (12 * 60 * 60)))


def test_leakage_without_held_out_examples_is_refused():
    with pytest.raises(DataError, match="test_fraction"):
        leakage(cloud(1, 5).x, cloud(1, 9), Examples(torch.zeros(0, 6), torch.zeros(0).long()), Key.of(0))


def test_as_many_real_examples_as_synthetic_ones_of_every_class():
    train = cloud(1, 100, classes=4)
    y = torch.tensor([0] * 3 + [2] * 40 + [3])
    found = matched(train, y, Key.of(0))
    assert torch.bincount(found.y, minlength=4).tolist() == [3, 0, 25, 1]
    assert len(found.x.unique(dim=0)) == 29


def test_features_tell_the_classes_apart_and_are_named():
    train, test = cloud(1, 300), cloud(2, 100)
    found = features_of_real(train, test, 2, None, Key.of(0))
    assert "trained here on real data" in found.name
    assert found.accuracy is not None
    assert found.accuracy > 0.95
    assert found.of(test.x).shape == (100, 64)
    near, far = (frechet_distance(found.of(some.x), found.of(test.x)) for some in (train, Examples(-train.x, train.y)))
    assert far > 10 * near


class Means(torch.nn.Module):
    """Stands in for Inception: the mean of every channel, and that it got what it was promised."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.shape[1] == 3
        assert x.shape[2] == 299
        return x.flatten(2).mean(2)


def test_features_of_a_torchscript_file(tmp_path):
    path = tmp_path / "network.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch would rather have its newer formats, which this file is not
        torch.jit.script(Means()).save(str(path))
    found = features_of_file(path, (-1.0, 1.0))
    grey = torch.stack([torch.full((1, 8, 8), -1.0), torch.full((1, 8, 8), 0.5)])
    assert torch.allclose(found.of(grey), torch.tensor([[0.0] * 3, [0.75] * 3]), atol=1e-6)
    assert found.name == "the network in network.pt"
    (tmp_path / "other.pt").write_bytes(b"no such thing")
    with pytest.raises(DataError, match="not a TorchScript file"):
        features_of_file(tmp_path / "other.pt", (0.0, 1.0))
    with pytest.raises(DataError, match="there is no file"):
        features_of_file(tmp_path / "nowhere.pt", (0.0, 1.0))
    with pytest.raises(DataError, match="declared range"):
        features_of_file(path, None)


@pytest.fixture(scope="module")
def trained():
    """FedCVAE on rows of two classes, a few rounds."""
    data = cloud(5, 300)
    task = make_task(
        Dataset(data.x, data.y, 2), {"kind": "cvae_rows", "width": 16, "latent": 2}, clients=3, classifier="logistic"
    )
    config = RunConfig(rounds=8, engine="loop", evaluate_every=8, classifier=QUICK)
    return run(algorithms.fedcvae(lr=0.02, batch_size=16), task, config)[0].trained


def test_a_whole_verdict(trained):
    x, y = samples_of(trained, 10)
    found = quality(trained, x, y)
    said = json.loads(json.dumps(found.to_json()))
    assert (said["count"], said["per_class"], said["round"]) == (20, 10.0, 8)
    assert said["synthetic_accuracy"] > 0.8
    assert said["real_accuracy"] > 0.8
    assert said["clients_accuracy"]["lowest"] <= said["clients_accuracy"]["mean"]
    assert said["frechet_real"] > 0
    assert said["leakage"]["suspicious"] is False
    params = sum(leaf.numel() for leaf in trained.shared["params"].values())
    assert said["wire"] == {"samples": 20 * 6 * 4, "upload": 4 * params, "download": 4 * params, "classifier": 14 * 4}


def test_a_compressed_upload_is_reported_as_it_travels(trained):
    packed = replace(trained.fed.algorithm, wire=(TopK(0.1),))
    said = wire_bytes(replace(trained, fed=replace(trained.fed, algorithm=packed)), torch.zeros(1))
    numbers = sum(leaf.numel() for leaf in trained.shared["params"].values())
    assert said["upload"] == int(numbers * 0.1) * (4 + (1 if numbers <= 256 else 2))


def test_worse_samples_get_worse_numbers(trained):
    x, y = samples_of(trained, 10)
    good, bad = quality(trained, x, y), quality(trained, x - 20, y)
    assert bad.frechet > 10 * good.frechet
    swapped = quality(trained, x, 1 - y)
    assert swapped.synthetic_accuracy < 0.3 < good.synthetic_accuracy
    assert swapped.frechet == pytest.approx(good.frechet)


def test_the_training_data_themselves_are_no_synthetic_set(trained):
    own = trained.fed.task.train
    assert quality(trained, own.x[:40], own.y[:40]).leakage.suspicious


def test_a_method_that_makes_nothing_is_refused():
    task = make_task("digits", clients=2)
    ending, _ = run(algorithms.fedavg(), task, RunConfig(rounds=1, engine="loop"))
    with pytest.raises(SpecError, match="makes no synthetic samples: run fedevg"):
        samples_of(ending.trained, 3)
