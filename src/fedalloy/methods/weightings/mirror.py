"""Weights by one mirror step from a prior: FedAvg, q-FFL's coefficients, DR-FedAvg, TERM and PropFair are settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedalloy.core.protocols import Weighting
from fedalloy.core.registry import register
from fedalloy.core.search import Range
from fedalloy.core.types import Context, Contributions, Info, State, Weights
from fedalloy.methods.weightings.attendance import usable

Response = Literal["none", "loss", "log_loss", "log_gap"]
Loss = Literal["loss_before", "running_loss"]
Prior = Literal["samples", "uniform"]


@register("weighting", "mirror")
@dataclass(frozen=True)
class Mirror(Weighting):
    """``p_k`` proportional to ``prior_k exp(r_k / zeta)``: the ``p`` that maximises ``<p, r> - zeta KL(p | prior)``.

    | response | ``r_k`` | zeta | is |
    |---|---|---|---|
    | ``none`` | 0 | any | FedAvg |
    | ``log_loss`` | ``log F_k`` | ``1 / q`` | q-FFL's coefficients; DR-FedAvg with ``1 / (q + 1)`` |
    | ``loss`` | ``F_k`` | ``1 / tilt`` | TERM |
    | ``log_gap`` | ``-log max(M - F_k, gap)`` | 1 | PropFair |

    ``F_k`` is the mean loss of the received model on all training examples of the client (``loss_before``), or the
    sum of the minibatch losses of local training (``running_loss``), as in some public code. A loss that is not finite
    counts as the largest finite one, so that its client counts as badly served but does not take all the weight; if no
    response is usable, the weights are the prior. A client that took no step counts by its examples; with a uniform
    prior it is left out. A negative zeta prefers small responses. Source: the unification of fair aggregation as online
    mirror descent (Hahn et al. 2024, arXiv:2405.20821), where every response has its own step size.
    When to use it: to try a response or a temperature that no published method has.

    >>> from fedalloy.core.types import Cohort
    >>> cohort = Cohort(torch.arange(2), {}, {"num_examples": torch.ones(2), "loss_before": torch.tensor([1.0, 3.0])})
    >>> Mirror("log_loss").weigh(cohort, {}, None)[0]
    tensor([0.2500, 0.7500], dtype=torch.float64)
    """

    weight_bound: ClassVar[float | None] = 1.0

    response: Response = "loss"
    prior: Prior = "samples"
    zeta: float = 1.0
    M: float = 3.0
    gap: float = 0.2
    loss: Loss = "loss_before"

    def __post_init__(self) -> None:
        if self.zeta == 0:
            raise ValueError("zeta must not be 0: it divides the response")
        check_gap(self.M, self.gap)

    @property
    def requires(self) -> frozenset[str]:
        sizes = {"num_examples"} if self.prior == "samples" else set()
        return frozenset(sizes if self.response == "none" else {*sizes, self.loss})

    @property
    def counts_idle(self) -> bool:
        return self.prior == "samples"

    def weigh(self, cohort: Contributions, state: State, ctx: Context) -> tuple[Weights, State, Info]:
        prior = prior_of(cohort, self.prior)
        if self.response == "none":
            return tilted(prior, torch.zeros_like(prior)), state, {}
        response = self._response(usable(cohort.stats[self.loss]))
        return tilted(prior, response / self.zeta), state, {"response": response}

    def _response(self, losses: Tensor) -> Tensor:
        if self.response == "loss":
            return losses
        return losses.log() if self.response == "log_loss" else -(self.M - losses).clamp(min=self.gap).log()


@register("weighting", "qffl", search={"q": Range(1e-3, 10.0, log=True)})
def qffl(q: float = 1.0) -> Mirror:
    """``p_k`` proportional to ``n_k F_k^q``: the coefficients of q-FFL (Li et al. 2020, arXiv:1905.10497).

    These are the coefficients alone, as surveys list them; the published solver also controls the step length, see
    ``qfedavg``. ``q = 0`` is FedAvg; as ``q`` goes to infinity, only the worst client counts.
    When to use it: more even losses over clients, with one parameter to tune.

    >>> qffl(2.0).zeta
    0.5
    """
    return _power_of_loss(q, "loss_before")


@register("weighting", "dr", aliases=("drfedavg",), search={"q": Range(1e-3, 10.0, log=True)})
def dr(q: float = 1.0, official: bool = False) -> Mirror:
    """``p_k`` proportional to ``n_k F_k^(q+1)``: DR-FedAvg, a baseline of the paper on deep-unfolded weights (q = 1).

    That paper is Nakai-Kasai and Wadayama 2022, arXiv:2212.12191.
    ``official`` takes the sum of the minibatch losses of local training, as the public code does: it grows with the
    number of batches, so the weight grows about like ``n_k^(q+2)``. Both agree with one batch per round. A client whose
    link failed has no batch and weight 0 there. Correction: by default ``F_k`` is the mean loss of the received model,
    which does not depend on the number of batches.
    When to use it: a few clients are served much worse than the others.

    >>> dr(q=1.0) == Mirror("log_loss", zeta=0.5)
    True
    """
    if q < 0:
        raise ValueError(f"q must be 0 or more, got {q}")
    return _power_of_loss(q + 1, "running_loss" if official else "loss_before")


@register("weighting", "term", search={"tilt": Range(1e-3, 10.0, log=True)})
def term(tilt: float = 0.1, prior: Prior = "samples") -> Mirror:
    """``p_k`` proportional to ``n_k exp(tilt F_k)``: TERM (Li et al. 2021, arXiv:2007.01162) over clients.

    Public code leaves out ``n_k``, as does ``prior = "uniform"``. A negative tilt prefers clients with small losses.
    When to use it: losses of comparable scale, and the worst clients should count more (or less, with negative tilt).

    >>> term(tilt=10.0) == Mirror("loss", zeta=0.1)
    True
    """
    return Mirror("loss", prior, 1 / tilt) if tilt else Mirror("none", prior)


@register("weighting", "propfair", search={"M": Range(1.0, 10.0, log=True)})
def propfair(M: float = 3.0, gap: float = 0.2) -> Mirror:
    """``p_k`` proportional to ``n_k / max(M - F_k, gap)``: PropFair (Zhang et al. 2022, arXiv:2202.01666).

    ``M`` is a loss that no client should reach; the floor ``gap`` replaces the paper's huberised logarithm. Public code
    changes the clients' loss instead: that is the solver ``propfair``. With all losses above ``M`` this is FedAvg.
    When to use it: improving a badly served client by some percent is worth worsening another by the same percentage.

    >>> propfair(M=2.0).response
    'log_gap'
    """
    return Mirror("log_gap", "samples", 1.0, M, gap)


def tilted(prior: Tensor, logits: Tensor) -> Tensor:
    """``prior_k exp(logit_k)``, normalised over clients in float64; no logits overflow.

    >>> tilted(torch.tensor([1.0, 3.0]), torch.tensor([1e9, 1e9])).tolist()
    [0.25, 0.75]
    """
    known = logits.double().nan_to_num(nan=-torch.inf, posinf=torch.finfo(torch.float64).max, neginf=-torch.inf)
    scores = prior.double().log() + known
    if bool(scores.isneginf().all()):
        return prior.double() / prior.sum().clamp(min=1e-12)
    return scores.softmax(0)


def prior_of(cohort: Contributions, prior: Prior) -> Tensor:
    """The prior weights, unnormalised: the numbers of examples, or ones."""
    if prior == "samples":
        return cohort.stats["num_examples"].double()
    return torch.ones(len(cohort), dtype=torch.float64)


def check_gap(M: float, gap: float) -> None:
    """Refuse a gap outside (0, M]."""
    if not 0 < gap <= M:
        raise ValueError(f"gap must lie in (0, M], got gap = {gap} with M = {M}")


def _power_of_loss(power: float, loss: Loss) -> Mirror:
    if power < 0:
        raise ValueError(f"q must be 0 or more, got {power}")
    return Mirror("log_loss", zeta=1 / power, loss=loss) if power else Mirror("none")
