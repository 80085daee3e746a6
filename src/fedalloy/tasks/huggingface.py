"""Models of ``transformers``: one implementation of attention for all engines. Nothing is imported unless the model
comes from there, and nothing is changed in the user's own model."""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

import torch
from torch import nn

NAME = "fedalloy"
"""Under which attention and mask are registered in transformers."""


def pretrained_models(module: nn.Module) -> list[Any]:
    """The outermost models of ``transformers`` in a module: itself, or those inside a wrapper such as PEFT's."""
    library: Any = sys.modules.get("transformers.modeling_utils")
    if library is None:
        return []
    if isinstance(module, library.PreTrainedModel):
        return [module]
    return [found for child in module.children() for found in pretrained_models(child)]


def with_own_attention(module: nn.Module) -> bool:
    """Let the models in ``module`` use our attention, and no cache; returns whether any of them has an attention that
    can be replaced. The caller passes a copy: this changes the configuration."""
    models = [one for one in pretrained_models(module) if _has_attention(one)]
    if models:
        register()
    for model in models:
        model.set_attn_implementation(NAME)
        if getattr(model.config, "use_cache", False):
            model.config.use_cache = False
    return bool(models)


def scored_by(module: nn.Module) -> str:
    """The loss by name that a model of transformers computes itself, as far as its type tells; empty if unknown."""
    for model in pretrained_models(module):
        if _shifts(model):
            return "next_token"
        if getattr(model.config, "problem_type", None) == "multi_label_classification":
            return "binary"
    return ""


def _shifts(model: Any) -> bool:
    """Whether a model's own loss compares every output with the next token: by its type, or because it calls the loss
    function of transformers, which does so for types that it does not know, such as GPT-2's."""
    kind = getattr(model, "loss_type", None)
    if kind == "ForCausalLM":
        return True
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    if LOSS_MAPPING.get(kind, ForCausalLMLoss) is not ForCausalLMLoss:
        return False
    try:
        return "self.loss_function(" in inspect.getsource(type(model).forward)
    except (OSError, TypeError):  # a class without a file
        return False


@functools.cache
def register() -> None:
    """Register our attention and mask: the model's own plain formula, and a mask that is always made. The defaults
    ask for the values of a mask, which does not work for a block of clients."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)


def _attention(module: nn.Module, *given: Any, **named: Any) -> Any:
    """The plain attention of the file that defines the layer, with its scaling, bias and dropout."""
    homes: Any = (sys.modules[base.__module__] for base in type(module).__mro__)
    plain = next(home.eager_attention_forward for home in homes if hasattr(home, "eager_attention_forward"))
    return plain(module, *given, **named)


def _mask(*given: Any, **named: Any) -> Any:
    """The plain mask. Where everything is masked (padding under a sliding window), models that compute their softmax in
    float32 make NaN of the least number of float64, which is infinite there."""
    from transformers.masking_utils import eager_mask

    mask = eager_mask(*given, **{**named, "allow_is_bidirectional_skip": False, "allow_is_causal_skip": False})
    return mask.clamp(min=torch.finfo(torch.float32).min) if mask.dtype == torch.float64 else mask


def _has_attention(model: Any) -> bool:
    """Whether the attention can be replaced: the model asks transformers' interface for it, and its file has the plain
    formula."""
    home = sys.modules[type(model).__module__]
    return bool(model._can_set_attn_implementation()) and hasattr(home, "eager_attention_forward")
