"""The ClientApp, the same for every run: it passes an order to the node's resident process, and its answer back.

Flower starts a process for every message, so nothing heavy is imported here.
"""

from __future__ import annotations

import json

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

import fedalloy
from fedalloy.core.errors import FedalloyError
from fedalloy.flower.config import NodeConfig
from fedalloy.flower.resident import NoResident, ask

app = ClientApp()


def handle(message: Message, context: Context) -> Message:
    """Answer a message; a node that is configured wrongly says so."""
    try:
        store = NodeConfig.read(context.node_config).store
        content = ask(store, context.node_config, message.content)
    except FedalloyError as error:
        content = _excuse("refused", f"this node is not configured properly: {error}")
    except NoResident as error:
        content = _excuse("failed", str(error))
    return Message(content, reply_to=message)


def _excuse(status: str, reason: str) -> RecordDict:
    """An answer without the means of making one: the format of letters, written by hand."""
    header = {"format": 3, "fedalloy": fedalloy.__version__, "status": status, "reason": reason, "parts": {}}
    return RecordDict({"fedalloy": ConfigRecord({"header": json.dumps(header)})})


@app.train()
def train(message: Message, context: Context) -> Message:
    """Local work of a round."""
    return handle(message, context)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Scores on the node's own data."""
    return handle(message, context)


@app.query()
def query(message: Message, context: Context) -> Message:
    """Who the node is."""
    return handle(message, context)
