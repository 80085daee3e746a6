"""A federation of which every client shows only a part of its training examples."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedalloy.core import inputs
from fedalloy.core.fraction import fractions_of
from fedalloy.core.keys import Key
from fedalloy.core.protocols import DataPart
from fedalloy.core.task import TaskAround
from fedalloy.core.types import Block


@dataclass(frozen=True, eq=False)
class Portion(TaskAround):
    """The task with ``fraction`` of every client's training examples, at least one, drawn once by key."""

    fraction: float
    key: Key

    def data(self, part: DataPart, ids: Tensor) -> Block:
        """The task's own, except for the training part."""
        if part != "train":
            return self.task.data(part, ids)
        pool = self._chosen
        return Block(pool.x, pool.y, pool.start[ids], pool.size[ids])

    @cached_property
    def _chosen(self) -> Block:
        whole = self.task.data("train", torch.arange(self.population))
        most = whole.size.cpu()
        size = fractions_of(most, self.fraction).round().to(torch.int64).clamp(min=1).minimum(most)
        rows = [
            int(whole.start[k]) + self.key.fold(k).permutation(int(whole.size[k]))[: int(size[k])].sort().values
            for k in range(self.population)
        ]
        chosen = torch.cat(rows).to(inputs.device_of(whole.y))
        return Block(inputs.take(whole.x, chosen), inputs.take(whole.y, chosen), size.cumsum(0) - size, size)
