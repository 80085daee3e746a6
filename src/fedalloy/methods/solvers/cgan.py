"""Every client trains a conditional GAN and the server averages them: FedCGAN (AC-GAN of Odena et al. 2017)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from fedalloy.core import tree
from fedalloy.core.aspects import Generative
from fedalloy.core.keys import Key
from fedalloy.core.names import Names
from fedalloy.core.protocols import ApplyCapability, Carry, GradAt, Objective, Shared
from fedalloy.core.registry import register
from fedalloy.core.types import Context, Payload, Plan, State, Tree
from fedalloy.methods.solvers.descent import descend, descend_start, gradient
from fedalloy.methods.solvers.generating import generated, noise_keys
from fedalloy.methods.solvers.training import LocalTraining

Loss = Callable[[ApplyCapability, Tensor, Tensor], Tensor]


@register("solver", "cgan")
@dataclass(frozen=True)
class Cgan(LocalTraining, Generative):
    """Per batch one step of the discriminator D, then one of the generator G, each with its own optimizer state.

    D descends on ``BCE(real, 1) + BCE(fake, 0) + CE(real, y) + CE(fake, y)``, G on ``BCE(fake, 1) + CE(fake, y)``;
    fakes are generated from the batch's labels y. ``official`` gives D's classifier random labels for the fakes, as the
    published code does; it then learns noise from them. ``train_loss`` is D's. Needs a model with the capabilities
    ``generate`` and ``judge`` (acgan, acgan_rows); leaves matching ``generator`` belong to G, all others to D.
    When to use it: you need sharp images and clients have enough examples; averaging GANs under strong label skew is
    unstable.
    """

    capabilities: ClassVar[frozenset[str]] = frozenset({"generate", "judge"})
    provides: ClassVar[frozenset[str]] = frozenset()
    """Empty: two alternating optimizers have no common update length."""
    models: ClassVar[tuple[str, ...]] = ("acgan", "acgan_rows")

    official: bool = False
    generator: tuple[str, ...] = ("generator.*",)

    def draws(self, plan: Plan, keys: Key, shared: Shared) -> Tree:
        return {**super().draws(plan, keys, shared), **noise_keys(plan, keys)}

    def begin(self, shared: Shared, mine: State, ctx: Context) -> Carry:
        makes, judges = Names(self.generator).split(shared["params"])
        memory = {"generator": descend_start(self, makes), "discriminator": descend_start(self, judges)}
        return {"params": shared["params"], "memory": memory}

    def step(self, carry: Carry, grad_at: GradAt, draws: Tree, phase: Tensor, ctx: Context) -> Carry:
        makes, judges = Names(self.generator).split(carry["params"])
        memory = dict(carry["memory"])
        loss = discriminator_loss(draws["noise"], self.official)
        grads = gradient(self, grad_at, judges, memory["discriminator"], fixed=makes, by=loss)
        judges, memory["discriminator"] = descend(self, judges, grads, memory["discriminator"], draws, ctx)
        loss = generator_loss(draws["noise"])
        grads = gradient(self, grad_at, makes, memory["generator"], fixed=judges, by=loss)
        makes, memory["generator"] = descend(self, makes, grads, memory["generator"], draws, ctx)
        return {"params": {name: (makes | judges)[name] for name in carry["params"]}, "memory": memory}

    def end(self, carry: Carry, shared: Shared, mine: State, steps: Tensor, ctx: Context) -> tuple[Payload, State]:
        return {"delta": tree.subtract(carry["params"], shared["params"])}, mine

    def synthesise(self, shared: Shared, key: Key, per_class: int, objective: Objective) -> tuple[Tensor, Tensor]:
        return generated(shared, key, per_class, objective)


def discriminator_loss(noise: Tensor, official: bool = False) -> Loss:
    """``BCE(real, 1) + BCE(fake, 0) + CE(real, y) + CE(fake, y)`` per example, with one fake of the same label."""

    def loss(model: ApplyCapability, x: Tensor, y: Tensor) -> Tensor:
        fake = model("generate", noise, y)
        # Interleave real and fake in one batch: both enter the same batch statistics, and padding stays at the end.
        both = torch.stack([x.to(fake.dtype), fake], dim=1).flatten(0, 1)
        real_logit, classes = model("judge", both)
        named = torch.stack([y, _random_labels(noise, y, classes.shape[1]) if official else y], dim=1).flatten()
        real, made = real_logit.reshape(-1, 2).unbind(1)
        sides = functional.softplus(-real) + functional.softplus(made)
        return sides + functional.cross_entropy(classes, named, reduction="none").reshape(-1, 2).sum(1)

    return loss


def generator_loss(noise: Tensor) -> Loss:
    """``BCE(fake, 1) + CE(fake, y)`` per example, for a fake of its label."""

    def loss(model: ApplyCapability, x: Tensor, y: Tensor) -> Tensor:
        real_logit, classes = model("judge", model("generate", noise, y))
        return functional.softplus(-real_logit) + functional.cross_entropy(classes, y, reduction="none")

    return loss


def _random_labels(noise: Tensor, y: Tensor, classes: int) -> Tensor:
    return (Key(noise).fold("labels").uniform(len(y), device=y.device) * classes).to(y.dtype)
