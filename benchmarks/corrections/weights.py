"""Weightings as printed or coded elsewhere. For measurements only, not for use."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedalloy.core.protocols import ElementRound, Weighting
from fedalloy.core.tree import Chunk
from fedalloy.core.types import Cohort, Context, Contributions, Info, State, Weights
from fedalloy.methods.weightings.afl import Afl
from fedalloy.methods.weightings.attendance import among
from fedalloy.methods.weightings.boosting import Boosting
from fedalloy.methods.weightings.ewwa import Ewwa
from fedalloy.methods.weightings.fedadp import Angles, angles_to_mean, steepness
from fedalloy.methods.weightings.mgda import FedMgda
from fedalloy.methods.weightings.mirror import tilted
from fedalloy.methods.weightings.qfedavg import QFedAvg


@dataclass(frozen=True)
class AnglesByRound(Angles):
    """FedAdp that divides by the round number, also for clients that did not take part in every round."""

    def weigh(self, cohort: Contributions, state: State, ctx: Context) -> tuple[Weights, State, Info]:
        passed = torch.zeros_like(state["count"]).index_fill(0, cohort.ids, ctx.round - 1.0)
        return super().weigh(cohort, {**state, "count": passed}, ctx)


@dataclass(frozen=True)
class AnglesOneBehind(Angles):
    """FedAdp of S0's code: a mean that lags by one round, and no memory of absent clients."""

    def weigh(self, cohort: Contributions, state: State, ctx: Context) -> tuple[Weights, State, Info]:
        ids, sizes = cohort.ids, cohort.stats["num_examples"].double()
        count = state["count"].index_add(0, ids, torch.ones_like(sizes))
        now = angles_to_mean(cohort, sizes / sizes.sum(), {"": list(cohort.template("delta"))})[""]
        past, seen = state["angle"].get("", torch.zeros_like(count))[ids], count[ids]
        mixed = now if ctx.round == 1 else (seen * past + now) / (seen + 1)
        kept = torch.zeros_like(count).index_copy(0, ids, mixed)
        weights = tilted(sizes, steepness(mixed, self.alpha))
        return weights, {"count": count, "angle": {"": kept}}, {"smoothed_angle": mixed}


@dataclass(frozen=True)
class AnglesWithoutSizes(Angles):
    """FedAdp or FedLayerWise with every client's number of examples left out of the weights."""

    def weigh(self, cohort: Contributions, state: State, ctx: Context) -> tuple[Weights, State, Info]:
        even = torch.ones_like(cohort.stats["num_examples"])
        return super().weigh(cohort.with_stats({"num_examples": even}), state, ctx)


@dataclass(frozen=True)
class Received(Weighting):
    """The average of the models that were received instead of those that were trained: the model never changes."""

    def weigh(self, cohort: Contributions, state: State, ctx: Context) -> tuple[Weights, State, Info]:
        return torch.zeros(len(cohort), dtype=torch.float64), state, {}


@dataclass(frozen=True)
class EwwaFromFirst(Ewwa):
    """EWWA as its Algorithms 1 and 2 are printed: the second moment decays from the last *first* moment."""

    def step(self, m: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        first, _ = super().step(m, v, g)
        _, second = super().step(m, m, g)
        return first, second


@dataclass(frozen=True)
class EwwaPrintedYogi(Ewwa):
    """EWWA with Yogi as its eq. 4 is printed: ``beta2 v + (1 - beta2) g^2 sign(v - g^2)``."""

    def step(self, m: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        first, _ = super().step(m, v, g)
        return first, self.beta2 * v + (1 - self.beta2) * g * g * (v - g * g).sign()


@dataclass(frozen=True)
class EwwaBackwards(Ewwa):
    """EWWA that processes the same clients in the opposite order."""

    def open(self, cohort: Contributions, state: State, ctx: Context) -> ElementRound:
        assert isinstance(cohort, Cohort)
        turned = cohort.take(torch.arange(len(cohort) - 1, -1, -1))
        return _Turned(super().open(turned, state, ctx))


class _Turned(ElementRound):
    def __init__(self, inner: ElementRound) -> None:
        self._inner = inner

    def weigh_chunk(self, updates: Tensor, chunk: Chunk) -> Tensor:
        return self._inner.weigh_chunk(updates.flip(0), chunk).flip(0)

    def close(self) -> tuple[State, Info]:
        return self._inner.close()


@dataclass(frozen=True)
class AflOldWeights(Afl):
    """AFL as in its first paper: the model moves with the weights from before the round's losses."""

    def weigh(self, cohort: Contributions, state: State, ctx: Context) -> tuple[Weights, State, Info]:
        _, kept, info = super().weigh(cohort, state, ctx)
        return among(state["lambda"], cohort.ids), kept, info


@dataclass(frozen=True)
class QFedAvgFirstStep(QFedAvg):
    """q-FedAvg that computes with the first local step size after the step has decayed."""

    first_lr: float = 0.1

    def weigh(self, cohort: Contributions, state: State, ctx: Context) -> tuple[Weights, State, Info]:
        return super().weigh(cohort, state, replace(ctx, local_lr=self.first_lr))


@dataclass(frozen=True)
class RoughMgda(FedMgda):
    """FedMGDA+ whose lambda is off by up to 2e-5, as far as the public code's solver is."""

    error: float = 2e-5

    def weigh(self, cohort: Contributions, state: State, ctx: Context) -> tuple[Weights, State, Info]:
        _, kept, info = super().weigh(cohort, state, ctx)
        noise = ctx.key.fold("solver error").uniform(len(cohort), dtype=torch.float64) * 2 - 1
        rough = (info["lambda"] + self.error * noise).clamp(min=0)
        return rough / rough.sum() / info["norms"].clamp(min=1e-30), kept, info


@dataclass(frozen=True)
class BoostingByErrors(Boosting):
    """FedBoosting read with error rates for "results"."""

    def weigh(self, cohort: Contributions, state: State, ctx: Context) -> tuple[Weights, State, Info]:
        wrong = cohort.with_stats({"accuracy_after": 1 - cohort.stats["accuracy_after"]})
        assert cohort.cross is not None
        return super().weigh(wrong.with_cross(1 - cohort.cross), state, ctx)
