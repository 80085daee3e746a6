"""A node that a test can hold in the middle of a round: the file ``gate`` in its folder says which round is the last
that it answers for the time being. Its data function runs on it and changes it in this way."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

from fedalloy.flower.protocol.orders import ReceivedOrder
from fedalloy.flower.protocol.tensor_messages import TensorMessage

# The process of a node works in its store.
GATE, HELD = Path("../gate"), Path("../held")


def data() -> tuple[Any, Any]:
    """The first client's share; from now on this process looks at the gate before it answers."""
    from fedalloy.flower.node import answer as node
    from tests.flower.shares import share

    honest = vars(node)["answer"]

    def held(order: ReceivedOrder, *rest: Any) -> TensorMessage:
        round = getattr(order.head, "round", None) or 0
        while round > _allowed():
            HELD.write_text(str(round))
            time.sleep(0.05)
        return honest(order, *rest)

    if honest.__name__ != held.__name__:
        setattr(node, "answer", held)  # noqa: B010
    return share(0)


def _allowed() -> float:
    try:
        return float(GATE.read_text())
    except FileNotFoundError:
        return math.inf
