"""Dropout whose mask is a pure function of a key, so that it is the same in every engine."""

from __future__ import annotations

from torch import Tensor, nn

from fedalloy.core.errors import SpecError
from fedalloy.core.keys import Key


class Dropout(nn.Module):
    """Zero each feature with probability ``p`` in training and scale the rest by ``1 / (1 - p)``.

    The key of the mask is the scalar int64 buffer ``draw``, which the objective sets for one call. Feature ``f``
    of example slot ``i`` uses number ``i * features + f`` of that key, so padding at the end of the batch changes
    nothing. Use a separate ``Dropout`` for every place in a model: a module that is called twice uses the same
    mask twice.

    >>> import torch
    >>> Dropout(0.5).eval()(torch.ones(3))
    tensor([1., 1., 1.])
    """

    draw: Tensor | None

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        if not 0.0 <= p < 1.0:
            raise SpecError(f"Dropout: p is {p}; allowed: 0 <= p < 1")
        self.p = p
        self.register_buffer("draw", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """The masked input in training, the input itself in evaluation."""
        if not self.training:
            return x
        if self.draw is None:
            raise SpecError(
                "Dropout in training needs a random draw: call it through ModuleObjective.loss(..., draw=key), "
                "or set the module to .eval()"
            )
        if self.p == 0.0:
            return x
        kept = Key(self.draw).uniform(*x.shape, device=x.device) >= self.p
        return x * kept / (1.0 - self.p)

    def extra_repr(self) -> str:
        """What ``print(model)`` shows."""
        return f"p={self.p}"
