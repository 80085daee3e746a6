"""Models that are chains of convolutions, pointwise layers, pooling and dense layers, as stages around matrix products.

A stage is one product, a convolution or a dense layer, and the layers between it and the next product. Images are in
channels-last layout, so a convolution is the product of its patches with its weight, and leaves have the layout of
these products: weights ``[outputs, inputs]``, with a convolution's inputs in the order (height, width, channel).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedalloy.core.types import Tree
from fedalloy.engines.kernels.fused import LOSSES
from fedalloy.engines.kernels.layer_chain import Chain, Layer

Shape = tuple[int, int, int]
"""Height, width, channels."""
ALIGNED = 8
_ACTIVATIONS = ("relu", "tanh", "sigmoid")


@dataclass(frozen=True)
class Window:
    """The patches of a convolution: size, stride and padding, each down and right."""

    size: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]

    def over(self, shape: Shape) -> tuple[int, int]:
        """How many patches an image has, down and right."""
        down, right = (
            (extent + 2 * pad - size) // step + 1
            for extent, pad, size, step in zip(shape, self.padding, self.size, self.stride, strict=False)
        )
        return down, right


@dataclass(frozen=True)
class Op:
    """A layer between two products: an activation, or pooling over windows that do not overlap."""

    kind: str
    size: tuple[int, int] = (1, 1)


@dataclass(frozen=True)
class ProductStage:
    """One product: its leaves, the image it reads (dense layers: None), its patches, and the layers after it.

    ``shape`` is the product's result for one example; a dense layer's is ``(1, 1, outputs)``. ``flattens`` is the image
    whose flattened form a dense layer reads: torch flattens channels first, so its weight is reordered.
    """

    weight: str
    bias: str | None
    shape: Shape
    reads: Shape | None
    window: Window | None
    flattens: Shape | None
    ops: tuple[Op, ...] = ()

    @property
    def leaves(self) -> list[str]:
        """The names of its leaves."""
        return [self.weight, *([self.bias] if self.bias else [])]

    @property
    def inputs(self) -> int:
        """The numbers in one patch; 0 for a dense layer."""
        return 0 if self.window is None or self.reads is None else prod(self.window.size) * self.reads[2]

    @property
    def extra(self) -> int:
        """Zeros after every patch, up to a multiple of 8: products of other lengths do not reach the matrix units."""
        return -self.inputs % ALIGNED

    def to_product(self, leaf: Tensor) -> Tensor:
        """The weight, ``[outputs, inputs]``, from the model's."""
        if self.window is not None:
            return functional.pad(leaf.permute(0, 2, 3, 1).flatten(1), (0, self.extra))
        if self.flattens is None:
            return leaf
        height, width, channels = self.flattens
        return leaf.reshape(-1, channels, height, width).permute(0, 2, 3, 1).flatten(1)

    def to_model(self, stacked: Tensor) -> Tensor:
        """All clients' weights as the model has them, from those of the products, ``[C, outputs, inputs]``."""
        if self.window is not None and self.reads is not None:
            size, channels = self.window.size, self.reads[2]
            return stacked[:, :, : self.inputs].reshape(*stacked.shape[:2], *size, channels).permute(0, 1, 4, 2, 3)
        if self.flattens is None:
            return stacked
        return stacked.reshape(*stacked.shape[:2], *self.flattens).permute(0, 1, 4, 2, 3).flatten(2)

    def numbers(self) -> int:
        """How many numbers its products read and write for one example, for an estimate of memory."""
        patches = self.shape[0] * self.shape[1]
        return patches * (2 * self.shape[2] + 2 * (self.inputs + self.extra))


Stages = tuple[ProductStage, ...]


def stages_of(chain: Chain | None, params: Tree, loss: str | None, example: tuple[int, ...]) -> Stages | None:
    """The chain as stages; None if it has no convolution, ends in another layer than a dense one, or has a layer or a
    loss that the kernel does not know."""
    if chain is None or loss not in LOSSES or not any(layer.kind == "conv" for layer in chain):
        return None
    found = _Reading(example)
    for layer in chain:
        if not found.read(layer, params):
            return None
    last = found.stages[-1]
    return tuple(found.stages) if last.window is None and not last.ops and found.flat else None


class _Reading:
    """Reads a chain layer by layer, with the shape of an example after each."""

    def __init__(self, example: tuple[int, ...]) -> None:
        self.stages: list[ProductStage] = []
        self.flattens: Shape | None = None
        self.shape: Shape | None = (example[1], example[2], example[0]) if len(example) == 3 else None
        self.flat = False

    def read(self, layer: Layer, params: Tree) -> bool:
        """Whether the layer is known where it is."""
        if layer.kind == "image":
            return not self.stages and self._image(layer.module)
        if layer.kind == "flatten":
            return self._flatten()
        if layer.kind in ("conv", "linear"):
            assert layer.module is not None
            return self._conv(layer, layer.module) if layer.kind == "conv" else self._linear(layer, params)
        if layer.kind in ("maxpool", "avgpool"):
            return self._pool(layer)
        return layer.kind in _ACTIVATIONS and self._add(Op(layer.kind))

    def _image(self, module: Any) -> bool:
        channels, height, width = getattr(module, "unflattened_size", None) or module.shape
        self.shape = (height, width, channels)
        return True

    def _flatten(self) -> bool:
        if self.flat:
            return True
        self.flattens, self.flat = self.shape, True
        return bool(self.stages) and self.shape is not None

    def _conv(self, layer: Layer, module: Any) -> bool:
        if self.flat or self.shape is None or module.dilation != (1, 1) or self.shape[2] != module.in_channels:
            return False
        window = Window(module.kernel_size, module.stride, module.padding)
        after = (*window.over(self.shape), module.out_channels)
        self.stages.append(ProductStage(*_names(layer, module), after, self.shape, window, None))
        self.shape = after
        return all(extent > 0 for extent in after)

    def _linear(self, layer: Layer, params: Tree) -> bool:
        if not self.flat:
            return False
        weight, bias = _names(layer, layer.module)
        inputs = prod(self.flattens) if self.flattens is not None else self.stages[-1].shape[2]
        if params[weight].shape[1] != inputs:
            return False
        self.stages.append(ProductStage(weight, bias, (1, 1, params[weight].shape[0]), None, None, self.flattens))
        self.flattens = None
        return True

    def _pool(self, layer: Layer) -> bool:
        module: Any = layer.module
        size = _pair(module.kernel_size)
        plain = _pair(module.padding) == (0, 0) and _pair(module.stride) == size and not module.ceil_mode
        if self.flat or self.shape is None or not plain:
            return False
        if isinstance(module, nn.MaxPool2d) and _pair(module.dilation) != (1, 1):
            return False
        if isinstance(module, nn.AvgPool2d) and module.divisor_override is not None:
            return False
        self.shape = (self.shape[0] // size[0], self.shape[1] // size[1], self.shape[2])
        return min(self.shape) > 0 and self._add(Op(layer.kind, size))

    def _add(self, op: Op) -> bool:
        """Put a layer after the last product; a layer between flattening and the next product is not known."""
        if not self.stages or self.flattens is not None:
            return False
        last = self.stages[-1]
        self.stages[-1] = ProductStage(**{**vars(last), "ops": (*last.ops, op)})
        return True


def received(stages: Stages, params: Tree) -> Tree:
    """The received model in the layout of the products."""
    leaves = {name: params[name] for stage in stages for name in stage.leaves}
    return leaves | {stage.weight: stage.to_product(params[stage.weight]).contiguous() for stage in stages}


def updates(stages: Stages, model: Tree, params: Tree) -> Tree:
    """What the clients send, in the layout of the model: their leaves minus the received ones."""
    moved = {stage.weight: stage.to_model(model[stage.weight]) for stage in stages if stage.weight in params}
    return {name: torch.sub(moved.get(name, model[name]), leaf).contiguous() for name, leaf in params.items()}


def _names(layer: Layer, module: Any) -> tuple[str, str | None]:
    prefix = f"{layer.name}." if layer.name else ""
    return f"{prefix}weight", f"{prefix}bias" if module.bias is not None else None


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[1]))
