"""Published methods, one line each: a named composition of solver, weighting, server and wire.

Every function takes the settings of its parts by keyword; local-training settings (``lr``, ``epochs``,
``batch_size``, ...) go to the solver. ``fedavg(lr=0.05)`` is ``Algorithm(Sgd(lr=0.05), Samples(), ServerSgd())``.
"""

from __future__ import annotations

from typing import Any, Literal, Unpack, cast

from fedalloy.core import registry
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.moments import Kind
from fedalloy.core.registry import register
from fedalloy.methods.generative import fedcgan as fedcgan
from fedalloy.methods.generative import fedcvae as fedcvae
from fedalloy.methods.generative import fedevg as fedevg
from fedalloy.methods.robust import krum as krum
from fedalloy.methods.robust import median as median
from fedalloy.methods.robust import multi_krum as multi_krum
from fedalloy.methods.robust import trimmed_mean as trimmed_mean
from fedalloy.methods.servers.adaptive import Adagrad, Adam, Yogi
from fedalloy.methods.servers.amsgrad import AmsGrad
from fedalloy.methods.servers.momentum import Momentum
from fedalloy.methods.servers.period_momentum import PeriodMomentum
from fedalloy.methods.servers.sgd import ServerSgd
from fedalloy.methods.solvers.apfl import Apfl
from fedalloy.methods.solvers.ditto import Ditto
from fedalloy.methods.solvers.finetune import FineTune
from fedalloy.methods.solvers.personal import HEAD, NORM, Personal
from fedalloy.methods.solvers.pfedme import PFedMe
from fedalloy.methods.solvers.propfair import PropFair
from fedalloy.methods.solvers.prox import Prox
from fedalloy.methods.solvers.scaffold import Scaffold
from fedalloy.methods.solvers.settings import LocalSettings as Local
from fedalloy.methods.solvers.sgd import Sgd
from fedalloy.methods.solvers.superfed import SuPerFed
from fedalloy.methods.unfolded import duw_fedavg as duw_fedavg
from fedalloy.methods.unfolded import duw_fednova as duw_fednova
from fedalloy.methods.weightings import mirror
from fedalloy.methods.weightings.aaggff_d import AaggffD
from fedalloy.methods.weightings.aaggff_s import AaggffS
from fedalloy.methods.weightings.afl import Afl
from fedalloy.methods.weightings.boosting import Boosting
from fedalloy.methods.weightings.cdf import Cdf, CdfName
from fedalloy.methods.weightings.ewwa import Ewwa
from fedalloy.methods.weightings.fedadp import Angles
from fedalloy.methods.weightings.fedfa import Information
from fedalloy.methods.weightings.mgda import FedMgda
from fedalloy.methods.weightings.mirror import Prior
from fedalloy.methods.weightings.nova import Nova
from fedalloy.methods.weightings.qfedavg import QFedAvg
from fedalloy.methods.weightings.samples import Samples
from fedalloy.methods.weightings.uniform import Uniform
from fedalloy.methods.wires.scaled_sign import ScaledSign
from fedalloy.methods.wires.topk import TopK


@register("algorithm", "fedavg")
def fedavg(*, server_lr: float = 1.0, **local: Unpack[Local]) -> Algorithm:
    """Average by data size (McMahan et al. 2017)."""
    return Algorithm(Sgd(**local), Samples(), ServerSgd(server_lr))


@register("algorithm", "fedprox")
def fedprox(mu: float = 0.01, *, server_lr: float = 1.0, **local: Unpack[Local]) -> Algorithm:
    """FedAvg whose clients are pulled towards the received model (Li et al. 2020)."""
    return Algorithm(Prox(mu, **local), Samples(), ServerSgd(server_lr))


@register("algorithm", "fednova")
def fednova(mu: float = 0.0, *, server_lr: float = 1.0, **local: Unpack[Local]) -> Algorithm:
    """Updates normalised by each client's number of steps (Wang et al. 2020); ``mu`` adds a proximal term."""
    solver = Prox(mu, **local) if mu else Sgd(**local)
    return Algorithm(solver, Nova(), ServerSgd(server_lr))


@register("algorithm", "scaffold")
def scaffold(*, server_lr: float = 1.0, **local: Unpack[Local]) -> Algorithm:
    """Control variates at every client (Karimireddy et al. 2020); clients count equally."""
    return Algorithm(Scaffold(**local), Uniform(), ServerSgd(server_lr))


@register("algorithm", "fedavgm")
def fedavgm(beta: float = 0.9, *, server_lr: float = 1.0, **local: Unpack[Local]) -> Algorithm:
    """FedAvg with momentum at the server (Hsu et al. 2019)."""
    return Algorithm(Sgd(**local), Samples(), Momentum(server_lr, beta))


@register("algorithm", "fedadam")
def fedadam(
    *,
    server_lr: float = 0.01,
    beta1: float = 0.9,
    beta2: float = 0.99,
    tau: float = 1e-3,
    bias_correction: bool = False,
    **local: Unpack[Local],
) -> Algorithm:
    """FedAvg with Adam at the server (Reddi et al. 2021)."""
    return Algorithm(Sgd(**local), Samples(), Adam(server_lr, beta1, beta2, tau, bias_correction))


@register("algorithm", "fedadagrad")
def fedadagrad(
    *,
    server_lr: float = 0.01,
    beta1: float = 0.0,
    beta2: float = 0.99,
    tau: float = 1e-3,
    bias_correction: bool = False,
    **local: Unpack[Local],
) -> Algorithm:
    """FedAvg with Adagrad at the server (Reddi et al. 2021)."""
    return Algorithm(Sgd(**local), Samples(), Adagrad(server_lr, beta1, beta2, tau, bias_correction))


@register("algorithm", "fedyogi")
def fedyogi(
    *,
    server_lr: float = 0.01,
    beta1: float = 0.9,
    beta2: float = 0.99,
    tau: float = 1e-3,
    bias_correction: bool = False,
    **local: Unpack[Local],
) -> Algorithm:
    """FedAvg with Yogi at the server (Reddi et al. 2021)."""
    return Algorithm(Sgd(**local), Samples(), Yogi(server_lr, beta1, beta2, tau, bias_correction))


@register("algorithm", "fedams")
def fedams(
    *,
    server_lr: float = 0.01,
    beta1: float = 0.9,
    beta2: float = 0.99,
    eps: float = 1e-3,
    option: Literal["max", "plus"] = "max",
    vhat0: float = 0.0,
    bias_correction: bool = False,
    **local: Any,
) -> Algorithm:
    """AMSGrad at the server (Wang et al. 2022); clients count equally."""
    return Algorithm(Sgd(**local), Uniform(), AmsGrad(server_lr, beta1, beta2, eps, option, vhat0, bias_correction))


@register("algorithm", "fedcams")
def fedcams(
    compressor: Literal["topk", "scaled_sign"] = "topk",
    ratio: float = 1 / 64,
    *,
    beta1: float = 0.9,
    beta2: float = 0.99,
    eps: float = 1e-3,
    option: Literal["max", "plus"] = "max",
    vhat0: float = 0.0,
    bias_correction: bool = False,
    server_lr: float = 0.01,
    **local: Any,
) -> Algorithm:
    """FedAMS on compressed updates with error feedback (Wang et al. 2022); ``ratio`` is used by top-k only."""
    server = AmsGrad(server_lr, beta1, beta2, eps, option, vhat0, bias_correction)
    wire = TopK(ratio) if compressor == "topk" else ScaledSign()
    return Algorithm(Sgd(**local), Uniform(), server, (wire,))


@register("algorithm", "ewwa")
def ewwa(
    kind: Kind = "adam",
    mode: Literal["paper", "official"] = "paper",
    score_lr: float = 1.0,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    scratch: str | None = None,
    *,
    server_lr: float = 1.0,
    **local: Any,
) -> Algorithm:
    """A weight for every element from running moments of the updates (Hu et al. 2023)."""
    rule = Ewwa(kind, mode, score_lr, beta1, beta2, eps, scratch=scratch)
    return Algorithm(Sgd(**local), rule, ServerSgd(server_lr))


@register("algorithm", "drfedavg")
def drfedavg(q: float = 1.0, official: bool = False, *, server_lr: float = 1.0, **local: Unpack[Local]) -> Algorithm:
    """Data sizes times losses to the power ``q + 1`` (DR-FedAvg); ``official`` sums the losses of all minibatches."""
    return Algorithm(Sgd(**local), mirror.dr(q, official), ServerSgd(server_lr))


@register("algorithm", "qffl")
def qffl(q: float = 1.0, *, server_lr: float = 1.0, **local: Unpack[Local]) -> Algorithm:
    """Data sizes times losses to the power ``q``: q-FFL's coefficients without its step control (Li et al. 2020)."""
    return Algorithm(Sgd(**local), mirror.qffl(q), ServerSgd(server_lr))


@register("algorithm", "qfedavg")
def qfedavg(q: float = 1.0, weights: Prior = "uniform", *, server_lr: float = 1.0, **local: Unpack[Local]) -> Algorithm:
    """q-FFL with its step control (Li et al. 2020)."""
    return Algorithm(Sgd(**local), QFedAvg(q, weights), ServerSgd(server_lr))


@register("algorithm", "term")
def term(tilt: float = 0.1, *, server_lr: float = 1.0, **local: Unpack[Local]) -> Algorithm:
    """Clients with large losses count exponentially more (Li et al. 2021)."""
    return Algorithm(Sgd(**local), mirror.term(tilt), ServerSgd(server_lr))


@register("algorithm", "propfair")
def propfair(
    M: float = 3.0, gap: float = 0.2, official: bool = False, *, server_lr: float = 1.0, **local: Unpack[Local]
) -> Algorithm:
    """Proportional fairness (Zhang et al. 2022) by weights; ``official`` changes the clients' loss instead."""
    if official:
        return Algorithm(PropFair(M=M, gap=gap, **local), Samples(), ServerSgd(server_lr))
    return Algorithm(Sgd(**local), mirror.propfair(M, gap), ServerSgd(server_lr))


@register("algorithm", "fedboosting")
def fedboosting(*, server_lr: float = 1.0, **local: Unpack[Local]) -> Algorithm:
    """Weights from validating every client's model on the other clients' validation parts (Ren et al. 2020)."""
    return Algorithm(Sgd(**local), Boosting(), ServerSgd(server_lr))


@register("algorithm", "fedadp")
def fedadp(alpha: float = 5.0, *, server_lr: float = 1.0, **local: Unpack[Local]) -> Algorithm:
    """Clients whose updates point away from the average update count less (Wu and Wang 2021)."""
    return Algorithm(Sgd(**local), Angles("client", alpha), ServerSgd(server_lr))


@register("algorithm", "fedlayerwise")
def fedlayerwise(alpha: float = 5.0, *, server_lr: float = 1.0, **local: Unpack[Local]) -> Algorithm:
    """FedAdp with separate angles and weights for every layer."""
    return Algorithm(Sgd(**local), Angles("layer", alpha), ServerSgd(server_lr))


@register("algorithm", "fedfa")
def fedfa(
    alpha: float = 0.5,
    beta: float = 0.5,
    c: float = 1e-6,
    gamma: float = 0.5,
    period: int = 1,
    *,
    server_lr: float = 1.0,
    **local: Unpack[Local],
) -> Algorithm:
    """Low accuracy and frequent participation count more; momentum at clients and server (Huang et al. 2020)."""
    settings: Local = {"momentum": 0.5, **local}
    return Algorithm(Sgd(**settings), Information(alpha, beta, c), PeriodMomentum(server_lr, gamma, period))


@register("algorithm", "fedfa_mo")
def fedfa_mo(gamma: float = 0.5, period: int = 1, *, server_lr: float = 1.0, **local: Unpack[Local]) -> Algorithm:
    """FedFa's double momentum alone, with FedAvg's weights (Huang et al. 2020)."""
    settings: Local = {"momentum": 0.5, **local}
    return Algorithm(Sgd(**settings), Samples(), PeriodMomentum(server_lr, gamma, period))


@register("algorithm", "afl")
def afl(step: float = 0.01, *, server_lr: float = 1.0, **local: Unpack[Local]) -> Algorithm:
    """Gradient ascent on the weights, for the worst-served client (Mohri et al. 2019); needs full participation."""
    return Algorithm(Sgd(**local), Afl(step), ServerSgd(server_lr))


@register("algorithm", "fedmgda")
def fedmgda(
    epsilon: float = 0.5, prior: Prior = "uniform", *, server_lr: float = 1.0, **local: Unpack[Local]
) -> Algorithm:
    """FedMGDA+: the shortest convex combination of unit updates, a common descent direction (Hu et al. 2020)."""
    return Algorithm(Sgd(**local), FedMgda(epsilon, prior), ServerSgd(server_lr))


@register("algorithm", "aaggff_s")
def aaggff_s(
    cdf: CdfName | Cdf = "weibull",
    C1: float = 0.0,
    C2: float | None = None,
    mode: Literal["paper", "official"] = "paper",
    *,
    server_lr: float = 1.0,
    **local: Unpack[Local],
) -> Algorithm:
    """Weights learned online over a few clients that all take part in every round (Hahn et al. 2024)."""
    return Algorithm(Sgd(**local), AaggffS(cdf, C1, C2, mode), ServerSgd(server_lr))


@register("algorithm", "aaggff_d")
def aaggff_d(
    cdf: CdfName | Cdf = "weibull",
    C1: float = 0.0,
    C2: float | None = None,
    C: float | None = None,
    mode: Literal["paper", "official"] = "paper",
    *,
    server_lr: float = 1.0,
    **local: Unpack[Local],
) -> Algorithm:
    """Weights learned online over many clients, a few of which are sampled per round (Hahn et al. 2024)."""
    return Algorithm(Sgd(**local), AaggffD(cdf, C1, C2, C, mode), ServerSgd(server_lr))


@register("algorithm", "superfed_mm")
def superfed_mm(
    mu: float = 0.01, nu: float = 1.0, start: float = 0.4, *, server_lr: float = 1.0, **local: Unpack[Local]
) -> Algorithm:
    """SuPerFed with one mixing coefficient for the whole model (Hahn et al. 2022)."""
    return Algorithm(SuPerFed(mu, nu, "model", start, **local), Samples(), ServerSgd(server_lr))


@register("algorithm", "superfed_lm")
def superfed_lm(
    mu: float = 0.01, nu: float = 2.0, start: float = 0.6, *, server_lr: float = 1.0, **local: Unpack[Local]
) -> Algorithm:
    """SuPerFed with a mixing coefficient for every layer (Hahn et al. 2022)."""
    return Algorithm(SuPerFed(mu, nu, "layer", start, **local), Samples(), ServerSgd(server_lr))


@register("algorithm", "fedper")
def fedper(names: tuple[str, ...] = HEAD, *, server_lr: float = 1.0, **local: Unpack[Local]) -> Algorithm:
    """The head of the model stays at the client (Arivazhagan et al. 2019)."""
    return Algorithm(Personal(Sgd(**local), names), Samples(), ServerSgd(server_lr))


@register("algorithm", "lgfedavg")
def lgfedavg(names: tuple[str, ...] = HEAD, *, server_lr: float = 1.0, **local: Unpack[Local]) -> Algorithm:
    """Only the head of the model is shared (Liang et al. 2020)."""
    return Algorithm(Personal(Sgd(**local), names, keep="others"), Samples(), ServerSgd(server_lr))


@register("algorithm", "fedrep")
def fedrep(names: tuple[str, ...] = HEAD, tau: int = 5, *, server_lr: float = 1.0, **local: Unpack[Local]) -> Algorithm:
    """FedPer in two phases: ``epochs`` on the head, then ``tau`` epochs on the body (Collins et al. 2021)."""
    return Algorithm(Personal(Sgd(**local), names, shared_epochs=tau), Samples(), ServerSgd(server_lr))


@register("algorithm", "fedbn")
def fedbn(names: tuple[str, ...] = NORM, *, server_lr: float = 1.0, **local: Unpack[Local]) -> Algorithm:
    """Normalisation layers and their statistics stay at the client (Li et al. 2021)."""
    return Algorithm(Personal(Sgd(**local), names), Samples(), ServerSgd(server_lr))


@register("algorithm", "apfl")
def apfl(alpha: float = 0.25, adaptive: bool = False, *, server_lr: float = 1.0, **local: Unpack[Local]) -> Algorithm:
    """A mixture of shared and local model (Deng et al. 2020), ``alpha`` of it local; ``adaptive`` learns alpha."""
    return Algorithm(Apfl(alpha, adaptive, **local), Samples(), ServerSgd(server_lr))


@register("algorithm", "pfedme")
def pfedme(
    lam: float = 15.0, inner: int = 5, inner_lr: float = 0.09, beta: float = 1.0, **local: Unpack[Local]
) -> Algorithm:
    """Personal models by a Moreau envelope (Dinh et al. 2020); ``beta`` is the server's step towards the average."""
    return Algorithm(PFedMe(lam, inner, inner_lr, **local), Samples(), ServerSgd(beta))


@register("algorithm", "ditto")
def ditto(lam: float = 1.0, personal_epochs: int = 5, *, server_lr: float = 1.0, **local: Unpack[Local]) -> Algorithm:
    """FedAvg plus a personal model at every client, pulled towards the shared one (Li et al. 2021)."""
    return Algorithm(Ditto(lam, personal_epochs, **local), Samples(), ServerSgd(server_lr))


@register("algorithm", "fedavg_ft")
def fedavg_ft(personal_epochs: int = 1, *, server_lr: float = 1.0, **local: Unpack[Local]) -> Algorithm:
    """FedAvg whose clients keep the received model after their own training, ``personal_epochs`` longer."""
    return Algorithm(FineTune(personal_epochs, **local), Samples(), ServerSgd(server_lr))


@register("algorithm", "local_only")
def local_only(**local: Unpack[Local]) -> Algorithm:
    """Every client trains alone and sends nothing: the baseline of the personalised methods."""
    return Algorithm(Personal(Sgd(**local), ("*",)), Uniform(), ServerSgd())


def named(name: str, **settings: Any) -> Algorithm:
    """A published method by name; settings that its function does not list go to local training.

    >>> named("fedprox", mu=0.1, lr=0.05).solver
    Prox(lr=0.05, epochs=1, batch_size=32, ..., mu=0.1)
    """
    make = registry.find("algorithm", name)
    return cast(Algorithm, make(**settings))
