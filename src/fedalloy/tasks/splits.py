"""The training, validation and test part of each client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

from fedalloy.core.errors import SpecError
from fedalloy.core.fraction import fractions_of
from fedalloy.core.keys import Key


@dataclass(frozen=True, eq=False)
class Split:
    """The rows of one client's parts, each sorted."""

    train: Tensor
    valid: Tensor
    test: Tensor


def split(
    assignment: Sequence[Tensor],
    labels: Tensor,
    key: Key,
    *,
    test_fraction: float = 0.2,
    valid_fraction: float = 0.0,
    held_out: Tensor | None = None,
    part: Tensor | None = None,
) -> list[Split]:
    """Split every client's rows; client k's draws depend on ``key.fold("split").fold(k)`` alone.

    If the data come with a test flag (``held_out``), flagged rows are the test part and ``test_fraction`` is not
    used; a client that has only flagged rows trains on one of them. If they come with the ``part`` of every row (0
    training, 1 validation, 2 testing), it is used as it is.
    """
    check_fractions(test_fraction, valid_fraction)
    if part is not None:
        if valid_fraction and not bool((part == 1).any()):
            raise unused_share(valid_fraction)
        return [Split(*(rows[part[rows] == number] for number in range(3))) for rows in assignment]
    counts = torch.tensor([len(rows) for rows in assignment], dtype=torch.int64)
    _, valid, test = part_sizes(counts, test_fraction, valid_fraction)
    keys = key.fold("split")
    if held_out is not None:
        flags = [_never_all(held_out[rows]) for rows in assignment]
        valid = _share(counts, valid_fraction, torch.stack([(~flag).sum() for flag in flags]))
        return [_given(rows, labels[rows], flags[k], int(valid[k]), keys.fold(k)) for k, rows in enumerate(assignment)]
    return [_drawn(rows, labels[rows], int(valid[k]), int(test[k]), keys.fold(k)) for k, rows in enumerate(assignment)]


def split_client(
    client: int, labels: Tensor, key: Key, *, test_fraction: float = 0.2, valid_fraction: float = 0.0
) -> Split:
    """The split of a client that owns all of these rows, the same as :func:`split` makes for this client number."""
    check_fractions(test_fraction, valid_fraction)
    _, valid, test = part_sizes(torch.tensor([len(labels)]), test_fraction, valid_fraction)
    return _drawn(torch.arange(len(labels)), labels, int(valid[0]), int(test[0]), key.fold("split").fold(client))


def unused_share(valid_fraction: float, among: str = "") -> SpecError:
    """The error about a validation share of data that come with their parts, none of them for validation."""
    return SpecError(
        f"valid_fraction = {valid_fraction} is not used, because the data say which rows are for training and "
        f"testing{among}: give a part 'valid' as well, or leave valid_fraction out"
    )


def part_sizes(sizes: Tensor, test_fraction: float, valid_fraction: float) -> tuple[Tensor, Tensor, Tensor]:
    """The numbers of training, validation and test examples, for clients of these sizes.

    If ``test_fraction`` is positive, a client with two or more examples has at least one for testing and one for
    training; validation gets one only if a third is left.

    >>> [part.tolist() for part in part_sizes(torch.tensor([1, 2, 3, 10]), 0.2, 0.1)]
    [[1, 1, 1, 7], [0, 0, 1, 1], [0, 1, 1, 2]]
    """
    test = _share(sizes, test_fraction, sizes)
    valid = _share(sizes, valid_fraction, sizes - test)
    return sizes - test - valid, valid, test


def check_fractions(test_fraction: float, valid_fraction: float) -> None:
    """Refuse fractions that leave nothing to train on."""
    for name, share in (("test_fraction", test_fraction), ("valid_fraction", valid_fraction)):
        if not isinstance(share, Real) or isinstance(share, bool):
            raise SpecError(f"{name} must be a number of at least 0 and below 1, got {share!r}")
    if not (0 <= test_fraction < 1 and 0 <= valid_fraction < 1 and test_fraction + valid_fraction < 1):
        raise SpecError(
            f"test_fraction = {test_fraction} and valid_fraction = {valid_fraction} must be at least 0 and together "
            "below 1, so that something is left for training"
        )


def _share(sizes: Tensor, fraction: float, available: Tensor) -> Tensor:
    """The fraction in whole examples: at least 1 unless the fraction is 0, but one available example is left."""
    if fraction == 0:
        return torch.zeros_like(sizes)
    wanted = fractions_of(sizes, fraction).round().to(sizes.dtype).clamp(min=1)
    return torch.minimum(wanted, available - 1).clamp(min=0)


def _drawn(rows: Tensor, labels: Tensor, valid_size: int, test_size: int, key: Key) -> Split:
    test = _stratified(labels, torch.arange(len(rows)), test_size, key.fold("test"))
    return _given(rows, labels, test, valid_size, key)


def _given(rows: Tensor, labels: Tensor, test: Tensor, valid_size: int, key: Key) -> Split:
    valid = _stratified(labels, (~test).nonzero().flatten(), valid_size, key.fold("valid"))
    return Split(rows[~(test | valid)], rows[valid], rows[test])


def _stratified(labels: Tensor, places: Tensor, size: int, key: Key) -> Tensor:
    """Flags ``size`` of the ``places``, the same share of every class up to rounding where an example has one class.

    Systematic sampling: shuffle, sort by class, take evenly spaced places from a random start. A class with a
    single place keeps it for training if the other classes suffice.
    """
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    if size == 0:
        return chosen
    by_class = labels.dim() == 1 and not labels.is_floating_point()
    if by_class:
        places = _in_company(labels, places, size)
    places = places[key.fold("order").permutation(len(places))]
    if by_class:
        places = places[labels[places].argsort(stable=True)]
    start = float(key.fold("start").uniform(dtype=torch.float64))
    steps = ((torch.arange(size, dtype=torch.float64) + start) * (len(places) / size)).to(torch.int64)
    chosen[places[steps.clamp(max=len(places) - 1)]] = True
    return chosen


def _in_company(labels: Tensor, places: Tensor, size: int) -> Tensor:
    """The places whose class has more than one, if these suffice; otherwise all."""
    classes = labels[places]
    several = places[torch.bincount(classes)[classes] > 1]
    return several if len(several) >= size else places


def _never_all(flagged: Tensor) -> Tensor:
    """The data's test flags, without the first if nothing would be left for training."""
    flags = flagged.to(torch.bool).clone()
    if len(flags) and bool(flags.all()):
        flags[0] = False
    return flags
