"""Quantity skew by given sizes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedalloy.core.errors import DataError, SpecError
from fedalloy.core.keys import Key
from fedalloy.core.registry import register
from fedalloy.tasks.partitions.base import Partition, check_clients, deal_in_order


@register("partition", "sizes")
@dataclass(frozen=True)
class Sizes(Partition):
    """Client k gets ``sizes[k]`` examples, drawn iid; the rest is unused."""

    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.sizes or min(self.sizes) < 1:
            raise SpecError(f"sizes: give one number of at least 1 per client, not {list(self.sizes)}")

    def clients_for(self, owner: Tensor | None) -> int | None:
        return len(self.sizes)

    def assign(self, labels: Tensor, clients: int, key: Key, owner: Tensor | None = None) -> list[Tensor]:
        check_clients("sizes", clients, len(self.sizes))
        if sum(self.sizes) > len(labels):
            raise DataError(
                f"partition 'sizes' asks for {sum(self.sizes)} examples in all, the data have {len(labels)}"
            )
        return deal_in_order(key.permutation(len(labels)), torch.tensor(self.sizes))
