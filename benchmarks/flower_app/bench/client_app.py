"""One epoch of SGD on this node's share of the digits."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from sklearn.datasets import load_digits
from torch import nn

app = ClientApp()


def network(hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))


@app.train()
def train(message: Message, context: Context) -> Message:
    torch.set_num_threads(1)
    share, of = int(context.node_config["partition-id"]), int(context.node_config["num-partitions"])
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x[share::of], dtype=torch.float32) / 16, torch.tensor(y[share::of])
    model = network(int(context.run_config["hidden"]))
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for some in torch.randperm(len(y)).split(64):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[some]), y[some]).backward()
        optimizer.step()
    metrics = MetricRecord({"num-examples": len(y)})
    return Message(
        content=RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message
    )
