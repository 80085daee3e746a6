"""Nodes whose own code is hostile or broken: their data function runs on them and may change anything there."""

from __future__ import annotations

from typing import Any

import torch

from fedalloy.flower.protocol import tensor_messages
from fedalloy.flower.protocol.tensor_messages import TensorMessage


def patient_names() -> Any:
    raise RuntimeError("cannot read the record of Jane Doe")


def data() -> tuple[Any, Any]:
    """Honest data of the shape that the tests' recipes expect."""
    from tests.flower.shares import share

    return share(1)


def _tampering(change: Any) -> tuple[Any, Any]:
    """From here on this process changes every contribution before it is sent."""
    from fedalloy.flower.node import answer as node

    honest = tensor_messages.pack

    def tampered(message: TensorMessage, **_: Any) -> Any:
        return honest(TensorMessage(message.header, change(message.parts)) if message.parts else message)

    setattr(node, "as_records", tampered)  # noqa: B010
    return data()


def nan() -> tuple[Any, Any]:
    return _tampering(
        lambda parts: {
            part: {name: leaf * torch.nan for name, leaf in leaves.items()} for part, leaves in parts.items()
        }
    )


def wrong_shapes() -> tuple[Any, Any]:
    return _tampering(
        lambda parts: {part: {name: leaf.reshape(-1)[1:] for name, leaf in leaves.items()}
                       for part, leaves in parts.items()}
    )  # fmt: skip


def two_hundred_megabytes() -> tuple[Any, Any]:
    big = torch.zeros(50_000_000)
    return _tampering(lambda parts: {part: {**leaves, next(iter(leaves)): big} for part, leaves in parts.items()})
