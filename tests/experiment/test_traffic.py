"""What is recorded as sent: the parts a solver receives, and leaves that stay at a client only until it has them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fedalloy import algorithms
from fedalloy.core import tree
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.keys import Key
from fedalloy.core.traffic import sent_to
from fedalloy.engines.loop import Loop
from fedalloy.experiment.config import RunConfig
from fedalloy.experiment.fit import fit
from fedalloy.experiment.records.store import MemoryStore
from fedalloy.experiment.round import Federation, Stopwatch, run_round
from fedalloy.experiment.sampling import Listed
from fedalloy.experiment.starting import begin
from fedalloy.tasks.devices import DeviceProfile
from fedalloy.testing import small_task
from fedalloy.testing.comparing import differences
from tests.engines.rounds import Called

TASK = small_task()  # five clients
LOCAL: dict[str, Any] = {"batch_size": 3, "lr": 0.1}
ENGINES = ["loop", "batched", "workers"]
HEAD = ("output.*",)


def sizes(names: tuple[str, ...], task=TASK) -> tuple[int, int]:
    """The bytes of a whole model with its buffers, and of all that is not named."""
    params, buffers = task.objective.init(Key.of(0))
    leaves = {**params, **buffers}
    kept = {name: leaf for name, leaf in leaves.items() if not name.startswith(names)}
    return tree.nbytes(leaves), tree.nbytes(kept)


def rows(algorithm: Algorithm, engine: str = "loop", task=TASK, rounds: int = 3, **settings: Any) -> list[dict]:
    return list(fit(algorithm, task, rounds=rounds, engine=engine, evaluate_every=rounds, **settings).rounds())


def columns(found: list[dict], *names: str) -> list[list[int]]:
    return [[row[name] for row in found] for name in names]


@pytest.mark.parametrize("engine", ENGINES)
def test_leaves_that_stay_travel_once(engine):
    whole, shared = sizes(("output",))
    found = rows(algorithms.named("fedper", names=HEAD, **LOCAL), engine)
    assert columns(found, "bytes_down", "bytes_up") == [[5 * whole, 5 * shared, 5 * shared], [5 * shared] * 3]


def test_the_other_way_round_for_lg_fedavg():
    whole, body = sizes(("output",))
    found = rows(algorithms.named("lgfedavg", names=HEAD, **LOCAL))
    head = whole - body
    assert columns(found, "bytes_down", "bytes_up") == [[5 * whole, 5 * head, 5 * head], [5 * head] * 3]


def test_local_training_receives_its_first_model_and_nothing_more():
    whole, _ = sizes(())
    assert columns(rows(algorithms.named("local_only", **LOCAL)), "bytes_down", "bytes_up") == [
        [5 * whole, 0, 0],
        [0, 0, 0],
    ]


def test_every_client_is_met_for_the_first_time_in_its_own_round():
    whole, shared = sizes(("output",))
    listed = Listed(((0, 1), (1, 2, 3), (0, 3, 4)))
    found = rows(algorithms.named("fedper", names=HEAD, **LOCAL), sampling=listed)
    assert columns(found, "bytes_down") == [[2 * whole, shared + 2 * whole, 2 * shared + whole]]


def test_buffers_that_stay_travel_once_too():
    task = small_task("batchnorm")
    whole, shared = sizes(("norm",), task)
    found = rows(algorithms.named("fedbn", names=("norm.*",), **LOCAL), task=task)
    assert columns(found, "bytes_down", "bytes_up") == [[5 * whole, 5 * shared, 5 * shared], [5 * shared] * 3]


def federation(algorithm: Algorithm, **settings: Any) -> Federation:
    return Federation(algorithm, TASK, settings.pop("engine", Loop()), RunConfig(engine="loop", **settings), Key.of(0))


def test_a_client_that_did_not_count_has_nothing_and_is_sent_everything_again():
    """In batches of 3 clients 2 and 3 take more than two steps and miss the deadline: they keep no state."""
    whole, shared = sizes(("output",))
    devices = DeviceProfile(seconds_per_step=1.0, deadline=2.0)
    fed, store = federation(algorithms.named("fedper", names=HEAD, **LOCAL), devices=devices), MemoryStore()
    first = run_round(fed, begin(fed), store, 1, Stopwatch())
    second = run_round(fed, first.step.state, store, 2, Stopwatch())
    assert first.row["late"] == [2, 3]
    assert (first.row["bytes_down"], second.row["bytes_down"]) == (5 * whole, 3 * shared + 2 * whole)


@pytest.mark.parametrize("engine", ENGINES)
def test_fedevg_receives_samples_and_labels(engine):
    algorithm = algorithms.fedevg(per_class=2, batch_size=3, start=1.0)
    found = rows(algorithm, engine, rounds=2)
    state = algorithm.bind(TASK).init(TASK.objective.init(Key.of(0))[0], 5)["shared"]
    down = tree.nbytes(state["samples"]) + tree.nbytes(state["labels"])
    up = tree.nbytes(state["samples"]) + tree.nbytes(state["factors"])
    assert columns(found, "bytes_down", "bytes_up") == [[5 * down] * 2, [5 * up] * 2]


def test_the_buffers_that_fedevg_begins_with_are_counted():
    task = small_task("batchnorm")
    found = rows(algorithms.fedevg(per_class=2, batch_size=3, start=1.0), task=task, rounds=2)
    plain = rows(algorithms.fedevg(per_class=2, batch_size=3, start=1.0), rounds=2)
    buffers = 5 * tree.nbytes(task.objective.init(Key.of(0))[1])
    assert found[0]["bytes_down"] == plain[0]["bytes_down"] + buffers
    assert found[0]["bytes_up"] == plain[0]["bytes_up"] + buffers


@pytest.mark.parametrize(("name", "model"), [("fedevg", "mlp"), ("fedevg", "batchnorm"), ("fedper", "mlp")])
def test_no_solver_looks_at_what_it_does_not_receive(name, model):
    """Whatever the server has besides, the clients of a round do the same: here in the second, when all are known."""
    task = small_task(model)
    more = {"names": HEAD} if name == "fedper" else {}
    algorithm = algorithms.named(name, **more, batch_size=3).bind(task)
    seen: list[Any] = []

    def engine(algorithm, task, shared, states, work, ctx):
        sent = sent_to(algorithm, shared, known=True)
        poisoned = {
            part: {**tree.map_leaves(_poisoned, leaves), **sent.get(part, {})} for part, leaves in shared.items()
        }
        found = [Loop()(algorithm, task, given, states, work, ctx) for given in (shared, poisoned)]
        seen[:] = [one.cohort.payload for one in found]
        return found[0]

    fed, store = Federation(algorithm, task, Loop(), RunConfig(engine="loop"), Key.of(0)), MemoryStore()
    first = run_round(fed, begin(fed), store, 1, Stopwatch())
    run_round(replace(fed, engine=Called(engine)), first.step.state, store, 2, Stopwatch())
    assert list(differences(*seen)) == []


def _poisoned(leaf: torch.Tensor) -> torch.Tensor:
    return torch.full_like(leaf, torch.nan if leaf.is_floating_point() else 99)


def test_models_that_others_try_are_counted():
    """FedBoosting: everyone receives the common model and the updates of all five to score them."""
    numbers = tree.nbytes(TASK.objective.init(Key.of(0))[0])
    found = rows(algorithms.named("fedboosting", **LOCAL), rounds=2)
    assert columns(found, "bytes_down", "bytes_up") == [[5 * numbers + 5 * 6 * numbers] * 2, [5 * numbers] * 2]


def test_the_simulated_clock_follows_the_bytes():
    """A megabyte takes a second: the round lasts as long as the upload of a client."""
    devices = DeviceProfile(seconds_per_megabyte=1.0)
    whole, shared = sizes(("output",))
    for algorithm, sent in (
        (algorithms.fedavg(**LOCAL), whole),
        (algorithms.named("fedper", names=HEAD, **LOCAL), shared),
        (algorithms.fedcams("topk", ratio=0.1, **LOCAL), (whole // 80) * (8 + 1)),
    ):
        fed = federation(algorithm, devices=devices)
        row = run_round(fed, begin(fed), MemoryStore(), 1, Stopwatch()).row
        assert row["simulated_seconds"] == pytest.approx(sent / 1e6)
        assert row["bytes_up"] == 5 * sent
