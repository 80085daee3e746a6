"""pfl-research: ``FederatedAveraging`` on its ``SimulatedBackend``, with PyTorch."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import nn
from torch.nn import functional

from benchmarks.models import model_of
from benchmarks.peers.runners.turns import Load, Turns, sample

FOREVER = 10**6


class Trained(nn.Module):
    """A model with the two methods that pfl asks for; metrics are never computed."""

    def __init__(self, workload: str) -> None:
        super().__init__()
        self.net = model_of(workload)

    def loss(self, x: Any, y: Any, eval: bool = False) -> Any:
        return functional.cross_entropy(self.net(x), y)

    def metrics(self, x: Any, y: Any) -> dict[str, Any]:
        return {}


class TakesTurns(TrainingProcessCallback):
    """Tells the turns about the end of every iteration."""

    def __init__(self, turns: Turns, net: nn.Module) -> None:
        self.turns, self.net = turns, net

    def after_central_iteration(self, metrics: Any, model: Any, *, central_iteration: int) -> tuple[bool, Any]:
        self.turns.round_done(lambda: {name: leaf.detach().numpy() for name, leaf in self.net.named_parameters()})
        return False, Metrics()


def cohorts(load: Load) -> Any:
    """Called for one client at a time; no client twice in a cohort."""
    generator, waiting = np.random.default_rng(0), []

    def one() -> int:
        if not waiting:
            waiting.extend(sample(generator, load))
        return waiting.pop()

    return one


def main() -> None:
    load = Load.read(sys.argv[1])
    turns = Turns(load, "pfl", torch.set_num_threads)
    x, y = (torch.from_numpy(part) for part in load.data())

    def dataset(client: int) -> Dataset:
        rows = load.rows(client)
        return Dataset((x[rows], y[rows]))

    module = Trained(load.name)
    module.net.load_state_dict({name: torch.from_numpy(leaf) for name, leaf in load.initial().items()})
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    data = FederatedDataset(dataset, cohorts(load))
    algorithm = NNAlgorithmParams(
        central_num_iterations=FOREVER, evaluation_frequency=FOREVER, train_cohort_size=load.cohort, val_cohort_size=0
    )
    local = NNTrainHyperParams(local_batch_size=load.batch, local_num_epochs=1, local_learning_rate=load.lr)
    turns.begin()
    FederatedAveraging().run(
        algorithm, SimulatedBackend(data, data), model, local, callbacks=[TakesTurns(turns, module.net)],
        send_metrics_to_platform=False,
    )  # fmt: skip


if __name__ == "__main__":
    main()
