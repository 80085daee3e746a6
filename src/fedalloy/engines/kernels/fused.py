"""Plain descent on a chain of linear layers: hand-written backward, updates fused in place. Not differentiable.

Every leaf of all clients' models is in one ``[C, *shape]`` buffer that this kernel owns, and one ``baddbmm_`` computes
the gradient of a weight and applies it (without momentum). The kernel returns these buffers minus the received model;
combining them over clients reads the memory once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedalloy.core.blocks import Prepared
from fedalloy.core.program import BlockTraining, TrainingResult
from fedalloy.core.types import Block, Context, Tree
from fedalloy.core.wide import widest
from fedalloy.engines.batches import batches
from fedalloy.engines.kernels import fused_logistic
from fedalloy.engines.kernels.layer_chain import Chain
from fedalloy.engines.kinds import PlainSgd, plain_sgd_of

DIFFERENTIABLE = False
LOSSES = ("cross_entropy", "binary")
_ACTIVATIONS = ("relu", "tanh", "sigmoid")


@dataclass(frozen=True)
class Dense:
    """One linear layer of a chain and the activation after it. ``features`` is the length of its input; ``flattens``:
    examples of any shape are flattened before it."""

    weight: str
    bias: str | None
    activation: str | None
    features: int
    flattens: bool = False


@dataclass
class Memory:
    """The buffers of a block, ``[C, *shape]`` each: the clients' models and their velocities. ``received`` is the model
    that all clients start from; ``shift`` is added to every gradient of a client, if there is one."""

    received: Tree
    model: Tree
    velocity: Tree
    shift: Tree = field(default_factory=dict)

    def first(self, clients: int) -> Memory:
        """The rows of the first clients, as views."""
        views = (
            {name: leaf[:clients] for name, leaf in kept.items()} for kept in (self.model, self.velocity, self.shift)
        )
        return Memory(self.received, *views)


def dense_layers(chain: Chain | None, loss: str | None) -> tuple[Dense, ...] | None:
    """The chain as dense layers; None if it has other layers, an activation at the end, or a loss not in ``LOSSES``."""
    if chain is None or loss not in LOSSES:
        return None
    layers: list[Dense] = []
    flattens = False
    for position, layer in enumerate(chain):
        if layer.kind == "flatten" and not layers:
            flattens = True
        elif layer.kind == "linear" and isinstance(layer.module, nn.Linear):
            prefix = f"{layer.name}." if layer.name else ""
            bias = f"{prefix}bias" if layer.module.bias is not None else None
            activation = _activation(chain, position)
            layers.append(Dense(f"{prefix}weight", bias, activation, layer.module.in_features, flattens and not layers))
        elif not (layer.kind in _ACTIVATIONS and layers and chain[position - 1].kind == "linear"):
            return None
    return tuple(layers) if layers and layers[-1].activation is None else None


def accepts(layers: tuple[Dense, ...], data: Block, casts: bool) -> bool:
    """Whether the model accepts these examples, with one target each. For others it raises an error, which kernels, on
    plain memory, would not. ``casts``: the model gets whole numbers as floats."""
    x, y = data.x, data.y
    if not (isinstance(x, Tensor) and isinstance(y, Tensor) and y.dim() == 1 and x.dim() >= 2):
        return False
    if not (x.is_floating_point() or casts):
        return False
    return (x.dim() == 2 or layers[0].flattens) and x.shape[1:].numel() == layers[0].features


def train(layers: tuple[Dense, ...], training: BlockTraining) -> TrainingResult:
    """The kernel, for a model of these layers and a solver that declares plain descent."""
    layers, loss, sgd = setting(layers, training)
    params, block, ctx = training.shared["params"], training.block, training.ctx
    if len(layers) == 1 and loss == "cross_entropy":
        found = fused_logistic.train(layers[0].weight, layers[0].bias, sgd, params, block, ctx)
        if found is not None:
            return found
    deltas, loss_sum = descend(layers, loss, sgd, params, block, ctx)
    return TrainingResult({}, {}, loss_sum, sent={"delta": deltas})


def setting(layers: tuple[Dense, ...], training: BlockTraining) -> tuple[tuple[Dense, ...], str, PlainSgd]:
    """What is the same in all rounds: the layers, the name of the loss and the settings of SGD."""
    sgd = plain_sgd_of(training.algorithm)
    assert sgd is not None
    return layers, training.objective.loss_name or "", sgd


def descend(
    layers: tuple[Dense, ...], loss: str, sgd: PlainSgd, params: Tree, block: Prepared, ctx: Context
) -> tuple[Tree, Tensor]:
    """Take every step of a block; returns the clients' deltas and the sums of their losses (see ``summed_losses``)."""
    memory = allocate(params, len(block), momentum=sgd.momentum > 0)
    losses = walk(layers, loss, sgd, memory, block, ctx)
    for name, leaf in memory.model.items():
        leaf.sub_(params[name])
    return memory.model, losses


def walk(layers: tuple[Dense, ...], loss: str, sgd: PlainSgd, memory: Memory, block: Prepared, ctx: Context) -> Tensor:
    """Take every step of a block on the models in ``memory``; returns the sums of the clients' losses."""
    now, passes = memory, Passes(layers, loss, block)
    for step, (x, y) in enumerate(batches(block)):
        if block.running[step] < len(block):
            now = memory.first(block.running[step])
        values, out_grad, scale = passes.forward(now.model, step, x, y)
        backward(layers, now, sgd, values, out_grad, scale, ctx.local_lr)
    return passes.totals()


class Passes:
    """The forward passes of a block; also adds up the losses."""

    def __init__(self, layers: tuple[Dense, ...], loss: str, block: Prepared) -> None:
        self.layers, self.loss, self.block = layers, loss, block
        self.seen = block.seen
        self.summed: list[Tensor] = []

    def forward(self, model: Tree, step: int, x: Tensor, y: Tensor) -> tuple[list[Tensor], Tensor, float]:
        """The inputs of all layers, the gradient of the running clients' losses with respect to the output, and the
        factor that the gradient must still be multiplied by to be that of the mean loss."""
        running, scale = self.block.running[step], 1.0 / x.shape[1]
        values = _forward(self.layers, model, x if x.dim() == 3 else x.flatten(2))
        out_grad, losses = output_gradient(self.loss, values.pop(), y.unsqueeze(1))
        if not self.block.full[step]:
            mask, scale = self.block.mask[step, :running], 1.0
            losses.masked_fill_(~mask, 0.0)
            out_grad *= (mask.to(out_grad.dtype) / self.seen[step, :running].unsqueeze(1)).unsqueeze(1)
        self.summed.append(losses.sum(1, dtype=widest(losses.device)))
        return values, out_grad, scale

    def totals(self) -> Tensor:
        """The sums of the losses over examples and over batches, ``[C, 2]``."""
        return loss_totals(self.summed, self.seen)


def loss_totals(summed: list[Tensor], seen: Tensor) -> Tensor:
    """The sums over examples and over batches, ``[C, 2]``, from the sum of every step and ``Prepared.seen``."""
    clients = seen.shape[1]
    if not summed:
        return torch.zeros(clients, 2, dtype=widest(seen.device), device=seen.device)
    # Clients that had no step left are the last ones.
    sums = torch.stack([one if len(one) == clients else functional.pad(one, (0, clients - len(one))) for one in summed])
    return torch.stack([sums.sum(0), (sums / seen.clamp(min=1)).sum(0)], dim=1)


def _activation(chain: Chain, position: int) -> str | None:
    after = chain[position + 1].kind if position + 1 < len(chain) else None
    return after if after in _ACTIVATIONS else None


def allocate(params: Tree, clients: int, momentum: bool) -> Memory:
    """The buffers of a block: a private copy of every leaf for each client."""
    # One contiguous buffer per leaf: on slices of one wide matrix, baddbmm_ would copy them there and back.
    model = {name: leaf.repeat(clients, *[1] * leaf.dim()) for name, leaf in params.items()}
    return Memory(params, model, {name: torch.zeros_like(leaf) for name, leaf in model.items()} if momentum else {})


def _forward(layers: tuple[Dense, ...], model: Tree, x: Tensor) -> list[Tensor]:
    """The input of every layer, ``[c, B, features]``, followed by the output, ``[c, classes, B]``: with the batch as
    the last axis, the softmax over a few classes is four times faster."""
    values = [x.to(model[layers[0].weight].dtype)]
    for layer in layers[:-1]:
        bias = None if layer.bias is None else model[layer.bias].unsqueeze(1)
        out = _affine(bias, values[-1], model[layer.weight].transpose(1, 2))
        values.append(_activate(out, layer.activation))
    last = layers[-1]
    bias = None if last.bias is None else model[last.bias].unsqueeze(2)
    return [*values, _affine(bias, model[last.weight], values[-1].transpose(1, 2))]


def _affine(bias: Tensor | None, one: Tensor, other: Tensor) -> Tensor:
    return torch.bmm(one, other) if bias is None else torch.baddbmm(bias, one, other)


def _activate(out: Tensor, activation: str | None) -> Tensor:
    if activation == "relu":
        return out.relu_()
    if activation == "tanh":
        return out.tanh_()
    return out.sigmoid_() if activation == "sigmoid" else out


def output_gradient(loss: str, out: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of every example's loss with respect to the output, ``[c, classes, B]``, and the losses, ``[c, B]``.
    Overwrites ``out`` if the loss is binary."""
    if loss == "binary":
        target = y.to(out.dtype).reshape(out.shape)
        losses = functional.binary_cross_entropy_with_logits(out, target, reduction="none")
        return out.sigmoid_().sub_(target), losses.squeeze(1)
    logs = out.log_softmax(1)
    losses = logs.gather(1, y).squeeze(1).neg_()
    return logs.exp_().scatter_(1, y, -1.0, reduce="add"), losses


def backward(
    layers: tuple[Dense, ...],
    memory: Memory,
    sgd: PlainSgd,
    inputs: list[Tensor],
    out_grad: Tensor,
    scale: float,
    lr: float,
    at: Tree | None = None,
) -> None:
    """From the last layer to the first: compute the gradient for the layer before it, then update the layer.
    Gradients are ``[c, features, B]``, those of the models ``at`` (default: the ones that are updated)."""
    model = memory.model if at is None else at
    for depth in reversed(range(len(layers))):
        layer, before = layers[depth], inputs[depth]
        onward = torch.bmm(out_grad.transpose(1, 2), model[layer.weight]) if depth else out_grad
        move_weight(memory, layer.weight, sgd, out_grad, before, scale, lr)
        if layer.bias is not None:
            move_bias(memory, layer.bias, sgd, out_grad, scale, lr)
        if depth:
            out_grad = through(onward, before, layers[depth - 1].activation).transpose(1, 2)


def through(out_grad: Tensor, value: Tensor, activation: str | None) -> Tensor:
    """The gradient with respect to the input of an activation with the output ``value``; may overwrite ``out_grad``."""
    if activation == "relu":
        result: Tensor = torch.ops.aten.threshold_backward(out_grad, value, 0)
        return result
    if activation == "tanh":
        return out_grad.mul_(1 - value * value)
    return out_grad.mul_(value * (1 - value)) if activation == "sigmoid" else out_grad


def move_weight(
    memory: Memory, leaf: str, sgd: PlainSgd, out_grad: Tensor, before: Tensor, scale: float, lr: float
) -> None:
    """``w <- w - lr (out_grad before + wd w + pull (w - received))``; without momentum the gradient is never stored."""
    weight = memory.model[leaf]
    if sgd.momentum:
        momentum_step(memory, leaf, sgd, torch.bmm(out_grad, before).mul_(scale), lr)
        return
    weight.baddbmm_(out_grad, before, beta=1.0 - lr * (sgd.weight_decay + sgd.pull), alpha=-lr * scale)
    if sgd.pull:
        weight.add_(memory.received[leaf], alpha=lr * sgd.pull)
    if memory.shift:
        weight.sub_(memory.shift[leaf], alpha=lr)


def move_bias(memory: Memory, leaf: str, sgd: PlainSgd, out_grad: Tensor, scale: float, lr: float) -> None:
    """The same for a bias."""
    bias = memory.model[leaf]
    grad = out_grad.sum(2, dtype=bias.dtype)
    if sgd.momentum:
        momentum_step(memory, leaf, sgd, grad.mul_(scale), lr)
        return
    if sgd.weight_decay or sgd.pull:
        bias.mul_(1.0 - lr * (sgd.weight_decay + sgd.pull))
        bias.add_(memory.received[leaf], alpha=lr * sgd.pull)
    bias.sub_(grad, alpha=lr * scale)
    if memory.shift:
        bias.sub_(memory.shift[leaf], alpha=lr)


def momentum_step(memory: Memory, leaf: str, sgd: PlainSgd, grad: Tensor, lr: float) -> None:
    """A step with momentum; overwrites ``grad``."""
    value, velocity = memory.model[leaf], memory.velocity[leaf]
    if sgd.weight_decay or sgd.pull:
        grad.add_(value, alpha=sgd.weight_decay + sgd.pull)
        grad.sub_(memory.received[leaf], alpha=sgd.pull)
    if memory.shift:
        grad.add_(memory.shift[leaf])
    velocity.mul_(sgd.momentum).add_(grad)
    value.sub_(grad.add_(velocity, alpha=sgd.momentum) if sgd.nesterov else velocity, alpha=lr)
