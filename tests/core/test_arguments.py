"""One check of arguments for recipes and for Python: every registered rule and every class of settings."""

from __future__ import annotations

import dataclasses
import inspect
import math
import typing
from typing import Any, Literal

import numpy as np
import pytest

from fedalloy import algorithms
from fedalloy.core import registry
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.arguments import checked
from fedalloy.core.errors import SpecError
from fedalloy.core.spec import from_spec
from fedalloy.experiment.config import RunConfig
from fedalloy.experiment.recipe import parse, resolve
from fedalloy.experiment.sampling import BySize, Listed, UniformSampling
from fedalloy.methods.classifier import ClassifierTraining
from fedalloy.methods.servers.sgd import ServerSgd
from fedalloy.methods.solvers.sgd import Sgd
from fedalloy.methods.weightings.samples import Samples
from fedalloy.studies.unfolding.settings import Learning
from fedalloy.tasks.devices import DeviceProfile, EpochRange, Slow
from fedalloy.tasks.noise import LabelNoise
from fedalloy.tasks.partitions.iid import Iid

CATEGORIES = ("algorithm", "solver", "weighting", "server", "wire", "partition", "dataset", "metric", "engine", "model")
SETTINGS: tuple[Any, ...] = (
    RunConfig, UniformSampling, BySize, Listed, EpochRange, Slow, DeviceProfile, ClassifierTraining, Learning,
    LabelNoise,
)  # fmt: skip
NEEDED: dict[str, Any] = {
    "iid": 1, "non_iid": 1, "sizes": (1, 2), "path": "here", "function": "a:b", "shape": (2,), "inputs": 3,
    "classes": 2, "kind": "pair", "ratio": 0.5, "low": 0, "high": 1, "fraction": 0.5, "factor": 2.0, "cohorts": ((0,),),
    "label": Iid(), "quantity": Iid(), "partitioner": "IidPartitioner",
}  # fmt: skip
MAY_BE_NEGATIVE = {"ignore_index", "low", "high", "tilt", "zeta", "seed", "target"}


RULES = {f"{category}-{name}": rule for category in CATEGORIES for name, rule in registry.everything(category).items()}
RULES |= {kind.__name__: kind for kind in SETTINGS}


def arguments(rule: Any) -> dict[str, tuple[Any, bool]]:
    """The hint of every argument, and whether it must be given."""
    hints = typing.get_type_hints(rule if dataclasses.is_dataclass(rule) else inspect.unwrap(rule))
    found = inspect.signature(rule).parameters.values()
    named = (one for one in found if one.kind is not one.VAR_KEYWORD and not one.name.startswith("_"))
    return {one.name: (hints[one.name], one.default is one.empty) for one in named}


def refused(rule: Any, given: dict[str, Any]) -> bool:
    try:
        rule(**given)
    except SpecError:
        return True
    return False


def wrong(hint: Any) -> list[Any]:
    """Values of other types than those hinted, or outside of every number that makes sense."""
    parts = typing.get_args(hint) if typing.get_origin(hint) is not Literal else (hint,)
    numbers = {int, float} & {hint, *parts}
    return [object(), *([math.nan, math.inf, -math.inf, True, "many"] if numbers else [])]


@pytest.mark.parametrize("named", RULES)
def test_every_rule_refuses_wrong_types_wrong_choices_and_numbers_that_are_not_finite(named):
    rule, known = RULES[named], arguments(RULES[named])
    base = {name: NEEDED[name] for name, (_, needed) in known.items() if needed}
    for name, (hint, _) in known.items():
        for value in wrong(hint):
            assert refused(rule, {**base, name: value}), f"{name} = {value!r} was taken"


@pytest.mark.parametrize("named", [name for name in RULES if not name.startswith("model-")])
def test_every_rule_refuses_negative_numbers_unless_they_mean_something(named):
    rule, known = RULES[named], arguments(RULES[named])
    base = {name: NEEDED[name] for name, (_, needed) in known.items() if needed}
    for name, (hint, _) in known.items():
        if name not in MAY_BE_NEGATIVE and {int, float} & {hint, *typing.get_args(hint)}:
            assert refused(rule, {**base, name: -1}), f"{name} = -1 was taken"


@pytest.mark.parametrize("named", RULES)
def test_every_rule_answers_an_unknown_name_with_the_nearest(named):
    rule, known = RULES[named], arguments(RULES[named])
    base = {name: NEEDED[name] for name, (_, needed) in known.items() if needed}
    close = next(iter(known), "batch_size")
    hint = f"did you mean '{close}'" if close in known and len(close) > 2 else "unknown argument"
    with pytest.raises(SpecError, match=rf"unknown argument '{close}_'.*") as error:
        rule(**{**base, f"{close}_": 1})
    assert hint in str(error.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "adamax"}, {"optimizer": "lbfgs"}, {"optimizer": 3}, {"epochs": 1.5}, {"epochs": True},
        {"lr": math.nan}, {"lr": math.inf}, {"lr": -1}, {"weight_decay": -1}, {"momentum": 1}, {"batch_size": 0},
        {"betas": [0.9]}, {"betas": [0.9, 1.5]}, {"eps": -1}, {"decay": 0}, {"milestones": [2.0]}, {"server_lr": "x"},
        {"learning_rate": 0.1}, {"epoch": 3}, {"shuffle": 1}, {"optimizer": "adam", "momentum": 0.9}, {"eps": 1e-3},
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["fedavg", "fedprox", "fedper"])
def test_python_and_recipes_refuse_in_the_same_words(name, settings):
    with pytest.raises(SpecError) as in_python:
        getattr(algorithms, name)(**settings)
    with pytest.raises(SpecError) as in_recipe:
        resolve(parse({"algorithm": {"name": name, **settings}}))
    assert str(in_python.value) == str(in_recipe.value)


@pytest.mark.parametrize("digits", [400, 5000])
def test_a_number_that_no_float_can_hold_is_refused(digits):
    with pytest.raises(SpecError, match=r"lr: expected a finite number, got a number of hundreds of digits"):
        Sgd(lr=10**digits)


@pytest.mark.parametrize(
    "settings", [{"optimizer": "adamax"}, {"epochs": 1.5}, {"lr": math.nan}, {"lr": 0}, {"lrr": 1}]
)
def test_a_part_is_refused_in_the_words_of_its_table(settings):
    with pytest.raises(SpecError) as in_python:
        Sgd(**settings)
    with pytest.raises(SpecError) as in_recipe:
        from_spec("solver", {"kind": "sgd", **settings})
    assert str(in_python.value) == str(in_recipe.value)


def test_the_nearest_name_is_looked_for_among_the_methods_own_settings_and_those_of_local_training():
    with pytest.raises(SpecError, match=r"algorithm 'fedprox': unknown argument 'serverlr'; did you mean 'server_lr'"):
        algorithms.fedprox(serverlr=1.0)  # type: ignore[call-arg]
    with pytest.raises(SpecError, match="did you mean 'batch_size'"):
        algorithms.fedprox(batchsize=3)  # type: ignore[call-arg]


def test_numbers_of_other_libraries_become_plain_and_lists_become_tuples():
    made: Any = Sgd
    solver = made(lr=np.float32(0.5), epochs=np.int64(3), milestones=[0.5])
    assert (solver.lr, solver.epochs, solver.milestones) == (0.5, 3, (0.5,))
    assert (type(solver.lr), type(solver.epochs)) == (float, int)
    config: Any = RunConfig
    assert config(seed=np.int64(3), metrics=["accuracy"]).metrics == ("accuracy",)


def test_arguments_by_place():
    with pytest.raises(SpecError, match="'mu' is given twice"):
        algorithms.fedprox(0.1, mu=0.1)  # type: ignore[misc]
    with pytest.raises(SpecError, match="2 arguments are given by place, allowed: 1"):
        ServerSgd(1.0, 2.0)  # type: ignore[call-arg]
    with pytest.raises(SpecError, match=r"noise: 'ratio' is missing; needed: kind, ratio"):
        LabelNoise("pair")  # type: ignore[call-arg]


def test_parts_in_the_wrong_places_are_refused():
    with pytest.raises(SpecError, match=r"algorithm\.solver"):
        Algorithm(Samples(), Sgd(), ServerSgd())  # type: ignore[arg-type]
    with pytest.raises(SpecError, match=r"algorithm: unknown argument 'wires'; did you mean 'wire'"):
        Algorithm(Sgd(), Samples(), ServerSgd(), wires=())  # type: ignore[call-arg]


def test_a_class_keeps_its_signature_and_its_subclasses_their_own_check():
    assert list(inspect.signature(ServerSgd).parameters) == ["lr"]

    @checked("thing")
    @dataclasses.dataclass(frozen=True)
    class Thing:
        size: int = 1

    @dataclasses.dataclass(frozen=True)
    class Larger(Thing):
        free: Any = None

    with pytest.raises(SpecError, match=r"thing\.size: expected a whole number, got 1\.5"):
        Thing(1.5)  # type: ignore[arg-type]
    assert Larger(2, free="x") == Larger(2, "x")


@pytest.mark.parametrize(
    "table",
    [{"run": {"target": math.nan}}, {"run": {"max_norm": math.inf}}, {"devices": {"deadline": math.nan}},
     {"devices": {"success": [math.nan]}}, {"sampling": {"cohort": math.inf}},
     {"evaluate": {"classifier": {"lr": math.nan}}}],
)  # fmt: skip
def test_recipes_refuse_numbers_that_are_not_finite(table):
    with pytest.raises(SpecError, match=r"got \[?(nan|inf)\]?;"):
        parse(table)
