"""The pathological split: sort by label, cut into shards, assign a few to each client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedalloy.core.errors import DataError, SpecError
from fedalloy.core.keys import Key
from fedalloy.core.registry import register
from fedalloy.tasks.partitions.base import Partition, check_supply

Deal = Literal["random", "stride"]


@register("partition", "shards")
@dataclass(frozen=True)
class Shards(Partition):
    """``clients * per_client`` equal shards of the examples sorted by label, or by a quantity; every example is used.

    ``deal = "random"`` shuffles the examples of a label and assigns shards at random. ``"stride"`` keeps the order of
    the data and gives client i the shards i, i + K, i + 2K, ...; nothing is random.
    """

    per_client: int = 2
    deal: Deal = "random"

    def __post_init__(self) -> None:
        if self.per_client < 1:
            raise SpecError(f"shards: per_client = {self.per_client} must be at least 1")

    def assign(self, labels: Tensor, clients: int, key: Key, owner: Tensor | None = None) -> list[Tensor]:
        if labels.dim() != 1:
            raise DataError(
                f"partition 'shards' sorts examples by label, and theirs have shape {tuple(labels.shape[1:])}, which "
                "has no order; use iid, sizes, power_law, lognormal or natural"
            )
        check_supply("shards", len(labels), clients, self.per_client)
        chance = self.deal == "random"
        mixed = key.fold("within").permutation(len(labels)) if chance else torch.arange(len(labels))
        order = mixed[labels[mixed].argsort(stable=True)]
        shards = order.tensor_split(clients * self.per_client)
        turn = key.fold("deal").permutation(len(shards)) if chance else torch.arange(len(shards))
        hands = turn.reshape(self.per_client, clients).T.tolist()
        return [torch.cat([shards[shard] for shard in hand]).sort().values for hand in hands]
