"""Accuracy against confidence: a calibrated model lies on the diagonal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedalloy.experiment.recipe import reopen
from fedalloy.experiment.trained import Trained
from fedalloy.report.plots.canvas import Options
from fedalloy.tasks.metrics.calibration import ExpectedCalibrationError
from fedalloy.tasks.metrics.metric import check_metrics, means, sums

BINS = 15


@torch.no_grad()
def confidences(trained: Trained) -> tuple[Tensor, Tensor]:
    """Confidence and hit of every client's test examples, by the client's own model."""
    task, metric = trained.fed.task, ExpectedCalibrationError(BINS)
    check_metrics(("ece",), task.kind)
    found = [torch.zeros(0, 2, dtype=torch.float64)]
    for some in torch.arange(task.population).split(trained.at_once):
        block = task.data("test", some)
        for row, model in enumerate(trained.models(some)):
            own = block.client(row)
            if len(own):
                device = next(iter(model[0].values())).device
                outputs = task.objective.outputs(*model, own.x.to(device))
                found.append(metric.evidence(task.objective, outputs, own.y.to(device)).cpu())
    both = torch.cat(found)
    return both[:, 0], both[:, 1]


def bins(confidence: Tensor, hit: Tensor, count: int = BINS) -> tuple[Tensor, Tensor, Tensor]:
    """Mean confidence, accuracy and number of examples of every bin ``(lo, hi]``; NaN where it is empty.

    >>> bins(torch.tensor([0.2, 0.9]).double(), torch.tensor([0.0, 1.0]).double(), 2)[1]
    tensor([0., 1.], dtype=torch.float64)
    """
    place = torch.bucketize(confidence.contiguous(), torch.arange(1, count, dtype=torch.float64) / count)
    inside = sums(torch.ones_like(hit), place, count)
    return means(confidence, place, count), means(hit, place, count), inside


def draw(axes: Any, runs: Sequence[Path], options: Options) -> None:
    """Bars of accuracy over bins of confidence, and how many examples each bin holds."""
    confidence, hit = confidences(reopen(runs[0]))
    said, right, inside = bins(confidence, hit)
    gap = ((said - right).abs().nan_to_num(0.0) * inside).sum() / inside.sum()
    middle = (torch.arange(BINS) + 0.5) / BINS
    axes.bar(middle.tolist(), right.nan_to_num(0.0).tolist(), width=0.9 / BINS, label="accuracy")
    axes.plot([0, 1], [0, 1], color="0.3", linestyle="--", label="perfectly calibrated")
    share = (inside / inside.sum()).tolist()
    edges = [number / BINS for number in range(BINS + 1)]
    axes.step(edges, [*share, share[-1]], where="post", color="tab:orange", label="share of examples")
    axes.set(xlabel="confidence", ylabel="accuracy", xlim=(0, 1), ylim=(0, 1))
    axes.set_title(f"all clients' test examples together: ECE {float(gap):.3f}")
    axes.legend(loc="upper left")
