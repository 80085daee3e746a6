"""Every weighting goes with every server: three rounds, the same on the loop and on the batched engine."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from fedalloy import fit
from fedalloy.core import registry
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.errors import AlgorithmError
from fedalloy.experiment.fit import RunResult
from fedalloy.methods.solvers.sgd import Sgd
from fedalloy.testing import SmallTask, small_task, specimen
from fedalloy.testing.comparing import broken, differences
from fedalloy.testing.engines import TOLERANCE
from tests.cli.lines import Nursery

ROUNDS = 3
# What the issue that built the weightings promised by name.
PROMISED = {
    "fedavg", "fedprox", "fednova", "scaffold", "fedavgm",
    "drfedavg", "term", "propfair", "qffl", "qfedavg", "fedboosting",
    "fedadp", "fedlayerwise", "fedfa", "fedfa_mo", "ewwa",
    "fedadam", "fedadagrad", "fedyogi", "fedams", "fedcams",
    "afl", "fedmgda", "aaggff_s", "aaggff_d",
    "median", "trimmed_mean", "krum", "multi_krum",
}  # fmt: skip


@pytest.fixture(scope="module")
def task() -> SmallTask:
    """Five ragged clients and a model of fifteen numbers; validation parts hold the examples they train on."""
    return small_task("linear")


def play(algorithm: Algorithm, task: SmallTask, engine: str) -> RunResult:
    cohort = task.population if algorithm.weighting.needs_everyone else 3
    settings: dict[str, Any] = {"cohort": cohort, "evaluate_every": ROUNDS, "metrics": ("loss",)}
    return fit(algorithm, task, rounds=ROUNDS, seed=4, engine=engine, **settings)


def disagreement(algorithm: Algorithm, task: SmallTask) -> list[str]:
    """Where the two engines part, or where the loop's numbers are no numbers."""
    truth, tried = play(algorithm, task, "loop"), play(algorithm, task, "batched")
    if truth.status != "finished":
        return [f"the loop ended as {truth.status}"]
    left, right = (
        {"state": run.ending.state, "rows": {str(row["round"]): told(row) for row in run.rounds()}}
        for run in (tried, truth)
    )
    return [*broken(right), *differences(left, right, TOLERANCE)]


def told(row: dict[str, Any]) -> dict[str, Any]:
    """What a round says about its clients, as tensors where it says it in numbers."""
    return {"ids": row["ids"], "weights": tensors(row["weights"]), "info": tensors(row["info"])}


def tensors(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: tensors(inner) for name, inner in value.items()}
    return torch.tensor(value, dtype=torch.float64)


def of_models(weighting: str) -> bool:
    """Whether a rule weighs updates of models; one that reads another part goes with that part's solver alone."""
    return specimen("weighting", weighting).reads <= {"delta"}


@pytest.mark.parametrize("weighting", [name for name in registry.names("weighting") if of_models(name)])
def test_a_weighting_goes_with_every_server_on_both_engines(weighting: str, task: SmallTask):
    wrong = {}
    for server in registry.names("server"):
        algorithm = Algorithm(Sgd(lr=0.2, batch_size=4), specimen("weighting", weighting), specimen("server", server))
        if found := disagreement(algorithm, task):
            wrong[server] = found
    assert not wrong


def test_a_weighting_of_another_part_is_refused_with_a_solver_of_models():
    others = [name for name in registry.names("weighting") if not of_models(name)]
    assert others == ["energies"]
    with pytest.raises(AlgorithmError, match="does not send; sent: delta"):
        Algorithm(Sgd(), specimen("weighting", "energies"), specimen("server", "sgd"))


def test_the_comparison_sees_a_difference(task: SmallTask):
    one = Algorithm(Sgd(lr=0.2, batch_size=4), specimen("weighting", "samples"), specimen("server", "adam"))
    other = Algorithm(Sgd(lr=0.2 + 1e-6, batch_size=4), one.weighting, one.server)
    left, right = (play(algorithm, task, "loop").ending.state for algorithm in (one, other))
    assert list(differences(left, right, TOLERANCE))


def test_the_command_line_names_every_promised_method(cli: Nursery):
    done = cli.run("list", "algorithms", "--json")
    assert done.code == 0, done.err
    listed = json.loads(done.out)["algorithms"]
    assert set(listed) >= PROMISED
    assert all(listed[name].strip() for name in PROMISED)
