"""The loss on a plane through the global model, which shows how flat the minimum is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedalloy.core import tree
from fedalloy.core.errors import SpecError
from fedalloy.core.keys import Key
from fedalloy.core.types import Examples, Tree
from fedalloy.experiment.recipe import reopen
from fedalloy.experiment.trained import Trained
from fedalloy.report.plots.canvas import Options
from fedalloy.tasks.evaluation import evaluate_pool

MOST_EXAMPLES = 2000


def direction(params: Tree, key: Key) -> Tree:
    """A random direction in which every leaf has the norm of the model's leaf, so that planes of models of different
    scale can be compared (after Li et al. 2018, arXiv:1712.09913, by leaf instead of by filter)."""
    drawn = {name: key.fold(name).normal(*leaf.shape, dtype=torch.float64).to(leaf) for name, leaf in params.items()}
    return tree.map_leaves(lambda d, leaf: d * (leaf.norm() / d.norm().clamp(min=1e-12)), drawn, params)


def on_the_plane(trained: Trained, metric: str, points: int, reach: float = 1.0) -> tuple[Tensor, Tensor]:
    """Positions from ``-reach`` to ``reach`` and the global model's value at each pair of them, ``[points,
    points]``."""
    task, key = trained.fed.task, trained.fed.root.fold("plane")
    params, buffers = trained.shared["params"], trained.shared["buffers"]
    first, second = direction(params, key.fold("first")), direction(params, key.fold("second"))
    pool, places = _examples(trained, key), torch.linspace(-reach, reach, points, dtype=torch.float64)
    values = torch.empty(points, points, dtype=torch.float64)
    for row, up in enumerate(places.tolist()):
        for column, right in enumerate(places.tolist()):
            moved = tree.add(tree.add(params, first, right), second, up)
            values[row, column] = evaluate_pool(task.objective, moved, buffers, pool, (metric,))[metric]
    return places, values


def _examples(trained: Trained, key: Key) -> Examples:
    pool = trained.fed.task.global_test
    if pool is None:
        raise SpecError("this run's data have no global test set to score the plane on")
    if len(pool) <= MOST_EXAMPLES:
        return pool
    rows = key.fold("examples").choice(len(pool), MOST_EXAMPLES).to(pool.y.device)
    return Examples(pool.x[rows], pool.y[rows])


def draw(axes: Any, runs: Sequence[Path], options: Options) -> None:
    """Contours; the cross is the global model."""
    trained, metric = reopen(runs[0]), options.metric or "loss"
    places, values = on_the_plane(trained, metric, options.points)
    drawn = axes.contourf(places.numpy(), places.numpy(), values.numpy(), levels=20)
    axes.figure.colorbar(drawn, ax=axes, label=f"{metric} on the global test set")
    axes.plot([0], [0], marker="+", color="white", markersize=12)
    axes.set(
        xlabel="first direction", ylabel="second direction", title=f"around the global model, round {trained.round}"
    )
