"""Clients that took no step, and rounds that a rule is not defined for: named in the record, and no more than that."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from fedalloy import algorithms
from fedalloy.core import registry
from fedalloy.core.algorithm import Algorithm, server_step
from fedalloy.core.errors import AlgorithmError, RoundRefused
from fedalloy.core.keys import Key
from fedalloy.core.types import Cohort, Context
from fedalloy.engines.loop import Loop
from fedalloy.experiment.config import RunConfig
from fedalloy.experiment.fit import fit
from fedalloy.experiment.health import EMPTY_LIMIT
from fedalloy.experiment.records.store import MemoryStore
from fedalloy.experiment.round import Federation, Stopwatch, run_round
from fedalloy.experiment.sampling import Listed
from fedalloy.experiment.starting import begin
from fedalloy.methods.servers.sgd import ServerSgd
from fedalloy.methods.solvers.scaffold import Scaffold
from fedalloy.methods.solvers.sgd import Sgd
from fedalloy.methods.weightings.aaggff_d import AaggffD
from fedalloy.methods.weightings.krum import Krum
from fedalloy.methods.weightings.mirror import Mirror
from fedalloy.methods.weightings.qfedavg import QFedAvg
from fedalloy.methods.weightings.samples import Samples
from fedalloy.methods.weightings.unfolded import Unfolded
from fedalloy.methods.weightings.uniform import Uniform
from fedalloy.tasks.assembly import make_task
from fedalloy.tasks.devices import DeviceProfile
from fedalloy.testing import HalfWithMemory, small_task, specimen
from fedalloy.testing.comparing import differences
from tests.engines.rounds import Called

LOCAL: dict[str, Any] = {"lr": 0.2, "batch_size": 3}
TASK = small_task()
IDLE = DeviceProfile(epochs=(1, 0, 1, 1, 1))
NOT_COUNTED = {
    "krum", "multi_krum", "median", "trimmed_mean", "uniform", "ewwa", "angles", "information", "boosting", "qfedavg",
    "fedmgda",
}  # fmt: skip


def made(weighting, solver=None, **more) -> Algorithm:
    return Algorithm(solver or Sgd(**LOCAL), weighting, ServerSgd(), **more)


def first(algorithm: Algorithm, task=TASK, store=None, state=None, engine: Any = None, **settings):
    fed = Federation(algorithm, task, engine or Loop(), RunConfig(engine="loop", **settings), Key.of(0))
    state = begin(fed) if state is None else state
    return state, run_round(fed, state, MemoryStore() if store is None else store, 1, Stopwatch())


# ---------------------------------------------------------------------------------------------- who counts


def test_a_client_that_stands_still_does_not_win_krum_under_label_skew():
    task = make_task("digits", "logistic", {"kind": "classes", "per_client": 2}, 10, seed=0)
    algorithm = replace(algorithms.fedavg(batch_size=32), weighting=Krum())
    lazy = DeviceProfile(epochs=(0, *(1 for _ in range(9))))
    result = fit(algorithm, task, rounds=10, evaluate_every=10, devices=lazy, engine="batched")
    assert result.last()["mean"] > 0.15, "the model never moved: about 0.1"
    assert [row["idle"] for row in result.rounds()] == [[0]] * 10
    assert all(0 not in row["ids"] and not row["dropped"] for row in result.rounds())


@pytest.mark.parametrize("name", registry.names("weighting"))
def test_every_rule_says_whether_an_idle_client_counts(name):
    rule = specimen("weighting", name)
    assert rule.counts_idle == (name not in NOT_COUNTED)
    assert not Mirror("none", "uniform").counts_idle
    assert QFedAvg(weights="samples").counts_idle


@pytest.mark.parametrize("name", sorted(NOT_COUNTED - {"boosting"}))
def test_where_clients_are_chosen_or_counted_the_round_is_that_of_the_others(name):
    algorithm = made(specimen("weighting", name))
    state, played = first(algorithm, devices=IDLE)
    _, without = first(algorithm, state=state, sampling=Listed(((0, 2, 3, 4),)))
    assert (played.row["ids"], played.row["idle"]) == ([0, 2, 3, 4], [1])
    assert played.row["weights"] == without.row["weights"]
    assert list(differences(played.step.state, without.step.state)) == []


def test_scaffold_counts_no_idle_client_whatever_its_weighting():
    _, played = first(made(Samples(), Scaffold(**LOCAL)), devices=IDLE)
    assert played.row["ids"] == [0, 2, 3, 4]


@pytest.mark.parametrize("name", ["fedavg", "fednova", "afl", "drfedavg"])
def test_sums_by_samples_and_by_losses_are_as_they_were(name):
    _, played = first(algorithms.named(name, **LOCAL), devices=IDLE)
    assert (played.row["ids"], played.row["idle"]) == ([0, 1, 2, 3, 4], [1])
    if name == "fedavg":
        assert played.row["weights"] == pytest.approx([size / 28 for size in (1, 3, 7, 12, 5)])


def test_a_client_without_examples_has_no_loss_and_is_idle_not_refused():
    task = small_task(sizes=(4, 0, 5, 3))
    _, played = first(algorithms.afl(**LOCAL), task)
    assert (played.row["ids"], played.row["idle"], played.row["dropped"]) == ([0, 2, 3], [1], {})
    _, plain = first(algorithms.fedavg(**LOCAL), task)
    assert (plain.row["ids"], plain.row["weights"][1]) == ([0, 1, 2, 3], 0.0)


def test_under_resend_a_failed_link_counts_as_before():
    devices = DeviceProfile(success=(1.0, 0.0, 1.0, 1.0, 1.0), on_failure="resend")
    _, played = first(made(Uniform()), devices=devices)
    assert (played.row["ids"], played.row["idle"], played.row["resent"]) == ([0, 1, 2, 3, 4], [], [1])


def test_the_state_of_an_idle_client_is_kept():
    """An error memory must not be spent on a contribution that does not count."""
    algorithm, store = made(Uniform(), wire=(HalfWithMemory(),)), MemoryStore()
    _, played = first(algorithm, store=store)
    before = store.get([1])
    fed = Federation(algorithm, TASK, Loop(), RunConfig(engine="loop", devices=IDLE), Key.of(0))
    second = run_round(fed, played.step.state, store, 2, Stopwatch())
    assert second.row["idle"] == [1]
    assert list(differences({"1": store.get([1])[1]}, {"1": before[1]})) == []


def test_a_round_of_idle_clients_alone_has_no_effect_and_is_no_divergence():
    state, played = first(made(Uniform()), devices=DeviceProfile(epochs=0))
    assert played.step.state is state
    assert (played.row["ids"], played.row["idle"]) == ([], [0, 1, 2, 3, 4])
    result = fit(made(Uniform()), TASK, rounds=EMPTY_LIMIT + 2, devices=DeviceProfile(epochs=0), engine="loop")
    assert len(list(result.rounds())) == EMPTY_LIMIT + 2


# ---------------------------------------------------------------------------------------------- refusals


FEW = DeviceProfile(success=(1.0, 1.0, 1.0, 1.0, 0.0))


def test_krum_with_too_few_left_is_a_round_without_effect():
    algorithm, store = made(Krum(byzantine=1), Scaffold(**LOCAL)), MemoryStore()
    state, played = first(algorithm, store=store, devices=FEW)
    assert played.step.state is state
    assert played.row["refusal"] == "weighting 'Krum' needs at least 5 contributions that count, got 4"
    assert (played.row["ids"], played.row["weights"], played.row["dropped"]) == ([], [], {})
    assert store.get(range(5)) == {}, "what did not count leaves no trace"


def test_refused_rounds_neither_end_a_run_nor_count_as_barren():
    rounds = EMPTY_LIMIT + 2
    result = fit(made(Krum(byzantine=1)), TASK, rounds=rounds, devices=FEW, engine="loop")
    rows = list(result.rounds())
    assert len(rows) == rounds
    assert all("needs at least 5" in row["refusal"] for row in rows)
    assert result.ending.progress.barren == 0


def test_a_refused_round_with_dropped_contributions_is_not_barren_either():
    def engine(*given):
        outcome = Loop()(*given)
        delta = {name: leaf.clone() for name, leaf in outcome.cohort.payload["delta"].items()}
        delta["output.bias"][0] = torch.nan
        broken = Cohort(outcome.cohort.ids, {**outcome.cohort.payload, "delta": delta}, outcome.cohort.stats)
        return replace(outcome, cohort=broken)

    result = fit(made(Krum(byzantine=1)), TASK, rounds=EMPTY_LIMIT + 2, engine=Called(engine))
    rows = list(result.rounds())
    assert len(rows) == EMPTY_LIMIT + 2
    assert all(row["dropped"] == {"0": "not finite"} and "got 4" in row["refusal"] for row in rows)


@pytest.mark.parametrize(
    "settings",
    [
        {"cohort": 4},
        {"sampling": Listed(((0, 1, 2, 3, 4), (0, 1)))},
        {"devices": DeviceProfile(epochs=(1, 0, 1, 1, 1))},
    ],
)
def test_a_cohort_that_can_never_be_large_enough_is_refused_before_round_one(settings):
    with pytest.raises(AlgorithmError, match="weighting 'Krum' needs at least 5 clients that count in a round"):
        fit(made(Krum(byzantine=1)), TASK, rounds=1, engine="loop", **settings)


def test_so_are_clients_without_examples():
    with pytest.raises(AlgorithmError, match="needs at least 5 clients that count in a round, but there can be only 4"):
        fit(made(Krum(byzantine=1)), small_task(sizes=(3, 4, 0, 5, 6)), rounds=1, engine="loop")


def test_responses_need_enough_clients():
    with pytest.raises(AlgorithmError, match="'AaggffD' needs at least 3 clients"):
        fit(made(AaggffD(C1=0.4)), TASK, rounds=1, cohort=2, engine="loop")
    _, played = first(made(AaggffD(C1=0.7)), devices=DeviceProfile(success=(1.0, 0.0, 1.0, 1.0, 0.0)))
    assert "needs at least 4 contributions that count, got 3" in played.row["refusal"]


SIZES = (1, 3, 7, 12, 5)


def test_a_table_for_other_clients_is_refused_before_round_one_where_the_data_are_at_hand():
    other = Unfolded(((0.2,) * 5,), sizes=(1, 3, 7, 12, 6))
    _, played = first(made(other))
    assert "client 4 has 5 examples, the table was learned with one of 6" in played.row["refusal"]
    with pytest.raises(AlgorithmError, match="client 4 has 5 examples"):
        fit(made(other), TASK, rounds=1, engine=Called(never_called))
    assert fit(made(Unfolded(((0.2,) * 5,), sizes=SIZES)), TASK, rounds=1, engine="loop").status == "finished"


def never_called(*given):
    raise AssertionError("round 1 began")


def test_a_rule_may_refuse_a_round_by_itself():
    @dataclass(frozen=True)
    class Fussy(Samples):
        def weigh(self, cohort, state, ctx):
            raise RoundRefused("not with these")

    algorithm = made(Fussy())
    state = algorithm.init({"w": torch.zeros(1)}, 2)
    cohort = Cohort(torch.arange(2), {"delta": {"w": torch.ones(2, 1)}}, {"num_examples": torch.ones(2)})
    step = server_step(algorithm, state, cohort, Context(1, 2, Key.of(0)))
    assert step.state is state
    assert (step.refusal, step.ids.tolist(), len(step.weights)) == ("not with these", [], 0)
