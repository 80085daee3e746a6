"""Models with several capabilities, all called through one ``forward``, so that every engine can run them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fedalloy.core import renamed
from fedalloy.core.errors import SpecError, nearest

Bounds = tuple[float, float]


class CapabilityModule(nn.Module):
    """A module whose ``forward(*inputs, capability=...)`` runs one of its ``capabilities``; by default it classifies.

    A capability is a method of that name. To write a generative model, inherit from this class and define the
    capabilities that its solver needs.
    """

    capabilities: frozenset[str] = frozenset({"classify"})

    def forward(self, *inputs: Tensor, capability: str = "classify") -> Any:
        """Run one capability."""
        if capability not in self.capabilities:
            raise SpecError(f"{type(self).__name__} cannot '{capability}': {nearest(capability, self.capabilities)}")
        part: Callable[..., Any] = getattr(self, capability)
        return part(*inputs)


class Between(nn.Module):
    """Scales values linearly between the data's range ``bounds`` and the network's range ``inner``.

    Without bounds values are not changed, because rows of a table may have any values.

    >>> between = Between((0.0, 1.0), (-1.0, 1.0))
    >>> between.inward(torch.tensor([0.0, 0.5])), between.outward(torch.tensor([1.0]))
    (tensor([-1.,  0.]), tensor([1.]))
    """

    def __init__(self, bounds: Bounds | None, inner: Bounds) -> None:
        super().__init__()
        if bounds is not None and not bounds[0] < bounds[1]:
            raise SpecError(f"bounds are {bounds}: the lower one must be below the upper one")
        low, high = bounds or inner
        self.factor = (inner[1] - inner[0]) / (high - low)
        self.low, self.inner_low = low, inner[0]

    def inward(self, x: Tensor) -> Tensor:
        """From the data's values to the network's."""
        return (x - self.low) * self.factor + self.inner_low

    def outward(self, x: Tensor) -> Tensor:
        """From the network's values to the data's."""
        return (x - self.inner_low) / self.factor + self.low


def one_hot(y: Tensor, classes: int, dtype: torch.dtype) -> Tensor:
    """One-hot rows ``[N, classes]``, computed by comparison so that it works under ``vmap``.

    >>> one_hot(torch.tensor([1]), 3, torch.float32)
    tensor([[0., 1., 0.]])
    """
    return (y.unsqueeze(-1) == torch.arange(classes, device=y.device)).to(dtype)


def check_classes(model: str, classes: int) -> None:
    """Refuse a conditional model for fewer than two classes."""
    if classes < 2:
        raise SpecError(
            f"model '{model}' makes examples of a wanted class and needs two classes or more, not {classes} output: "
            "for data with two classes set loss = 'cross_entropy'"
        )


def declared(model: str, bounds: Bounds | None) -> Bounds:
    """The bounds of image data, which must be declared: without them the values of black and white are unknown."""
    if bounds is None:
        raise SpecError(
            f"model '{model}' needs data with a declared range of values: scale = 'unit' of mnist or cifar10 has one; "
            f"for other data write model = {{ kind = '{model}', bounds = [0.0, 1.0] }}"
        )
    return bounds


if not TYPE_CHECKING:  # old names, kept for one version
    __getattr__ = renamed.old_names(__name__, {"Versatile": "CapabilityModule"})
