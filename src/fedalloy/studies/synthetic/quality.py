"""The quality of a synthetic set: distance to the real distribution, use for training, leakage, and bytes sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedalloy.core import tree
from fedalloy.core.errors import DataError, SpecError
from fedalloy.core.keys import Key
from fedalloy.core.packing import bytes_up
from fedalloy.core.protocols import DataPart
from fedalloy.core.traffic import nbytes, sent_to
from fedalloy.core.types import Examples, Tree
from fedalloy.engines.loop import Loop
from fedalloy.experiment.trained import Trained
from fedalloy.methods.classifier import ClassifierTraining, classifier_of, synthetic_set, train_classifier
from fedalloy.studies.synthetic.features import Features, features_of_real
from fedalloy.studies.synthetic.leakage import Leakage, leakage
from fedalloy.tasks.evaluation import evaluate_clients
from fedalloy.tasks.federation import FederatedTask
from fedalloy.tasks.metrics.frechet import frechet_distance


@dataclass(frozen=True)
class Quality:
    """The measurements of a synthetic set; ``to_json`` has everything by name.

    ``frechet`` is the Frechet distance to the whole global test set in features named by ``features``; ``frechet_real``
    is that of equally many real training examples, a lower reference for this size. ``synthetic_accuracy``
    and ``real_accuracy`` are of one and the same kind of classifier, trained on the synthetic set and on equally
    many real training examples, on the global test set; ``clients_accuracy`` is the former on every client's test part.
    """

    round: int
    per_class: float
    count: int
    features: str
    features_accuracy: float | None
    frechet: float
    frechet_real: float
    synthetic_accuracy: float
    real_accuracy: float
    clients_accuracy: Tensor
    leakage: Leakage
    wire: dict[str, int]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        own = {name: value for name, value in vars(self).items() if name not in ("clients_accuracy", "leakage")}
        clients = self.clients_accuracy[~self.clients_accuracy.isnan()]
        spread = {"mean": float(clients.mean()), "lowest": float(clients.min())} if len(clients) else {}
        return {**own, "clients_accuracy": spread, "leakage": self.leakage.to_json()}


def samples_of(trained: Trained, per_class: int) -> tuple[Tensor, Tensor]:
    """The labelled synthetic samples of a run in its current state; a method that makes none is refused."""
    fed = trained.fed
    made = synthetic_set(fed.task, fed.algorithm, trained.state, fed.root.fold("synthetic", trained.round), per_class)
    if made is None:
        raise SpecError(
            f"solver '{type(fed.algorithm.solver).__name__}' makes no synthetic samples: run fedevg, fedcgan or fedcvae"
        )
    return made


def quality(
    trained: Trained,
    x: Tensor,
    y: Tensor,
    features: Features | None = None,
    settings: ClassifierTraining | None = None,
) -> Quality:
    """Measure a run's samples against its data; needs all clients' data in one place, so it is for simulations.

    Real and synthetic examples have the same scale and preprocessing. Without ``features`` a classifier is
    trained for them on the clients' training parts.
    """
    task, key = real_data(trained), trained.fed.root.fold("quality", trained.round)
    train, common = of_population(task, "train"), task.global_test
    if common is None or not len(common):
        raise DataError("quality is measured on the global test set, and this task has none: set test_fraction above 0")
    classes = int(max(train.y.max(), common.y.max(), y.max())) + 1
    features = features or features_of_real(train, common, classes, task.bounds, key.fold("features"))
    alike = matched(train, y, key.fold("matched"))
    seen = features.of(common.x)
    score = _Scorer(trained, common, key.fold("classifier"), settings or trained.fed.config.classifier)
    accuracy, per_client = score(x, y)
    return Quality(
        round=trained.round,
        per_class=len(y) / classes,
        count=len(y),
        features=features.name,
        features_accuracy=features.accuracy,
        frechet=frechet_distance(features.of(x), seen),
        frechet_real=frechet_distance(features.of(alike.x), seen),
        synthetic_accuracy=accuracy,
        real_accuracy=score(alike.x, alike.y)[0],
        clients_accuracy=per_client,
        leakage=leakage(x, train, _held_out(task, common), key.fold("leakage")),
        wire=wire_bytes(trained, x),
    )


def real_data(trained: Trained) -> FederatedTask:
    """The run's task, whose data must be in memory."""
    task = trained.fed.task
    if not isinstance(task, FederatedTask):
        raise DataError(f"quality needs a task whose data are in memory, not a {type(task).__name__}")
    return task


def of_population(task: FederatedTask, part: DataPart) -> Examples:
    """One data part of all clients that may take part, concatenated; unseen clients come last and are left out."""
    block = task.everyone(part)
    end = int(block.size.sum())
    return Examples(block.x[:end], block.y[:end])


def matched(train: Examples, y: Tensor, key: Key) -> Examples:
    """As many real examples of every class as ``y`` has, drawn by key; all examples of a class that has fewer."""
    rows = []
    for label in y.unique().tolist():
        own = (train.y == label).nonzero().flatten()
        rows.append(own[key.fold(int(label)).permutation(len(own), device=own.device)[: int((y == label).sum())]])
    chosen = torch.cat(rows)
    return Examples(train.x[chosen], train.y[chosen])


def wire_bytes(trained: Trained, x: Tensor) -> dict[str, int]:
    """Bytes: the samples, one client's message of a round as the method sends it, and the same with the classifier as
    model; for methods that send a model the first two differ, for FedEvg they are nearly equal."""
    algorithm, shared = trained.fed.algorithm, trained.shared
    sent = {name: tree.stack([_ones(part.template(shared))]) for name, part in algorithm.parts(shared).items()}
    params, buffers = classifier_of(trained.fed.task).init(Key.of(0))
    return {
        "samples": tree.nbytes({"x": x}),
        "upload": int(bytes_up(sent, algorithm.packings, 1)[0]),
        "download": nbytes(sent_to(algorithm, shared, known=True)),
        "classifier": tree.nbytes(params) + tree.nbytes(buffers),
    }


def _ones(leaves: Tree) -> Tree:
    """An update without zeros, so that sparse encodings save nothing."""
    return tree.map_leaves(torch.ones_like, leaves)


@dataclass(frozen=True)
class _Scorer:
    """Trains a classifier on given examples: its accuracy on the global test set, and on every client's test part."""

    trained: Trained
    common: Examples
    key: Key
    settings: ClassifierTraining

    def __call__(self, x: Tensor, y: Tensor) -> tuple[float, Tensor]:
        task = self.trained.fed.task
        objective = classifier_of(task)
        params, buffers = train_classifier(objective, x, y, self.key, Loop(), self.settings)
        hits = [
            objective.hits(objective.outputs(params, buffers, some), labels).double()
            for some, labels in zip(self.common.x.split(1024), self.common.y.split(1024), strict=True)
        ]
        block = task.data("test", torch.arange(task.population))
        clients = evaluate_clients(objective, params, buffers, block, ("accuracy",))["accuracy"]
        return float(torch.cat(hits).mean()), clients


def _held_out(task: FederatedTask, common: Examples) -> Examples:
    """The clients' test parts, which have the same distribution as their training parts; else the global test set."""
    own = of_population(task, "test")
    return own if len(own) else common
