"""The numbers that clients send: their ranges, sizes that are pinned, steps that the server counts itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from fedalloy import algorithms
from fedalloy.core import aspects, registry
from fedalloy.core.algorithm import Algorithm, server_step
from fedalloy.core.keys import Key
from fedalloy.core.recount import recounted
from fedalloy.core.screening import screen
from fedalloy.core.statistics import ANY_SIZE, MAX_EXAMPLES, STATISTICS, SizeLimits, Statistic
from fedalloy.core.types import Cohort, Context, Work
from fedalloy.methods.servers.sgd import ServerSgd
from fedalloy.methods.solvers.energy import Energy
from fedalloy.methods.solvers.personal import Personal
from fedalloy.methods.solvers.sgd import Sgd
from fedalloy.methods.solvers.training import update_length
from fedalloy.methods.weightings.krum import Krum, MultiKrum
from fedalloy.methods.weightings.nova import Nova
from fedalloy.methods.weightings.robust import Median, TrimmedMean
from fedalloy.methods.weightings.samples import Samples
from fedalloy.methods.weightings.uniform import Uniform
from fedalloy.testing import Wavering, specimen

CTX = Context(1, 8, Key.of(0))
NAN, INF = torch.nan, torch.inf


def cohort(
    values: list[float] | None = None, buffers: dict[str, torch.Tensor] | None = None, **stats: list[float]
) -> Cohort:
    moved = torch.tensor(values or [1.0, 2.0, 3.0])
    payload = {"delta": {"w": moved.unsqueeze(1)}, **({"buffers": buffers} if buffers else {})}
    known = {"num_examples": [10.0, 20.0, 30.0], **stats}
    told = {name: torch.tensor(numbers, dtype=torch.float64) for name, numbers in known.items()}
    return Cohort(torch.arange(len(moved)), payload, told)


@pytest.mark.parametrize(
    ("name", "bad", "reason"),
    [
        ("num_examples", -1e9, "is -1000000000; allowed: 0 to 10000000"),
        ("num_examples", 1e15, "is 1e+15; allowed: 0 to 10000000 (max_examples)"),
        ("num_examples", NAN, "is not finite"),
        ("num_examples", INF, "is not finite"),
        ("num_steps", -1.0, "is -1; allowed: whole numbers 0 to 1000000000"),
        ("num_steps", 1.5, "is 1.5; allowed: whole numbers"),
        ("step_norm", 1e-9, "is 1e-09; allowed: 0, and 1 to 1000000000"),
        ("step_norm", -2.0, "is -2; allowed"),
        ("effective_steps", 1e300, "is 1e+300; allowed"),
        ("accuracy_after", 1.01, "is 1.01; allowed: 0 to 1"),
        ("accuracy_after", NAN, "is not finite"),
        ("bytes_up", -3811.0, "is -3811; allowed: whole numbers from 0"),
    ],
)
def test_a_number_out_of_its_range_drops_the_client_and_is_named(name, bad, reason):
    defaults = {"num_examples": 20.0, "accuracy_after": 0.5}.get(name, 4.0)
    told: dict[str, Any] = {name: [defaults, bad, defaults]}
    given = cohort(**told)
    kept, dropped = screen(given, "delta", needed=frozenset({name}))
    assert kept.ids.tolist() == [0, 2]
    assert dropped[1].startswith(f"statistic '{name}' ")
    assert reason in dropped[1]


def test_ranges_hold_for_numbers_that_nobody_needs_but_these_may_be_missing():
    assert screen(cohort(num_steps=[1.0, NAN, 2.0]), "delta")[1] == {}
    assert list(screen(cohort(num_steps=[1.0, -1.0, 2.0]), "delta")[1]) == [1]


def test_a_loss_that_overflowed_is_kept_for_the_rule_to_count_as_the_worst():
    given = cohort(loss_before=[1.0, NAN, INF])
    assert screen(given, "delta", needed=frozenset({"loss_before"}))[1] == {}
    without = given.with_stats({"num_examples": torch.tensor([1.0, 0.0, 1.0])})
    assert screen(without, "delta", needed=frozenset({"loss_before"}))[1] == {
        1: "statistic 'loss_before' is not finite"
    }


def test_every_statistic_of_a_solver_must_be_finite_and_may_have_a_range():
    @dataclass(frozen=True)
    class Telling(Sgd):
        @property
        def provides(self):
            return frozenset({"share", "other"})

        @property
        def statistics(self):
            return {"share": Statistic("a share", 0, 1)}

    algorithm = Algorithm(Telling(), Samples(), ServerSgd())
    given = cohort(share=[0.5, 2.0, 0.1], other=[1.0, 1.0, INF])
    step = server_step(algorithm, algorithm.init({"w": torch.zeros(1)}, 8), given, CTX)
    assert step.dropped == {1: "statistic 'share' is 2; allowed: 0 to 1", 2: "statistic 'other' is not finite"}


def test_a_size_that_changes_is_dropped_with_both_numbers():
    known = SizeLimits(known=torch.tensor([10.0, 19.0, NAN], dtype=torch.float64))
    kept, dropped = screen(cohort(), "delta", sizes=known)
    assert kept.ids.tolist() == [0, 2]
    assert dropped == {1: "statistic 'num_examples' is 20, but was 19 in its first round of this run"}


def test_sizes_have_a_stated_limit_and_runs_want_whole_numbers():
    assert ANY_SIZE.most == MAX_EXAMPLES == 10_000_000
    assert list(screen(cohort(), "delta", sizes=SizeLimits(most=25))[1]) == [2]
    assert "whole numbers" in screen(cohort(num_examples=[1.0, 1.5, 2.0]), "delta", sizes=SizeLimits(whole=True))[1][1]


VARIANCE = {"norm.running_var": torch.tensor([[1.0], [-5.0], [2.0]])}
SHARED = {"params": {"w": torch.zeros(1)}, "buffers": {"norm.running_var": torch.ones(1)}}


def test_a_negative_variance_is_refused():
    counted = {"n.num_batches_tracked": torch.tensor([1, 2, -1])}
    _, dropped = screen(cohort(buffers={**VARIANCE, **counted}), "delta")
    assert dropped == {
        1: "part 'buffers': norm.running_var is negative",
        2: "part 'buffers': n.num_batches_tracked is negative",
    }


def step_with(weighting, given: Cohort, buffers: dict[str, torch.Tensor]):
    algorithm = Algorithm(Sgd(), weighting, ServerSgd())
    state = algorithm.init({"w": torch.zeros(1)}, 8, buffers)
    return server_step(algorithm, state, given, CTX)


def test_a_part_averaged_by_samples_wants_sizes_whatever_the_rule_requires():
    mean = {"norm.running_mean": torch.tensor([[1.0], [2.0], [3.0]])}
    given = cohort(buffers=mean, num_examples=[1.0, NAN, 1.0])
    step = step_with(Uniform(), given, {"norm.running_mean": torch.zeros(1)})
    assert step.dropped == {1: "statistic 'num_examples' is not finite"}
    assert step.state["shared"]["buffers"]["norm.running_mean"].tolist() == [2.0]
    assert step_with(Uniform(), replace(given, payload={"delta": given.payload["delta"]}), {}).dropped == {}


@pytest.mark.parametrize(
    ("rule", "expected", "count"),
    [(Median(), 2.5, 4), (TrimmedMean(0.25), 2.5, 4), (Krum(), 2.0, 3), (MultiKrum(keep=3), 2.0, 3)],
)
def test_robust_rules_reduce_buffers_by_their_own_choice(rule, expected, count):
    """One client lies about its size and its variance: neither sets everybody's."""
    buffers = {
        "norm.running_var": torch.tensor([[1.0], [2.0], [3.0], [900.0]]),
        "norm.num_batches_tracked": torch.tensor([2, 3, 4, 10**9]),
    }
    given = cohort([1.0, 1.1, 1.2, 90.0], buffers, num_examples=[1.0, 1.0, 1.0, 9e6])
    step = step_with(rule, given, {name: torch.ones_like(leaf[0]) for name, leaf in buffers.items()})
    found = step.state["shared"]["buffers"]
    assert found["norm.running_var"].tolist() == [expected]
    assert int(found["norm.num_batches_tracked"]) == count
    assert found["norm.num_batches_tracked"].dtype == torch.int64


def test_a_robust_rule_needs_no_sizes_for_buffers():
    given = cohort(buffers={"m": torch.ones(3, 1)}, num_examples=[NAN, 1.0, 1.0])
    assert step_with(Median(), given, {"m": torch.ones(1)}).dropped == {}


def test_a_robust_rule_guards_control_variates_too():
    algorithm = replace(algorithms.scaffold(), weighting=Median())
    assert algorithm.weighting.guards_all_parts
    payload = {"delta": {"w": torch.ones(3, 1)}, "control": {"w": torch.tensor([[1.0], [2.0], [900.0]])}}
    state = algorithm.init({"w": torch.zeros(1)}, 3)
    moved = server_step(algorithm, state, replace(cohort(), payload=payload), replace(CTX, population=3)).state
    assert moved["shared"]["control"]["w"].tolist() == [2.0]


SOLVERS = [specimen("solver", name) for name in registry.names("solver")] + [
    Wavering(), Sgd(epochs=3, batch_size=None), Energy(per_class=2, iterations=3), Sgd(epochs=0),
    Sgd(batch_size=4, leftover="merge"), Sgd(batch_size=4, leftover="drop"), Sgd(batch_size=None, leftover="merge"),
    Personal(Sgd(epochs=2, batch_size=4)), Personal(Sgd(batch_size=4), shared_epochs=2),
]  # fmt: skip


@pytest.mark.parametrize("solver", SOLVERS, ids=repr)
def test_the_server_counts_the_steps_that_clients_plan(solver):
    sizes = torch.tensor([0, 1, 2, 3, 4, 5, 31, 32, 33, 64, 65, 97])
    for epochs in (-1, 0, 1, 3):
        wanted = torch.full_like(sizes, epochs)
        keys = Key.of(3).each(torch.arange(len(sizes)))
        assert aspects.count_steps(solver, sizes, wanted).tolist() == solver.plan(sizes, wanted, keys).steps.tolist()


def test_a_size_beyond_all_reason_costs_nothing_to_count():
    solver = Sgd(epochs=5, batch_size=1, momentum=0.9)
    steps = solver.count_steps(torch.tensor([10_000_000]), torch.tensor([-1]))
    assert steps.tolist() == [50_000_000]
    assert float(update_length(steps.double(), 0.9)) == pytest.approx((5e7 - 9) / 0.1, rel=1e-9)


@pytest.mark.parametrize(("momentum", "nesterov", "pull"), [(0.0, False, 0.0), (0.9, False, 0.0), (0.9, True, 0.0),
                                                            (0.0, False, 0.3), (0.5, True, 0.1)])  # fmt: skip
def test_lengths_are_those_of_the_steps_taken_one_by_one(momentum, nesterov, pull):
    length = velocity = 0.0
    expected = [0.0]
    for _ in range(2000):
        slope = 1.0 - pull * length
        velocity = momentum * velocity + slope
        length += slope + momentum * velocity if nesterov else velocity
        expected.append(length)
    found = update_length(torch.arange(2001).double(), momentum, nesterov, pull)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_what_the_server_can_count_is_not_believed():
    algorithm = Algorithm(Sgd(batch_size=8, epochs=2), Nova(), ServerSgd())
    lies: dict[str, Any] = {
        "num_steps": [900.0, 0.0, 7.0],
        "step_norm": [1e-9, 1.0, 1.0],
        "effective_steps": [1e9, 1.0, 1.0],
    }
    work = Work.of(torch.arange(4), torch.tensor([-1, 1, -1, -1]))
    told = recounted(algorithm, cohort(**lies), work, CTX, SizeLimits(whole=True)).stats
    assert told["num_steps"].tolist() == [4.0, 3.0, 8.0]
    assert told["step_norm"].tolist() == told["effective_steps"].tolist() == [4.0, 3.0, 8.0]


def test_a_size_that_cannot_be_is_left_to_the_screening():
    algorithm = Algorithm(Sgd(batch_size=8), Samples(), ServerSgd())
    given = cohort(num_examples=[10.0, -1e9, NAN], num_steps=[1.0, 5.0, 6.0])
    told = recounted(algorithm, given, Work.of(torch.arange(3)), CTX, SizeLimits(whole=True)).stats
    assert told["num_steps"].tolist() == [2.0, 5.0, 6.0]


def test_every_statistic_says_what_it_is():
    assert all(one.meaning and one.low <= one.high for one in STATISTICS.values())
    assert algorithms.fednova().provides <= STATISTICS.keys()


def test_a_look_at_sizes_is_kept_for_these_sizes_alone():
    """Several steps of a round ask, some of them for numbers of sequences; and a tensor may be written between two."""
    limits, good, wrong = SizeLimits(10.0), *(torch.tensor([size], dtype=torch.float64) for size in (7.0, 11.0))
    assert [limits.look(sizes)[0] for sizes in (good, wrong, good)] == [True, False, True]
    good += 4
    assert not limits.look(good)[0]
