"""SGD on a federated and a local model at once, in place, for a chain of linear layers. Not differentiable.

All leaves of a client's model are in one row of a ``[C, d]`` buffer that this kernel owns. A step is one forward and
backward pass at the interpolated model and then a few linear combinations of rows. Each of them reads the rows once
and allocates no new ones, so it is fast while all rows are in the processor's cache: a block should have no more
clients than fit there.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from fedalloy.core import tree
from fedalloy.core.program import BlockTraining, TrainingResult
from fedalloy.core.types import Tree
from fedalloy.engines.batches import batches
from fedalloy.engines.kernels.fused import Dense, Passes, through
from fedalloy.engines.kernels.fused_pair import PairSteps, pair_steps
from fedalloy.engines.kinds import InterpolatedSgd, interpolated_sgd_of

DIFFERENTIABLE = False
CACHE_BYTES = 8 << 20
"""The most memory that the rows of a block should take."""
_ROWS = 7
Span = tuple[slice, int]
"""Columns with the same mixing coefficient, and the index of this coefficient."""


@dataclass(frozen=True)
class InterpolationMemory:
    """One row per client: both models, their velocities, the interpolated model and the gradient of the loss at it.
    Without a local model, ``local`` and ``mixed`` are the federated one. ``received`` is one row for all clients."""

    received: Tensor
    federated: Tensor
    local: Tensor
    velocity: Tensor
    local_velocity: Tensor
    mixed: Tensor
    out_grad: Tensor
    mixed_leaves: Tree
    gradient_leaves: Tree

    @property
    def mixes(self) -> bool:
        """Whether there is a local model."""
        return self.local is not self.federated

    def first(self, clients: int) -> InterpolationMemory:
        """The rows of the first clients, as views."""
        federated, local, mixed = (rows[:clients] for rows in (self.federated, self.local, self.mixed))
        if not self.mixes:
            local = mixed = federated
        velocities = self.velocity[:clients], self.local_velocity[:clients]
        leaves = ({n: leaf[:clients] for n, leaf in kept.items()} for kept in (self.mixed_leaves, self.gradient_leaves))
        return InterpolationMemory(
            self.received, federated, local, *velocities, mixed, self.out_grad[:clients], *leaves
        )


def clients_in_cache(params: Tree) -> int:
    """How many clients a block should have so that its rows fit in the cache."""
    return max(1, CACHE_BYTES // (_ROWS * max(1, tree.nbytes(params))))


def train(layers: tuple[Dense, ...], training: BlockTraining) -> TrainingResult:
    """The kernel, for a model of these layers and a solver of the kind ``pair_descent``."""
    interpolated, params = interpolated_sgd_of(training.algorithm), training.shared["params"]
    assert interpolated is not None
    block, carry = training.block, training.carry
    memory = _allocate(params, carry.get("local"), len(block))
    passes, now = Passes(layers, training.objective.loss_name or "", block), memory
    shares, spans = _shares(block.draws["mix"], params)
    compiled = _compiled(memory, interpolated, shares, spans, training.ctx.local_lr)
    for step, (x, y) in enumerate(batches(block)):
        training.at.name = f"step {step + 1} of {len(block.running)}"
        running = block.running[step]
        if running < len(block):
            now = memory.first(running)
        share = shares[:running, step]
        if compiled is None or step == 0:
            _mix(now, share, spans)
        values, out_grad, scale = passes.forward(now.mixed_leaves, step, x, y)
        _backward(layers, now, values, out_grad)
        if compiled is None:
            _move(now, interpolated, share, spans, scale, training.ctx.local_lr)
        else:
            compiled.take(step, running, scale)
    # Copies, because a client's state that is a view would keep the whole buffer alive.
    kept = {"params": memory.federated, **({"local": memory.local} if memory.mixes else {})}
    models = {name: {n: leaf.clone() for n, leaf in _leaves(flat, params).items()} for name, flat in kept.items()}
    return TrainingResult({**carry, **models}, {}, passes.totals())


def _compiled(
    memory: InterpolationMemory, interpolated: InterpolatedSgd, shares: Tensor, spans: list[Span], lr: float
) -> PairSteps | None:
    """The compiled updates, which also mix; None without them or without a local model."""
    if not memory.mixes:
        return None
    rows = {
        "received": memory.received, "gradient": memory.out_grad, "federated": memory.federated,
        "local": memory.local, "velocity": memory.velocity, "local_velocity": memory.local_velocity,
        "mixed": memory.mixed,
    }  # fmt: skip
    return pair_steps(rows, interpolated, shares, spans, lr)


def _allocate(params: Tree, local: Tree | None, clients: int) -> InterpolationMemory:
    received = torch.cat([leaf.reshape(-1) for leaf in params.values()])
    federated = received.repeat(clients, 1)
    velocity, out_grad = torch.zeros_like(federated), torch.empty_like(federated)
    if local is None:
        own = mixed = federated
    else:
        own, mixed = torch.cat([local[name].flatten(1) for name in params], dim=1), torch.empty_like(federated)
    other = velocity if local is None else torch.zeros_like(federated)
    leaves = _leaves(mixed, params), _leaves(out_grad, params)
    return InterpolationMemory(received, federated, own, velocity, other, mixed, out_grad, *leaves)


def _slices(params: Tree) -> list[slice]:
    ends = list(accumulate(leaf.numel() for leaf in params.values()))
    return [slice(begin, end) for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


def _leaves(flat: Tensor, params: Tree) -> Tree:
    """Views of the rows as leaves ``[C, *shape]``."""
    named = zip(params.items(), _slices(params), strict=True)
    return {name: flat[:, span].unflatten(1, leaf.shape) for (name, leaf), span in named}


def _shares(mix: Tensor, params: Tree) -> tuple[Tensor, list[Span]]:
    """The coefficients ``[C, S, n]`` in the model's precision, and the columns that each of them applies to."""
    dtype, slices = next(iter(params.values())).dtype, _slices(params)
    if mix.dim() == 2:
        return mix.to(dtype).unsqueeze(2), [(slice(0, slices[-1].stop), 0)]
    places = {name: place for place, names in enumerate(tree.layers(params).values()) for name in names}
    return mix.to(dtype), [(span, places[name]) for name, span in zip(params, slices, strict=True)]


def _mix(memory: InterpolationMemory, share: Tensor, spans: list[Span]) -> None:
    if memory.mixes:
        for span, place in spans:
            weight = share[:, place : place + 1]
            torch.lerp(memory.federated[:, span], memory.local[:, span], weight, out=memory.mixed[:, span])


def _backward(layers: tuple[Dense, ...], memory: InterpolationMemory, inputs: list[Tensor], out_grad: Tensor) -> None:
    """Compute the gradients with respect to the leaves of the interpolated model, from the last layer to the first."""
    for depth in reversed(range(len(layers))):
        layer, before = layers[depth], inputs[depth]
        torch.bmm(out_grad, before, out=memory.gradient_leaves[layer.weight])
        if layer.bias is not None:
            torch.sum(out_grad, 2, out=memory.gradient_leaves[layer.bias])
        if depth:
            onward = torch.bmm(out_grad.transpose(1, 2), memory.mixed_leaves[layer.weight])
            out_grad = through(onward, before, layers[depth - 1].activation).transpose(1, 2)


def _move(
    memory: InterpolationMemory,
    interpolated: InterpolatedSgd,
    share: Tensor,
    spans: list[Span],
    scale: float,
    lr: float,
) -> None:
    """Update both models. The gradient of each is its share of the gradient at the interpolated model plus multiples
    of both models and of the received one."""
    f, own, both = memory.federated, memory.local, memory.mixes and interpolated.angle > 0
    cross, along_f, along_own = _angle(f, own, interpolated.angle) if both else (None, 0.0, 0.0)
    _gather(memory.velocity, interpolated, f, interpolated.weight_decay + interpolated.pull - along_f, own, cross)
    if interpolated.pull:
        memory.velocity.sub_(memory.received, alpha=interpolated.pull)
    if not memory.mixes:
        f.sub_(memory.velocity.add_(memory.out_grad, alpha=scale), alpha=lr)
        return
    _gather(memory.local_velocity, interpolated, own, interpolated.weight_decay - along_own, f, cross)
    for span, place in spans:
        weight = share[:, place : place + 1]
        memory.velocity[:, span].addcmul_(memory.out_grad[:, span], (1 - weight) * scale)
        memory.local_velocity[:, span].addcmul_(memory.out_grad[:, span], weight * scale)
    f.sub_(memory.velocity, alpha=lr)
    own.sub_(memory.local_velocity, alpha=lr)


def _gather(
    velocity: Tensor,
    interpolated: InterpolatedSgd,
    one: Tensor,
    along: float | Tensor,
    other: Tensor,
    cross: Tensor | None,
) -> None:
    """``velocity <- momentum velocity + along one + cross other``."""
    if interpolated.momentum:
        velocity.mul_(interpolated.momentum)
        velocity.addcmul_(one, torch.as_tensor(along, dtype=one.dtype))
    else:
        torch.mul(one, along, out=velocity)
    if cross is not None:
        velocity.addcmul_(other, cross)


def _angle(f: Tensor, own: Tensor, nu: float) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of ``nu cos^2(f, l)`` are ``cross l - along_f f`` and ``cross f - along_l l``; all ``[C, 1]``."""
    tiny = torch.finfo(f.dtype).tiny
    ff, ll = (_inner(model, model).clamp_(min=tiny) for model in (f, own))
    lengths = ff.sqrt() * ll.sqrt()
    cosine = _inner(f, own) / lengths
    along = 2 * nu * cosine.square()
    return 2 * nu * cosine / lengths, along / ff, along / ll


def _inner(one: Tensor, other: Tensor) -> Tensor:
    """The inner products of the rows, ``[C, 1]``. ``bmm`` is faster here than any reduction."""
    return torch.bmm(one.unsqueeze(1), other.unsqueeze(2)).squeeze(2)
