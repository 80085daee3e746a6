"""The ClientApp, the same for every run: receives an order and returns the node's answer.

Flower starts a process for every message, so nothing heavy is imported here.
"""

from __future__ import annotations

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedalloy.core.errors import FedalloyError
from fedalloy.flower.config import NodeConfig
from fedalloy.flower.prefork import NotCarriedOut, launcher
from fedalloy.flower.protocol.header import plain_record, signed

app = ClientApp()


def handle(message: Message, context: Context) -> Message:
    """Answer a message; a wrong configuration of the node is reported in the answer."""
    try:
        store = NodeConfig.read(context.node_config).store
        content = launcher().respond(store, context.node_config, message.content)
    except FedalloyError as error:
        reason = f"this node is not configured properly: {error}"
        content = plain_record(signed(status="refused", reason=reason))
    except NotCarriedOut as error:
        content = plain_record(signed(status="failed", reason=str(error)))
    return Message(content, reply_to=message)


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
    """The node's identity."""
    return handle(message, context)
