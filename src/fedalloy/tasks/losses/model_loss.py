"""The loss that a model computes itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedalloy.core.errors import SpecError
from fedalloy.core.registry import register
from fedalloy.tasks.losses.classes import IGNORED
from fedalloy.tasks.losses.loss import Loss, choose


@register("loss", "model")
@dataclass(frozen=True)
class ModelLoss(Loss):
    """The model's own: in training it gets the targets as ``labels`` and returns an object with ``loss``, as models of
    ``transformers`` do. Batches are not padded, so that no other rows enter it.

    Scores are computed from the model's outputs by the loss ``scored_by``; default: that of the model's type, if
    transformers knows it, else squared error for quantities and cross-entropy for classes.
    """

    scored_by: str = ""
    ignore_index: int = IGNORED

    def __post_init__(self) -> None:
        if self.ignore_index != IGNORED:
            raise SpecError(
                f"loss 'model': models themselves ignore the target {IGNORED}, and the data's ignore_index is "
                f"{self.ignore_index}: use {IGNORED} in the data"
            )

    @property
    def ignored(self) -> int | None:
        return self.ignore_index

    def rule(self, y: Tensor) -> Loss:
        """The loss by which examples are scored."""
        return choose(self.scored_by or ("mse" if y.is_floating_point() else "cross_entropy"))

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """One value per example, by ``scored_by``."""
        return self.rule(y).losses(outputs, y)

    def hits(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Those of ``scored_by``."""
        return self.rule(y).hits(outputs, y)

    def counts(self, y: Tensor) -> Tensor | None:
        """How many targets of every example count."""
        return self.rule(y).counts(y)

    def classes(self, outputs: Tensor, y: Tensor) -> int | None:
        """The number of classes."""
        return self.rule(y).classes(outputs, y)


def own_loss(returned: Any) -> Tensor:
    """The loss in what a model returned."""
    found = returned.get("loss") if isinstance(returned, Mapping) else getattr(returned, "loss", None)
    if isinstance(found, Tensor):
        return found
    raise SpecError(
        f"loss 'model': the model returned a {type(returned).__name__} without a 'loss' when called with 'labels'; "
        "choose a loss by name (fedalloy list losses), or let the model return one"
    )
