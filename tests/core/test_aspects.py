"""A solver of three functions, what solvers are besides, and what passes through one around another."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from fedalloy.core import aspects, tree
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.aspects import ASPECTS, BindsToData, Describes, Fusible, Generative, PartlyLocal, Personalised
from fedalloy.core.keys import Key
from fedalloy.core.names import NO_NAMES
from fedalloy.core.protocols import LocalSolver
from fedalloy.core.types import DataSpec
from fedalloy.core.wrappers import SolverWrapper
from fedalloy.experiment.fit import fit
from fedalloy.methods.servers.sgd import ServerSgd
from fedalloy.methods.solvers.cgan import Cgan
from fedalloy.methods.solvers.ditto import Ditto
from fedalloy.methods.solvers.energy import Energy
from fedalloy.methods.solvers.personal import Personal
from fedalloy.methods.solvers.sgd import Sgd
from fedalloy.methods.weightings.uniform import Uniform
from fedalloy.testing import check_rule, small_task

ENGINES = ("loop", "batched")
FACTS = DataSpec((4,), torch.float64, 3, -1.0, 1.0, alone=False)


@dataclass(frozen=True)
class Three(LocalSolver):
    """Gradient descent with what every solver has by itself."""

    def begin(self, shared, mine, ctx):
        return {"params": shared["params"]}

    def step(self, carry, grad_at, draws, phase, ctx):
        return {"params": tree.add(carry["params"], grad_at(carry["params"]), -0.1 * ctx.local_lr)}

    def end(self, carry, shared, mine, steps, ctx):
        return {"delta": tree.subtract(carry["params"], shared["params"])}, mine


def members(kind: type) -> list[str]:
    return [name for name in vars(kind) if not name.startswith("_")]


def test_a_solver_has_few_members_and_three_to_write():
    assert len(members(LocalSolver)) <= 14
    assert LocalSolver.__abstractmethods__ == {"begin", "step", "end"}
    assert set(members(LocalSolver)) & {name for kind in ASPECTS for name in members(kind)} == set()


def test_three_functions_are_a_solver_that_keeps_all_promises():
    assert check_rule("solver", Three()) == []
    task = small_task()
    ends = [fit(Algorithm(Three(), Uniform(), ServerSgd()), task, rounds=2, engine=engine) for engine in ENGINES]
    plain = fit(Algorithm(Sgd(lr=0.1, batch_size=None, shuffle=False), Uniform(), ServerSgd()), task, rounds=2)
    for end in ends:
        for name, leaf in plain.model.items():
            torch.testing.assert_close(end.model[name], leaf)


def test_by_itself_a_solver_takes_one_step_with_all_examples_per_epoch():
    plan = Three().plan(torch.tensor([2, 0, 3]), torch.tensor([-1, 2, 2]), Key.of(0).each(torch.arange(3)))
    assert plan.steps.tolist() == [1, 0, 2]
    assert plan.mask.sum(2).tolist() == [[2, 0], [0, 0], [3, 3]]
    assert plan.index[2].tolist() == [[0, 1, 2], [0, 1, 2]]
    assert Three().lr_at(7) == 1.0


def test_answers_hold_for_solvers_that_are_none_of_it():
    solver, shared = Three(), {"params": {"w": torch.ones(2)}, "buffers": {}}
    assert all(solver.aspect(kind) is None for kind in ASPECTS)
    assert aspects.local_leaves(solver) is NO_NAMES
    received = (shared["params"], shared["buffers"])
    assert aspects.start_model(solver, shared, {}) == aspects.personal_model(solver, shared, {}, 0.3) == received
    assert (aspects.provides(solver), aspects.receives(solver), aspects.fusing(solver)) == (frozenset(), None, None)
    assert not any(ask(solver) for ask in (aspects.is_personalised, aspects.is_mixable, aspects.needs_fresh))
    assert aspects.count_steps(solver, torch.tensor([5, 0]), torch.tensor([3, 3])).tolist() == [3, 0]
    assert aspects.bind(solver, FACTS) is solver


@pytest.mark.parametrize(
    ("solver", "kinds"),
    [
        (Sgd(), {Describes, Fusible, BindsToData}),
        (Ditto(), {Personalised, Describes, Fusible, BindsToData}),
        (Cgan(), {Generative, Describes, BindsToData}),
        (Personal(), {Personalised, PartlyLocal, Describes, BindsToData}),
        (Energy.example(), {Generative, Describes, BindsToData}),
    ],
)
def test_a_solver_around_another_is_what_that_one_is_except_fusible(solver, kinds):
    asked = (Personalised, PartlyLocal, Generative, Describes, BindsToData, Fusible)
    assert {kind for kind in asked if solver.aspect(kind) is not None} == kinds
    around = SolverWrapper(SolverWrapper(solver))
    assert {kind for kind in asked if around.aspect(kind) is not None} == kinds - {Fusible}
    assert around.aspect(Describes) is solver


def test_what_is_known_of_the_data_reaches_the_solver_inside():
    around = aspects.bind(SolverWrapper(Personal(Sgd(batch_size=3))), FACTS)
    assert around == SolverWrapper(Personal(Sgd(batch_size=3, leftover="merge")))


@pytest.mark.parametrize(
    "name", ["provides", "personal", "local_leaves", "synthesise", "count_steps", "fusing", "bind"]
)
def test_an_answer_that_nobody_would_ask_for_is_refused(name):
    with pytest.raises(TypeError, match=rf"solver Silent defines '{name}'.*fedalloy\.core\.aspects\.[A-Z]\w+: inherit"):
        type("Silent", (Three,), {name: property(lambda self: None)})


def test_an_answer_from_a_mixin_or_a_field_is_refused_too():
    mixin = type("Mixin", (), {"personal": lambda self, shared, mine, mix=None: (shared["params"], {})})
    with pytest.raises(TypeError, match=r"solver Silent defines 'personal'"):
        type("Silent", (mixin, Three), {})
    with pytest.raises(TypeError, match=r"solver Silent defines 'provides'"):
        type("Silent", (Three,), {"__annotations__": {"provides": frozenset[str]}})


def test_what_is_declared_may_be_a_field_without_a_default():
    @dataclass(frozen=True)
    class Chosen(Three, Personalised):
        target: str
        mixable: bool

    assert (Chosen("params", True).target, aspects.is_mixable(Chosen("params", True))) == ("params", True)


@dataclass(frozen=True)
class LongerForSome(SolverWrapper):
    """Three epochs for clients with more than ten examples."""

    def plan(self, sizes, epochs, keys):
        return self.inner.plan(sizes, torch.where(sizes > 10, 3, 1), keys)


def test_a_solver_around_another_with_a_plan_of_its_own_is_counted_by_that_plan():
    algorithm = Algorithm(LongerForSome(Sgd(lr=0.1)), Uniform(), ServerSgd())
    sizes = small_task().data("train", torch.arange(5)).size
    (row,) = fit(algorithm, small_task(), rounds=1, engine="loop").rounds()
    assert row["num_steps"] == [3.0 if size > 10 else 1.0 for size in sizes.tolist()]
    assert len(set(row["num_steps"])) == 2


@dataclass(frozen=True)
class Curious(Three, BindsToData):
    """It must know the form of the data."""

    shape: tuple[int, ...] = ()

    def bind(self, data_spec):
        return Curious(data_spec.shape)


@pytest.mark.parametrize("wrap", [lambda solver: solver, SolverWrapper])
def test_a_solver_that_fits_the_data_is_asked_whatever_the_model(wrap):
    bind = Algorithm(wrap(Curious()), Uniform(), ServerSgd()).bind(small_task())
    assert bind.solver == wrap(Curious((4,)))


@dataclass(frozen=True)
class Undeclared(Three):
    """It sends a part that it does not declare."""

    def end(self, carry, shared, mine, steps, ctx):
        payload, mine = super().end(carry, shared, mine, steps, ctx)
        return {**payload, "extra": payload["delta"]}, mine


@pytest.mark.parametrize("engine", ENGINES)
def test_parts_that_are_not_declared_count_in_no_engine(engine):
    (row,) = fit(Algorithm(Undeclared(), Uniform(), ServerSgd()), small_task(), rounds=1, engine=engine).rounds()
    assert row["ids"] == []
    assert row["dropped"]["0"] == "sent the parts delta, extra instead of delta"
