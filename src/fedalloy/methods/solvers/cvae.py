"""Clients train conditional VAEs and the server averages them: FedCVAE (Kingma & Welling 2014, arXiv:1312.6114)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedalloy.core import tree
from fedalloy.core.aspects import Generative
from fedalloy.core.keys import Key
from fedalloy.core.protocols import ApplyCapability, Carry, GradAt, Objective, Shared
from fedalloy.core.registry import register
from fedalloy.core.types import Context, Payload, Plan, State, Tree
from fedalloy.methods.solvers.descent import descend, descend_start, gradient
from fedalloy.methods.solvers.generating import generated, noise_keys
from fedalloy.methods.solvers.training import LocalTraining


@register("solver", "cvae")
@dataclass(frozen=True)
class Cvae(LocalTraining, Generative):
    """Minimises ``sum_d (x_d - x'_d)^2 + KL(N(mean, spread^2) || N(0, I))`` with the code drawn once per example.

    The squared error is summed over features, so that both terms are per example; ``official`` takes its mean, as the
    published code does: KL then has too much weight, by a factor of the number of pixels, and images blur. Only the
    decoder sees the label. Needs a model with the capabilities ``reconstruct`` and ``generate`` (cvae, cvae_rows).
    When to use it: stable training on few examples matters more than sharp images.
    """

    capabilities: ClassVar[frozenset[str]] = frozenset({"generate", "reconstruct"})
    models: ClassVar[tuple[str, ...]] = ("cvae", "cvae_rows")

    official: bool = False

    def draws(self, plan: Plan, keys: Key, shared: Shared) -> Tree:
        return {**super().draws(plan, keys, shared), **noise_keys(plan, keys)}

    def begin(self, shared: Shared, mine: State, ctx: Context) -> Carry:
        return {"params": shared["params"], "memory": descend_start(self, shared["params"])}

    def step(self, carry: Carry, grad_at: GradAt, draws: Tree, phase: Tensor, ctx: Context) -> Carry:
        loss = evidence_loss(draws["noise"], self.official)
        grads = gradient(self, grad_at, carry["params"], carry["memory"], by=loss)
        params, memory = descend(self, carry["params"], grads, carry["memory"], draws, ctx)
        return {"params": params, "memory": memory}

    def end(self, carry: Carry, shared: Shared, mine: State, steps: Tensor, ctx: Context) -> tuple[Payload, State]:
        return {"delta": tree.subtract(carry["params"], shared["params"])}, mine

    def synthesise(self, shared: Shared, key: Key, per_class: int, objective: Objective) -> tuple[Tensor, Tensor]:
        return generated(shared, key, per_class, objective)


def evidence_loss(noise: Tensor, official: bool = False) -> Callable[[ApplyCapability, Tensor, Tensor], Tensor]:
    """Squared error (summed over features, or averaged with ``official``) plus KL, per example."""

    def loss(model: ApplyCapability, x: Tensor, y: Tensor) -> Tensor:
        target, made, mean, spread = model("reconstruct", x, y, noise)
        squares: Tensor = (made - target).square()
        return (squares.mean(1) if official else squares.sum(1)) + divergence(mean, spread)

    return loss


def divergence(mean: Tensor, spread: Tensor) -> Tensor:
    """``KL(N(mean, spread^2) || N(0, I)) = sum (mean^2 + spread^2 - 1 - log spread^2) / 2`` of every example.

    >>> import torch
    >>> divergence(torch.tensor([[1.0, 0.0]]), torch.ones(1, 2))
    tensor([0.5000])
    """
    terms: Tensor = mean.square() + spread.square() - 1.0 - 2.0 * spread.log()
    return terms.sum(1) / 2
