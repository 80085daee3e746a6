"""Local classifiers as energy models: what a client of FedEvg does (Hahn's thesis, chapter IV).

The view of a classifier as an energy model is due to Grathwohl et al. 2020, arXiv:1912.03263.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.func import grad
from torch.nn import functional

from fedalloy.core.aspects import Generative, OwnStart
from fedalloy.core.errors import SpecError
from fedalloy.core.keys import Key
from fedalloy.core.protocols import ApplyCapability, Carry, GradAt, Objective, Outputs, Shared
from fedalloy.core.registry import register
from fedalloy.core.types import Context, DataSpec, Part, Payload, Plan, State, Tree
from fedalloy.methods.solvers.descent import descend, descend_start, gradient
from fedalloy.methods.solvers.epoch_plans import steps_per_epoch
from fedalloy.methods.solvers.training import LocalTraining

_TOLERANCE = 1e-6
_RECEIVED = frozenset({"samples", "labels", "buffers"})


@register("solver", "energy")
@dataclass(frozen=True)
class Energy(LocalTraining, OwnStart, Generative):
    """Energy gradients of the federation's synthetic samples ``(x_j, y_j)`` under a classifier f trained from scratch.

    With the energy ``E(x, y) = -f(x)[y]`` a local step minimises ``mean E(real) - mean E(fake) + CE(real) + synthetic
    CE(received)``: it makes real data likely and the chain's samples unlikely. The chain starts every round from the
    received samples; in each local step ``batch_size`` of them first take ``langevin`` steps ``x <- x - step_size
    grad E + noise z``. A client sends ``grad E`` at the received samples and the factor ``exp(sign f(x_j)[y_j])``; the
    model itself is neither sent nor kept. Energy gradients are clipped to ``[-bound, bound]`` and samples to
    ``[low, high]`` (default: the limits declared for the data, if any). ``per_class`` samples of every class start as
    normal noise. ``iterations`` limits the local steps. ``shape``, ``classes`` and ``seed`` are set by the run.
    When to use it: models too large to send, or clients with different models; classifiers with one output per class,
    better with GroupNorm than with BatchNorm.
    """

    parts: ClassVar[dict[str, Part]] = {
        "energy_grad": Part(like="samples"),
        "factors": Part("stack", like="factors", neutral=1.0),
    }
    target: ClassVar[str] = "samples"
    update: ClassVar[str] = "energy_grad"
    linear: ClassVar[bool] = False
    needs_fresh: ClassVar[bool] = True
    receives: ClassVar[frozenset[str]] = _RECEIVED

    per_class: int = 10
    synthetic: float = 0.1
    langevin: int = 1
    step_size: float = 1.0
    noise: float = 0.01
    bound: float | None = 3.0
    low: float | None = None
    high: float | None = None
    iterations: int | None = None
    shape: tuple[int, ...] | None = None
    classes: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.per_class < 1 or self.langevin < 0 or self.noise < 0:
            raise ValueError(
                f"per_class must be 1 or more, langevin and noise 0 or more, got {self.per_class}, {self.langevin} "
                f"and {self.noise}"
            )
        if self.synthetic < 0 or self.step_size < 0 or (self.bound is not None and self.bound <= 0):
            raise ValueError(
                f"synthetic and step_size must be 0 or more and bound above 0 (or none), got {self.synthetic}, "
                f"{self.step_size} and {self.bound}"
            )
        if min(one for one in (self.iterations, self.classes, 1) if one is not None) < 1:
            raise ValueError(f"iterations and classes must be 1 or more, got {self.iterations} and {self.classes}")
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ValueError(f"low must be below high, got {self.low} and {self.high}")

    @staticmethod
    def example() -> Energy:
        """An instance for the conformance tests."""
        return Energy(per_class=2, batch_size=3, lr=0.01)

    @property
    def holds_per_class(self) -> int:
        return self.per_class

    def bind(self, data_spec: DataSpec) -> Energy:
        if data_spec.outputs < 2:
            raise ValueError(
                "solver 'energy' needs a model with one output per class, and this one has a single output: "
                'set loss = "cross_entropy" for the task'
            )
        if not data_spec.shape:
            raise SpecError("solver 'energy' needs examples that are one tensor with at least one axis")
        low, high = data_spec.bounds or (None, None)
        low, high = low if self.low is None else self.low, high if self.high is None else self.high
        below, above = (
            low is not None and data_spec.low < low - _TOLERANCE,
            high is not None and data_spec.high > high + _TOLERANCE,
        )
        if below or above:
            raise ValueError(
                f"solver 'energy' keeps its samples in [{low}, {high}], but the data reach from {data_spec.low:g} to "
                f"{data_spec.high:g}: scale the data, or set low and high (-inf and inf: no limit)"
            )
        return replace(
            super().bind(data_spec),
            low=low,
            high=high,
            shape=data_spec.shape,
            classes=data_spec.outputs,
            seed=data_spec.seed,
        )

    def plan(self, sizes: Tensor, epochs: Tensor, keys: Key) -> Plan:
        whole = super().plan(sizes, epochs, keys)
        most = whole.index.shape[1] if self.iterations is None else self.iterations
        return Plan(whole.index[:, :most], whole.mask[:, :most], whole.phase[:, :most])

    def count_steps(self, sizes: Tensor, epochs: Tensor) -> Tensor:
        steps = steps_per_epoch(sizes, self.batch_size, self.leftover) * self.all_epochs(epochs)[1]
        return steps if self.iterations is None else steps.clamp(max=self.iterations)

    def draws(self, plan: Plan, keys: Key, shared: Shared) -> Tree:
        steps, samples = torch.arange(plan.index.shape[1]), len(shared["labels"]["y"])
        order = keys.fold("chain").each(steps).permutation(samples)
        noise, chosen = keys.fold("noise").each(steps).state, order[..., : min(self.batch_size or samples, samples)]
        return {**super().draws(plan, keys, shared), "chosen": chosen, "noise": torch.as_tensor(noise)}

    def init_shared(self, params: Tree) -> Shared:
        if self.shape is None or self.classes is None:
            raise ValueError("solver 'energy' is not bound to data yet: call algorithm.bind(task) first")
        some = next(iter(params.values()))
        y = torch.arange(self.classes, device=some.device).repeat_interleave(self.per_class)
        x = Key.of(self.seed).fold("samples").normal(len(y), *self.shape, dtype=some.dtype).to(some.device)
        return {"samples": {"x": x}, "labels": {"y": y}, "factors": {"x": torch.ones_like(x.flatten(1)[:, 0])}}

    def init_client(self, shared: Shared, key: Key) -> State:
        return {"fresh": shared["fresh"]}

    def start_model(self, shared: Shared, mine: State) -> tuple[Tree, Tree]:
        return mine["fresh"], shared["buffers"]

    def begin(self, shared: Shared, mine: State, ctx: Context) -> Carry:
        fixed = {"x": shared["samples"]["x"], "y": shared["labels"]["y"]}
        memory = descend_start(self, mine["fresh"])
        return {"params": mine["fresh"], "memory": memory, "chain": shared["samples"]["x"], "received": fixed}

    def step(self, carry: Carry, grad_at: GradAt, draws: Tree, phase: Tensor, ctx: Context) -> Carry:
        chosen, params = draws["chosen"], carry["params"]
        y = carry["received"]["y"][chosen]
        fake = self.walk(carry["chain"][chosen], y, params, grad_at.outputs, Key(draws["noise"]))
        received = carry["received"]["x"][chosen]

        def loss(model: ApplyCapability, x: Tensor, labels: Tensor) -> Tensor:
            said = model("classify", torch.cat([x, fake, received]))
            real, made, known = said.split([len(x), len(fake), len(received)])
            crossed = functional.cross_entropy(known, y)
            return contrast(real, labels, made, y) + _crossed(real, labels) + self.synthetic * crossed

        grads = gradient(self, grad_at, params, carry["memory"], by=loss)
        params, memory = descend(self, params, grads, carry["memory"], draws, ctx)
        chain = carry["chain"].index_copy(0, chosen, fake)
        return {**carry, "params": params, "memory": memory, "chain": chain}

    def walk(self, x: Tensor, y: Tensor, params: Tree, outputs: Outputs, key: Key) -> Tensor:
        """Langevin steps down the energy."""
        for number in range(self.langevin):
            uphill, _ = energy_gradient(lambda z: outputs(params, z), x, y, self.bound)
            moved = x - self.step_size * uphill
            if self.noise:
                moved = moved + self.noise * key.fold(number).normal(*x.shape, dtype=x.dtype, device=x.device)
            x = moved if self.low is None and self.high is None else moved.clamp(self.low, self.high)
        return x

    def post_train(self, carry: Carry, shared: Shared, outputs: Outputs) -> Carry:
        x, y, params = carry["received"]["x"], carry["received"]["y"], carry["params"]
        gradient, logits = energy_gradient(lambda z: outputs(params, z), x, y, self.bound)
        return {**carry, "slope": gradient, "factors": factors(logits)}

    def end(self, carry: Carry, shared: Shared, mine: State, steps: Tensor, ctx: Context) -> tuple[Payload, State]:
        trained = steps.to(carry["slope"].device) > 0
        gradient = torch.where(trained, carry["slope"], 0.0)
        return {"energy_grad": {"x": gradient}, "factors": {"x": torch.where(trained, carry["factors"], 1.0)}}, mine

    def synthesise(self, shared: Shared, key: Key, per_class: int, objective: Objective) -> tuple[Tensor, Tensor]:
        """The samples themselves, at most as many as exist."""
        x, y = shared["samples"]["x"], shared["labels"]["y"]
        if self.low is not None or self.high is not None:
            x = x.clamp(self.low, self.high)  # before the first server step they are unclipped noise
        kept = torch.arange(len(y), device=y.device) % self.per_class < per_class
        return x[kept], y[kept]


def contrast(real: Tensor, y: Tensor, made: Tensor, y_made: Tensor) -> Tensor:
    """``E(x_i) - mean E(x_fake)`` for every real example, from logits, with ``E = -f(x)[y]``.

    The mean over real examples is the loss of contrastive divergence: descending on it raises the logit of real data.

    >>> contrast(torch.tensor([[2.0, 0.0]]), torch.tensor([0]), torch.tensor([[0.5, 0.0]]), torch.tensor([0]))
    tensor([-1.5000])
    """
    return chosen_logits(made, y_made).mean() - chosen_logits(real, y)


def chosen_logits(logits: Tensor, y: Tensor) -> Tensor:
    """``f(x)[y]`` of every example."""
    return logits.gather(1, y.unsqueeze(1)).squeeze(1)


def factors(logits: Tensor) -> Tensor:
    """``exp(sign f(x)[y])``: e, 1 or 1/e, so that the scale of a client's energy does not affect its weight.

    >>> factors(torch.tensor([3.0, 0.0, -0.1]))
    tensor([2.7183, 1.0000, 0.3679])
    """
    return logits.sign().exp()


def energy_gradient(
    model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, bound: float | None
) -> tuple[Tensor, Tensor]:
    """``grad_x E(x, y)`` of every example, clipped elementwise to ``[-bound, bound]``; and ``f(x)[y] = -E``."""

    def energy(z: Tensor) -> tuple[Tensor, Tensor]:
        logits = chosen_logits(model(z), y)
        return -logits.sum(), logits

    gradient, logits = grad(energy, has_aux=True)(x)
    return (gradient if bound is None else gradient.clamp(-bound, bound)), logits


def _crossed(logits: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(logits, y, reduction="none")
