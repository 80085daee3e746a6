"""The natural clients of the data."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedalloy.core.errors import DataError
from fedalloy.core.keys import Key
from fedalloy.core.registry import register
from fedalloy.tasks.partitions.base import Partition, group


@register("partition", "natural")
@dataclass(frozen=True)
class Natural(Partition):
    """Every natural owner is a client; if fewer clients are requested, that many owners are drawn at random."""

    def clients_for(self, owner: Tensor | None) -> int | None:
        return None if owner is None else len(_owners(owner))

    def assign(self, labels: Tensor, clients: int, key: Key, owner: Tensor | None = None) -> list[Tensor]:
        if owner is None:
            raise DataError(
                "partition 'natural' needs a dataset that knows the client of every example; use another rule"
            )
        owners = _owners(owner)
        if not 1 <= clients <= len(owners):
            raise DataError(f"partition 'natural': the data have {len(owners)} clients, {clients} were asked for")
        chosen = owners[key.choice(len(owners), clients)]
        number = torch.full((int(owners.max()) + 2,), -1, dtype=torch.int64)  # one more: index -1 gives -1
        number[chosen] = torch.arange(clients)
        return group(number[owner], clients)


def _owners(owner: Tensor) -> Tensor:
    owners: Tensor = owner[owner >= 0].unique()
    return owners
