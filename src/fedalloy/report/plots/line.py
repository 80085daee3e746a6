"""The loss on the straight line between the federated and the local model of a client."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedalloy.core import aspects, tree
from fedalloy.core.errors import SpecError
from fedalloy.experiment.recipe import reopen
from fedalloy.experiment.trained import Trained
from fedalloy.report.plots.canvas import Options
from fedalloy.tasks.evaluation import Model, evaluate_models


def along_the_line(trained: Trained, metric: str, points: int, clients: int) -> tuple[Tensor, Tensor]:
    """Positions from 0 (federated) to 1 (local) and every client's value there, ``[points]`` and ``[points, K]``."""
    if not aspects.is_personalised(trained.fed.algorithm.solver):
        raise SpecError("the clients of this run have no personal model, so there is no line to draw")
    task, places = trained.fed.task, torch.linspace(0, 1, points, dtype=torch.float64)
    ids = trained.fed.root.fold("line").choice(task.population, min(clients, task.population))
    values = []
    for some in ids.split(max(1, trained.at_once // 2)):
        block, ends = task.data("test", some), list(zip(*_ends(trained, some), strict=True))
        at = [[between(*pair, float(place)) for pair in ends] for place in places]
        values.append(torch.stack([evaluate_models(task.objective, models, block, (metric,))[metric] for models in at]))
    return places, torch.cat(values, 1)


def between(one: Model, other: Model, share: float) -> Model:
    """The model ``share`` of the way from one to another; buffers of the nearer one."""
    params = tree.map_leaves(lambda a, b: torch.lerp(a, b, share), one[0], other[0])
    return params, (one if share < 0.5 else other)[1]


def _ends(trained: Trained, ids: Tensor) -> tuple[list[Model], list[Model]]:
    """Federated and local models; where a method does not mix two, the shared and the personal one."""
    if aspects.is_mixable(trained.fed.algorithm.solver):
        return trained.models(ids, 0.0), trained.models(ids, 1.0)
    shared = (trained.shared["params"], trained.shared["buffers"])
    return [shared] * len(ids), trained.models(ids)


def draw(axes: Any, runs: Sequence[Path], options: Options) -> None:
    """The mean over clients, a band of one standard deviation, every client as a thin line."""
    trained, metric = reopen(runs[0]), options.metric or "loss"
    places, values = along_the_line(trained, metric, options.points, options.clients)
    values = values[:, ~values.isnan().any(0)]
    mean, spread = values.mean(1), values.std(1, correction=0)
    axes.plot(places.numpy(), values.numpy(), color="0.8", linewidth=0.5)
    axes.fill_between(places.numpy(), (mean - spread).numpy(), (mean + spread).numpy(), alpha=0.3)
    axes.plot(places.numpy(), mean.numpy(), label=f"mean of {values.shape[1]} clients, ± one standard deviation")
    axes.set(xlabel="from the federated (0) to the local model (1)", ylabel=f"{metric} on the client's test part")
    axes.set_title(f"round {trained.round}")
    axes.legend()
