"""The interface of partition rules, and their shared helpers."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from fedalloy.core.errors import DataError
from fedalloy.core.keys import Key


class Partition(ABC):
    """Assigns examples to clients: a frozen dataclass, registered with ``@register("partition", name)``."""

    @abstractmethod
    def assign(self, labels: Tensor, clients: int, key: Key, owner: Tensor | None = None) -> list[Tensor]:
        """One sorted tensor of row numbers per client; no row is assigned twice.

        ``owner`` is the natural client of every row, for the rules that use it.
        """

    def clients_for(self, owner: Tensor | None) -> int | None:
        """The number of clients that the rule defines; None if it must be given."""
        return None


def group(owner: Tensor, clients: int) -> list[Tensor]:
    """The rows of every client, from the client of every row (-1: none).

    >>> group(torch.tensor([1, 0, -1, 1]), 2)
    [tensor([1]), tensor([0, 3])]
    """
    order = owner.argsort(stable=True)
    sizes = torch.bincount(owner[owner >= 0], minlength=clients)
    return list(order[len(owner) - int(sizes.sum()) :].split(sizes.tolist()))


def deal_in_order(order: Tensor, sizes: Tensor) -> list[Tensor]:
    """Cut the row numbers ``order`` into consecutive parts of these sizes, each sorted."""
    return [hand.sort().values for hand in order[: int(sizes.sum())].split(sizes.tolist())]


def deal_by_class(table: Tensor, labels: Tensor, key: Key) -> list[Tensor]:
    """Assign ``table[k, c]`` rows of class c to client k, drawn without replacement."""
    owner = torch.full_like(labels, -1)
    everyone = torch.arange(len(table))
    for label in range(table.shape[1]):
        rows = (labels == label).nonzero().flatten()
        rows = rows[key.fold(label).permutation(len(rows))]
        takers = everyone.repeat_interleave(table[:, label])
        owner[rows[: len(takers)]] = takers
    return group(owner, len(table))


def class_totals(labels: Tensor, rule: str) -> Tensor:
    """The number of examples of each class; an error if labels are not classes."""
    if labels.is_floating_point() or labels.dim() != 1:
        raise DataError(
            f"partition '{rule}' deals by class but the labels are {labels.dtype} of shape {tuple(labels.shape)}; "
            "use iid, sizes, power_law, lognormal or natural"
        )
    return torch.bincount(labels)


def check_supply(rule: str, examples: int, clients: int, each: int = 1) -> None:
    """Refuse less than one client, and more clients than there are examples for."""
    if clients < 1:
        raise DataError(f"partition '{rule}': {clients} clients asked for; at least 1 is needed")
    if clients * each > examples:
        raise DataError(
            f"partition '{rule}' is impossible: {clients} clients with at least {each} examples each need "
            f"{clients * each}, the data have {examples}; ask for at most {examples // each} clients or less for each"
        )


def check_clients(rule: str, clients: int, made: int) -> None:
    """Refuse a number of clients other than the one that the rule defines."""
    if clients != made:
        raise DataError(f"partition '{rule}' makes {made} clients but {clients} were asked for; leave the number out")
