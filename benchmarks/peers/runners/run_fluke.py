"""fluke: ``FedAVG`` with one ``Client`` object per client."""

from __future__ import annotations

import sys

import torch
from torch import nn

# fluke imports torchvision, which refuses to load beside a torch without CUDA unless these operators are declared.
_declared = torch.library.Library("torchvision", "FRAGMENT")
for _name in ("nms", "qnms"):
    _declared.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from fluke import DDict, FlukeENV  # noqa: E402
from fluke.algorithms.fedavg import FedAVG  # noqa: E402
from fluke.client import Client  # noqa: E402
from fluke.config import OptimizerConfigurator  # noqa: E402
from fluke.data import FastDataLoader  # noqa: E402
from fluke.server import Server  # noqa: E402
from fluke.utils import FederationObserver  # noqa: E402

from benchmarks.models import CLASSES, model_of  # noqa: E402
from benchmarks.peers.runners.turns import Load, Turns  # noqa: E402

FOREVER = 10**6


class TakesTurns(FederationObserver):
    """Tells the turns about the end of every round."""

    def __init__(self, turns: Turns, server: Server) -> None:
        self.turns, self.server = turns, server

    def end_round(self, round: int) -> None:
        self.turns.round_done(lambda: {name: leaf.numpy() for name, leaf in self.server.model.state_dict().items()})


def client_of(load: Load, index: int, x: torch.Tensor, y: torch.Tensor) -> Client:
    rows = load.rows(index)
    data = FastDataLoader(x[rows], y[rows], num_labels=CLASSES, batch_size=load.batch, shuffle=True)
    optimizer = OptimizerConfigurator(DDict(name="SGD", lr=load.lr))
    return Client(index, data, None, optimizer, nn.CrossEntropyLoss(), local_epochs=1)


def main() -> None:
    load = Load.read(sys.argv[1])
    turns = Turns(load, "fluke-fl", torch.set_num_threads)
    FlukeENV().set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
    FlukeENV().set_seed(0)
    model = model_of(load.name)
    model.load_state_dict({name: torch.from_numpy(leaf) for name, leaf in load.initial().items()})
    x, y = (torch.from_numpy(part) for part in load.data())
    clients = [client_of(load, index, x, y) for index in range(load.clients)]
    server = Server(model, None, clients, weighted=True)
    algorithm = FedAVG(load.clients, None, {}, clients=clients, server=server)
    algorithm.set_callbacks(TakesTurns(turns, server))
    turns.begin()
    algorithm.run(FOREVER, load.cohort / load.clients)


if __name__ == "__main__":
    main()
