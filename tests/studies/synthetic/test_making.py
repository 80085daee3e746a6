"""A little training makes samples that a classifier of real digits takes for what they are meant to be."""

from __future__ import annotations

import pytest
import torch

from fedalloy import algorithms
from fedalloy.core.aspects import Generative
from fedalloy.core.keys import Key
from fedalloy.engines.loop import Loop
from fedalloy.experiment.config import RunConfig
from fedalloy.experiment.driver import run
from fedalloy.experiment.machinery import make_engine
from fedalloy.experiment.round import Federation
from fedalloy.experiment.starting import begin
from fedalloy.methods.classifier import ClassifierTraining, train_classifier
from fedalloy.studies.synthetic.features import FeatureClassifier
from fedalloy.tasks.assembly import make_task
from fedalloy.tasks.datasets.base import Dataset
from fedalloy.tasks.datasets.digits import Digits
from fedalloy.tasks.objective import ModuleObjective

CLASSES = 3
CASES = [
    ("fedcvae", {"kind": "cvae_rows", "width": 48, "latent": 4}, 15, {"lr": 3e-3}),
    ("fedcgan", {"kind": "acgan_rows", "width": 48, "latent": 8}, 25, {"lr": 2e-3}),
    ("fedcvae", {"kind": "cvae", "width": 8, "latent": 4}, 8, {"lr": 3e-3}),
]


@pytest.fixture(scope="module")
def digits():
    """Zeros, ones and twos, and a judge who knows them."""
    whole = Digits(flat=False).load(Key.of(0))
    rows = whole.y < CLASSES
    data = Dataset(whole.x[rows], whole.y[rows], CLASSES, bounds=whole.bounds)
    judge = ModuleObjective(lambda: FeatureClassifier((1, 8, 8), CLASSES, picture=True))
    params, buffers = train_classifier(judge, data.x, data.y, Key.of(1), Loop(), ClassifierTraining(epochs=20))
    said = judge.outputs(params, buffers, data.x).argmax(1)
    assert float((said == data.y).double().mean()) > 0.97
    return data, lambda x: judge.outputs(params, buffers, x).argmax(1)


@pytest.mark.parametrize(("name", "model", "rounds", "local"), CASES, ids=["vae rows", "gan rows", "vae pictures"])
def test_samples_are_taken_for_what_they_are_meant_to_be(digits, name, model, rounds, local):
    data, judge = digits
    task = make_task(data, model, {"kind": "dirichlet", "alpha": 1.0}, clients=3, classifier="logistic")
    quick = ClassifierTraining(epochs=1)
    config = RunConfig(rounds=rounds, engine="loop", evaluate_every=rounds, classifier=quick)
    algorithm = algorithms.named(name, batch_size=16, **local)
    before = begin(Federation(algorithm, task, make_engine(config), config, Key.of(config.seed)))["shared"]
    after = run(algorithm, task, config)[0].trained.shared
    right = []
    for shared in (before, after):
        maker = algorithm.solver.aspect(Generative)
        assert maker is not None
        x, y = maker.synthesise(shared, Key.of(2), 40, task.objective)
        assert x.shape == (CLASSES * 40, 1, 8, 8)
        right.append(float((judge(x) == y).double().mean()))
    assert right[0] < 0.5
    assert right[1] > 0.8, right


def test_engines_make_the_same_model_of_pictures(digits):
    """Convolutions, batch statistics, dropout and clients of different sizes: the loop and vmap agree."""
    data, _ = digits
    task = make_task(data, {"kind": "acgan", "width": 4, "latent": 6}, {"kind": "dirichlet", "alpha": 1.0}, 3)
    made = []
    for engine in ("loop", "batched"):
        config = RunConfig(rounds=1, engine=engine, classifier=ClassifierTraining(epochs=1))
        ending, _ = run(algorithms.fedcgan(batch_size=32), task, config)
        made.append(ending.trained.shared)
    for part in ("params", "buffers"):
        for leaf, value in made[0][part].items():
            assert torch.allclose(value, made[1][part][leaf], atol=2e-4), leaf
