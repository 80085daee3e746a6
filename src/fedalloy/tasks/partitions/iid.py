"""Random parts of equal size."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedalloy.core.keys import Key
from fedalloy.core.registry import register
from fedalloy.tasks.partitions.base import Partition, check_supply, deal_in_order
from fedalloy.tasks.partitions.margins import apportion


@register("partition", "iid")
@dataclass(frozen=True)
class Iid(Partition):
    """Shuffle, then cut into equal parts (sizes differ by at most one); every example is used."""

    def assign(self, labels: Tensor, clients: int, key: Key, owner: Tensor | None = None) -> list[Tensor]:
        check_supply("iid", len(labels), clients)
        return deal_in_order(key.permutation(len(labels)), apportion(torch.ones(clients), len(labels)))
