"""The Frechet distance between two sets of features (FID if they come from an Inception network)."""

from __future__ import annotations

import torch
from torch import Tensor

from fedalloy.core.errors import DataError


def frechet_distance(one: Tensor, other: Tensor) -> float:
    """``|m1 - m2|^2 + tr(S1 + S2 - 2 (S1 S2)^(1/2))`` with means m and n-1 covariances S of ``[N, d]`` features.

    The trace of the root is that of the symmetric ``(A S2 A)^(1/2)`` with ``A = S1^(1/2)``, which has the same
    eigenvalues as ``S1 S2`` and needs no complex numbers.

    >>> cloud = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    >>> round(frechet_distance(cloud, cloud + 1.0), 9)
    2.0
    """
    if one.dim() != 2 or other.dim() != 2 or one.shape[1] != other.shape[1] or min(len(one), len(other)) < 2:
        raise DataError(
            f"features of shapes {tuple(one.shape)} and {tuple(other.shape)}: needed are two matrices [N >= 2, d]"
        )
    one, other = one.double(), other.double()
    first, second = _covariance(one), _covariance(other)
    values, vectors = torch.linalg.eigh(first)
    root = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
    shared = torch.linalg.eigvalsh(root @ second @ root).clamp(min=0).sqrt().sum()
    apart = (one.mean(0) - other.mean(0)).square().sum()
    return float(apart + first.trace() + second.trace() - 2.0 * shared)


def _covariance(features: Tensor) -> Tensor:
    centred = features - features.mean(0)
    return centred.T @ centred / (len(features) - 1)
