"""One round: links that fail, deadlines, dropped contributions, what stays at a client."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from fedalloy import algorithms
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.keys import Key
from fedalloy.core.types import Context
from fedalloy.engines.loop import Loop
from fedalloy.experiment.config import RunConfig
from fedalloy.experiment.records.store import MemoryStore
from fedalloy.experiment.round import Federation, Stopwatch, run_round
from fedalloy.experiment.sampling import Listed
from fedalloy.experiment.starting import begin
from fedalloy.methods.servers.sgd import ServerSgd
from fedalloy.methods.solvers.sgd import Sgd
from fedalloy.methods.weightings.samples import Samples
from fedalloy.methods.weightings.uniform import Uniform
from fedalloy.tasks.devices import DeviceProfile
from fedalloy.testing import HalfWithMemory, small_task
from fedalloy.testing.comparing import differences
from tests.engines.rounds import Called

TASK = small_task()
SIZES = (1, 3, 7, 12, 5)


def federation(algorithm: Algorithm, task=TASK, engine: Any = None, **settings) -> Federation:
    return Federation(algorithm, task, engine or Loop(), RunConfig(engine="loop", **settings), Key.of(0))


def first(fed: Federation, store: MemoryStore | None = None):
    state = begin(fed)
    return state, run_round(fed, state, store if store is not None else MemoryStore(), 1, Stopwatch())


LINKS = (1.0, 0.0, 1.0, 0.0, 1.0)
LOCAL: dict[str, Any] = {"batch_size": 3, "lr": 0.2}


def test_under_drop_a_failed_link_is_absent_and_the_rest_is_renormalised():
    _, played = first(federation(algorithms.fedavg(**LOCAL), devices=DeviceProfile(success=LINKS)))
    assert played.row["ids"] == [0, 2, 4]
    assert played.row["absent"] == [1, 3]
    assert played.row["weights"] == pytest.approx([size / 13 for size in (1, 7, 5)])


def test_under_resend_a_failed_link_keeps_its_weight_and_its_update_is_zero():
    devices = DeviceProfile(success=LINKS, on_failure="resend")
    state, resent = first(federation(algorithms.fedavg(**LOCAL), devices=devices))
    _, dropped = first(federation(algorithms.fedavg(**LOCAL), devices=replace(devices, on_failure="drop")))
    assert resent.row["ids"] == [0, 1, 2, 3, 4]
    assert resent.row["absent"] == []
    assert resent.row["resent"] == [1, 3]
    assert resent.row["weights"] == pytest.approx([size / 28 for size in SIZES])
    before = state["shared"]["params"]["output.bias"]
    whole = dropped.step.state["shared"]["params"]["output.bias"] - before
    torch.testing.assert_close(resent.step.state["shared"]["params"]["output.bias"] - before, whole * 13 / 28)


def test_an_algorithm_may_overrule_the_devices():
    algorithm = replace(algorithms.fedavg(**LOCAL), on_failure="resend")
    _, played = first(federation(algorithm, devices=DeviceProfile(success=LINKS, on_failure="drop")))
    assert played.row["ids"] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("on_failure", ["drop", "resend"])
def test_a_failed_link_leaves_no_trace_at_the_client(on_failure):
    algorithm = replace(algorithms.scaffold(**LOCAL), wire=(HalfWithMemory(),))
    store = MemoryStore()
    first(federation(algorithm, devices=DeviceProfile(success=LINKS, on_failure=on_failure)), store)
    assert sorted(store.get(range(5))) == [0, 2, 4]


def test_an_error_memory_does_not_speak_for_a_client_that_is_not_there():
    """Round 1 fills the memories; in round 2 nobody's link works, so nothing moves and nothing is forgotten."""
    algorithm = Algorithm(Sgd(**LOCAL), Uniform(), ServerSgd(), (HalfWithMemory(),))
    store, devices = MemoryStore(), DeviceProfile(on_failure="resend")
    _, played = first(federation(algorithm, devices=devices), store)
    memories = store.commit(2)
    silent = federation(algorithm, devices=replace(devices, success=0.0))
    second = run_round(silent, played.step.state, store, 2, Stopwatch())
    assert second.row["ids"] == [0, 1, 2, 3, 4]
    assert list(differences(second.step.state["shared"], played.step.state["shared"])) == []
    after, before = ({str(client): mine for client, mine in kept.items()} for kept in (store.commit(2), memories))
    assert list(differences(after, before)) == []


DEADLINE = DeviceProfile(seconds_per_step=1.0, deadline=2.0)  # in batches of 3: 1, 1, 3, 4 and 2 steps


def test_late_clients_are_left_out_and_the_clock_stops_at_the_deadline():
    _, played = first(federation(algorithms.fedavg(**LOCAL), devices=DEADLINE))
    assert played.row["ids"] == [0, 1, 4]
    assert played.row["late"] == played.row["absent"] == [2, 3]
    assert played.row["simulated_seconds"] == 2.0
    _, patient = first(federation(algorithms.fedavg(**LOCAL), devices=replace(DEADLINE, deadline=None)))
    assert patient.row["simulated_seconds"] == 4.0
    assert patient.row["late"] == []


def test_late_clients_under_resend_count_with_the_received_model():
    task = small_task("batchnorm")  # sizes 2, 3, 8, 11, 6: in batches of 3 1, 1, 3, 4 and 2 steps
    devices, store = replace(DEADLINE, on_failure="resend"), MemoryStore()
    state, played = first(federation(algorithms.scaffold(**LOCAL), task, devices=devices), store)
    assert played.row["ids"] == [0, 1, 2, 3, 4]
    assert (played.row["late"], played.row["resent"], played.row["absent"]) == ([2, 3], [2, 3], [])
    assert sorted(store.get(range(5))) == [0, 1, 4]
    tracked = played.step.state["shared"]["buffers"]["norm.num_batches_tracked"]
    assert int(tracked) == round((1 * 2 + 1 * 3 + 2 * 6) / 30)  # the late ones send the counter they received: 0
    alone = federation(algorithms.scaffold(**LOCAL), task, sampling=Listed(((0, 1, 4),)))
    _, punctual = first(alone)
    moved = {
        name: leaf - state["shared"]["params"][name] for name, leaf in punctual.step.state["shared"]["params"].items()
    }
    for name, leaf in played.step.state["shared"]["params"].items():
        torch.testing.assert_close(leaf - state["shared"]["params"][name], moved[name] * 3 / 5)


def test_a_late_client_that_diverged_is_silenced_not_dropped():
    algorithm = algorithms.fedavg(**LOCAL)

    def engine(*given):
        outcome = Loop()(*given)
        for leaf in outcome.cohort.payload["delta"].values():
            leaf[3] = torch.nan
        return outcome

    _, played = first(federation(algorithm, engine=Called(engine), devices=replace(DEADLINE, on_failure="resend")))
    assert played.row["dropped"] == {}
    assert 3 in played.row["ids"]


def test_a_long_update_is_dropped_and_named_in_the_row():
    _, free = first(federation(algorithms.fedavg(**LOCAL)))
    assert free.row["dropped"] == {}
    store = MemoryStore()
    _, played = first(federation(algorithms.scaffold(**LOCAL), max_norm=0.25), store)
    assert played.row["dropped"]
    for client, why in played.row["dropped"].items():
        assert why.endswith("above the limit 0.25")
        assert int(client) not in played.row["ids"]
        assert store.get([int(client)]) == {}, "what did not count leaves no trace at the client"


def test_a_round_without_a_valid_contribution_leaves_the_model_and_says_so():
    state, played = first(federation(algorithms.fedavgm(**LOCAL), max_norm=1e-9))
    assert played.step.state is state
    assert played.row["ids"] == []
    assert played.row["weights"] == []
    assert len(played.row["dropped"]) == 5
    assert played.row["train_loss"] is None or played.row["train_loss"] > 0


def test_a_round_in_which_nobody_can_be_reached():
    for devices in (DeviceProfile(availability=0.0), DeviceProfile(success=0.0)):
        state, played = first(federation(algorithms.fedavg(**LOCAL), devices=devices))
        assert played.step.state is state
        assert (played.row["ids"], played.row["bytes_up"], played.row["train_loss"]) == ([], 0, None)


def test_epochs_of_the_devices_reach_the_clients():
    _, played = first(federation(algorithms.fedavg(**LOCAL), devices=DeviceProfile(epochs=(2, 1, 0, 3, 1))))
    assert played.row["num_steps"] == [2, 1, 0, 12, 2]


def test_the_row_counts_bytes_both_ways():
    _, played = first(federation(algorithms.scaffold(**LOCAL)))
    params = TASK.objective.init(Key.of(0))[0]
    numbers = sum(leaf.numel() for leaf in params.values())
    assert played.row["bytes_up"] == played.row["bytes_down"] == 5 * 2 * 8 * numbers


def test_the_weighting_knows_who_is_absent():
    seen: list[Context] = []

    @dataclass(frozen=True)
    class Noting(Samples):
        def weigh(self, cohort, state, ctx):
            seen.append(ctx)
            return super().weigh(cohort, state, ctx)

    algorithm = Algorithm(Sgd(**LOCAL, decay=0.5), Noting(), ServerSgd())
    fed = federation(algorithm, devices=DeviceProfile(success=LINKS), rounds=9)
    run_round(fed, begin(fed), MemoryStore(), 3, Stopwatch())
    ctx = seen[0]
    assert (ctx.absent, ctx.round, ctx.rounds, ctx.population) == ((1, 3), 3, 9, 5)
    assert ctx.local_lr == pytest.approx(0.2 * 0.25)


def test_a_client_keeps_its_state_through_rounds_it_misses():
    algorithm, store = algorithms.scaffold(**LOCAL), MemoryStore()
    fed = federation(algorithm, sampling=Listed(((0, 1), (2, 3), (0, 4))))
    state = begin(fed)
    kept = []
    for round in (1, 2, 3):
        state = run_round(fed, state, store, round, Stopwatch()).step.state
        kept.append(store.get([0])[0])
    assert list(differences(kept[1], kept[0])) == []
    assert list(differences(kept[2], kept[0])) != []


def test_a_late_client_of_fedevg_counts_as_one_whose_link_failed():
    """Its factors are 1, not 0: under resend it keeps its weight and says nothing about the samples."""
    algorithm = algorithms.fedevg(per_class=2, batch_size=3, start=1.0).bind(TASK)
    late = replace(DEADLINE, on_failure="resend")  # clients 2 and 3
    failed = DeviceProfile(success=(1.0, 1.0, 0.0, 0.0, 1.0), on_failure="resend")
    (_, slow), (_, broken) = (first(federation(algorithm, devices=devices)) for devices in (late, failed))
    assert slow.row["late"] == broken.row["resent"] == [2, 3]
    assert bool((slow.step.weights[2:4] > 0).all())
    torch.testing.assert_close(slow.step.weights, broken.step.weights)
    assert list(differences(slow.step.state["shared"], broken.step.state["shared"], 1e-12)) == []
