"""Label skew and quantity skew together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedalloy.core.keys import Key
from fedalloy.core.registry import register
from fedalloy.tasks.partitions.base import Partition, class_totals, deal_by_class
from fedalloy.tasks.partitions.manifest import Manifest
from fedalloy.tasks.partitions.margins import fill, fit, floored

Keep = Literal["labels", "sizes"]
_LEAK = 1e-3


@register("partition", "skewed")
@dataclass(frozen=True)
class Skewed(Partition):
    """The label mix of one rule with the sizes of another.

    ``label`` defines each client's mix of classes, ``quantity`` its number of examples. Examples are then assigned by
    class: the table of counts is the one nearest (in relative entropy) to "size times mix" among those that use no
    example twice. The two rules may conflict (a very large client of a rare class); ``keep`` decides which one holds.
    ``labels``: a client never gets a class that its label rule did not give it, may fall short of its size, and
    examples may stay unused. ``sizes``: sizes are met exactly, with other classes if necessary.
    """

    label: Partition
    quantity: Partition
    keep: Keep = "labels"

    def clients_for(self, owner: Tensor | None) -> int | None:
        made = self.label.clients_for(owner)
        return self.quantity.clients_for(owner) if made is None else made

    def assign(self, labels: Tensor, clients: int, key: Key, owner: Tensor | None = None) -> list[Tensor]:
        totals = class_totals(labels, "skewed")
        by_label = self.label.assign(labels, clients, key.fold("label"), owner)
        by_size = self.quantity.assign(labels, clients, key.fold("quantity"), owner)
        counts = Manifest.of(by_label, labels, len(totals)).class_counts
        sizes = torch.tensor([len(rows) for rows in by_size])
        return deal_by_class(self._table(counts, sizes, totals), labels, key.fold("deal"))

    def _table(self, counts: Tensor, sizes: Tensor, totals: Tensor) -> Tensor:
        mix = counts / counts.sum(1, keepdim=True).clamp(min=1)
        if self.keep == "sizes":
            mix = mix + _LEAK * totals / totals.sum()
        table = fit(mix, sizes, totals, cover=False)
        # A client that might get nothing after rounding starts with one example of its most frequent class.
        poor = (table.floor().sum(1) < 2).unsqueeze(1)
        first = torch.nn.functional.one_hot(counts.argmax(1), counts.shape[1]) * poor
        return fill(floored(table * ~poor, first, totals), table, sizes, totals)
