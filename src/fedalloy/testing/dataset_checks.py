"""Checks of data set loaders."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from fedalloy.core.inputs import leaves
from fedalloy.core.keys import Key
from fedalloy.experiment.fit import fit
from fedalloy.methods.published import fedavg
from fedalloy.tasks.assembly import make_task
from fedalloy.tasks.datasets.base import Dataset, DatasetLoader
from fedalloy.testing.comparing import differences

COHORT = 5
"""Clients of a trial round: enough to combine something, few enough for large data."""


def same_again(loader: DatasetLoader) -> Iterator[str]:
    """The same key gives the same examples."""
    first, second = (_columns(loader.load(Key.of(1))) for _ in range(2))
    yield from (f"a second load with the same key differs: {place}" for place in differences(second, first))


def bounds(loader: DatasetLoader) -> Iterator[str]:
    """Features are within their declared bounds, to which generative methods keep their samples."""
    data = loader.load(Key.of(1))
    if data.bounds is None:
        return
    low, high = min(float(x.min()) for x in leaves(data.x)), max(float(x.max()) for x in leaves(data.x))
    if low < data.bounds[0] or high > data.bounds[1]:
        yield f"features range from {low:g} to {high:g}, declared bounds are {data.bounds[0]:g} to {data.bounds[1]:g}"


def learns(loader: DatasetLoader) -> Iterator[str]:
    """Two rounds with the default model run, with finite losses."""
    task = make_task(loader)
    few = min(COHORT, task.population)
    done = fit(fedavg(lr=0.01), task, rounds=2, cohort=few, engine="loop", evaluate_every=2, evaluate_clients=few)
    for row in done.rounds():
        if row["train_loss"] is None or not math.isfinite(row["train_loss"]):
            yield f"round {row['round']}: the training loss is {row['train_loss']}"


CHECKS = {"same again": same_again, "bounds": bounds, "learns": learns}


def _columns(data: Dataset) -> dict[str, Any]:
    """The fields of a data set, comparable one by one."""
    found = dict(vars(data))
    return {**found, "test": None if data.test is None else vars(data.test)}
