"""Replays ``metrics``: calibration, ranking, top-k, tails, inequality, FID, label noise and CDF transforms."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import get_args

import torch
from torch import Tensor, nn

from fedalloy.core.keys import Key
from fedalloy.core.registry import register
from fedalloy.core.types import Examples
from fedalloy.methods.weightings.cdf import CdfName, respond
from fedalloy.tasks.evaluation import evaluate_pool
from fedalloy.tasks.metrics.averages import TopKAccuracy
from fedalloy.tasks.metrics.calibration import ExpectedCalibrationError, MaximumCalibrationError
from fedalloy.tasks.metrics.frechet import frechet_distance
from fedalloy.tasks.metrics.metric import Metric
from fedalloy.tasks.metrics.ranking import Auroc
from fedalloy.tasks.metrics.summary import best, gini, parity_gap, worst
from fedalloy.tasks.noise import transition
from fedalloy.tasks.objective import ModuleObjective
from fedalloy.testing.vectors.files import Values, VectorCase
from fedalloy.testing.vectors.replay import Fields


class Echo(nn.Module):
    """A model that returns its input, so that a file's logits reach the metrics through evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x


@register("conform", "metrics")
def metrics(case: VectorCase) -> Iterator[Fields]:
    """Label-noise matrices from their settings, everything else from the inputs of a round."""
    for inputs in case.rounds:
        parts = [score(case, inputs) for given, score in SCORES.items() if given in inputs]
        parts += [noise(case.params)] if "noise" in case.params else []
        yield {name: value for part in parts for name, value in part.items()}


def noise(params: Values) -> Fields:
    """Which label becomes which."""
    return {"matrix": transition(params["noise"], params["classes"], params["ratio"])}


def predictions(case: VectorCase, inputs: Values) -> Fields:
    """Calibration and top-k of logits over classes."""
    bins = case.params.settings(bins="bins")
    chosen: dict[str, Metric] = {"ece": ExpectedCalibrationError(**bins), "mce": MaximumCalibrationError(**bins)}
    chosen |= {f"top{k}": TopKAccuracy(k) for k in _numbers_after("top", case)}
    return _evaluated(inputs.tensor("logits", 2), inputs.tensor("labels", 1), chosen)


def ranking(case: VectorCase, inputs: Values) -> Fields:
    """AUROC of one score per example."""
    return _evaluated(inputs.tensor("binary_scores", 1), inputs.tensor("binary_labels", 1), {"auroc": Auroc()})


def clients(case: VectorCase, inputs: Values) -> Fields:
    """Tails, gaps and inequality of one score per client."""
    scores, counts = inputs.tensor("client_scores", 1), inputs.tensor("client_counts", 1)
    fractions = case.params.tensor("fractions", 1).tolist()
    percents = _numbers_after("parity_gap_", case)
    return {
        "gini": gini(scores),
        "tails": [[worst(scores, f), best(scores, f)] for f in fractions],
        "tails_weighted": [[worst(scores, f, counts), best(scores, f, counts)] for f in fractions],
        "parity_gap": parity_gap(scores),
        **{f"parity_gap_{percent}": parity_gap(scores, percent / 100) for percent in percents},
    }


def clouds(case: VectorCase, inputs: Values) -> Fields:
    """The distance between two sets of features."""
    return {"fid": frechet_distance(inputs.tensor("features_a", 2), inputs.tensor("features_b", 2))}


def transforms(case: VectorCase, inputs: Values) -> Fields:
    """Losses through every distribution function, before they are scaled."""
    losses = inputs.tensor("losses", 1)
    return {name: respond(losses, name, 0.0, 1.0) for name in get_args(CdfName)}


SCORES: dict[str, Callable[[VectorCase, Values], Fields]] = {
    "logits": predictions,
    "binary_scores": ranking,
    "client_scores": clients,
    "features_a": clouds,
    "losses": transforms,
}


def _evaluated(outputs: Tensor, labels: Tensor, chosen: dict[str, Metric]) -> dict[str, float]:
    objective = ModuleObjective(Echo, dtype=torch.float64)
    return evaluate_pool(objective, *objective.init(Key.of(0)), Examples(outputs, labels.long()), chosen)


def _numbers_after(prefix: str, case: VectorCase) -> list[int]:
    """The numbers in the names of the expected fields: ``top3`` asks for 3."""
    found = (re.fullmatch(rf"{prefix}(\d+)", name) for name in case.wanted)
    return sorted(int(match[1]) for match in found if match)
