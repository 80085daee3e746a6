"""Modules that cannot be trained as they are, each refused with what to give instead."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from fedalloy.core.errors import SpecError

_WRAPPERS = {
    "OptimizedModule": ("compiled by torch.compile", "give the module before torch.compile"),
    "DataParallel": ("wrapped in nn.DataParallel", "give the module inside, its '.module'"),
    "DistributedDataParallel": ("wrapped in DistributedDataParallel", "give the module inside, its '.module'"),
    "FullyShardedDataParallel": ("wrapped in FullyShardedDataParallel", "give the module before it is wrapped"),
}
"""By class, so that none of them has to be imported."""
_OLD = {"WeightNorm": "weight_norm", "SpectralNorm": "spectral_norm"}
"""Hooks that write a weight in every call, by class, with the name of what replaces them."""


def checked(made: Any) -> nn.Module:
    """What a user's function returned, if it is a module that can be trained."""
    if not isinstance(made, nn.Module):
        raise SpecError(f"the model is a {type(made).__name__}: the function that builds it must return an nn.Module")
    for name, part in made.named_modules():
        where = f"the model's part '{name}'" if name else "the model"
        found = _WRAPPERS.get(type(part).__name__)
        if found is not None:
            raise SpecError(f"{where} is {found[0]}, which keeps its leaves to itself: {found[1]}")
        if isinstance(part, torch.jit.ScriptModule):
            raise SpecError(f"{where} is a ScriptModule, whose leaves cannot be replaced: give the nn.Module itself")
        for hook in part._forward_pre_hooks.values():
            if new := _OLD.get(type(hook).__name__):
                raise SpecError(
                    f"{where} has torch's old {new}, which writes a weight in every call: use "
                    f"torch.nn.utils.parametrizations.{new}"
                )
    for name, leaf in made.named_parameters():
        if leaf._backward_hooks or leaf._post_accumulate_grad_hooks:
            raise SpecError(
                f"the parameter '{name}' has a hook for its gradient, which would not be called, because clients train "
                "copies: let the model compute with a changed copy of the parameter instead (a mask, a parametrization)"
            )
        if leaf.is_complex():
            raise SpecError(
                f"the parameter '{name}' is complex, and models are trained in real numbers: keep its real and "
                "imaginary part as one parameter (torch.view_as_real), and join them in the call"
            )
    return made


def tell_rounding(module: nn.Module, dtype: torch.dtype) -> None:
    """A built model in float64 loses digits in a task that computes in float32."""
    if dtype != torch.float64 and any(leaf.dtype == torch.float64 for leaf in module.parameters()):
        warnings.warn(
            f"the model is in float64 and the task in {str(dtype).removeprefix('torch.')}, so that its weights are "
            "rounded: give the task dtype='float64' to keep them",
            UserWarning,
            stacklevel=2,
        )
