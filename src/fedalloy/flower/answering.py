"""A node's answer to whatever Flower brings it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from fedalloy.core.errors import FedalloyError
from fedalloy.flower.config import NodeConfig
from fedalloy.flower.data import MakeTask, local_task
from fedalloy.flower.node import answer, log
from fedalloy.flower.policy import Policy
from fedalloy.flower.protocol.header import Malformed, plain_record, signed
from fedalloy.flower.protocol.letters import pack
from fedalloy.flower.protocol.orders import read_order

if TYPE_CHECKING:
    from flwr.app import RecordDict


def respond(content: RecordDict, node_config: Mapping[str, Any], make_task: MakeTask = local_task) -> RecordDict:
    """The answer to an order; a node that is configured wrongly says so. ``make_task`` reads the node's data."""
    try:
        config = NodeConfig.read(node_config)
        policy = Policy.read(config.policy)
    except FedalloyError as error:
        log.error("%s", error)
        return _refusal(f"this node is not configured properly: {error}")
    try:
        order = read_order(content, policy.max_megabytes * 1e6, policy.models)
    except Malformed as error:
        return _refusal(f"the server's letter cannot be read: {error}")
    except FedalloyError as error:
        log.warning("refused: %s", error)
        return _refusal(str(error))
    if config.threads:
        torch.set_num_threads(config.threads)
    return pack(answer(order, config, policy, make_task))


def _refusal(reason: str) -> RecordDict:
    return plain_record(signed(status="refused", reason=reason))
