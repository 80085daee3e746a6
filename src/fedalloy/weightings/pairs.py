"""Every pair of clients' updates compared, a chunk of columns at a time: inner products and distances."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from fedalloy.core import tree


def gram(stacked: Mapping[str, Tensor]) -> Tensor:
    """Inner products of all pairs of clients, ``[C, C]`` in float64 on the CPU.

    >>> gram({"w": torch.tensor([[1.0, 0.0], [2.0, 2.0]])})
    tensor([[1., 2.],
            [2., 8.]], dtype=torch.float64)
    """
    return _added(part @ part.T for part in _chunks(stacked))


def squared_distances(stacked: Mapping[str, Tensor]) -> Tensor:
    """Squared distances of all pairs, ``[C, C]`` in float64 on the CPU.

    Differences are taken before they are squared: inner products would lose the distances of close clients as soon
    as one client sends something huge.

    >>> squared_distances({"w": torch.tensor([[1.0, 0.0], [2.0, 2.0]])})
    tensor([[0., 5.],
            [5., 0.]], dtype=torch.float64)
    """
    clients = len(next(iter(stacked.values())))
    result = torch.zeros(clients, clients, dtype=torch.float64)
    if clients > 1:
        pairs = _added(torch.nn.functional.pdist(part).square() for part in _chunks(stacked))
        above = torch.triu_indices(clients, clients, 1)
        result[above[0], above[1]] = result[above[1], above[0]] = pairs
    return result


def _added(terms: Iterator[Tensor]) -> Tensor:
    """One after the other, so that memory does not grow with the model."""
    total = next(terms)
    for term in terms:
        total = total + term
    return total.cpu()


def _chunks(stacked: Mapping[str, Tensor]) -> Iterator[Tensor]:
    return (part.detach().double().contiguous() for _, part in tree.chunks(stacked))
