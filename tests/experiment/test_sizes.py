"""A run believes no client: sizes are pinned at the first answer, steps are counted, buffers are looked at."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from fedalloy import algorithms
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.errors import SpecError
from fedalloy.core.types import Cohort
from fedalloy.engines.loop import Loop
from fedalloy.experiment.config import RunConfig
from fedalloy.experiment.fit import fit
from fedalloy.experiment.sizes import KnownSizes
from fedalloy.methods.servers.sgd import ServerSgd
from fedalloy.methods.solvers.sgd import Sgd
from fedalloy.methods.weightings.uniform import Uniform
from fedalloy.testing import small_task
from tests.engines.rounds import Called

LOCAL: dict[str, Any] = {"lr": 0.2, "batch_size": 3}
TASK = small_task()


def telling(change):
    """An engine whose clients say other numbers: ``change(stats, round)`` in place."""

    def engine(*given):
        outcome = Loop()(*given)
        stats = {name: values.clone() for name, values in outcome.cohort.stats.items()}
        change(stats, given[-1].round)
        return replace(outcome, cohort=outcome.cohort.with_stats(stats))

    return Called(engine)


def only_in(round: int, client: int, size: float):
    def change(stats, now):
        if now == round:
            stats["num_examples"][client] = size

    return telling(change)


def test_a_client_that_changes_its_size_is_dropped_with_the_reason():
    result = fit(algorithms.fedavg(**LOCAL), TASK, rounds=3, engine=only_in(2, 3, 13.0))
    rows = list(result.rounds())
    reason = "statistic 'num_examples' is 13, but was 12 in its first round of this run"
    assert [row["dropped"] for row in rows] == [{}, {"3": reason}, {}]


def test_the_first_answer_counts_also_after_the_run_was_resumed(tmp_path):
    settings: dict[str, Any] = {"folder": tmp_path / "run", "checkpoint_every": 0.0}

    class Stop(Exception):
        pass

    def stop(event):
        if event.row["round"] == 2:
            raise Stop

    with pytest.raises(Stop):
        fit(algorithms.fedavg(**LOCAL), TASK, rounds=4, engine=only_in(99, 0, 0.0), watcher=stop, **settings)
    resumed = fit(algorithms.fedavg(**LOCAL), TASK, rounds=4, engine=only_in(4, 2, 8.0), resume=True, **settings)
    rows = list(resumed.rounds())
    assert [list(row["dropped"]) for row in rows] == [[], [], [], ["2"]]
    assert "but was 7 in its first round" in rows[-1]["dropped"]["2"]


@pytest.mark.parametrize("size", [-1e9, 1e15, float("nan"), 2.5])
def test_a_size_that_cannot_be_is_neither_counted_nor_pinned(size):
    result = fit(algorithms.fedavg(**LOCAL), TASK, rounds=2, engine=only_in(1, 3, size))
    rows = list(result.rounds())
    assert rows[0]["ids"] == [0, 1, 2, 4]
    assert "'num_examples'" in rows[0]["dropped"]["3"]
    assert rows[1]["ids"] == [0, 1, 2, 3, 4]
    assert max(rows[0]["weights"]) <= 1


def test_the_limit_is_a_setting():
    rows = list(fit(algorithms.fedavg(**LOCAL), TASK, rounds=1, max_examples=10, engine="loop").rounds())
    assert rows[0]["dropped"] == {"3": "statistic 'num_examples' is 12; allowed: whole numbers 0 to 10 (max_examples)"}
    assert RunConfig().max_examples == 10_000_000
    with pytest.raises(SpecError, match="max_examples"):
        RunConfig(max_examples=0)


def test_steps_are_counted_by_the_server_whatever_the_engine_says():
    def lie(stats, round):
        stats["step_norm"][1], stats["effective_steps"][0], stats["num_steps"][2] = 1e-9, 1e9, -7.0

    algorithm = algorithms.fednova(**LOCAL)
    honest, lying = (fit(algorithm, TASK, rounds=2, engine=engine) for engine in (Loop(), telling(lie)))
    assert [row["weights"] for row in lying.rounds()] == [row["weights"] for row in honest.rounds()]
    assert [row["num_steps"] for row in lying.rounds()] == [row["num_steps"] for row in honest.rounds()]


@dataclass(frozen=True)
class Spoiling(Sgd):
    """Training is well, and a buffer of the server's is not."""

    def absorb(self, shared, aggregate, cohort, ctx):
        mean = shared["buffers"]["norm.running_mean"] * torch.nan
        return {**shared, "buffers": {**shared["buffers"], "norm.running_mean": mean}}


def test_buffers_that_are_not_finite_fail_the_run():
    algorithm = Algorithm(Spoiling(**LOCAL), Uniform(), ServerSgd())
    result = fit(algorithm, small_task("batchnorm"), rounds=3, evaluate_every=3, engine="loop")
    assert result.status == "failed"
    assert "running statistics (a buffer) is not finite after round 1" in result.ending.reason


def test_known_sizes_survive_a_checkpoint():
    sizes, again = KnownSizes(4), KnownSizes(4)
    sizes.learn(Cohort(torch.tensor([1, 3]), {}, {"num_examples": torch.tensor([5.0, -1.0])}))
    again.restore(sizes.to_state())
    assert again.to_state()["ids"].tolist() == [1]
    known = again.limits(torch.tensor([1])).known
    assert known is not None
    assert known.tolist() == [5.0]
    again.restore(None)
    assert again.to_state()["ids"].tolist() == []
