"""Inner products and distances of all pairs of clients' updates, computed a chunk of columns at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fedalloy.core.types import Contributions


def gram(cohort: Contributions, part: str = "delta") -> Tensor:
    """Inner products of all pairs of clients, ``[C, C]`` in float64 on the CPU.

    >>> from fedalloy.core.types import Cohort
    >>> gram(Cohort(torch.arange(2), {"delta": {"w": torch.tensor([[1.0, 0.0], [2.0, 2.0]])}}))
    tensor([[1., 2.],
            [2., 8.]], dtype=torch.float64)
    """
    return _added(columns @ columns.T for columns in _chunks(cohort, part))


def squared_distances(cohort: Contributions, part: str = "delta") -> Tensor:
    """Squared distances of all pairs, ``[C, C]`` in float64 on the CPU.

    Differences are squared directly: computed from inner products, the distances between close clients would drown in
    rounding errors when their updates are large.

    >>> from fedalloy.core.types import Cohort
    >>> squared_distances(Cohort(torch.arange(2), {"delta": {"w": torch.tensor([[1.0, 0.0], [2.0, 2.0]])}}))
    tensor([[0., 5.],
            [5., 0.]], dtype=torch.float64)
    """
    clients = len(cohort)
    result = torch.zeros(clients, clients, dtype=torch.float64)
    if clients > 1:
        pairs = _added(torch.nn.functional.pdist(columns).square() for columns in _chunks(cohort, part))
        above = torch.triu_indices(clients, clients, 1)
        result[above[0], above[1]] = result[above[1], above[0]] = pairs
    return result


def _added(terms: Iterator[Tensor]) -> Tensor:
    """Sum one term at a time, so that memory does not grow with the model."""
    total = next(terms)
    for term in terms:
        total = total + term
    return total.cpu()


def _chunks(cohort: Contributions, part: str) -> Iterator[Tensor]:
    return (columns.detach().double().contiguous() for _, (columns,) in cohort.chunks((part,)))
