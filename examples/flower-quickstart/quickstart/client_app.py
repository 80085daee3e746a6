"""The client half: trains and evaluates what it receives."""

from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from quickstart.task import Model, evaluate, load_data, train

app = ClientApp()


def received(message: Message) -> Model:
    """The model in a message."""
    return {name: array.numpy() for name, array in message.content["arrays"].items()}


@app.train()
def train_model(message: Message, context: Context) -> Message:
    """One round of local training; ``train_loss`` is that of the received model, ``train_acc`` of the trained one."""
    data, _ = load_data(int(context.node_config["partition-id"]))
    model = received(message)
    loss, _ = evaluate(model, data)
    model = train(model, data, int(context.run_config["local-epochs"]), float(context.run_config["learning-rate"]))
    _, accuracy = evaluate(model, data)
    metrics = MetricRecord({"train_loss": loss, "train_acc": accuracy, "num-examples": len(data[1])})
    arrays = ArrayRecord({name: Array(leaf) for name, leaf in model.items()})
    return Message(content=RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


@app.evaluate()
def evaluate_model(message: Message, context: Context) -> Message:
    """How good the received model is here."""
    _, data = load_data(int(context.node_config["partition-id"]))
    loss, accuracy = evaluate(received(message), data)
    metrics = MetricRecord({"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(data[1])})
    return Message(content=RecordDict({"metrics": metrics}), reply_to=message)
