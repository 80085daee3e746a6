"""Detects modules that are plain chains of layers, for which engines have fast kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from fedalloy.core.protocols import Objective
from fedalloy.core.types import Tree

_FUNCTIONS: dict[Any, str] = {
    functional.relu: "relu", torch.relu: "relu", torch.tanh: "tanh", functional.tanh: "tanh",
    torch.sigmoid: "sigmoid", functional.sigmoid: "sigmoid", torch.flatten: "flatten",
}  # fmt: skip
_METHODS = {"relu": "relu", "tanh": "tanh", "sigmoid": "sigmoid", "flatten": "flatten"}
_MODULES: dict[type[nn.Module], str] = {
    nn.ReLU: "relu", nn.Tanh: "tanh", nn.Sigmoid: "sigmoid", nn.Flatten: "flatten", nn.Identity: "identity",
    nn.Linear: "linear", nn.Conv2d: "conv", nn.MaxPool2d: "maxpool", nn.AvgPool2d: "avgpool",
    nn.Unflatten: "image",
}  # fmt: skip


@dataclass(frozen=True)
class Layer:
    """One layer of a chain: its kind and, unless it is a function, its module and its name in the model."""

    kind: str
    name: str = ""
    module: nn.Module | None = None


Chain = tuple[Layer, ...]


def chain_of(objective: Objective, params: Tree) -> Chain | None:
    """The layers in order; None if the model is not a chain or if its parameters are not exactly ``params``."""
    structure = objective.structure
    layers = None if structure is None else _layers(structure)
    if layers is None or sorted(_leaves(layers)) != sorted(params):
        return None
    return tuple(layer for layer in layers if layer.kind != "identity")


def _layers(structure: nn.Module) -> list[Layer] | None:
    if kind := _kind(structure):  # tracing would trace the inside of a model that is a single layer
        return [Layer(kind, "", structure)] if _plain(structure) else None
    if not all(map(_runs_its_class, structure.modules())):
        return None
    try:
        with torch.enable_grad():
            graph = _Tracer().trace(structure)
    except Exception:
        return None  # data-dependent or otherwise untraceable: not a chain
    return _walk(graph, structure)


class _Tracer(fx.Tracer):
    """Does not look into modules that are one layer of a chain. Refuses calls under ``no_grad`` or autocast: a graph
    has the calls alone, and the kernels would compute gradients that the model does not have."""

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return bool(_kind(module)) or super().is_leaf_module(module, name)

    def create_node(self, *given: Any, **named: Any) -> fx.Node:
        if not torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            raise NotImplementedError("a call in another mode of torch")
        return super().create_node(*given, **named)


def _runs_its_class(module: nn.Module) -> bool:
    """Whether a call of a module is the ``forward`` of its class and nothing else: no hooks, which may change values or
    gradients, and no function put in its place."""
    hooks = (
        module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks,
    )  # fmt: skip
    return not any(hooks) and "forward" not in vars(module) and type(module).__call__ is nn.Module.__call__


def _kind(module: nn.Module) -> str | None:
    """The kind of layer that a module is. ``reads_as_image`` in a class, not in one that it inherits from, says that
    its modules only reshape every example to the image ``shape``."""
    if vars(type(module)).get("reads_as_image"):
        return "image"
    return _MODULES.get(type(module))


def _walk(graph: fx.Graph, structure: nn.Module) -> list[Layer] | None:
    """The layers on the only path from input to output; None if it branches or has an unsupported operation."""
    layers: list[Layer] = []
    previous: fx.Node | None = None
    for node in graph.nodes:
        if node.op == "placeholder":
            if previous is not None:
                return None
        elif node.op == "output":
            return layers if node.args[0] is previous else None
        else:
            layer = _layer(node, structure)
            if layer is None or not node.args or node.args[0] is not previous:
                return None
            layers.append(layer)
        previous = node
    return None


def _layer(node: fx.Node, structure: nn.Module) -> Layer | None:
    if node.op == "call_module":
        module = structure.get_submodule(str(node.target))
        kind = _kind(module)
        return Layer(kind, str(node.target), module) if kind and _plain(module) else None
    table: dict[Any, str] = _FUNCTIONS if node.op == "call_function" else _METHODS
    kind = table.get(node.target) if node.op in ("call_function", "call_method") else None
    if kind == "flatten":
        return Layer(kind) if node.args[1:] == (1,) or node.kwargs == {"start_dim": 1} else None
    return Layer(kind) if kind and len(node.args) == 1 and not node.kwargs.get("inplace") else None


def _plain(module: nn.Module) -> bool:
    """Whether the kernels support the module's settings."""
    if not (_runs_its_class(module) and _has_standard_leaves(module)):
        return False
    if isinstance(module, nn.Conv2d):
        return module.groups == 1 and module.padding_mode == "zeros" and not isinstance(module.padding, str)
    if isinstance(module, nn.MaxPool2d):
        return not module.return_indices
    if isinstance(module, nn.Unflatten):
        return module.dim == 1 and isinstance(module.unflattened_size, tuple) and len(module.unflattened_size) == 3
    if isinstance(module, nn.Flatten):
        return module.start_dim == 1 and module.end_dim == -1
    return True


def _has_standard_leaves(module: nn.Module) -> bool:
    """Whether a layer's leaves are those that its class makes. Kernels know no further ones, which weight decay changes
    too, and read a bias of another shape (one number for all outputs) past its end."""
    if not isinstance(module, nn.Linear | nn.Conv2d):
        return True
    weight, bias = module.weight.shape, module.bias
    if isinstance(module, nn.Linear):
        fits = weight == (module.out_features, module.in_features)
    else:
        fits = weight == (module.out_channels, module.in_channels // module.groups, *module.kernel_size)
    fits = fits and (bias is None or bias.shape == weight[:1])
    return fits and {name for name, _ in module.named_parameters()} <= {"weight", "bias"}


def _leaves(layers: list[Layer]) -> list[str]:
    """The names of all leaves, repeated if a layer is used twice. Such a model is not treated as a chain, because the
    gradients of both uses must be added."""
    return [
        f"{layer.name}.{leaf}".removeprefix(".")
        for layer in layers
        if layer.module is not None
        for leaf, _ in layer.module.named_parameters()
    ]
