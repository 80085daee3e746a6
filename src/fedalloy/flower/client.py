"""The ClientApp, the same for every run: it takes an order, lets this node carry it out, and answers."""

from __future__ import annotations

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

import fedalloy
from fedalloy.core.errors import FedalloyError
from fedalloy.engines.flower_letters import FORMAT, Letter, Malformed, pack, unpack
from fedalloy.flower.config import NodeConfig
from fedalloy.flower.node import answer, log
from fedalloy.flower.policy import Policy

app = ClientApp()


def handle(message: Message, context: Context) -> Message:
    """Answer a message; a node that is configured wrongly says so."""
    try:
        config = NodeConfig.read(context.node_config)
        policy = Policy.read(config.policy)
    except FedalloyError as error:
        log.error("%s", error)
        return _refusal(message, f"this node is not configured properly: {error}")
    try:
        letter = unpack(message.content, policy.max_megabytes * 1e6)
    except Malformed as error:
        return _refusal(message, f"the server's letter cannot be read: {error}")
    if config.threads:
        torch.set_num_threads(config.threads)
    return Message(pack(answer(letter, config, policy)), reply_to=message)


def _refusal(message: Message, reason: str) -> Message:
    head = {"format": FORMAT, "fedalloy": fedalloy.__version__, "status": "refused", "reason": reason}
    return Message(pack(Letter(head)), reply_to=message)


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
