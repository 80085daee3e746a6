"""A federation in one process that keeps every message, to be compared with what is recorded."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from flwr.app import Message, RecordDict

from fedalloy.core import tree
from fedalloy.experiment.records.reading import read_run
from fedalloy.flower.protocol.tensor_messages import TensorMessage, unpack
from tests.flower.fake import FakeGrid, federation


@dataclass
class Watched(FakeGrid):
    """Keeps what was sent in both directions; ``lose`` names a round before which a node loses its disk."""

    down: list[tuple[int, TensorMessage]] = field(default_factory=list)
    up: list[tuple[int, TensorMessage]] = field(default_factory=list)
    lose: dict[int, int] = field(default_factory=dict)

    def _reply(self, message: Message) -> Message | None:
        node, tensor_message = message.metadata.dst_node_id, unpack(message.content)
        _check_raw(message.content, tensor_message)
        self.down.append((node, tensor_message))
        if tensor_message.header.get("kind") == "train" and self.lose.get(node) == tensor_message.header["round"]:
            del self.lose[node]
            shutil.rmtree(self.nodes[node].config["fedalloy-store"])
        reply = super()._reply(message)
        if reply is not None:
            self.up.append((node, unpack(reply.content)))
            _check_raw(reply.content, self.up[-1][1])
        return reply


def _bytes(tensor_message: TensorMessage) -> int:
    return sum(tree.nbytes(leaves) for leaves in tensor_message.parts.values())


def _check_raw(content: RecordDict, tensor_message: TensorMessage) -> None:
    """The bytes in the records are those of the tensors, each filled up to a multiple of eight."""
    record = content.config_records["fedalloy"]
    raw = len(record.get("tensors", b""))  # type: ignore[arg-type]
    raw += sum(len(array.data) for arrays in content.array_records.values() for array in arrays.values())
    leaves = [leaf for tree_ in tensor_message.parts.values() for leaf in tree_.values()]
    assert raw == sum(math.ceil(leaf.numel() * leaf.element_size() / 8) * 8 for leaf in leaves)


def watched(place: Path) -> Watched:
    return Watched(federation(place).nodes)


def recorded(folder: Path) -> list[tuple[int, int]]:
    return [(row["bytes_down"], row["bytes_up"]) for row in read_run(folder).rounds()]


def per_round(grid: Watched, rounds: int) -> list[tuple[int, int]]:
    """The tensor bytes in the messages of each round, down and up; what is only measured does not count."""
    sums = [[0, 0] for _ in range(rounds)]
    round = 0
    for _, tensor_message in grid.down:
        if tensor_message.header.get("kind") in ("train", "cross"):
            round = tensor_message.header.get("round") or round
            sums[round - 1][0] += _bytes(tensor_message)
    ups = [tensor_message for _, tensor_message in grid.up if tensor_message.header.get("stats")]
    for place, tensor_message in enumerate(ups):
        sums[place // (len(ups) // rounds)][1] += _bytes(tensor_message)
    return [(down, up) for down, up in sums]
