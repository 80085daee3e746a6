"""All inputs, by name."""

from __future__ import annotations

from benchmarks.fuzz import (
    checkpoints,
    data_folders,
    http_requests,
    node_messages,
    orders,
    recipes,
    run_folders,
    strategy_replies,
)
from benchmarks.fuzz.driving import Way

_FLOWER = (node_messages.WAY, strategy_replies.WAY, orders.WAY)
_OTHERS = (http_requests.WAY, checkpoints.WAY, run_folders.WAY, recipes.WAY, data_folders.WAY)
WAYS: dict[str, Way] = {way.name: way for way in (*_FLOWER, *_OTHERS)}


def ready() -> None:
    """Import what the inputs need, so that the forked processes need not."""
    import flwr.serverapp.strategy  # noqa: F401
    import pydantic  # noqa: F401
    import torch

    import fedalloy
    import fedalloy.experiment.recipe

    torch.set_num_threads(1)
    fedalloy.fit("fedavg", fedalloy.task(), rounds=1, cohort=1)
    for way in WAYS.values():
        way.examples()
