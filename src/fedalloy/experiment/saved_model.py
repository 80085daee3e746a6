"""The model of a saved result, built again from its name and settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fedalloy.core.errors import CheckpointError, SpecError
from fedalloy.core.types import Tree
from fedalloy.tasks.models.build import NamedModel

_DTYPES = {str(one): one for one in (torch.float32, torch.float64, torch.bfloat16, torch.float16)}


@dataclass(frozen=True)
class ModelBuilder:
    """A named model and the type of its numbers."""

    named: NamedModel
    dtype: torch.dtype

    @staticmethod
    def read(told: Mapping[str, Any]) -> ModelBuilder:
        """What a result's file says about its model."""
        return ModelBuilder(NamedModel.read(told), _DTYPES[told["dtype"]])

    def __call__(self, leaves: Tree) -> nn.Module:
        """The model for these leaves. It is built without memory first: a file that was changed could name any size."""
        try:
            with torch.device("meta"):
                found = {name: leaf.shape for name, leaf in self.named().named_parameters()}
        except (SpecError, RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(f"the saved model '{self.named.kind}' cannot be built: {error}") from None
        if wrong := [name for name, shape in found.items() if name not in leaves or leaves[name].shape != shape]:
            raise CheckpointError(f"the saved model '{self.named.kind}' has other weights than its file: {wrong[0]}")
        with torch.random.fork_rng(devices=[]):
            return self.named().to(self.dtype)
