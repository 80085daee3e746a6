"""Modules as skeletons: structure without values of its own, because every call brings all leaves."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from fedalloy.core.errors import SpecError
from fedalloy.core.inputs import Inputs, device_of
from fedalloy.core.inputs import leaves as leaves_of
from fedalloy.core.types import Tree
from fedalloy.tasks.calling import arguments


def materialised(
    module: nn.Module, example: Inputs | None, prepare: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> nn.Module:
    """The module; lazy layers get their sizes from a call with an example. A model that fails on whole numbers gets
    them as floating-point numbers of ``dtype``."""
    if not is_lazy(module):
        return module
    if example is None:
        raise SpecError(
            "the model has lazy layers, and there is no example here from which they could get their sizes: give every "
            "layer its sizes"
        )
    modes = [(part, part.training) for part in module.modules()]
    module.eval().to(device_of(example))
    try:
        _call(module, example, prepare)
    except (RuntimeError, TypeError, ValueError):
        if all(leaf.is_floating_point() for leaf in leaves_of(example)):
            raise
        _call(module, example, lambda leaf: leaf.to(dtype))
    for part, mode in modes:
        part.training = mode
    return module


def is_lazy(module: nn.Module) -> bool:
    """Whether a module has layers without sizes."""
    return any(isinstance(leaf, UninitializedParameter | UninitializedBuffer) for leaf in _all_leaves(module))


def copied(module: nn.Module) -> nn.Module:
    """A deep copy, which torch refuses to make of buffers without sizes (``nn.LazyBatchNorm1d``)."""
    fresh = {
        id(leaf): UninitializedBuffer(False, leaf.device, leaf.dtype)  # type: ignore[arg-type]  # torch's stub has another order
        for leaf in module.buffers()
        if isinstance(leaf, UninitializedBuffer)
    }
    made: nn.Module = copy.deepcopy(module, fresh)
    return made


@torch.no_grad()
def _call(module: nn.Module, example: Inputs, prepare: Callable[[Tensor], Tensor]) -> None:
    args, named = arguments(example, prepare)
    module(*args, **named)


def leaves_in(module: nn.Module, names: tuple[str, ...]) -> Tree:
    """Detached copies of some parameters and buffers, by name."""
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: named[name].detach().clone() for name in names}


def skeleton(module: nn.Module) -> nn.Module:
    """A copy of the structure that shares its tensors, because every call replaces all of them. The shortcut of
    ``nn.TransformerEncoder`` through nested tensors is off: it does not work for a block of clients. So are sparse
    gradients of embeddings: local optimizers compute with whole tensors."""
    made: nn.Module = copy.deepcopy(module, {id(leaf): leaf for leaf in _all_leaves(module)})
    for part in made.modules():
        if isinstance(part, nn.TransformerEncoder):
            part.use_nested_tensor = False
        if isinstance(part, nn.Embedding | nn.EmbeddingBag):
            part.sparse = False
    return made


def hollow(module: nn.Module, names: Iterable[str]) -> None:
    """Release the values of some parameters and buffers, which every call replaces: each becomes one number in the
    shape that it had."""
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for leaf in (named[name] for name in names if name in named):
        leaf.data = torch.zeros((), dtype=leaf.dtype, device=leaf.device).expand(leaf.shape)


def own_buffers(buffers: Tree, x: Inputs, params: Tree) -> Tree:
    """Copies that a module may write to. Adding a zero made from the data and the parameters gives the copy
    every batch axis they have: under vmap a module cannot write a batched value into a shared buffer."""
    first, *others = leaves_of(x)
    zero = torch.zeros_like(first.reshape(-1)[:1]).sum()
    for leaf in (*others, *params.values()):
        zero = zero + torch.zeros_like(leaf.reshape(-1)[:1]).sum()
    return {name: leaf + zero.to(leaf.dtype) for name, leaf in buffers.items()}


def _all_leaves(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]
