"""Label skew by a fixed number of classes per client."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedalloy.core.errors import DataError, SpecError
from fedalloy.core.keys import Key
from fedalloy.core.registry import register
from fedalloy.tasks.partitions.base import Partition, check_supply, class_totals, deal_by_class
from fedalloy.tasks.partitions.margins import apportion, fill, fit, floored


@register("partition", "classes")
@dataclass(frozen=True)
class Classes(Partition):
    """Every client gets exactly ``per_client`` classes; sizes are as equal as the classes allow.

    The number of clients with a class is proportional to its size, up to rounding. If ``clients * per_client`` is at
    least the number of classes, every class has a client and every example is used; otherwise only the largest classes
    are used.
    """

    per_client: int = 2

    def __post_init__(self) -> None:
        if self.per_client < 1:
            raise SpecError(f"classes: per_client = {self.per_client} must be at least 1")

    def assign(self, labels: Tensor, clients: int, key: Key, owner: Tensor | None = None) -> list[Tensor]:
        totals = class_totals(labels, "classes")
        check_supply("classes", len(labels), clients, self.per_client)
        holds = choose_classes(totals, clients, self.per_client, key.fold("classes"))
        return deal_by_class(covering_table(holds, totals), labels, key.fold("deal"))


def choose_classes(totals: Tensor, clients: int, per_client: int, key: Key) -> Tensor:
    """Which client gets which class, ``[K, classes]`` of 0 and 1, ``per_client`` ones in each row."""
    present = int((totals > 0).sum())
    if per_client > present:
        raise DataError(
            f"{per_client} classes per client asked for, the data have {present}; ask for at most {present}"
        )
    places = _places(totals, clients, per_client)
    share = totals / places.clamp(min=1)
    free, load = torch.full((clients,), per_client), torch.zeros(clients, dtype=torch.float64)
    holds = torch.zeros(clients, len(totals), dtype=torch.int64)
    turn = key.fold("turn").permutation(len(totals))
    for label in turn[share[turn].argsort(descending=True, stable=True)].tolist():
        takers = _neediest(free, load, key.fold("takers", label))[: int(places[label])]
        holds[takers, label] = 1
        free[takers] -= 1
        load[takers] += share[label]
    return holds


def _neediest(free: Tensor, load: Tensor, key: Key) -> Tensor:
    """Clients by free places (most first, so that all places can be filled), then by load; ties in random order."""
    order = key.permutation(len(free))
    order = order[load[order].argsort(stable=True)]
    return order[free[order].argsort(descending=True, stable=True)]


def covering_table(holds: Tensor, totals: Tensor) -> Tensor:
    """Distribute every chosen class completely: rows as equal as possible, at least 1 where ``holds`` is 1."""
    held = totals * (holds.sum(0) > 0)
    sizes = apportion(torch.ones(len(holds)), int(held.sum()))
    table = fit(holds, sizes, held, cover=True)
    # First fill up to the wanted sizes; then distribute the rest of each class, beyond these sizes.
    shared = fill(floored(table, holds, held).T, table.T, held, sizes)
    return fill(shared, table.T, held, torch.full_like(sizes, int(held.sum()))).T


def _places(totals: Tensor, clients: int, per_client: int) -> Tensor:
    """How many clients get each class: by its size, at least 1 if possible, at most one per client and per example."""
    most = totals.clamp(max=clients)
    needed = clients * per_client
    if int(most.sum()) < needed:
        raise DataError(
            f"{clients} clients with {per_client} classes each need {needed} places, the classes have room for "
            f"{int(most.sum())} (one per client and example); ask for fewer clients or classes"
        )
    # Webster's rule: the next place goes to the class with the largest n_c / (places + 1/2), all first places before
    # any second one.
    place = torch.arange(clients)
    claim = totals.unsqueeze(1) / (place + 0.5).to(torch.float64)
    claim[:, 0] += float(totals.sum()) * (totals > 0)
    claim = claim.masked_fill(place >= most.unsqueeze(1), -1.0)
    winners = claim.flatten().argsort(descending=True, stable=True)[:needed]
    return torch.bincount(winners // clients, minlength=len(totals))
