"""The client of the Flower runner; a module of its own, because Ray's workers import it by name."""

from __future__ import annotations

import os
from functools import lru_cache

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor
from torch.nn import functional

from benchmarks.models import model_of
from benchmarks.peers.runners.turns import Load

app = ClientApp()


@lru_cache(1)
def examples() -> tuple[Load, Tensor, Tensor]:
    """All clients' examples, read once by every actor."""
    torch.set_num_threads(1)
    load = Load.read(os.environ["PEERS_FOLDER"])
    x, y = load.data()
    return load, torch.from_numpy(x), torch.from_numpy(y)


@app.train()
def train(message: Message, context: Context) -> Message:
    """One epoch of a client."""
    load, x, y = examples()
    rows = load.rows(int(context.node_config["partition-id"]))
    x, y, model = x[rows], y[rows], model_of(load.name)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=load.lr)
    for some in torch.randperm(load.examples).split(load.batch):
        optimizer.zero_grad()
        functional.cross_entropy(model(x[some]), y[some]).backward()
        optimizer.step()
    metrics = MetricRecord({"num-examples": load.examples})
    return Message(
        content=RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message
    )
