"""Standardisation of features per client, without using held-out data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedalloy.core import inputs
from fedalloy.core.errors import SpecError
from fedalloy.core.protocols import DataPart
from fedalloy.core.types import Examples


class Learned(Protocol):
    """What is learned from clients' training rows and applied to any part of them."""

    def apply(self, x: Tensor, sizes: Tensor) -> Tensor:
        """The changed rows."""


@dataclass(frozen=True, eq=False)
class Scaler:
    """The centre and spread of every client's features, ``[K, ...]``, learned from training rows alone.

    Both are computed in float64; the spread is the standard deviation with divisor n. A feature that is constant in a
    client's training part has spread 1: it becomes 0 there, and deviations from it in the test part keep their size.
    """

    centre: Tensor
    spread: Tensor

    @staticmethod
    def learn(x: Tensor, sizes: Tensor) -> Scaler:
        """Learn from all clients' training rows, sorted by client: the first ``sizes[0]`` rows are those of client 0.

        >>> Scaler.learn(torch.tensor([[1.0], [3.0], [7.0]]), torch.tensor([2, 1])).centre.flatten()
        tensor([2., 7.], dtype=torch.float64)
        """
        if not x.is_floating_point():
            raise SpecError(f"features of type {x.dtype} are no measurements: leave 'standardise' out (or 'none')")
        parts = x.double().split(sizes.tolist())
        # A client without training rows has no scale: its other rows, if any, are not changed.
        none = torch.zeros(x.shape[1:], dtype=torch.float64, device=x.device)
        centre = torch.stack([part.mean(0) if len(part) else none for part in parts])
        spread = torch.stack([part.std(0, correction=0) if len(part) else none for part in parts])
        # Because of rounding, a constant column can have a spread of about 1e-16 of its magnitude.
        constant = spread <= 1e-12 * (1 + centre.abs())
        return Scaler(centre, torch.where(constant, 1.0, spread))

    def apply(self, x: Tensor, sizes: Tensor) -> Tensor:
        """Scale any part of the clients' rows, sorted by client, with the centre and spread of their training rows."""
        owner = torch.repeat_interleave(sizes)
        return ((x.double() - self.centre[owner]) / self.spread[owner]).to(x.dtype)


def changed_parts(
    parts: Mapping[DataPart, Examples], learn: Callable[[Tensor, Tensor], Learned]
) -> dict[DataPart, Examples]:
    """All parts of one client, changed as its training part says."""

    def changed(leaf: Tensor, learned: Tensor) -> Tensor:
        return learn(learned, torch.tensor([len(learned)])).apply(leaf, torch.tensor([len(leaf)]))

    first = parts["train"].x
    return {part: Examples(inputs.each(changed, one.x, first), one.y) for part, one in parts.items()}
