"""Shared by the cases: the local training, values read from rounds, and short constructors of algorithms."""

from __future__ import annotations

import math
from typing import Any

from benchmarks.corrections.measuring import Column, RoundResult, Watched, mean_length
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.protocols import LocalSolver, ServerOptimizer, Weighting
from fedalloy.methods.servers.sgd import ServerSgd
from fedalloy.methods.solvers.sgd import Sgd
from fedalloy.methods.weightings.cdf import Cdf
from fedalloy.methods.weightings.samples import Samples

LR, BATCH = 0.2, 16
LOCAL: dict[str, Any] = {"lr": LR, "batch_size": BATCH, "epochs": 2}
NORMAL = Cdf("normal")
ERFC = Cdf("normal", variant="affine_erfc")

POOLED = Column("pooled", "over examples", 1, 100)
LENGTH = Column("length", "length of updates", 2)
OWNER = Column("owner", "largest client", 2)
LARGEST = Column("largest", "largest weight", 2)
AGREES = Column("agrees", "weight and loss", 2)
ANGLE = Column("angle", "mean angle", 2)
SPREAD = Column("spread", "largest / smallest", 3)
SEEN = Column("seen", "seen / others", 3)
STRIDE = Column("stride", "stride", 1)


def weighed(rule: Weighting, server: ServerOptimizer | None = None, **settings: Any) -> Algorithm:
    """Plain local training under a rule that is watched."""
    return Algorithm(Sgd(**{**LOCAL, **settings}), Watched(rule), server or ServerSgd())


def served(server: ServerOptimizer, rule: Weighting | None = None, **settings: Any) -> Algorithm:
    """Plain local training and FedAvg's weights, with another server."""
    return Algorithm(Sgd(**{**LOCAL, **settings}), rule or Samples(), server)


def solved(solver: LocalSolver, rule: Weighting | None = None) -> Algorithm:
    """Another solver under FedAvg's weights."""
    return Algorithm(solver, Watched(rule or Samples()), ServerSgd())


def pooled(played: RoundResult) -> float:
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
    """The mean weight of participants over that of the others."""
    p, ids = row["info"]["p"], set(row["ids"])
    inside = [value for client, value in enumerate(p) if client in ids]
    outside = [value for client, value in enumerate(p) if client not in ids]
    return float(sum(inside) / len(inside) / (sum(outside) / len(outside)))


def stride(row: dict[str, Any]) -> float:
    """The norm of the combined update, relative to the clients' updates."""
    return float(row["info"]["seen_move"]) / mean_length(row)
