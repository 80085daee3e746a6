"""Plans of local epochs: shuffled batches of every client's examples. Small plans of cohorts with the same sizes share
everything but their permutations."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from fedalloy.core.keys import Key
from fedalloy.core.types import Plan
from fedalloy.core.written import writes_to

_KEPT_SLOTS = 1 << 18
"""Larger schedules are not kept: their memory would be noticed, and their cost is not."""


def epoch_plan(sizes: Tensor, epochs: Tensor, batch_size: int | None, keys: Key | None, leftover: str = "keep") -> Plan:
    """Batches for a block of clients; a client's batches do not depend on the other clients of the block.

    >>> plan = epoch_plan(torch.tensor([3, 1]), torch.tensor([1, 2]), 2, None)
    >>> plan.steps.tolist(), plan.index[0].tolist()
    ([2, 2], [[0, 1], [2, 0]])
    >>> epoch_plan(torch.tensor([3]), torch.tensor([1]), 2, None, "merge").index[0].tolist()
    [[0, 1, 2]]
    """
    return planned(tuple(sizes.tolist()), tuple(epochs.tolist()), batch_size, keys, leftover)


def planned(
    sizes: tuple[int, ...], epochs: tuple[int, ...], batch_size: int | None, keys: Key | None, leftover: str = "keep"
) -> Plan:
    """The same from plain numbers."""
    schedule = _schedule(sizes, epochs, batch_size, leftover)
    if keys is None:
        return Plan(torch.where(schedule.mask, schedule.place, 0), schedule.mask, schedule.phase)
    order = keys.each(schedule.labels).permutation(schedule.longest, valid=schedule.valid)
    if schedule.straight:
        return Plan(order.reshape(schedule.mask.shape), schedule.mask, schedule.phase)
    index = order.flatten(1).gather(1, schedule.address).reshape(schedule.mask.shape)
    return Plan(index if schedule.whole else torch.where(schedule.mask, index, 0), schedule.mask, schedule.phase)


@dataclass(frozen=True)
class _Schedule:
    """Everything about a plan but its permutations. ``place`` and ``mask`` are ``[C, S, B]``; ``address`` is the place
    in all permutations of a client, one after another; ``valid`` are the sizes for each of them, None if all clients
    have ``longest`` examples; ``labels`` are the numbers of the epochs. ``whole``: every slot is used; ``straight``:
    and a plan is its permutations, in order. ``versions`` are those of mask and phase, by which torch counts writes."""

    place: Tensor
    mask: Tensor
    phase: Tensor
    address: Tensor
    valid: Tensor | None
    labels: Tensor
    longest: int
    whole: bool
    straight: bool
    versions: tuple[int, int]


def _schedule(sizes: tuple[int, ...], epochs: tuple[int, ...], batch_size: int | None, leftover: str) -> _Schedule:
    """The schedule of a cohort. Small ones are kept: cohorts of clients with equal sizes repeat in every round, and
    building one takes longer than a small round."""
    longest = max(sizes, default=1)
    slots = len(sizes) * max(longest, 1) * max(1, max(epochs, default=1))
    if slots > _KEPT_SLOTS:
        return _kept_schedule.__wrapped__(sizes, epochs, batch_size, leftover)
    found = _kept_schedule(sizes, epochs, batch_size, leftover)
    if (writes_to(found.mask), writes_to(found.phase)) == found.versions:
        return found
    _kept_schedule.cache_clear()  # somebody wrote into a plan
    return _kept_schedule(sizes, epochs, batch_size, leftover)


@lru_cache(8)
def _kept_schedule(
    all_sizes: tuple[int, ...], all_epochs: tuple[int, ...], batch_size: int | None, leftover: str
) -> _Schedule:
    sizes, epochs = torch.tensor(all_sizes), torch.tensor(all_epochs)
    longest, most = max(1, int(sizes.max())), max(1, int(epochs.max()))
    width = min(batch_size or longest, longest)
    single, per_epoch = _single(sizes, batch_size, leftover), steps_per_epoch(sizes, batch_size, leftover)
    merged = single is not None and leftover == "merge" and bool(single[per_epoch > 0].any())
    steps = torch.arange(max(1, int((per_epoch * epochs).max())))
    epoch = steps // per_epoch.clamp(min=1).unsqueeze(1)
    turn = steps % per_epoch.clamp(min=1).unsqueeze(1)
    place = turn.unsqueeze(2) * width + torch.arange(width + merged)
    used = sizes if single is None else torch.where(per_epoch > 0, sizes - single * (leftover == "drop"), 0)
    mask = (epoch < epochs.unsqueeze(1)).unsqueeze(2) & (place < used.reshape(-1, 1, 1))
    if merged:  # the extra slot holds the example that is merged into the last batch
        mask[:, :, width] &= turn == per_epoch.unsqueeze(1) - 1
    # Padding steps of small clients get any example.
    address = epoch.clamp(max=most - 1).unsqueeze(2) * longest + place.clamp(max=longest - 1)
    valid = None if bool((sizes == longest).all()) else sizes.unsqueeze(1).expand(-1, most)
    whole = bool(mask.all())
    straight = whole and address.shape[1:].numel() == most * longest
    phase, address = torch.zeros_like(epoch), address.flatten(1)
    versions = writes_to(mask), writes_to(phase)
    return _Schedule(place, mask, phase, address, valid, torch.arange(most), longest, whole, straight, versions)


def all_epochs(epochs: Tensor, own: int, second: int) -> tuple[Tensor, Tensor]:
    """The epochs of the first phase and of both; -1 means the solver's ``own`` number."""
    first = torch.where(epochs < 0, own, epochs)
    # A device's epochs are those of the first phase; with 0 of them it takes no step at all.
    return first, torch.where(first > 0, first + second, first) if second else first


@lru_cache(8)
def count_steps(
    sizes: tuple[int, ...], epochs: tuple[int, ...], own: int, second: int, batch_size: int | None, leftover: str
) -> Tensor:
    """How many steps every client takes; kept for the same reason as the schedule."""
    whole = all_epochs(torch.tensor(epochs), own, second)[1]
    return steps_per_epoch(torch.tensor(sizes), batch_size, leftover) * whole


def steps_per_epoch(sizes: Tensor, batch_size: int | None, leftover: str = "keep") -> Tensor:
    """How many batches ``epoch_plan`` makes of each client's examples.

    >>> steps_per_epoch(torch.tensor([0, 3, 4]), 3).tolist()
    [0, 1, 2]
    """
    whole = (sizes > 0).long() if batch_size is None else (sizes + batch_size - 1) // batch_size
    single = _single(sizes, batch_size, leftover)
    return whole if single is None else whole - single


def _single(sizes: Tensor, batch_size: int | None, leftover: str) -> Tensor | None:
    """1 for clients whose last batch has a single example that is not kept, else 0; None if there is no such client."""
    if leftover in ("keep", "auto") or batch_size == 1:
        return None
    found = sizes == 1 if batch_size is None else sizes % batch_size == 1
    return found.long() if bool(found.any()) else None
