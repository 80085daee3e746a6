"""Corrections that need no training, or more than one number from it: quadratics, counting, scoring, splitting."""

from __future__ import annotations

from itertools import combinations

import torch
from torch import Tensor

from benchmarks.corrections import servers
from benchmarks.corrections.measuring import OURS, Case, Column, Form, Readings, digits, form, run_round
from benchmarks.corrections.splits import SharedDirichlet
from fedalloy import algorithms
from fedalloy.core.algorithm import Algorithm, server_step
from fedalloy.core.keys import Key
from fedalloy.core.protocols import ServerOptimizer
from fedalloy.core.types import Cohort, Context
from fedalloy.experiment.fit import RunResult
from fedalloy.methods.servers.period_momentum import PeriodMomentum
from fedalloy.methods.solvers.sgd import Sgd
from fedalloy.methods.weightings.fedfa import Information
from fedalloy.tasks.assembly import as_dataset, make_task
from fedalloy.tasks.federation import FederatedTask
from fedalloy.tasks.metrics import summary
from fedalloy.tasks.partitions.base import Partition
from fedalloy.tasks.partitions.dirichlet import Dirichlet

CLIENTS, SIZE, ROUNDS = 8, 6, 20
LOCAL_STEP, LOCAL_STEPS = 0.1, 5


def exact_cases() -> list[Case]:
    """All of them, in the order of the page."""
    distance = Column("distance", f"distance from the minimum after {ROUNDS} rounds", 1, shape="e")
    gradient = Column("slope", "shrinkage of E[dr] towards the mean", 4)
    return [
        Case("fedfa-quadratic", (distance,), quadratic),
        Case("aaggff-d-estimate", (gradient,), estimate),
        scores(),
        splits(),
    ]


def quadratic(seed: int) -> Readings:
    """FedFa's servers on clients whose losses have one curvature and different minima."""
    forms: dict[str, ServerOptimizer] = {
        OURS: PeriodMomentum(),
        "as printed (S3 eq. 5): the sign": servers.AwayFromAverage(),
        "as printed: the clients' step at the server": PeriodMomentum(lr=LOCAL_STEP),
        "as printed: both": servers.AwayFromAverage(lr=LOCAL_STEP),
    }
    return {name: {"distance": _distance(server, Key.of(seed))} for name, server in forms.items()}


def _distance(server: ServerOptimizer, key: Key) -> float:
    """The distance of the model from the mean of the minima, which is the optimum for equal clients."""
    curvature = 0.5 + 1.5 * key.fold("curvature").uniform(SIZE, dtype=torch.float64)
    minima = key.fold("minima").normal(CLIENTS, SIZE, dtype=torch.float64)
    algorithm = Algorithm(Sgd(lr=LOCAL_STEP), Information(), server)
    state = algorithm.init({"w": 3 + minima.mean(0)}, CLIENTS)
    alike = {"accuracy_after": torch.full((CLIENTS,), 0.5, dtype=torch.float64)}
    for round in range(1, ROUNDS + 1):
        delta = (minima - state["shared"]["params"]["w"]) * (1 - (1 - LOCAL_STEP * curvature) ** LOCAL_STEPS)
        cohort = Cohort(torch.arange(CLIENTS), {"delta": {"w": delta}}, alike)
        state = server_step(algorithm, state, cohort, Context(round, CLIENTS, key)).state
    return float((state["shared"]["params"]["w"] - minima.mean(0)).norm())


def estimate(seed: int) -> Readings:
    """AAggFF-D's estimate over *all* cohorts of a size: how much of a client's difference from the mean it keeps."""
    responses = Key.of(seed).fold("responses").uniform(CLIENTS, dtype=torch.float64)
    found: Readings = {}
    for cohort in (2, 4):
        kept = 1 - (CLIENTS - cohort) / (cohort * (CLIENTS - 1))
        found[f"stated (S4 Lemma 3.2), {cohort} of {CLIENTS}"] = {"slope": 1.0}
        found[f"by hand, {cohort} of {CLIENTS}"] = {"slope": kept}
        found[f"counted over all cohorts, {cohort} of {CLIENTS}"] = {"slope": _gradient(responses, cohort)}
    return found


def _gradient(responses: Tensor, size: int) -> float:
    """The least-squares slope of the mean estimate against the truth, both measured from the mean response."""
    total, count = torch.zeros_like(responses), 0
    for ids in combinations(range(len(responses)), size):
        total += doubly_robust(responses, torch.tensor(ids))
        count += 1
    apart, seen = responses - responses.mean(), total / count - responses.mean()
    return float(apart @ seen / (apart @ apart))


def doubly_robust(responses: Tensor, ids: Tensor) -> Tensor:
    """``dr`` of eq. 3.10 for given responses: the mean of the participants, and each one's difference from it."""
    mean = responses[ids].mean()
    apart = (responses[ids] - mean) / (len(ids) / len(responses))
    return mean.expand(len(responses)).clone().index_add(0, ids, apart)


def scores() -> Case:
    """One run of FedAvg, scored with and without the sizes of the clients' test parts."""
    federation = digits(sizes="skewed")
    one = form(OURS, algorithms.fedavg(lr=0.2, batch_size=16, epochs=2))
    columns = (
        Column("mean", "mean (%)", 1, 100), Column("worst", "worst 10 % (%)", 1, 100),
        Column("best", "best 10 % (%)", 1, 100), Column("gap", "parity gap", 1, 100),
    )  # fmt: skip

    def measure(seed: int) -> Readings:
        task = federation(seed)
        last = list(run_round(one, task, seed, {"cohort": 5}).clients())[-1]
        values = torch.tensor(last["accuracy"], dtype=torch.float64)
        sizes = task.test.size[torch.tensor(last["ids"])].double()
        return {
            "every client alike (S3)": _scores(values, None),
            "by test size (S4 and its code)": _scores(values, sizes),
        }

    return Case("metrics", columns, measure)


def _scores(values: Tensor, sizes: Tensor | None) -> dict[str, float]:
    return {
        "mean": summary.mean(values, sizes), "worst": summary.worst(values, 0.1, sizes),
        "best": summary.best(values, 0.1, sizes), "gap": summary.parity_gap(values, 0.1, sizes),
    }  # fmt: skip


def splits() -> Case:
    """FedAvg over disjoint clients, and over clients that share examples."""
    columns = (
        Column("distinct", "distinct examples handed out", 0),
        Column("copies", "examples handed out", 0),
        Column("leak", "test examples that somebody trains on (%)", 1, 100),
        Column("classes", "classes per client", 1),
        Column("told", "accuracy as reported (%)", 1, 100),
        Column("true", "accuracy on digits nobody trains on (%)", 1, 100),
    )
    one = form(OURS, algorithms.fedavg(lr=0.2, batch_size=16, epochs=2))

    def measure(seed: int) -> Readings:
        rules: dict[str, Partition] = {
            "ours, alpha = 0.5": Dirichlet(0.5, min_samples=10),
            "ours, alpha = 0.1, for a like skew": Dirichlet(0.1, min_samples=10),
            "public code (AAggFF), alpha = 0.5": SharedDirichlet(0.5),
        }
        return {name: _split(rule, one, seed) for name, rule in rules.items()}

    return Case("dirichlet", columns, measure)


def _split(rule: Partition, one: Form, seed: int) -> dict[str, float]:
    task = make_task("digits", {"kind": "mlp", "hidden": [32]}, rule, 20, test_fraction=0.25, seed=seed)
    result = run_round(one, task, seed, {"cohort": 10})
    train, test = _rows(task.train.x), _rows(task.test.x)
    seen = set(train)
    return {
        "distinct": len(seen | set(test)),
        "copies": len(train) + len(test),
        "leak": sum(row in seen for row in test) / len(test),
        "classes": float((task.manifest.class_counts > 0).sum(1).double().mean()),
        "told": result.last("accuracy")["mean"],
        "true": _unseen_accuracy(task, result, seen),
    }


def _unseen_accuracy(task: FederatedTask, result: RunResult, seen: set[bytes]) -> float:
    """The accuracy on digits that are in no training part."""
    everything = as_dataset("digits", Key.of(0))
    new = torch.tensor([row not in seen for row in _rows(everything.x)])
    shared = result.ending.state["shared"]
    outputs = task.objective.outputs(shared["params"], shared["buffers"], everything.x[new])
    return float(task.objective.hits(outputs, everything.y[new]).double().mean())


def _rows(x: Tensor) -> list[bytes]:
    """Every example by its pixels."""
    return [row.numpy().tobytes() for row in x.reshape(len(x), -1)]
