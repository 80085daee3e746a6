"""A federated and a local model trained along the line between them: SuPerFed (Hahn et al. 2022, arXiv:2109.07628)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedalloy.core import tree
from fedalloy.core.aspects import Fusible, Fusing, OwnStart, Personalised
from fedalloy.core.keys import Key
from fedalloy.core.protocols import Carry, GradAt, Shared
from fedalloy.core.registry import register
from fedalloy.core.search import Range
from fedalloy.core.types import Context, Payload, Plan, State, Tree
from fedalloy.methods.solvers.descent import descend, descend_start, gradient
from fedalloy.methods.solvers.mixing import mixture
from fedalloy.methods.solvers.phases import chosen
from fedalloy.methods.solvers.training import LocalTraining

EVALUATED_AT = 0.5
"""The default mixing coefficient when a client's model is evaluated."""


@register(
    "solver",
    "superfed",
    search={"mu": Range(1e-4, 1.0, log=True), "nu": Range(0.1, 10.0, log=True), "start": Range(0.1, 0.9)},
)
@dataclass(frozen=True)
class SuPerFed(LocalTraining, Personalised, OwnStart, Fusible):
    """``L((1 - lam) f + lam l) + mu/2 |f - g|^2 + nu cos^2(f, l)`` over a federated f and a local l, from a received g.

    ``lam`` is drawn uniformly from (0, 1) in every step: one for the model (``mixing = "model"``) or one per layer
    (``"layer"``; weight and bias of a module share it). Norm and cosine are those of the whole model. Before round
    ``start`` only f is trained: lam = 0, l does not change and the cosine term is off. ``start`` below 1 is a share of
    the run, ``round > start * rounds``; from 1 on it is a round number. Every client starts with its own l, initialised
    like any model of the task. Models are evaluated at lam = 0.5, or at 0 while l has never been trained.
    When to use it: strongly skewed labels, noisy labels, or when calibrated models are needed.
    """

    stateful: ClassVar[bool] = True
    mixable: ClassVar[bool] = True
    needs_fresh: ClassVar[bool] = True
    linear: ClassVar[bool] = False

    mu: float = 0.01
    nu: float = 1.0
    mixing: Literal["model", "layer"] = "model"
    start: float = 0.4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mu < 0 or self.nu < 0 or self.start < 0:
            raise ValueError(f"mu, nu and start must be 0 or more, got {self.mu}, {self.nu} and {self.start}")

    @property
    def fusing(self) -> Fusing | None:
        if self.nesterov or type(self) is not SuPerFed or not self.plain_but():
            return None
        numbers = {"momentum": self.momentum, "weight_decay": self.weight_decay, "pull": self.mu, "angle": self.nu}
        return Fusing("pair_descent", numbers)

    @property
    def uses_length(self) -> str:
        share = f"start = {self.start} is the share of the run after which local models are trained"
        return share if 0 < self.start < 1 else super().uses_length

    def started(self, ctx: Context) -> bool:
        """Whether local models are trained in this round."""
        if self.start >= 1:
            return ctx.round >= self.start
        if self.start == 0:
            return True
        if ctx.rounds is None:
            raise ValueError(f"start = {self.start} is a share of a run of unknown length: give a round (1, 2, ...)")
        # The tolerance is for products that floating point puts just below a whole round (0.29 * 100).
        return ctx.round > int(self.start * ctx.rounds + 1e-9)

    def draws(self, plan: Plan, keys: Key, shared: Shared) -> Tree:
        steps = keys.fold("mix").each(torch.arange(plan.index.shape[1]))
        axes = (len(tree.layers(shared["params"])),) if self.mixing == "layer" else ()
        return {**super().draws(plan, keys, shared), "mix": steps.uniform(*axes, dtype=torch.float64)}

    def init_client(self, shared: Shared, key: Key) -> State:
        first = next(iter(shared["params"].values()))
        return {"local": shared["fresh"], "ready": torch.zeros((), dtype=first.dtype, device=first.device)}

    def personal(self, shared: Shared, mine: State, mix: float | None = None) -> tuple[Tree, Tree]:
        share = EVALUATED_AT * mine["ready"] if mix is None else mix
        return mixture(shared["params"], mine["local"], share), shared["buffers"]

    def begin(self, shared: Shared, mine: State, ctx: Context) -> Carry:
        memory = descend_start(self, shared["params"])
        carry = {"params": shared["params"], "anchor": shared["params"], "memory": memory}
        # ``step`` chooses between the two phases by the carry's form, not by the round: an engine may capture a step
        # once and replay it in later rounds with a carry of the same form.
        return {**carry, "local": mine["local"], "local_memory": memory} if self.started(ctx) else carry

    def step(self, carry: Carry, grad_at: GradAt, draws: Tree, phase: Tensor, ctx: Context) -> Carry:
        if "local" not in carry:
            pull = tree.subtract(carry["params"], carry["anchor"])
            grads = tree.add(gradient(self, grad_at, carry["params"], carry["memory"]), pull, self.mu)
            params, memory = descend(self, carry["params"], grads, carry["memory"], draws, ctx)
            return {**carry, "params": params, "memory": memory}
        shares = self.shares(carry["params"], draws["mix"])
        mixed = gradient(self, grad_at, mixture(carry["params"], carry["local"], shares), carry["memory"])
        grads, own = self.gradients(carry["params"], carry["local"], carry["anchor"], mixed, shares)
        params, memory = descend(self, carry["params"], grads, carry["memory"], draws, ctx)
        local, local_memory = descend(self, carry["local"], own, carry["local_memory"], draws, ctx)
        return {**carry, "params": params, "memory": memory, "local": local, "local_memory": local_memory}

    def end(self, carry: Carry, shared: Shared, mine: State, steps: Tensor, ctx: Context) -> tuple[Payload, State]:
        delta = {"delta": tree.subtract(carry["params"], shared["params"])}
        if "local" not in carry:
            return delta, mine
        ready = {"ready": torch.ones_like(mine["ready"])}
        return delta, {"local": carry["local"], **chosen(steps > 0, ready, {"ready": mine["ready"]})}

    def shares(self, params: Tree, mix: Tensor) -> Tree:
        """The mixing coefficient of every leaf, in the leaf's dtype."""
        if self.mixing == "model":
            return {name: mix.to(leaf) for name, leaf in params.items()}
        layers = enumerate(tree.layers(params).values())
        return {name: mix[position].to(params[name]) for position, names in layers for name in names}

    def gradients(
        self, federated: Tree, local: Tree, received: Tree, gradient: Tree, shares: Tree
    ) -> tuple[Tree, Tree]:
        """Gradients of the whole loss by f and by l, from the batch loss's ``gradient`` at the interpolated model.

        ``(1 - lam) gradient + mu (f - g) + 2 nu c dc/df`` and ``lam gradient + 2 nu c dc/dl`` with
        ``dc/df = l / (|f| |l|) - c f / |f|^2``.
        """
        cosine, ff, ll = angle(federated, local)
        cross, along = 2 * self.nu * cosine / (ff.sqrt() * ll.sqrt()), 2 * self.nu * cosine**2

        # Fused multiply-adds, one pass over memory each: this is most of the cost of a small model's step.
        def by_federated(f: Tensor, own: Tensor, g: Tensor, dl: Tensor, share: Tensor) -> Tensor:
            pulled = torch.addcmul((1 - share) * dl, f, self.mu - along / ff)
            return torch.addcmul(pulled, own, cross).sub(g, alpha=self.mu)

        def by_local(f: Tensor, own: Tensor, dl: Tensor, share: Tensor) -> Tensor:
            return torch.addcmul(torch.addcmul(share * dl, f, cross), own, -along / ll)

        return (
            tree.map_leaves(by_federated, federated, local, received, gradient, shares),
            tree.map_leaves(by_local, federated, local, gradient, shares),
        )

    def penalty(self, federated: Tree, local: Tree, received: Tree) -> Tensor:
        """``mu/2 |f - g|^2 + nu cos^2(f, l)``."""
        away = _squared_length(tree.subtract(federated, received))
        return self.mu / 2 * away + self.nu * angle(federated, local)[0] ** 2


def angle(one: Tree, other: Tree) -> tuple[Tensor, Tensor, Tensor]:
    """The cosine between two models as vectors, and their squared lengths.

    >>> angle({"w": torch.tensor([3.0, 4.0])}, {"w": torch.tensor([0.0, 2.0])})
    (tensor(0.8000), tensor(25.), tensor(4.))
    """
    tiny = torch.finfo(next(iter(one.values())).dtype).tiny
    first, second = (_squared_length(model).clamp(min=tiny) for model in (one, other))
    inner = torch.stack([(leaf * other[name]).sum() for name, leaf in one.items()]).sum()
    return inner / (first.sqrt() * second.sqrt()), first, second


def _squared_length(model: Tree) -> Tensor:
    """In the model's own dtype: it is computed in every step, and float64 is not needed for a penalty."""
    return torch.stack([torch.linalg.vector_norm(leaf) for leaf in model.values()]).square().sum()
