"""The kernels for descent in two phases (Ditto), at a mixture (APFL), with shifted gradients (SCAFFOLD) and between
two models (SuPerFed) against the loop, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fedalloy
from fedalloy import algorithms
from fedalloy.core.keys import Key
from fedalloy.engines.auto import expected
from fedalloy.engines.batched import Batched
from fedalloy.engines.kernels import (
    fused_interpolated,
    fused_logistic,
    fused_mixed,
    fused_pair,
    fused_phases,
    fused_shifted,
    vmap_kernel,
)
from fedalloy.engines.loop import run_one
from fedalloy.engines.workers import Workers
from fedalloy.methods.solvers.apfl import Apfl
from fedalloy.methods.solvers.ditto import Ditto
from fedalloy.methods.solvers.scaffold import Scaffold
from fedalloy.methods.solvers.superfed import SuPerFed
from fedalloy.methods.wires.topk import TopK
from fedalloy.tasks.datasets.base import Dataset
from fedalloy.testing import check_engine, work
from fedalloy.testing.cases import CHANGING, FAILING, UNEVEN
from fedalloy.testing.comparing import copied, differences
from tests.engines.fused_cases import LOCAL, agrees, case
from tests.engines.rounds import context, shared_of

MODELS = ("mlp", "linear")
PLAIN, HEAVY, NESTEROV = {"momentum": 0.0}, {"momentum": 0.8}, {"momentum": 0.8, "nesterov": True}


@dataclass(frozen=True)
class Fused:
    """A solver, the kernel that takes its steps, and the settings with which it does."""

    solver: Callable[..., Any]
    kernel: ModuleType
    drawn: dict[str, list[Any]]
    momenta: tuple[dict[str, Any], ...] = (PLAIN, HEAVY, NESTEROV)
    fixed: dict[str, Any] = field(default_factory=dict)
    left: tuple[dict[str, Any], ...] = ({"optimizer": "adam"}, {"clip_norm": 1.0}, {"accumulate": 2})

    def __call__(self, **more: Any) -> Any:
        return self.solver(**{**LOCAL, **self.fixed, **more})


FUSED = {
    "ditto": Fused(Ditto, fused_phases, {"lam": [0.0, 0.7], "personal_epochs": [0, 1, 3]}),
    "apfl": Fused(
        Apfl, fused_mixed, {"alpha": [0.0, 0.3, 1.0]},
        left=({"optimizer": "adam"}, {"clip_norm": 1.0}, {"accumulate": 2}, {"adaptive": True}),
    ),
    "scaffold": Fused(Scaffold, fused_shifted, {}, (PLAIN, HEAVY), left=()),
    "superfed": Fused(
        SuPerFed, fused_interpolated,
        {"mu": [0.0, 0.4], "nu": [0.0, 1.5], "start": [0, 2, 3, 99]}, (PLAIN, HEAVY),
        {"start": 0}, ({"optimizer": "adam"}, {"momentum": 0.5, "nesterov": True}),
    ),
}  # fmt: skip
every = pytest.mark.parametrize("fused", FUSED.values(), ids=FUSED)


@pytest.fixture
def only_fused(monkeypatch):
    """Whatever does not go through the kernel fails; no engine survives this kind of error by falling back."""
    monkeypatch.setattr(vmap_kernel, "train", lambda *_: pytest.fail("not fused"))


def without_compiled(patch: pytest.MonkeyPatch) -> None:
    for module in (fused_logistic, fused_pair):
        patch.setattr(module, "library", lambda: None)


@pytest.mark.parametrize(
    ("name", "fixed"),
    [
        ("ditto", {}),
        ("apfl", {}),
        ("scaffold", {}),
        ("superfed", {"mixing": "model"}),
        ("superfed", {"mixing": "layer"}),
    ],
)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_it_does_what_the_loop_does(name, fixed, data):
    def one_of(values):
        return data.draw(st.sampled_from(values))

    fused = FUSED[name]
    own = {name: one_of(values) for name, values in fused.drawn.items()} | one_of(fused.momenta) | fixed
    solver = fused(**own, batch_size=one_of([1, 3, 4, None]), weight_decay=one_of([0.0, 0.2]), decay=0.5)
    played, block = case(solver, one_of([CHANGING, UNEVEN, FAILING]), model=one_of(MODELS)), one_of([None, 1, 2])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vmap_kernel, "train", lambda *_: pytest.fail("not fused"))
        if one_of(["compiled", "torch"]) == "torch":
            without_compiled(patch)
        agrees(Batched(block=block), played)


@every
@pytest.mark.parametrize("model", [*MODELS, "twonn"])
@pytest.mark.usefixtures("only_fused")
def test_other_chains_and_wires_with_memory(fused, model):
    agrees(Batched(), case(fused(), UNEVEN, model=model))
    agrees(Batched(), case(fused(), wire=(TopK(0.3),), model=model))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.usefixtures("only_fused")
def test_shifted_gradients_without_compiled_kernels(model, monkeypatch):
    without_compiled(monkeypatch)
    agrees(Batched(), case(FUSED["scaffold"](), UNEVEN, model=model))


@pytest.mark.parametrize(("name", "other"), [(name, other) for name, one in FUSED.items() for other in one.left])
def test_other_settings_are_left_to_the_mapped_kernel(name, other):
    solver = FUSED[name](**other)
    assert solver.fusing is None
    agrees(Batched(), case(solver))


def test_a_precision_of_its_own_is_left_to_the_mapped_kernel():
    assert FUSED["scaffold"](precision="bf16").fusing is None


def backwards(solver: Any) -> Any:
    """The solver with steps uphill."""

    def step(self, carry, grad_at, draws, phase, ctx):
        return solver.step(self, carry, grad_at, draws, phase, replace(ctx, local_lr=-ctx.local_lr))

    return dataclass(frozen=True)(type("Backwards", (solver,), {"step": step}))


@every
def test_a_subclass_takes_its_own_steps(fused, monkeypatch):
    monkeypatch.setattr(fused.kernel, "train", lambda *_: pytest.fail("not its own"))
    uphill = replace(fused, solver=backwards(fused.solver))()
    assert uphill.fusing is None
    agrees(Batched(), case(uphill))


@every
def test_a_model_with_buffers_is_left_to_the_mapped_kernel(fused, monkeypatch):
    monkeypatch.setattr(fused.kernel, "train", lambda *_: pytest.fail("has buffers"))
    agrees(Batched(), case(fused(), model="batchnorm"))


def _unmixed(shared, own, shares, into):
    for name, leaf in shared.items():
        into[name].copy_(leaf)


def _anew(leaves):
    return {name: 0 * leaf for name, leaf in leaves.items()}


FAULTS: dict[str, dict[str, tuple[str, Callable[[Any], Any]]]] = {
    "ditto": {
        "the pull is forgotten": (
            "walk", lambda right: lambda layers, loss, sgd, *rest: right(layers, loss, type(sgd)(), *rest),
        ),
        "the personal model starts anew": ("_copied", lambda right: lambda leaves, order: _anew(right(leaves, order))),
        "clients get each other's models": ("_back", lambda right: lambda model, order: model),
        "the phases are exchanged": ("_of_phase", lambda right: lambda plan, which: right(plan, 1 - which)),
    },
    "apfl": {
        "the gradient is that of the received model": ("_mix", lambda right: _unmixed),
        "the share belongs to the other model": (
            "_mix", lambda right: lambda shared, own, shares, into: right(own, shared, shares, into),
        ),
        "the personal model starts anew": ("_own", lambda right: lambda leaves, memory: right(_anew(leaves), memory)),
        "clients get each other's models": (
            "_own",
            lambda right: lambda leaves, memory: right({name: leaf.flip(0) for name, leaf in leaves.items()}, memory),
        ),
        "gradients pass through the own model": ("backward", lambda right: lambda *given, at=None: right(*given)),
    },
    "scaffold": {
        "the shift is forgotten": (
            "Memory", lambda right: lambda received, model, velocity, _: right(received, model, velocity),
        ),
    },
    "superfed": {
        "no momentum": ("_gather", lambda right: lambda v, m, one, *rest: right(v.mul_(0), m, one, *rest)),
        "the angle is forgotten": (
            "_angle", lambda right: lambda f, own, nu: tuple(0 * part for part in right(f, own, nu)),
        ),
        "not mixed": ("_mix", lambda right: lambda memory, share, spans: right(memory, 0 * share, spans)),
    },
}  # fmt: skip
BROKEN: list[tuple[str, dict[str, Any]]] = [
    ("ditto", {"lam": 0.7, "personal_epochs": 1}),
    ("apfl", {}),
    ("scaffold", PLAIN),
    ("scaffold", HEAVY),
    ("superfed", {"mu": 0.4, "nu": 1.5, **HEAVY}),
]


@pytest.mark.parametrize(
    ("name", "own", "fault"), [(name, own, fault) for name, own in BROKEN for fault in FAULTS[name]]
)
def test_a_broken_kernel_is_noticed(monkeypatch, name, own, fault):
    fused, (what, breaks) = FUSED[name], FAULTS[name][fault]
    without_compiled(monkeypatch)
    monkeypatch.setattr(fused.kernel, what, breaks(getattr(fused.kernel, what)))
    assert check_engine(Batched(), [case(fused(**own), UNEVEN)])


@pytest.mark.parametrize("name", ["ditto", "apfl"])
def test_auto_expects_the_batched_engine(name):
    played = case(FUSED[name]())
    params, buffers = played.task.objective.init(Key.of(0))
    shared = played.algorithm.init(params, 5, buffers)["shared"]
    assert expected(played.algorithm, played.task, shared, 5, 2)[0].name == "batched"


@pytest.mark.parametrize(("name", "own"), [("ditto", {}), ("apfl", {}), ("superfed", {"start": 2, "momentum": 0.5})])
def test_workers_use_it_too(name, own, monkeypatch):
    def only_with_it(*arguments):
        assert arguments[-2].func is FUSED[name].kernel.train
        return run_one(*arguments)

    monkeypatch.setattr("fedalloy.engines.workers.run_one", only_with_it)
    engine = Workers(2)
    agrees(engine, case(FUSED[name](**own), FAILING))
    engine.close()


def test_workers_leave_several_targets_to_the_plain_kernel():
    """As the batched engine does: the fused kernels have one target per example."""
    labels = (Key.of(5).uniform(20, 4) < 0.5).float()
    task = fedalloy.task(
        Dataset(Key.of(6).normal(20, 3), labels, 0), model=lambda: nn.Linear(3, 4), kind="multilabel", clients=3,
        dtype="float64",
    )  # fmt: skip
    for method in (algorithms.ditto, algorithms.apfl, algorithms.superfed_mm):
        one, other = (fedalloy.fit(method(lr=0.1), task, rounds=1, engine=by).model for by in ("loop", "workers"))
        assert max(float((leaf - other[name]).abs().max()) for name, leaf in one.items()) <= 1e-9


def first_round(fused: Fused, model: str) -> tuple[Any, ...]:
    """What an engine gets in the first round, with everybody."""
    played = case(fused(), model=model)
    task, algorithm, now = played.task, played.algorithm, work(*range(played.task.population))
    shared = shared_of(algorithm, task)
    states = {client: algorithm.init_client(shared, Key.of(2).fold(client), task.objective.init) for client in range(5)}
    return algorithm, task, shared, states, now, context(algorithm, task)


@every
@pytest.mark.parametrize("model", ["mlp", "linear"])
def test_it_writes_into_nothing_it_was_given(fused, model):
    algorithm, task, shared, states, *rest = first_round(fused, model)
    given = copied({"shared": shared, "states": states})
    Batched()(algorithm, task, shared, states, *rest)
    assert list(differences({"shared": shared, "states": states}, given)) == []


@every
def test_states_are_no_views_of_what_changes(fused):
    """A state that is kept must not move when its client trains again."""
    algorithm, task, shared, states, now, ctx = first_round(fused, "mlp")
    engine = Batched()
    first = engine(algorithm, task, shared, states, now, ctx).states
    kept = copied(first)
    engine(algorithm, task, shared, first, now, context(algorithm, task, 2))
    assert list(differences(first, kept)) == []
    assert list(differences(kept, states)), "the clients trained"
