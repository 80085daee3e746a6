"""Every correction that can be measured by training: the forms that are laid side by side."""

from __future__ import annotations

import math
from typing import Any, cast

from benchmarks.corrections import local, servers, weights
from benchmarks.corrections.measuring import (
    OURS,
    Case,
    Column,
    Form,
    Played,
    Watched,
    agreement,
    digits,
    form,
    largest_owner,
    largest_weight,
    mean_length,
    normed,
    over_rounds,
    trained,
)
from fedalloy import algorithms
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.protocols import LocalSolver, ServerOptimizer, Weighting
from fedalloy.servers.adaptive import Adagrad, Adam, Yogi
from fedalloy.servers.amsgrad import AmsGrad
from fedalloy.servers.period_momentum import PeriodMomentum
from fedalloy.servers.sgd import ServerSgd
from fedalloy.solvers.propfair import PropFair
from fedalloy.solvers.prox import Prox
from fedalloy.solvers.scaffold import Scaffold
from fedalloy.solvers.sgd import Sgd
from fedalloy.tasks.devices import DeviceProfile
from fedalloy.weightings import mirror
from fedalloy.weightings.aaggff_d import AaggffD
from fedalloy.weightings.aaggff_s import AaggffS
from fedalloy.weightings.afl import Afl
from fedalloy.weightings.angles import Angles
from fedalloy.weightings.boosting import Boosting
from fedalloy.weightings.cdf import Cdf
from fedalloy.weightings.information import Information
from fedalloy.weightings.mgda import FedMgda
from fedalloy.weightings.moments import Ewwa
from fedalloy.weightings.qfedavg import QFedAvg
from fedalloy.weightings.samples import Samples
from fedalloy.weightings.uniform import Uniform

LR, BATCH = 0.2, 16
LOCAL: dict[str, Any] = {"lr": LR, "batch_size": BATCH, "epochs": 2}
EPOCHS = (1, 1, 2, 2, 3, 4, 5, 6, 8, 10)
"""Local epochs of ten clients of very different speed."""
NORMAL = Cdf("normal")
ERFC = Cdf("normal", variant="affine_erfc")

POOLED = Column("pooled", "accuracy, mean over examples (%)", 1, 100)
LENGTH = Column("length", "mean length of the updates", 2)
OWNER = Column("owner", "weight of the largest client / its share of the data", 2)
LARGEST = Column("largest", "largest weight", 2)
AGREES = Column("agrees", "correlation of weight and loss", 2)
ANGLE = Column("angle", "mean smoothed angle (rad)", 2)
SPREAD = Column("spread", "largest / smallest weight", 3)
SEEN = Column("seen", "p of clients just seen / p of the others", 3)
STRIDE = Column("stride", "server's step / mean length of the updates", 1)


def weighed(rule: Weighting, server: ServerOptimizer | None = None, **settings: Any) -> Algorithm:
    """Plain local training under a rule that is watched."""
    return Algorithm(Sgd(**{**LOCAL, **settings}), Watched(rule), server or ServerSgd())


def served(server: ServerOptimizer, rule: Weighting | None = None, **settings: Any) -> Algorithm:
    """Plain local training and FedAvg's weights, with another server."""
    return Algorithm(Sgd(**{**LOCAL, **settings}), rule or Samples(), server)


def solved(solver: LocalSolver, rule: Weighting | None = None) -> Algorithm:
    """Another solver under FedAvg's weights."""
    return Algorithm(solver, Watched(rule or Samples()), ServerSgd())


def pooled(played: Played) -> float:
    """The accuracy over all test examples together."""
    found = math.nan
    for row in played.result.rounds():
        found = row.get("global", {}).get("accuracy", found)
    return found


def spread(row: dict[str, Any]) -> float:
    return float(max(row["weights"]) / min(row["weights"])) if min(row["weights"]) > 0 else math.nan


def mean_angle(row: dict[str, Any]) -> float:
    angles = row["info"]["smoothed_angle"]
    return float(sum(angles) / len(angles))


def just_seen(row: dict[str, Any]) -> float:
    """The mean weight of those who took part over that of those who did not."""
    p, ids = row["info"]["p"], set(row["ids"])
    inside = [value for client, value in enumerate(p) if client in ids]
    outside = [value for client, value in enumerate(p) if client not in ids]
    return float(sum(inside) / len(inside) / (sum(outside) / len(outside)))


def stride(row: dict[str, Any]) -> float:
    """An upper bound of the server's step: FedMGDA+ moves by at most one, and clients send updates of this length."""
    return 1 / mean_length(row)


def averaging() -> list[Case]:
    decayed = {**LOCAL, "decay": 0.9, "decay_every": 5}
    whole: dict[str, Any] = {"lr": 0.5, "batch_size": None, "epochs": 5}  # BatchNorm has no use for a batch of one
    return [
        trained(
            "fedavg-shares",
            digits(sizes="skewed"),
            [form(OURS, weighed(Samples())), form("public code (AAggFF, C < 1), S2 eq. 13", weighed(Uniform()))],
            {POOLED: pooled, OWNER: over_rounds(largest_owner)},
            cohort=5,
        ),
        trained(
            "fedavg-decay",
            digits(),
            [
                form(OURS, algorithms.fedavg(**decayed)),
                form("public code (AAggFF)", served(servers.GrowingStep(), decay=0.9, decay_every=5)),
            ],
            cohort=5,
        ),
        trained(
            "batchnorm",
            digits(model=normed),
            [
                form(OURS, served(ServerSgd(), **whole)),
                form("public code (SuPerFed)", served(servers.OnlyWeights(), **whole)),
                form(
                    "the same, and running statistics not averaged",
                    Algorithm(local.ForgetfulBuffers(**whole), Samples(), servers.OnlyWeights()),
                ),
            ],
            cohort=10,
            rounds=30,
        ),
    ]


def solvers() -> list[Case]:
    def prox(mu: float) -> list[Form]:
        weight = ("weight",)
        return [
            form(OURS, solved(Prox(mu, **LOCAL))),
            form("public code (AAggFF)", solved(local.UnsquaredProx(mu=mu / 2, **LOCAL))),
            form("public code (SuPerFed)", solved(local.UnsquaredProx(mu=mu, pulled=weight, **LOCAL))),
        ]

    def stepwise(extra: int) -> Any:
        steps = {"lr": 0.1, "batch_size": BATCH}
        return lambda task: solved(
            local.StepwiseNova(effective=local.effective_steps(task, EPOCHS, BATCH), extra=extra, **steps)
        )

    speeds = {"devices": DeviceProfile(epochs=EPOCHS), "rounds": 30}
    variates: dict[str, Any] = {"lr": 0.1, "batch_size": BATCH, "epochs": 2}
    length = {LENGTH: over_rounds(mean_length)}
    return [
        trained("fedprox-weak", digits(10), prox(0.01), length, rounds=30),
        trained("fedprox-strong", digits(10), prox(1.0), length, rounds=30),
        trained(
            "fednova",
            digits(10),
            [
                form(OURS, algorithms.fednova(lr=0.1, batch_size=BATCH)),
                Form("as printed (S0 Alg. 5)", stepwise(1)),
                Form("public code (S0)", stepwise(0)),
                form("FedAvg, for comparison", algorithms.fedavg(lr=0.1, batch_size=BATCH)),
            ],
            **speeds,
        ),
        trained(
            "scaffold",
            digits(10),
            [
                form(OURS, Algorithm(Scaffold(**variates), Uniform(), ServerSgd())),
                form("divided by epochs", Algorithm(local.ScaffoldByEpochs(**variates), Uniform(), ServerSgd())),
                form("public code (SuPerFed): no variates", Algorithm(Sgd(**variates), Uniform(), ServerSgd())),
            ],
            rounds=30,
        ),
    ]


def losses() -> list[Case]:
    skewed = digits(sizes="skewed")
    sizes = {POOLED: pooled, OWNER: over_rounds(largest_owner), AGREES: over_rounds(agreement)}
    fading = {"decay": 0.9}
    return [
        trained(
            "drfedavg",
            skewed,
            [form(OURS, weighed(mirror.dr(1.0))), form("public code (S0)", weighed(mirror.dr(1.0, official=True)))],
            sizes,
            cohort=10,
        ),
        trained(
            "term",
            skewed,
            [form(OURS, weighed(mirror.term(1.0))), form("public code (AAggFF)", weighed(mirror.term(1.0, "uniform")))],
            sizes,
            cohort=10,
        ),
        trained(
            "qfedavg",
            skewed,
            [
                form(OURS, weighed(QFedAvg(1.0))),
                form("as printed (S4 eq. 3.17): n_k / n", weighed(QFedAvg(1.0, "samples"))),
                form("as printed (S4 Table 3.2): no step control", weighed(mirror.qffl(1.0))),
            ],
            {POOLED: pooled},
            cohort=10,
        ),
        trained(
            "qfedavg-decay",
            skewed,
            [
                form(OURS, weighed(QFedAvg(1.0), **fading)),
                form("public code (AAggFF): first step", weighed(weights.QFedAvgFirstStep(1.0, first_lr=LR), **fading)),
            ],
            {POOLED: pooled},
            cohort=10,
        ),
        trained("propfair", skewed, propfair(3.0), {POOLED: pooled}, cohort=10),
        trained("propfair-low", skewed, propfair(2.0), {POOLED: pooled}, cohort=10),
        trained(
            "fedboosting",
            digits(10, valid=0.2),
            [
                form(OURS, weighed(Boosting())),
                form('"results" read as errors', weighed(weights.BoostingByErrors())),
                form("equal weights, for comparison", weighed(Uniform())),
            ],
            {SPREAD: over_rounds(spread)},
            rounds=20,
        ),
    ]


def propfair(M: float) -> list[Form]:
    return [
        form(f"ours, M = {M:g}", weighed(mirror.propfair(M))),
        form(f"public code (AAggFF), M = {M:g}", solved(PropFair(M=M, **LOCAL))),
    ]


def angles() -> list[Case]:
    by_tensor = Angles(cast(Any, "leaf"))
    return [
        trained(
            "fedadp",
            digits(sizes="skewed"),
            [
                form(OURS, weighed(Angles())),
                form("as printed: round number for own count", weighed(weights.AnglesByRound())),
                form("public code (S0)", weighed(weights.AnglesOneBehind())),
                form("as printed (S2): without n_k", weighed(weights.AnglesWithoutSizes())),
            ],
            {POOLED: pooled, ANGLE: over_rounds(mean_angle), OWNER: over_rounds(largest_owner)},
            cohort=6,
        ),
        trained(
            "fedlayerwise",
            digits(sizes="skewed"),
            [
                form(OURS, served(ServerSgd(), Angles("layer"))),
                form("as printed (S1 eq. 7)", served(ServerSgd(), weights.Received())),
                form("a layer read as a tensor", served(ServerSgd(), by_tensor)),
                form("as printed (S1 Alg. 1): without n_k", served(ServerSgd(), weights.AnglesWithoutSizes("layer"))),
            ],
            {POOLED: pooled},
            cohort=10,
        ),
    ]


def momentum() -> list[Case]:
    def fedfa(server: ServerOptimizer) -> Algorithm:
        return served(server, Information(), momentum=0.5, lr=0.1)

    return [
        trained(
            "fedfa",
            digits(10),
            [
                form(OURS, fedfa(PeriodMomentum())),
                form("as printed (S3 eq. 5): the sign", fedfa(servers.AwayFromAverage())),
                form("as printed: the clients' step at the server", fedfa(PeriodMomentum(lr=0.1))),
                form("as printed: both", fedfa(servers.AwayFromAverage(lr=0.1))),
            ],
        )
    ]


def elements() -> list[Case]:
    settings: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "nesterov": True, "epochs": 1}

    def ewwa(rule: Weighting) -> Algorithm:
        return served(ServerSgd(), rule, **settings)

    return [
        trained(
            "ewwa",
            digits(5),
            [
                form(OURS, ewwa(Ewwa())),
                form("as printed (S2 Alg. 1): v from m", ewwa(weights.EwwaFromFirst())),
                form("public code (S2)", ewwa(Ewwa(mode="official"))),
                form("equal weights, for comparison", ewwa(Uniform())),
            ],
        ),
        trained(
            "ewwa-yogi",
            digits(5),
            [
                form(OURS, ewwa(Ewwa("yogi"))),
                form("as printed (S2 eq. 4)", ewwa(weights.EwwaPrintedYogi("yogi"))),
                form("public code (S2)", ewwa(Ewwa("yogi", mode="official"))),
            ],
        ),
        trained(
            "ewwa-order",
            digits(5),
            [
                form("public code (S2)", ewwa(Ewwa(mode="official"))),
                form("the same, clients in opposite order", ewwa(weights.EwwaBackwards(mode="official"))),
            ],
        ),
    ]


def adaptive() -> list[Case]:
    lr = 0.03
    ams: dict[str, Any] = {"option": "plus", "vhat0": 1e-3, "bias_correction": True}
    return [
        trained(
            "fedadam",
            digits(),
            [
                form(OURS, served(Adam(lr))),
                form("public code (FL-bench): v from 0", served(servers.AdamFromZero(lr))),
                form(
                    "public code (S2): v from 0, bias corrected", served(servers.AdamFromZero(lr, bias_correction=True))
                ),
                form("public code (AAggFF): built anew", served(servers.BuiltAnew("adam", lr))),
            ],
            cohort=10,
        ),
        trained(
            "fedadam-step",
            digits(),
            [
                form(f"ours, server step {lr}", served(Adam(lr))),
                form("ours, server step 1", served(Adam(1.0))),
                form("v from 0, server step 1", served(servers.AdamFromZero(1.0))),
                form("v from 0, server step 0.001", served(servers.AdamFromZero(0.001))),
            ],
            cohort=10,
        ),
        trained(
            "fedadagrad",
            digits(),
            [
                form(OURS, served(Adagrad(lr))),
                form("public code (AAggFF): built anew", served(servers.BuiltAnew("adagrad", lr, 0.0))),
            ],
            cohort=10,
        ),
        trained(
            "fedyogi",
            digits(),
            [
                form(OURS, served(Yogi(lr))),
                form("as printed (S2 eq. 4)", served(servers.YogiPrinted(lr))),
                form("public code (AAggFF): built anew", served(servers.BuiltAnew("yogi", lr))),
            ],
            cohort=10,
        ),
        trained(
            "fedams",
            digits(),
            [
                form('ours, "max"', served(AmsGrad(lr), Uniform())),
                form('"plus"', served(AmsGrad(lr, option="plus"), Uniform())),
                form("public code (S2), the same step", served(AmsGrad(lr, **ams), Uniform())),
                form("public code (S2), its step 0.001", served(AmsGrad(0.001, **ams), Uniform())),
            ],
            cohort=10,
        ),
    ]


def fair() -> list[Case]:
    watched = {LARGEST: over_rounds(largest_weight), AGREES: over_rounds(agreement)}
    few = digits(10, sizes="skewed")
    mgda = {STRIDE: over_rounds(stride)}
    tiny = {"lr": 1e-4}
    return [
        trained(
            "afl",
            few,
            [
                form(OURS, weighed(Afl(0.1))),
                form("as first published: old weights", weighed(weights.AflOldWeights(0.1))),
            ],
            watched,
        ),
        trained(
            "fedmgda",
            digits(10),
            [
                form("ours, server step 0.3", weighed(FedMgda(), ServerSgd(0.3))),
                form("the same, solved to 2e-5", weighed(weights.RoughMgda(), ServerSgd(0.3))),
                form("server step 1 (S4), local step 0.2", weighed(FedMgda())),
                form("server step 1 (S4), local step 0.0001", weighed(FedMgda(), **tiny)),
            ],
            mgda,
        ),
        trained(
            "aaggff-s",
            few,
            [
                form("ours, Weibull", weighed(AaggffS())),
                form("public code (AAggFF), Weibull", weighed(AaggffS(mode="official"))),
                form("ours, Normal", weighed(AaggffS(NORMAL))),
                form("public code (AAggFF), Normal by erfc", weighed(AaggffS(ERFC, mode="official"))),
            ],
            watched,
        ),
        trained(
            "aaggff-d",
            digits(sizes="skewed"),
            [
                form("ours, Weibull", weighed(AaggffD())),
                form("public code (AAggFF), Weibull", weighed(AaggffD(C=0.25, mode="official"))),
                form("ours, Normal", weighed(AaggffD(NORMAL))),
                form("public code (AAggFF), Normal by erfc", weighed(AaggffD(ERFC, C=0.25, mode="official"))),
            ],
            {SEEN: over_rounds(just_seen), AGREES: over_rounds(agreement)},
            cohort=5,
        ),
    ]


def training_cases() -> list[Case]:
    """All of them, in the order of the page."""
    return [*averaging(), *solvers(), *losses(), *angles(), *momentum(), *elements(), *adaptive(), *fair()]
