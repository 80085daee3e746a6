"""Replays ``fedadp`` and ``fedlayerwise``: one rule, its angles and weights by client or by layer."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fedalloy.core.algorithm import ServerStep
from fedalloy.core.registry import register
from fedalloy.methods.published import named
from fedalloy.testing.vectors.cohorts import Arrived, arrive, context, flat, serve
from fedalloy.testing.vectors.files import VectorCase
from fedalloy.testing.vectors.replay import Fields


@register("conform", "fedadp")
def fedadp(case: VectorCase) -> Iterator[Fields]:
    """Angles of whole models; the file's ``lr`` cancels out of them."""
    return _replayed(case, "fedadp")


@register("conform", "fedlayerwise")
def fedlayerwise(case: VectorCase) -> Iterator[Fields]:
    """Angles and weights layer by layer, ``[layers, clients]``."""
    return _replayed(case, "fedlayerwise")


def _replayed(case: VectorCase, method: str) -> Iterator[Fields]:
    algorithm, state = named(method, **case.params.settings(alpha="alpha")), None
    for number, inputs in enumerate(case.rounds, 1):
        arrived = arrive(case, inputs)
        step = serve(algorithm, state, arrived, context(case, number))
        state = step.state
        yield {
            "weights": arrived.weights(step),
            "instant_angle": _angles(step, "instant_angle", arrived),
            "smoothed_angle": _angles(step, "smoothed_angle", arrived),
            "w": flat(state["shared"]["params"]),
        }


def _angles(step: ServerStep, name: str, arrived: Arrived) -> Tensor:
    """``[C]``, or ``[layers, C]`` in the order of the model."""
    if name in step.info:
        return arrived.to_file(step.info[name])
    return torch.stack([arrived.to_file(step.info[f"{name}.{layer}"]) for layer in arrived.received])
