"""Tables of counts with given margins, for example examples by client (rows) and class (columns)."""

from __future__ import annotations

import torch
from torch import Tensor

_SCALINGS = 300


def apportion(weights: Tensor, total: int, minimum: int = 0) -> Tensor:
    """``minimum`` for each and the rest by weight, in whole numbers (largest remainders).

    >>> apportion(torch.tensor([3.0, 1.0, 1.0]), 10, minimum=1).tolist()
    [5, 3, 2]
    """
    rest = total - minimum * len(weights)
    share = weights.to(torch.float64) * rest / weights.sum(dtype=torch.float64)
    whole = share.floor()
    left = rest - int(whole.sum())
    whole[(share - whole).argsort(descending=True, stable=True)[:left]] += 1
    return whole.to(torch.int64) + minimum


def fit(seed: Tensor, rows: Tensor, columns: Tensor, *, cover: bool) -> Tensor:
    """Scale rows and columns of ``seed`` in turn until its margins are ``rows`` and ``columns``.

    Iterative proportional fitting: of all tables with these margins it tends to the one nearest to ``seed``
    in relative entropy, and zeros stay zero. Column sums are exactly ``columns`` with ``cover``, else at most these;
    row sums are as near as the zeros allow.
    """
    table, wanted = seed.to(torch.float64), rows.to(torch.float64)
    for _ in range(_SCALINGS):
        table = table * _ratio(wanted, table.sum(1)).unsqueeze(1)
        scale = _ratio(columns.to(torch.float64), table.sum(0))
        table = table * (scale if cover else scale.clamp(max=1.0))
        if bool(((table.sum(1) - wanted).abs() < 0.1).all()):
            break
    return table


def fill(counts: Tensor, table: Tensor, needs: Tensor, capacity: Tensor) -> Tensor:
    """Raise whole ``counts`` towards ``table`` until row sums are ``needs``, with column sums within ``capacity``.

    Counts are added only where ``table`` is positive: first one per column, largest deficit first, then as many as
    possible, largest value of ``table`` first. A row stays short if the capacity does not suffice.
    """
    given = counts.tolist()
    left = (capacity - counts.sum(0)).clamp(min=0).tolist()
    missing = (needs - counts.sum(1)).tolist()
    for row in (row for row, count in enumerate(missing) if count > 0):
        _fill_row(given[row], table[row], missing[row], left)
    return torch.tensor(given, dtype=torch.int64)


def _fill_row(given: list[int], weights: Tensor, missing: int, left: list[int]) -> None:
    lacks = weights - torch.tensor(given, dtype=torch.float64)
    for step, order in ((1, lacks), (missing, weights)):
        for column in order.argsort(descending=True, stable=True).tolist():
            taken = min(step, missing, left[column]) if float(weights[column]) > 0 else 0
            given[column] += taken
            left[column] -= taken
            missing -= taken


def floored(table: Tensor, least: Tensor, capacity: Tensor) -> Tensor:
    """``table`` rounded down but at least ``least``.

    In a column above its ``capacity``, counts that exceed ``least`` most are reduced first.
    """
    counts = torch.maximum(table.floor().to(torch.int64), least)
    for column in (counts.sum(0) > capacity).nonzero().flatten().tolist():
        for _ in range(int(counts[:, column].sum() - capacity[column])):
            counts[int((counts - least)[:, column].argmax()), column] -= 1
    return counts


def level_up(counts: Tensor, minimum: int) -> Tensor:
    """Move examples from the largest clients (from their most frequent class) to those below ``minimum``."""
    counts, sizes = counts.clone(), counts.sum(1)
    for needy in (sizes < minimum).nonzero().flatten().tolist():
        while (missing := minimum - int(sizes[needy])) > 0:
            donor = int(sizes.argmax())
            label = int(counts[donor].argmax())
            moved = min(missing, int(counts[donor, label]), int(sizes[donor]) - minimum)
            counts[donor, label] -= moved
            counts[needy, label] += moved
            sizes[donor] -= moved
            sizes[needy] += moved
    return counts


def _ratio(wanted: Tensor, found: Tensor) -> Tensor:
    return torch.where(found > 0, wanted / found.clamp(min=1e-300), torch.zeros_like(found))
