"""What a typed user writes, without a single narrowing or cast: `make lint` checks it with mypy, strictly."""

from __future__ import annotations

from pathlib import Path
from typing import assert_type

import matplotlib.axes
import numpy as np
import pandas
from torch import Tensor, nn

import fedalloy
from fedalloy import Algorithm, Comparison, RunRecord, RunResult, SavedResult, algorithms
from fedalloy.experiment.driver import RoundEvent
from fedalloy.methods import AaggffD, Momentum, Prox


class Logs(fedalloy.Callback):
    def on_round_end(self, event: RoundEvent) -> None:
        print(event.progress.round, event.score()[1])


def from_data_to_predictions(x: np.ndarray, y: np.ndarray, ids: np.ndarray) -> Tensor:
    task = fedalloy.task((x, y), "logistic", ids=ids, test_fraction=0.3, seed=1)
    assert_type(task.population, int)
    assert_type(task.notices, tuple[str, ...])
    print(task.describe(), task.kind, task.encoding, task.objective, task.metrics)
    result = fedalloy.fit(algorithms.fedavg(lr=0.1), task, rounds=2, callbacks=[Logs(), fedalloy.EarlyStopping()])
    assert_type(result, RunResult)
    assert_type(result.last("accuracy")["mean"], float)
    assert_type(result.module(), nn.Module)
    assert_type(result.personal_module(0), nn.Module)
    result.save("saved", clients=[0])
    saved = fedalloy.load("saved")
    assert_type(saved, SavedResult)
    assert_type(saved.module(nn.Linear(4, 2)), nn.Linear)
    assert_type(saved.predict(nn.Linear(4, 2), x, rows_of=0), Tensor)
    result.save("for some", rows_of=[0])
    return result.predict(x, client=0, rows_of=1) + result.predict(result.prepare(x, rows_of=1), prepared=True)


def from_algorithms_to_a_table(folder: Path) -> pandas.DataFrame:
    fair = Algorithm(Prox(0.01, lr=0.1), AaggffD(), Momentum())
    task = fedalloy.task("digits", clients=4)
    comparison = fedalloy.compare(task, {"fair": fair, "fedavg": "fedavg"}, folder, seeds=[0, 1], rounds=2)
    assert_type(comparison, Comparison)
    assert_type(comparison.conclusion, str)
    assert_type(comparison.report(), Path)
    axes: matplotlib.axes.Axes = comparison.plot()
    axes.set_title(", ".join(row.name for row in comparison.rows))
    runs = fedalloy.read_runs(folder)
    assert_type(fedalloy.read_run(folder / "fair" / "seed-0"), RunRecord)
    print(len(list(runs)), fedalloy.unfold("fedavg", task, rounds=2, iterations=1))
    frame: pandas.DataFrame = comparison.to_pandas()
    return frame
