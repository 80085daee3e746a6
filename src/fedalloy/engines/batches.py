"""The batches of a block, read from the pool of all clients' examples."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from fedalloy.core import inputs
from fedalloy.core.blocks import Prepared
from fedalloy.core.inputs import Inputs
from fedalloy.engines.profile import phase

# How much is copied out of the pool at a time: on a CPU little enough to be still in the cache when it is used.
_GATHER_BYTES = {"cpu": 4 << 20}
_GATHER_BYTES_ELSEWHERE = 256 << 20


def batches(block: Prepared) -> Iterator[tuple[Inputs, Inputs]]:
    """``x, y`` of every step for the running clients, ``[c, B, ...]``."""
    clients = len(block)
    for running, (x, y) in zip(block.running, padded_batches(block), strict=True):
        first = slice(running)
        yield (x, y) if running == clients else (inputs.take(x, first), inputs.take(y, first))


def padded_batches(block: Prepared) -> Iterator[tuple[Inputs, Inputs]]:
    """``x, y`` of every step for all clients: one indexed read for as many steps as fit into the limit above."""
    x, y = block.data.x, block.data.y
    step = inputs.bytes_each(x) * block.rows[:1].numel()
    at_once = _GATHER_BYTES.get(inputs.device_of(x).type, _GATHER_BYTES_ELSEWHERE) // max(1, step)
    for some in block.rows.split(max(1, min(len(block.rows), at_once))):
        with phase("data"):
            xs, ys = _gathered(x, some), _gathered(y, some)
        yield from zip(inputs.one_by_one(xs), inputs.one_by_one(ys), strict=True)


def dropout_keys(block: Prepared) -> Tensor:
    """One 64-bit key per client and step for dropout masks, ``[C, S]``, on the device of the data."""
    return block.dropout_keys().to(inputs.device_of(block.data.y))


def _gathered(x: Inputs, rows: Tensor) -> Inputs:
    flat = rows.reshape(-1)
    return inputs.each(lambda leaf: leaf.index_select(0, flat).reshape(*rows.shape, *leaf.shape[1:]), x)
