"""The loss that the table is learned by: that of the task, or the squared error against one-hot labels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedalloy.core.keys import Key
from fedalloy.core.protocols import Objective
from fedalloy.core.types import Tree


@dataclass(frozen=True)
class OneHotError(Objective):
    """``mean_c (softmax_c - [c = y])^2`` of a classifier, whatever loss its clients train with; in evaluation mode."""

    objective: Objective

    def init(self, key: Key) -> tuple[Tree, Tree]:
        """The classifier's own beginning."""
        return self.objective.init(key)

    def loss(
        self, params: Tree, buffers: Tree, x: Tensor, y: Tensor, mask: Tensor | None, draw: Tensor | None
    ) -> tuple[Tensor, Tree]:
        """Mean over the (masked) batch; buffers stay as they are."""
        losses = self.losses(self.outputs(params, buffers, x), y)
        if mask is None:
            return losses.mean(), buffers
        return torch.where(mask, losses, 0.0).sum() / mask.sum().clamp(min=1), buffers

    def outputs(self, params: Tree, buffers: Tree, x: Tensor) -> Tensor:
        """What the classifier says."""
        return self.objective.outputs(params, buffers, x)

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The squared error of every example.

        >>> OneHotError(None).losses(torch.tensor([[0.0, 0.0]]), torch.tensor([1]))
        tensor([0.2500])
        """
        wanted = (y.unsqueeze(-1) == torch.arange(outputs.shape[-1], device=y.device)).to(outputs.dtype)
        return (outputs.softmax(-1) - wanted).square().mean(-1)

    def hits(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The classifier's own."""
        return self.objective.hits(outputs, y)
