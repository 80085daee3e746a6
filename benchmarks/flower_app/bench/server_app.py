"""Some rounds with either strategy; writes when every round began and ended."""

import json
import time
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from bench.client_app import network
from fedalloy.flower import Strategy

app = ServerApp()


def timed(strategy: Any, began: list[float], ended: list[float]) -> Any:
    """The strategy, which also records the start and end of every training round."""
    configure, aggregate = strategy.configure_train, strategy.aggregate_train

    def begin(*arguments: Any) -> Any:
        began.append(time.perf_counter())
        return configure(*arguments)

    def end(*arguments: Any) -> Any:
        result = aggregate(*arguments)
        ended.append(time.perf_counter())
        return result

    strategy.configure_train, strategy.aggregate_train = begin, end
    return strategy


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    if config["strategy"] == "flower":
        strategy: Any = FedAvg(fraction_evaluate=0.0, min_train_nodes=3, min_available_nodes=3)
    else:
        strategy = Strategy("fedavg", fraction_evaluate=0.0, min_train_nodes=3, min_available_nodes=3)
    began: list[float] = []
    ended: list[float] = []
    initial = ArrayRecord(network(int(config["hidden"])).state_dict())
    timed(strategy, began, ended).start(grid=grid, initial_arrays=initial, num_rounds=int(config["rounds"]))
    seconds = [last - first for first, last in zip(began, ended, strict=True)]
    Path(str(config["output"])).write_text(json.dumps(seconds))
