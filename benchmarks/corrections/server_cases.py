"""Corrections of servers, of weights on elements and of fair weights: all forms of each."""

from __future__ import annotations

from typing import Any

from benchmarks.corrections import servers, weights
from benchmarks.corrections.measuring import (
    OURS,
    Case,
    Form,
    agreement,
    digits,
    form,
    largest_weight,
    over_rounds,
    trained,
)
from benchmarks.corrections.setting import (
    AGREES,
    ERFC,
    LARGEST,
    NORMAL,
    SEEN,
    STRIDE,
    just_seen,
    served,
    stride,
    weighed,
)
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.protocols import ServerOptimizer, Weighting
from fedalloy.methods.servers.adaptive import Adagrad, Adam, Yogi
from fedalloy.methods.servers.amsgrad import AmsGrad
from fedalloy.methods.servers.period_momentum import PeriodMomentum
from fedalloy.methods.servers.sgd import ServerSgd
from fedalloy.methods.weightings.aaggff_d import AaggffD
from fedalloy.methods.weightings.aaggff_s import AaggffS
from fedalloy.methods.weightings.afl import Afl
from fedalloy.methods.weightings.ewwa import Ewwa
from fedalloy.methods.weightings.fedfa import Information
from fedalloy.methods.weightings.mgda import FedMgda
from fedalloy.methods.weightings.uniform import Uniform


def server_cases() -> list[Case]:
    """All of them, in the order of the page."""
    return [*momentum(), *elements(), *adaptive(), *fair()]


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
                form("public code (AAggFF): rebuilt", served(servers.Rebuilt("adam", lr))),
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
                form("public code (AAggFF): rebuilt", served(servers.Rebuilt("adagrad", lr, 0.0))),
            ],
            cohort=10,
        ),
        trained(
            "fedyogi",
            digits(),
            [
                form(OURS, served(Yogi(lr))),
                form("as printed (S2 eq. 4)", served(servers.YogiPrinted(lr))),
                form("public code (AAggFF): rebuilt", served(servers.Rebuilt("yogi", lr))),
            ],
            cohort=10,
        ),
        trained(
            "fedams",
            digits(),
            [
                form('ours, "max", server step 0.3', served(AmsGrad(0.3), Uniform())),
                form('ours, "max", server step 0.03', served(AmsGrad(lr), Uniform())),
                form('ours, "plus", server step 0.03', served(AmsGrad(lr, option="plus"), Uniform())),
                form("public code (S2), server step 0.3", served(AmsGrad(0.3, **ams), Uniform())),
                form("public code (S2), server step 0.03", served(AmsGrad(lr, **ams), Uniform())),
                form("public code (S2), its default 0.001", served(AmsGrad(0.001, **ams), Uniform())),
            ],
            cohort=10,
        ),
    ]


def fair() -> list[Case]:
    watched = {LARGEST: over_rounds(largest_weight), AGREES: over_rounds(agreement)}
    seen = {SEEN: over_rounds(just_seen), AGREES: over_rounds(agreement)}
    few, many, share = digits(10, sizes="skewed"), digits(sizes="skewed"), 0.25
    code = "public code (AAggFF)"

    def online(ours: Weighting, theirs: Weighting, name: str = code) -> list[Form]:
        return [form(OURS, weighed(ours)), form(name, weighed(theirs))]

    return [
        trained("afl", few, online(Afl(0.1), weights.AflOldWeights(0.1), "as first published: old weights"), watched),
        trained(
            "fedmgda",
            digits(10),
            [
                form(OURS, weighed(FedMgda())),
                form("the same, lambda off by up to 2e-5", weighed(weights.RoughMgda())),
                form("ours, local step 0.0001 in place of 0.2", weighed(FedMgda(), lr=1e-4)),
            ],
            {STRIDE: over_rounds(stride)},
        ),
        trained("aaggff-s", few, online(AaggffS(), AaggffS(mode="official")), watched),
        trained("aaggff-s-normal", few, online(AaggffS(NORMAL), AaggffS(ERFC, mode="official")), watched),
        trained("aaggff-d", many, online(AaggffD(), AaggffD(C=share, mode="official")), seen, cohort=5),
        trained(
            "aaggff-d-normal", many, online(AaggffD(NORMAL), AaggffD(ERFC, C=share, mode="official")), seen, cohort=5
        ),
    ]
