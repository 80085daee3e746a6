"""Local solvers as printed or coded elsewhere. For measurements only, not for use."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedalloy.core import tree
from fedalloy.core.keys import Key
from fedalloy.core.protocols import Carry, GradAt, Shared
from fedalloy.core.types import Context, Contributions, Payload, Plan, State, Tree
from fedalloy.methods.solvers.descent import descend
from fedalloy.methods.solvers.epoch_plans import epoch_plan
from fedalloy.methods.solvers.scaffold import Scaffold
from fedalloy.methods.solvers.sgd import Sgd
from fedalloy.methods.solvers.training import LocalTraining
from fedalloy.tasks.federation import FederatedTask


@dataclass(frozen=True)
class UnsquaredProx(LocalTraining):
    """FedProx with ``mu sum_l |y_l - w_l|``: a pull of length ``mu`` in every tensor, independent of the distance.

    Over the tensors whose name ends in one of ``pulled``.
    """

    mu: float = 0.01
    pulled: tuple[str, ...] = ("weight", "bias")

    def begin(self, shared: Shared, mine: State, ctx: Context) -> Carry:
        return {"params": shared["params"], "anchor": shared["params"], "memory": {}}

    def step(self, carry: Carry, grad_at: GradAt, draws: Tree, phase: Tensor, ctx: Context) -> Carry:
        away = tree.subtract(carry["params"], carry["anchor"])
        pull = {name: _unit(leaf) * float(name.endswith(self.pulled)) for name, leaf in away.items()}
        grads = tree.add(grad_at(carry["params"]), pull, self.mu)
        params, memory = descend(self, carry["params"], grads, carry["memory"], draws, ctx)
        return {"params": params, "anchor": carry["anchor"], "memory": memory}

    def end(self, carry: Carry, shared: Shared, mine: State, steps: Tensor, ctx: Context) -> tuple[Payload, State]:
        return {"delta": tree.subtract(carry["params"], shared["params"])}, mine


def _unit(leaf: Tensor) -> Tensor:
    """The gradient of a norm: a unit vector, and zero at the anchor itself."""
    length = leaf.square().sum().sqrt()
    return torch.where(length > 0, leaf / length.clamp(min=1e-12), torch.zeros_like(leaf))


@dataclass(frozen=True)
class StepwiseNova(LocalTraining):
    """FedNova with ``tau_eff / tau_k`` inside every local step; ``extra`` steps beyond ``tau_k`` as in S0's loop.

    ``effective`` is ``tau_eff`` of a federation with full participation, so that it is known in advance.
    """

    effective: float = 1.0
    extra: int = 0

    def plan(self, sizes: Tensor, epochs: Tensor, keys: Key) -> Plan:
        plan = super().plan(sizes, epochs, keys)
        if not self.extra:
            return plan
        wanted = torch.where(epochs < 0, self.epochs, epochs)
        longer = epoch_plan(sizes, wanted + self.extra, self.batch_size, keys)
        last = (plan.steps + self.extra).reshape(-1, 1, 1)
        within = torch.arange(longer.mask.shape[1]).reshape(1, -1, 1) < last
        return Plan(longer.index, longer.mask & within, longer.phase)

    def draws(self, plan: Plan, keys: Key, shared: Shared) -> Tree:
        due = (plan.steps - self.extra).clamp(min=1)
        return {"scale": (self.effective / due).unsqueeze(1).expand(-1, plan.mask.shape[1])}

    def begin(self, shared: Shared, mine: State, ctx: Context) -> Carry:
        return {"params": shared["params"]}

    def step(self, carry: Carry, grad_at: GradAt, draws: Tree, phase: Tensor, ctx: Context) -> Carry:
        return {"params": tree.add(carry["params"], grad_at(carry["params"]), -ctx.local_lr * draws["scale"])}

    def end(self, carry: Carry, shared: Shared, mine: State, steps: Tensor, ctx: Context) -> tuple[Payload, State]:
        return {"delta": tree.subtract(carry["params"], shared["params"])}, mine


def effective_steps(task: FederatedTask, epochs: tuple[int, ...], batch_size: int) -> float:
    """``tau_eff = sum_k p_k tau_k`` with full participation."""
    sizes = task.train.size.double()
    steps = (sizes / batch_size).ceil() * torch.tensor(epochs, dtype=torch.float64)
    return float((sizes / sizes.sum() * steps).sum())


@dataclass(frozen=True)
class ScaffoldByEpochs(Scaffold):
    """SCAFFOLD whose control variates divide by the number of epochs where several steps make an epoch."""

    def end(self, carry: Carry, shared: Shared, mine: State, steps: Tensor, ctx: Context) -> tuple[Payload, State]:
        return super().end(carry, shared, mine, torch.full_like(steps, self.epochs), ctx)


@dataclass(frozen=True)
class ForgetfulBuffers(Sgd):
    """Plain training whose federation keeps the buffers it began with: only tensors named weight are averaged."""

    def absorb(self, shared: Shared, aggregate: Payload, cohort: Contributions, ctx: Context) -> Shared:
        first = {name: _first_statistics(name, leaf) for name, leaf in shared["buffers"].items()}
        return {**shared, "buffers": first}


def _first_statistics(name: str, leaf: Tensor) -> Tensor:
    return torch.ones_like(leaf) if name.endswith("running_var") else torch.zeros_like(leaf)
