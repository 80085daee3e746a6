"""Local optimizers, in the form of torch's: one step from parameters, gradients and memory to the next ones. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from fedalloy.core import tree
from fedalloy.core.moments import second_moment
from fedalloy.core.types import Carry, Tree

Moved = tuple[Tree, Carry]


class LocalOptimizer(ABC):
    """A rule for local steps."""

    @abstractmethod
    def start(self, params: Tree) -> Carry:
        """The memory before the first step."""

    @abstractmethod
    def move(self, params: Tree, grads: Tree, memory: Carry, lr: float | Tensor) -> Moved:
        """One step."""


@dataclass(frozen=True)
class GradientDescent(LocalOptimizer):
    """``v <- momentum v + (1 - dampening) g``, ``w <- w - lr v``; with ``nesterov`` ``w <- w - lr (g + momentum v)``.
    The first step is not dampened."""

    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def start(self, params: Tree) -> Carry:
        begun = {"begun": _scalar(params)} if self.dampening else {}
        return {"velocity": tree.zeros_like(params), **begun} if self.momentum else {}

    def move(self, params: Tree, grads: Tree, memory: Carry, lr: float | Tensor) -> Moved:
        if self.weight_decay:
            grads = tree.add(grads, params, self.weight_decay)
        if not self.momentum:
            if isinstance(lr, Tensor):  # inside a CUDA graph: reading it on the CPU would break the capture
                return tree.add(params, grads, -lr), memory
            return {name: torch.add(leaf, grads[name], alpha=-lr) for name, leaf in params.items()}, memory
        kept = dict(memory)
        fresh = grads
        if self.dampening:
            share, kept["begun"] = 1 - self.dampening * memory["begun"], torch.ones_like(memory["begun"])
            fresh = tree.map_leaves(lambda g: share.to(g.dtype) * g, grads)
        velocity = tree.add(fresh, memory["velocity"], self.momentum)
        direction = tree.add(grads, velocity, self.momentum) if self.nesterov else velocity
        return tree.add(params, direction, -lr), {**kept, "velocity": velocity}


@dataclass(frozen=True)
class LocalAdam(LocalOptimizer):
    """Adam with bias correction (Kingma and Ba 2015, arXiv:1412.6980); ``decoupled`` weight decay is AdamW
    (Loshchilov and Hutter 2019, arXiv:1711.05101), ``amsgrad`` divides by the largest second moment so far."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    amsgrad: bool = False
    decoupled: bool = False

    def start(self, params: Tree) -> Carry:
        largest = {"largest": tree.zeros_like(params)} if self.amsgrad else {}
        moments = {"first": tree.zeros_like(params), "second": tree.zeros_like(params)}
        return {**moments, "count": _scalar(params), **largest}

    def move(self, params: Tree, grads: Tree, memory: Carry, lr: float | Tensor) -> Moved:
        beta1, beta2 = self.betas
        if self.decoupled and self.weight_decay:
            params = tree.add(params, params, -lr * self.weight_decay)
        else:
            grads = decayed(grads, params, self.weight_decay)
        count = memory["count"] + 1
        first = tree.map_leaves(lambda m, g: beta1 * m + (1 - beta1) * g, memory["first"], grads)
        second = tree.map_leaves(lambda v, g: beta2 * v + (1 - beta2) * g * g, memory["second"], grads)
        kept = {"first": first, "second": second, "count": count}
        if self.amsgrad:
            second = tree.map_leaves(torch.maximum, memory["largest"], second)
            kept["largest"] = second
        rate, root = lr / (1 - beta1**count), (1 - beta2**count).sqrt()
        moved = tree.map_leaves(lambda w, m, v: w - rate * m / (v.sqrt() / root + self.eps), params, first, second)
        return moved, kept


@dataclass(frozen=True)
class RmsProp(LocalOptimizer):
    """``s <- smoothing s + (1 - smoothing) g^2``, ``w <- w - lr g / (sqrt(s) + eps)``; ``centered`` subtracts the
    square of the mean gradient from s, ``momentum`` accumulates the direction."""

    smoothing: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    centered: bool = False

    def start(self, params: Tree) -> Carry:
        parts = ["square", *(["mean"] if self.centered else []), *(["velocity"] if self.momentum else [])]
        return {part: tree.zeros_like(params) for part in parts}

    def move(self, params: Tree, grads: Tree, memory: Carry, lr: float | Tensor) -> Moved:
        grads = decayed(grads, params, self.weight_decay)
        square = tree.map_leaves(lambda s, g: second_moment("adam", s, g, self.smoothing), memory["square"], grads)
        kept, spread = {"square": square}, square
        if self.centered:
            share = 1 - self.smoothing
            kept["mean"] = tree.map_leaves(lambda m, g: m + share * (g - m), memory["mean"], grads)
            spread = tree.map_leaves(lambda s, m: s - m * m, square, kept["mean"])
        direction = tree.map_leaves(lambda g, s: g / (s.sqrt() + self.eps), grads, spread)
        if self.momentum:
            direction = kept["velocity"] = tree.add(direction, memory["velocity"], self.momentum)
        return tree.add(params, direction, -lr), kept


@dataclass(frozen=True)
class LocalAdagrad(LocalOptimizer):
    """``s <- s + g^2``, ``w <- w - lr / (1 + (t - 1) lr_decay) g / (sqrt(s) + eps)`` (Duchi et al. 2011)."""

    eps: float = 1e-8
    weight_decay: float = 0.0
    lr_decay: float = 0.0
    accumulator: float = 0.0

    def start(self, params: Tree) -> Carry:
        square = tree.map_leaves(lambda leaf: torch.full_like(leaf, self.accumulator), params)
        return {"square": square, "count": _scalar(params)}

    def move(self, params: Tree, grads: Tree, memory: Carry, lr: float | Tensor) -> Moved:
        grads = decayed(grads, params, self.weight_decay)
        square = tree.map_leaves(lambda s, g: second_moment("adagrad", s, g, 0.0), memory["square"], grads)
        rate = lr / (1 + memory["count"] * self.lr_decay)
        moved = tree.map_leaves(lambda w, g, s: w - rate * g / (s.sqrt() + self.eps), params, grads, square)
        return moved, {"square": square, "count": memory["count"] + 1}


def decayed(grads: Tree, params: Tree, weight_decay: float) -> Tree:
    """The gradients with that of ``weight_decay / 2 |w|^2``."""
    return tree.add(grads, params, weight_decay) if weight_decay else grads


def _scalar(params: Tree) -> Tensor:
    first = next(iter(params.values()))
    return torch.zeros((), dtype=first.dtype, device=first.device)
