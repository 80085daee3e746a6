"""Corrections of what clients do and of weights from sizes, losses and angles: all forms of each."""

from __future__ import annotations

from typing import Any

from benchmarks.corrections import local, servers, weights
from benchmarks.corrections.measuring import (
    OURS,
    Case,
    Form,
    agreement,
    digits,
    form,
    largest_owner,
    mean_length,
    normed,
    over_rounds,
    trained,
)
from benchmarks.corrections.setting import (
    AGREES,
    ANGLE,
    BATCH,
    LENGTH,
    LOCAL,
    LR,
    OWNER,
    POOLED,
    SPREAD,
    mean_angle,
    pooled,
    served,
    solved,
    spread,
    weighed,
)
from fedalloy import algorithms
from fedalloy.core.algorithm import Algorithm
from fedalloy.methods.servers.sgd import ServerSgd
from fedalloy.methods.solvers.propfair import PropFair
from fedalloy.methods.solvers.prox import Prox
from fedalloy.methods.solvers.scaffold import Scaffold
from fedalloy.methods.solvers.sgd import Sgd
from fedalloy.methods.weightings import mirror
from fedalloy.methods.weightings.boosting import Boosting
from fedalloy.methods.weightings.fedadp import Angles
from fedalloy.methods.weightings.qfedavg import QFedAvg
from fedalloy.methods.weightings.samples import Samples
from fedalloy.methods.weightings.uniform import Uniform
from fedalloy.tasks.devices import DeviceProfile

EPOCHS = (1, 1, 1, 2, 2, 3, 3, 4, 5, 6)
"""Local epochs of ten clients of very different speed."""


def client_cases() -> list[Case]:
    """All of them, in the order of the page."""
    return [*averaging(), *solvers(), *losses(), *angles()]


def averaging() -> list[Case]:
    decayed = {**LOCAL, "decay": 0.9, "decay_every": 5}
    whole: dict[str, Any] = {"lr": 0.5, "batch_size": None, "epochs": 3}  # BatchNorm has no use for a batch of one
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
            digits(10, model=normed),
            [
                form(OURS, served(ServerSgd(), **whole)),
                form("public code (SuPerFed)", served(servers.OnlyWeights(), **whole)),
                form(
                    "the same, and running statistics not averaged",
                    Algorithm(local.ForgetfulBuffers(**whole), Samples(), servers.OnlyWeights()),
                ),
            ],
            cohort=5,
            rounds=25,
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
        steps: dict[str, Any] = {"lr": 0.1, "batch_size": BATCH}
        return lambda task: solved(
            local.StepwiseNova(effective=local.effective_steps(task, EPOCHS, BATCH), extra=extra, **steps)
        )

    speeds: dict[str, Any] = {"devices": DeviceProfile(epochs=EPOCHS), "rounds": 20}
    variates: dict[str, Any] = {"lr": 0.1, "batch_size": BATCH, "epochs": 2}
    length = {LENGTH: over_rounds(mean_length)}
    return [
        trained("fedprox-weak", digits(10), prox(0.01), length, rounds=20),
        trained("fedprox-strong", digits(10), prox(1.0), length, rounds=20),
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
    fading: dict[str, Any] = {"decay": 0.9}
    longer = form("the same, local step 3 times as long", solved(PropFair(M=3.0, **{**LOCAL, "lr": 3 * LR})))
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
        trained("propfair", skewed, [*propfair(3.0), longer], {POOLED: pooled}, cohort=10),
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
    by_tensor = Angles("leaf")
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
