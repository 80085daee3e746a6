"""Flower's simulation: ``FedAvg`` and ``run_simulation`` with Ray, one actor for each core."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from benchmarks.peers.runners import flower_client
from benchmarks.peers.runners.turns import Load, Turns

FOREVER = 10**6
server_app = ServerApp()


@server_app.main()
def serve(grid: Grid, context: Context) -> None:
    """Rounds without end; the hook for the server's evaluation takes the turns."""
    load = Load.read(os.environ["PEERS_FOLDER"])
    turns = Turns(load, "flwr")

    def hook(round: int, arrays: ArrayRecord) -> None:
        if round == 0:
            turns.begin()
        else:
            turns.round_done(lambda: {name: array.numpy() for name, array in arrays.items()})

    strategy = FedAvg(
        fraction_train=load.cohort / load.clients, fraction_evaluate=0.0, min_train_nodes=load.cohort,
        min_evaluate_nodes=0, min_available_nodes=load.clients,
    )  # fmt: skip
    initial = ArrayRecord({name: torch.from_numpy(leaf) for name, leaf in load.initial().items()})
    strategy.start(grid=grid, initial_arrays=initial, num_rounds=FOREVER, evaluate_fn=hook)


def main() -> None:
    os.environ["PEERS_FOLDER"] = sys.argv[1]
    logging.getLogger("flwr").setLevel(logging.WARNING)
    backend: dict[str, Any] = {
        "init_args": {"num_cpus": os.cpu_count(), "num_gpus": 0, "include_dashboard": False},
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
    }
    run_simulation(server_app, flower_client.app, num_supernodes=Load.read(sys.argv[1]).clients, backend_config=backend)


if __name__ == "__main__":
    main()
