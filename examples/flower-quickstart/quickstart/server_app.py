"""The server half."""

import numpy as np
from flwr.app import Array, ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from quickstart.task import new_model

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train for some rounds and keep the model."""
    initial = ArrayRecord({name: Array(leaf) for name, leaf in new_model().items()})
    strategy = FedAvg()
    result = strategy.start(grid=grid, initial_arrays=initial, num_rounds=int(context.run_config["num-server-rounds"]))
    if context.run_config["output"]:
        np.savez(str(context.run_config["output"]), **{name: array.numpy() for name, array in result.arrays.items()})
