"""The algorithm as a value, and the whole server half as one pure function."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch

import fedalloy
from fedalloy import algorithms
from fedalloy.core import tree
from fedalloy.core.algorithm import Algorithm, server_step
from fedalloy.core.errors import AlgorithmError
from fedalloy.core.keys import Key
from fedalloy.core.protocols import Weighting, Wire
from fedalloy.core.types import Cohort, Context, Part
from fedalloy.methods.servers.momentum import Momentum
from fedalloy.methods.servers.sgd import ServerSgd
from fedalloy.methods.solvers.scaffold import Scaffold
from fedalloy.methods.solvers.sgd import Sgd
from fedalloy.methods.weightings.nova import Nova
from fedalloy.methods.weightings.samples import Samples
from fedalloy.methods.weightings.uniform import Uniform
from fedalloy.testing import HalfWithMemory
from fedalloy.testing.comparing import copied, differences

CTX = Context(round=1, population=4, key=Key.of(0))
PARAMS = {"w": torch.tensor([1.0, -1.0], dtype=torch.float64)}
BUFFERS = {"mean": torch.tensor([0.5], dtype=torch.float64), "count": torch.tensor(7)}


def cohort(*deltas: float, sizes: tuple[float, ...] | None = None, buffers: bool = False, **parts) -> Cohort:
    count = len(deltas)
    payload = {"delta": {"w": torch.tensor([[d, -d] for d in deltas], dtype=torch.float64)}, **parts}
    if buffers:
        means = torch.arange(count, dtype=torch.float64).reshape(-1, 1)
        payload["buffers"] = {"mean": means, "count": 10 * torch.arange(count) + 1}
    stats = {"num_examples": torch.tensor(sizes or [1.0] * count, dtype=torch.float64)}
    return Cohort(torch.arange(count), payload, stats)


# ---------------------------------------------------------------------------------------------- fitting together


def test_nova_needs_lengths_that_adam_cannot_give():
    with pytest.raises(AlgorithmError) as caught:
        Algorithm(Sgd(optimizer="adam"), Nova(), ServerSgd())
    message = str(caught.value)
    assert "weighting 'Nova' requires effective_steps, step_norm" in message
    assert "solver 'Sgd' does not provide" in message
    assert "loss_before" in message  # what there would be instead


@dataclass(frozen=True)
class Demanding(Weighting):
    """Asks for what nobody has, or for everybody."""

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({"shoe_size"})

    def weigh(self, cohort, state, ctx):
        raise NotImplementedError


def test_an_unknown_statistic_fails_before_the_first_round():
    with pytest.raises(AlgorithmError, match="requires shoe_size"):
        Algorithm(Sgd(), Demanding(), ServerSgd())


def test_a_solver_must_send_the_part_it_updates_with():
    @dataclass(frozen=True)
    class Silent(Sgd):
        @property
        def parts(self) -> Mapping[str, Part]:
            return {"control": Part()}

    with pytest.raises(AlgorithmError, match="declares no part 'delta'"):
        Algorithm(Silent(), Samples(), ServerSgd())


def test_a_rule_for_full_participation_refuses_a_sample():
    @dataclass(frozen=True)
    class Everyone(Uniform):
        @property
        def needs_everyone(self) -> bool:
            return True

    algorithm = Algorithm(Sgd(), Everyone(), ServerSgd())
    algorithm.check_cohort(10, 10)
    with pytest.raises(AlgorithmError, match="the cohort is 3 of 10: set the cohort to 10"):
        algorithm.check_cohort(3, 10)


def test_what_an_algorithm_keeps_and_sends():
    plain, control = algorithms.fedavg(), algorithms.scaffold()
    assert (plain.stateful, control.stateful) == (False, True)
    assert replace(plain, wire=(HalfWithMemory(),)).stateful
    assert list(plain.parts({"params": PARAMS, "buffers": {}})) == ["delta"]
    assert list(control.parts({"params": PARAMS, "buffers": BUFFERS})) == ["delta", "control", "buffers"]
    state = control.init(PARAMS, 4, BUFFERS)
    assert state["shared"].keys() == {"params", "buffers", "control"}
    mine = replace(control, wire=(HalfWithMemory(),)).init_client(state["shared"], Key.of(0))
    assert mine["wire"]["0"].keys() == {"memory"}


# ---------------------------------------------------------------------------------------------- one server step


def test_the_server_adds_the_weighted_update():
    algorithm = algorithms.fedavg(server_lr=0.5)
    step = server_step(algorithm, algorithm.init(PARAMS, 4), cohort(1.0, 4.0, sizes=(1.0, 3.0)), CTX)
    torch.testing.assert_close(step.weights, torch.tensor([0.25, 0.75], dtype=torch.float64))
    expected = PARAMS["w"] + 0.5 * torch.tensor([3.25, -3.25], dtype=torch.float64)
    torch.testing.assert_close(step.state["shared"]["params"]["w"], expected)
    assert step.ids.tolist() == [0, 1]


def test_an_empty_cohort_leaves_the_state_as_it_was():
    algorithm = algorithms.fedavgm()
    state = algorithm.init(PARAMS, 4)
    step = server_step(algorithm, state, Cohort(torch.zeros(0, dtype=torch.int64), {}, {}), CTX)
    assert step.state is state
    assert len(step.weights) == 0


def test_a_cohort_without_a_valid_contribution_leaves_the_state_as_it_was():
    algorithm = algorithms.fedavgm()
    state = algorithm.init(PARAMS, 4)
    step = server_step(algorithm, state, cohort(torch.nan, torch.inf), CTX)
    assert step.state is state
    assert step.dropped == {0: "not finite", 1: "not finite"}


def test_a_dropped_client_does_not_count_at_all():
    algorithm = algorithms.fedavg()
    state = algorithm.init(PARAMS, 4)
    step = server_step(algorithm, state, cohort(1.0, 1e6, 3.0, sizes=(1.0, 90.0, 1.0)), CTX, max_norm=10.0)
    assert step.ids.tolist() == [0, 2]
    torch.testing.assert_close(step.state["shared"]["params"]["w"], PARAMS["w"] + torch.tensor([2.0, -2.0]).double())
    assert list(step.dropped) == [1]


def test_the_server_keeps_its_momentum_from_round_to_round():
    algorithm = Algorithm(Sgd(), Uniform(), Momentum(lr=1.0, beta=0.5))
    state = algorithm.init(PARAMS, 4)
    for _ in range(3):
        state = server_step(algorithm, state, cohort(1.0), CTX).state
    torch.testing.assert_close(state["server"]["velocity"]["w"], torch.tensor([1.75, -1.75]).double())
    torch.testing.assert_close(state["shared"]["params"]["w"], PARAMS["w"] + torch.tensor([4.25, -4.25]).double())


def test_buffers_are_averaged_by_samples_and_never_optimised():
    algorithm = Algorithm(Sgd(), Uniform(), Momentum(lr=100.0, beta=0.5))
    state = algorithm.init(PARAMS, 4, BUFFERS)
    step = server_step(algorithm, state, cohort(0.0, 0.0, sizes=(1.0, 3.0), buffers=True), CTX)
    buffers = step.state["shared"]["buffers"]
    assert buffers["mean"].tolist() == [0.75]
    assert buffers["count"].dtype == torch.int64
    assert int(buffers["count"]) == 8  # 0.25 * 1 + 0.75 * 11 = 8.5, rounded to even
    assert step.state["server"]["velocity"].keys() == {"w"}


def test_buffers_of_clients_without_examples_count_alike():
    algorithm = algorithms.fedavg()
    state = algorithm.init(PARAMS, 4, BUFFERS)
    step = server_step(algorithm, state, cohort(0.0, 0.0, sizes=(0.0, 0.0), buffers=True), CTX)
    assert step.state["shared"]["buffers"]["mean"].tolist() == [0.5]
    assert torch.equal(step.state["shared"]["params"]["w"], PARAMS["w"])


def test_the_server_half_changes_nothing_it_was_given():
    algorithm = replace(algorithms.scaffold(), server=Momentum())
    state = algorithm.init(PARAMS, 4, BUFFERS)
    control = {"w": torch.ones(2, 2, dtype=torch.float64)}
    given = cohort(1.0, 2.0, buffers=True, control=control)
    before = copied({"state": state, "cohort": vars(given)})
    server_step(algorithm, state, given, CTX)
    assert list(differences({"state": state, "cohort": vars(given)}, before)) == []


def test_scaffold_adds_the_mean_change_scaled_by_the_share_of_the_population():
    algorithm = algorithms.scaffold()
    control = {"w": torch.tensor([[1.0, 0.0], [3.0, 0.0]], dtype=torch.float64)}
    step = server_step(algorithm, algorithm.init(PARAMS, 4), cohort(1.0, 2.0, control=control), CTX)
    assert step.state["shared"]["control"]["w"].tolist() == [1.0, 0.0]  # (1 / 4) (1 + 3)


@dataclass(frozen=True)
class Writes(Wire):
    """Notes the order in which the server undoes transforms."""

    name: str
    notes: list[str]

    def encode(self, payload, mine, draws):
        return payload, mine

    def after(self, aggregate, cohort, weights, ctx):
        self.notes.append(self.name)
        return {**aggregate, "delta": tree.map_leaves(lambda leaf: 2 * leaf, aggregate["delta"])}


def test_transforms_are_undone_in_reverse_order():
    notes: list[str] = []
    algorithm = replace(algorithms.fedavg(), wire=(Writes("first", notes), Writes("second", notes)))
    step = server_step(algorithm, algorithm.init(PARAMS, 4), cohort(1.0), CTX)
    assert notes == ["second", "first"]
    assert step.state["shared"]["params"]["w"].tolist() == [5.0, -5.0]


def test_parts_that_are_stacked_arrive_whole():
    seen = {}

    @dataclass(frozen=True)
    class Stacked(Scaffold):
        parts: ClassVar[Mapping[str, Part]] = {"delta": Part(), "control": Part("stack")}

        def absorb(self, shared, aggregate, cohort, ctx):
            seen.update(aggregate)
            return shared

    algorithm = Algorithm(Stacked(), Uniform(), ServerSgd())
    control = {"w": torch.ones(2, 2, dtype=torch.float64)}
    server_step(algorithm, algorithm.init(PARAMS, 4), cohort(1.0, 2.0, control=control), CTX)
    assert seen["control"]["w"].shape == (2, 2)
    assert seen["delta"]["w"].shape == (2,)


def test_a_round_is_differentiable_through_weights_and_updates():
    """Learned weights need gradients through the server half; nothing on the way may detach or write in place."""
    algorithm = algorithms.fedavgm()
    delta = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64, requires_grad=True)

    def moved(update: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        given = Cohort(torch.arange(2), {"delta": {"w": update}}, {"num_examples": sizes})
        state = server_step(algorithm, algorithm.init(PARAMS, 4), given, CTX).state
        return server_step(algorithm, state, given, CTX).state["shared"]["params"]["w"]

    sizes = torch.tensor([1.0, 3.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(moved, (delta, sizes))


class Says(Weighting):
    """A weighting that says what it is told to, and weighs with what it is given."""

    def __init__(self, weights: Any = None, **said: Any) -> None:
        self.weights = weights
        self.__dict__.update(said)

    def weigh(self, cohort, state, ctx):
        return self.weights, state, {}


@pytest.mark.parametrize("member", ["requires", "reads", "asks"])
@pytest.mark.parametrize("said", [["num_examples"], "num_examples", lambda: frozenset()])
def test_names_that_are_no_set_are_refused_when_an_algorithm_is_built(member, said):
    wrong = rf"weighting 'Says' declares '{member}' as (list|str|function): it must be a set"
    with pytest.raises(AlgorithmError, match=wrong):
        Algorithm(Sgd(), Says(**{member: said}), ServerSgd())


def test_a_question_that_no_contributions_answer_is_refused_when_an_algorithm_is_built():
    with pytest.raises(AlgorithmError, match=r"asks for 'median', allowed in 'asks': norms, combine"):
        Algorithm(Sgd(), Says(asks=frozenset({"median"})), ServerSgd())


@pytest.mark.parametrize(
    ("weights", "found"),
    [
        (torch.ones(3) / 3, r"of shape \(3,\)"),
        (torch.ones(()), r"of shape \(\)"),
        ([0.5, 0.5], "as list"),
        (None, "as"),
    ],
)
def test_weights_that_are_not_one_per_client_are_refused(weights, found):
    algorithm = Algorithm(Sgd(), Says(weights), ServerSgd())
    with pytest.raises(AlgorithmError, match=rf"weighting 'Says' returned weights {found}.*each of the 2 clients"):
        server_step(algorithm, algorithm.init(PARAMS, 4), cohort(1.0, 2.0), CTX)


@dataclass(frozen=True)
class Forgetful(Weighting):
    """Reads a statistic that it does not require."""

    def weigh(self, cohort, state, ctx):
        return cohort.stats["loss_before"], state, {"mine": cohort.stats["nonsense"]}


def test_a_statistic_that_is_read_and_not_required_is_named():
    forgetful = replace(algorithms.fedavg(), weighting=Forgetful())
    with pytest.raises(AlgorithmError, match="'Forgetful' reads the statistic 'loss_before', which it does not requ"):
        fedalloy.fit(forgetful, fedalloy.task("digits", clients=2), rounds=1, engine="loop")
