"""Models on the line between a federated and a local one."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedalloy.core.tree import Tree


def mixture(federated: Tree, local: Tree, share: float | Tensor | Mapping[str, Tensor]) -> Tree:
    """``(1 - share) federated + share local``; one share for all leaves, or one per leaf name.

    >>> mixture({"w": torch.tensor([0.0, 4.0])}, {"w": torch.tensor([1.0, 0.0])}, 0.25)
    {'w': tensor([0.2500, 3.0000])}
    """
    shares = share if isinstance(share, Mapping) else dict.fromkeys(federated, share)
    return {name: torch.lerp(leaf, local[name], _like(shares[name], leaf)) for name, leaf in federated.items()}


def _like(share: float | Tensor, leaf: Tensor) -> float | Tensor:
    return share.to(leaf) if isinstance(share, Tensor) else share
