"""Some clients iid, the others with few classes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedalloy.core.errors import SpecError
from fedalloy.core.keys import Key
from fedalloy.core.registry import register
from fedalloy.tasks.partitions.base import (
    Partition,
    check_clients,
    check_supply,
    class_totals,
    deal_by_class,
    deal_in_order,
)
from fedalloy.tasks.partitions.classes import choose_classes, covering_table
from fedalloy.tasks.partitions.margins import apportion, fill, fit, floored


@register("partition", "mixed")
@dataclass(frozen=True)
class Mixed(Partition):
    """Clients 0 .. iid-1 are iid, the next ``non_iid`` have ``classes`` classes each.

    Every client gets ``samples`` examples (fewer if its classes run out) and the rest is unused. Without ``samples``
    the iid clients get N / K examples each, and the others all that is left of their classes, in sizes as equal as the
    classes allow; what is left of a class that none of them has is unused.
    """

    iid: int
    non_iid: int
    classes: int = 2
    samples: int | None = None

    def __post_init__(self) -> None:
        if self.iid < 0 or self.non_iid < 0 or self.iid + self.non_iid < 1:
            raise SpecError(f"mixed: iid = {self.iid} and non_iid = {self.non_iid} must be counts, one above 0")
        if self.classes < 1 or (self.samples is not None and self.samples < self.classes):
            raise SpecError(f"mixed: needs classes >= 1 and samples >= classes, not {self.classes} and {self.samples}")

    def clients_for(self, owner: Tensor | None) -> int | None:
        return self.iid + self.non_iid

    def assign(self, labels: Tensor, clients: int, key: Key, owner: Tensor | None = None) -> list[Tensor]:
        check_clients("mixed", clients, self.iid + self.non_iid)
        class_totals(labels, "mixed")
        check_supply("mixed", len(labels), clients, self.samples or self.classes)
        sizes = self._iid_sizes(len(labels))
        order = key.fold("iid").permutation(len(labels))
        plain = deal_in_order(order, sizes)
        rest = order[int(sizes.sum()) :].sort().values
        return plain + ([rest[rows] for rows in self._few_classes(labels[rest], key)] if self.non_iid else [])

    def _iid_sizes(self, examples: int) -> Tensor:
        if self.samples is not None:
            return torch.full((self.iid,), self.samples)
        return apportion(torch.ones(self.iid + self.non_iid), examples)[: self.iid]

    def _few_classes(self, labels: Tensor, key: Key) -> list[Tensor]:
        totals = class_totals(labels, "mixed")
        holds = choose_classes(totals, self.non_iid, self.classes, key.fold("classes"))
        table = covering_table(holds, totals) if self.samples is None else _sized_table(holds, totals, self.samples)
        return deal_by_class(table, labels, key.fold("deal"))


def _sized_table(holds: Tensor, totals: Tensor, samples: int) -> Tensor:
    sizes = torch.full((len(holds),), samples)
    table = fit(holds, sizes, totals, cover=False)
    return fill(floored(table, holds, totals), table, sizes, totals)
