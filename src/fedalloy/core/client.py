"""The client half: one client's program from received parts to contribution. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import grad

from fedalloy.core import tree
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.errors import ClientError
from fedalloy.core.keys import Key
from fedalloy.core.objective import Act, Objective
from fedalloy.core.packing import bytes_up
from fedalloy.core.protocols import Carry, Shared
from fedalloy.core.types import Context, Contribution, Examples, Payload, Plan, State, Tree

_CHUNK = 4096


@dataclass(frozen=True)
class Assignment:
    """One client's share of a round: its data, how many epochs it has time for, whether its link works."""

    examples: Examples
    epochs: int = -1
    active: bool = True


Training = Callable[..., tuple[Carry, Tree, dict[str, float]]]
"""Takes what ``train`` takes and returns the same, within a stated tolerance."""


class BatchGradient:
    """``grad_at`` for one step: gradients of the batch loss, remembering the loss and the buffers.

    A solver that evaluates several models in one step passes ``track=False`` for those whose batch
    statistics should not enter the shared buffers. One that descends on a function of the batch loss passes it
    as ``of``; the loss that is remembered is the plain one. One with a loss of its own passes it as ``by``.
    """

    def __init__(
        self, objective: Objective, x: Tensor, y: Tensor, mask: Tensor | None, buffers: Tree, draw: Tensor | None
    ) -> None:
        self._objective, self._batch, self._draw = objective, (x, y, mask), draw
        self._acts = 0
        self.buffers = buffers
        self.loss: Tensor | None = None

    def __call__(
        self,
        params: Tree,
        *,
        track: bool | Tensor = True,
        of: Callable[[Tensor], Tensor] | None = None,
        by: Callable[[Act, Tensor, Tensor], Tensor] | None = None,
        fixed: Tree | None = None,
    ) -> Tree:
        def loss_of(leaves: Tree) -> tuple[Tensor, tuple[Tensor, Tree]]:
            whole = {**(fixed or {}), **leaves}
            if by is None:
                loss, buffers = self._objective.loss(whole, self.buffers, *self._batch, self._draw)
            else:
                loss, buffers = self._own_loss(whole, by)
            return (loss if of is None else of(loss)), (loss, buffers)

        grads, (loss, buffers) = grad(loss_of, has_aux=True)(params)
        if isinstance(track, Tensor):
            self.buffers = tree.map_leaves(
                lambda new, old: torch.where(track.to(new.device), new, old), buffers, self.buffers
            )
        elif track:
            self.buffers = buffers
        self.loss = loss if self.loss is None else self.loss
        return dict(grads)

    def outputs(self, params: Tree, x: Tensor) -> Tensor:
        """What the model says about any ``x``, in evaluation mode."""
        return self._objective.outputs(params, self.buffers, x)

    def _own_loss(self, leaves: Tree, by: Callable[[Act, Tensor, Tensor], Tensor]) -> tuple[Tensor, Tree]:
        """The masked mean of a loss that calls the model itself; every call of a step has dropout masks of its own."""
        x, y, mask = self._batch
        buffers = self.buffers

        def act(role: str, *inputs: Tensor) -> Any:
            nonlocal buffers
            draw = None if self._draw is None else torch.as_tensor(Key(self._draw).fold("act", self._acts).state)
            self._acts += 1
            result, buffers = self._objective.act(role, leaves, buffers, inputs, draw, training=True)
            return result

        losses = by(act, x, y)
        if mask is None:
            return losses.mean(), buffers
        return torch.where(mask, losses, torch.zeros_like(losses)).sum() / mask.sum().clamp(min=1), buffers

    def under(self, objective: Objective | None) -> BatchGradient:
        """The same batch asked anew, under another objective where one is given."""
        return BatchGradient(objective or self._objective, *self._batch, self.buffers, self._draw)


def run_client(
    algorithm: Algorithm,
    objective: Objective,
    shared: Shared,
    state: State,
    assignment: Assignment,
    key: Key,
    ctx: Context,
    training: Training | None = None,
) -> Contribution:
    """Plan, draw, begin, step, end, encode. An error names the stage it happened in.

    ``key`` is the client's own key of this round, as a batch of one; ``training`` a kernel in place of ``train``.
    """
    solver, examples = algorithm.solver, assignment.examples
    stats: dict[str, float] = {"num_examples": float(len(examples))}
    with stage("plan"):
        sizes, epochs = torch.tensor([len(examples)]), torch.tensor([assignment.epochs])
        plan = solver.plan(sizes, epochs, key.fold("plan"))
        draws = solver.draws(plan, key.fold("draws"), shared)
        stats["num_steps"] = float(plan.steps[0])
        if algorithm.weighting.requires & solver.provides:
            described = solver.describe(plan.steps.double(), ctx)
            stats |= {name: float(values[0]) for name, values in described.items()}
    model, buffers = solver.start_model(shared, state["solver"])
    if "loss_before" in algorithm.weighting.requires:
        with stage("loss_before"):
            stats["loss_before"] = mean_loss(objective, model, buffers, examples)
    with stage("begin"):
        carry = solver.begin(shared, state["solver"], ctx)
    run = training or train
    carry, buffers, losses = run(algorithm, objective, carry, buffers, assignment, plan, draws, key, ctx)
    stats |= {name: losses[name] for name in ("train_loss", *algorithm.weighting.requires & losses.keys())}
    if "accuracy_after" in algorithm.weighting.requires:
        with stage("accuracy_after"):
            stats["accuracy_after"] = _accuracy(objective, solver.trained(carry), buffers, examples)
    with stage("conclude"):
        carry = solver.conclude(carry, shared, lambda params, x: objective.outputs(params, buffers, x))
    with stage("end"):
        steps = torch.tensor(stats["num_steps"] if assignment.active else 0.0, dtype=torch.float64)
        payload, mine = solver.end(carry, shared, state["solver"], steps, ctx)
    if shared["buffers"]:
        payload, mine = {**payload, "buffers": solver.stays.split(buffers)[1]}, solver.settle(mine, buffers)
    kept = {"solver": mine, "wire": state["wire"]}
    return _send(algorithm, shared, payload, kept, stats, key, encode=assignment.active)


def mean_loss(objective: Objective, params: Tree, buffers: Tree, examples: Examples) -> float:
    """Mean loss over a client's examples; NaN for a client without any."""
    total = sum(
        float(objective.losses(objective.outputs(params, buffers, x), y).double().sum())
        for x, y in zip(examples.x.split(_CHUNK), examples.y.split(_CHUNK), strict=True)
    )
    return total / len(examples) if len(examples) else float("nan")


def client_keys(round_key: Key, ids: Tensor) -> Key:
    """One key per client of a round, by the client's id and nothing else, as a batch."""
    return round_key.fold("client").each(ids)


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Turn any error inside into one that names the stage."""
    try:
        yield
    except ClientError:
        raise
    except Exception as error:
        raise ClientError(name, error) from error


def dropout_draws(plan: Plan, keys: Key) -> Tensor:
    """One 64-bit key per client and step, from which dropout modules make their masks, ``[C, S]``."""
    state = keys.fold("dropout").each(torch.arange(plan.index.shape[1])).state
    assert isinstance(state, Tensor)
    return state


def train(
    algorithm: Algorithm,
    objective: Objective,
    carry: Carry,
    buffers: Tree,
    assignment: Assignment,
    plan: Plan,
    draws: Tree,
    key: Key,
    ctx: Context,
) -> tuple[Carry, Tree, dict[str, float]]:
    """Every planned step in turn; also the mean training loss over the examples seen, and the sum over batches."""
    dropout, losses = dropout_draws(plan, key), []
    steps = int(plan.steps[0]) if assignment.active else 0
    for step in range(steps):
        with stage(f"step {step + 1} of {steps}"):
            chosen = plan.index[0, step][plan.mask[0, step]]
            batch = assignment.examples.x[chosen], assignment.examples.y[chosen]
            grad_at = BatchGradient(objective, *batch, None, buffers, dropout[0, step])
            inputs: dict[str, Any] = {name: leaf[0, step] for name, leaf in draws.items()}
            carry = algorithm.solver.step(carry, grad_at, inputs, plan.phase[0, step], ctx)
            buffers = grad_at.buffers
            losses.append((len(chosen), float(grad_at.loss) if grad_at.loss is not None else 0.0))
    return carry, buffers, mean_losses(losses)


def mean_losses(losses: list[tuple[int, float]]) -> dict[str, float]:
    """Of the losses of batches, with their numbers of examples: the mean over examples and the sum over batches."""
    seen, total = sum(count for count, _ in losses), sum(count * loss for count, loss in losses)
    running = sum(loss for _, loss in losses)
    return {"train_loss": total / seen if seen else float("nan"), "running_loss": running}


def _accuracy(objective: Objective, params: Tree, buffers: Tree, examples: Examples) -> float:
    hits = sum(
        float(objective.hits(objective.outputs(params, buffers, x), y).sum())
        for x, y in zip(examples.x.split(_CHUNK), examples.y.split(_CHUNK), strict=True)
    )
    return hits / len(examples) if len(examples) else float("nan")


def _send(
    algorithm: Algorithm,
    shared: Shared,
    payload: Payload,
    state: State,
    stats: dict[str, float],
    key: Key,
    *,
    encode: bool,
) -> Contribution:
    """Encode in wire order and count what really travels.

    A client whose link failed counts with an update of zero: an error memory or noise must not speak for it. Where
    nothing is sent there is nothing to encode.
    """
    kept = dict(state["wire"])
    for position, wire in enumerate(algorithm.wire if encode and any(payload.values()) else ()):
        with stage(f"wire {position}"):
            draws = tree.rows(wire.draws(algorithm.exchanged(shared), key.fold("wire", position)), 0)
            payload, kept[str(position)] = wire.encode(payload, kept[str(position)], draws)
    alone = {part: tree.map_leaves(lambda leaf: leaf.unsqueeze(0), leaves) for part, leaves in payload.items()}
    sent = float(bytes_up(alone, algorithm.packings, 1)[0])
    return Contribution(payload, {**stats, "bytes_up": sent}, {**state, "wire": kept})
