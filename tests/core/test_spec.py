"""Rules as data: there and back, and errors that help."""

from __future__ import annotations

import dataclasses
import json
import typing
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from fedalloy.algorithms import named
from fedalloy.core import registry
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.arguments import build, convert
from fedalloy.core.errors import AlgorithmError, SpecError
from fedalloy.core.protocols import Weighting
from fedalloy.core.spec import algorithm_from_spec, algorithm_to_spec, from_spec, to_spec
from fedalloy.methods.servers.momentum import Momentum
from fedalloy.methods.solvers.prox import Prox
from fedalloy.methods.solvers.sgd import Sgd
from fedalloy.methods.weightings.samples import Samples
from fedalloy.testing import specimen

RULES = [
    (category, name) for category in ("solver", "weighting", "server", "wire") for name in registry.names(category)
]


FILLED: dict[Any, tuple[Any, ...]] = {str: ("a", "b"), int: (3, 4)}


def elsewhere(value: Any, hint: Any) -> Any:
    """Another value of the same type, inside the ranges that rules usually allow."""
    if typing.get_origin(hint) is Literal:
        return next((one for one in typing.get_args(hint) if one != value), value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value / 2 if value else 0.25
    if isinstance(value, str):
        return f"{value}2"
    if isinstance(value, tuple):
        inner = next(iter(typing.get_args(hint)), float)
        return tuple(elsewhere(one, type(one)) for one in value) or FILLED.get(inner, (0.25, 0.5))
    return value


def changed(rule: Any) -> Any:
    """The rule with every field changed that can be changed without breaking a range."""
    hints = typing.get_type_hints(type(rule))
    for field in dataclasses.fields(rule):
        try:
            value = elsewhere(getattr(rule, field.name), hints[field.name])
            rule = dataclasses.replace(rule, **{field.name: value})
        except (ValueError, SpecError):
            continue
    return rule


def there_and_back(category: str, rule: Any) -> Any:
    return from_spec(category, json.loads(json.dumps(to_spec(category, rule))))


@pytest.mark.parametrize(("category", "name"), RULES)
def test_every_rule_survives_json_with_values_of_its_own(category, name):
    plain = specimen(category, name)
    rule = changed(plain)
    assert rule != plain or not dataclasses.fields(rule)
    assert there_and_back(category, rule) == rule
    assert there_and_back(category, plain) == plain


def test_only_what_differs_from_the_default_is_written():
    spec = to_spec("solver", Prox(lr=0.5, mu=0.2, optimizer="adam", betas=(0.5, 0.6)))
    assert spec == {"kind": "prox", "lr": 0.5, "optimizer": "adam", "betas": [0.5, 0.6], "mu": 0.2}
    assert from_spec("weighting", "samples") == Samples()


@pytest.mark.parametrize("name", registry.names("algorithm"))
def test_every_algorithm_survives_json(name):
    algorithm = dataclasses.replace(named(name, lr=0.03, epochs=4), on_failure="resend")
    assert algorithm_from_spec(json.loads(json.dumps(algorithm_to_spec(algorithm)))) == algorithm


@dataclass(frozen=True)
class Inner:
    depth: int = 1


@dataclass(frozen=True)
class Outer:
    """Everything a field can be."""

    rule: Weighting = dataclasses.field(default_factory=Samples)
    inner: Inner = dataclasses.field(default_factory=Inner)
    either: int | tuple[int, ...] | None = None
    names: tuple[str, ...] = ()
    listed: list[float] = dataclasses.field(default_factory=list)
    anything: Any = None
    needed: float = dataclasses.field(kw_only=True)


def test_nested_rules_dataclasses_and_unions():
    values = {
        "rule": {"kind": "uniform"},
        "inner": {"depth": 3},
        "either": [1, 2],
        "names": ["a"],
        "listed": [1],
        "needed": 2,
    }
    built = build(Outer, values, "outer")
    assert type(built.rule).__name__ == "Uniform"
    assert (built.inner, built.either, built.names, built.listed) == (Inner(3), (1, 2), ("a",), [1.0])
    assert isinstance(built.needed, float)


@pytest.mark.parametrize(
    ("category", "spec", "message"),
    [
        ("solver", {"kind": "sgd", "momentun": 0.9}, "unknown argument 'momentun'; did you mean 'momentum'? allowed: "),
        ("solver", {"kind": "sgd", "lr": "fast"}, "solver 'sgd'.lr: expected a number, got 'fast'"),
        ("solver", {"kind": "sgd", "lr": True}, "solver 'sgd'.lr: expected a number, got True"),
        ("solver", {"kind": "sgd", "epochs": 1.5}, "solver 'sgd'.epochs: expected a whole number, got 1.5"),
        ("solver", {"kind": "sgd", "shuffle": 1}, "solver 'sgd'.shuffle: expected true or false, got 1"),
        ("solver", {"kind": "sgd", "betas": [0.9]}, "solver 'sgd'.betas: expected 2 values, got 1"),
        ("solver", {"kind": "sgd", "betas": [0.9, "x"]}, "solver 'sgd'.betas[1]: expected a number, got 'x'"),
        ("solver", {"kind": "sgd", "milestones": 0.5}, "solver 'sgd'.milestones: expected a list, got 0.5"),
        ("solver", {"kind": "sgd", "optimizer": "adm"}, "'sgd'.optimizer: 'adm' is not allowed; did you mean 'adam'"),
        ("solver", {"kind": "sgd", "batch_size": "all"}, "solver 'sgd'.batch_size: expected a whole number, got 'all'"),
        ("solver", {"kind": "sgd", "lr": -1}, "solver 'sgd': lr must be above 0, got -1.0"),
        ("solver", {"kind": "sdg"}, "solver.kind: unknown solver 'sdg': did you mean 'sgd'? allowed: "),
        ("weighting", {}, "weighting: needs a 'kind'; allowed: "),
        ("weighting", {"kind": 3}, "weighting: needs a 'kind'; allowed: "),
        ("weighting", 3, "weighting: needs a 'kind'; allowed: "),
        ("server", {"kind": "momentum", "beta": 1.0}, "server 'momentum': beta must lie in [0, 1), got 1.0"),
    ],
)  # fmt: skip
def test_a_wrong_spec_is_told_where_and_what_would_be_right(category, spec, message):
    with pytest.raises(SpecError) as caught:
        from_spec(category, spec)
    assert message in str(caught.value)


def test_a_missing_argument_is_named():
    with pytest.raises(SpecError, match=r"outer: .*'needed'"):
        build(Outer, {}, "outer")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"solver": "sgd", "weighting": "samples"}, "the part 'server' is missing; allowed: "),
        ({"sovler": "sgd"}, "unknown part 'sovler'; did you mean 'solver'?"),
        ({"solver": "sgd", "weighting": "samples", "server": "sgd", "on_failure": "drp"}, "did you mean 'drop'?"),
        ({"solver": "sgd", "weighting": "samples", "server": "sgd", "wire": ["nothing"]}, "wire[0].kind: unknown wire"),
    ],
)
def test_a_wrong_algorithm_spec(spec, message):
    with pytest.raises(SpecError) as caught:
        algorithm_from_spec(spec)
    assert message in str(caught.value)


def test_an_algorithm_that_does_not_fit_is_still_refused_from_a_spec():
    with pytest.raises(AlgorithmError, match="step_norm"):
        algorithm_from_spec({"solver": {"kind": "sgd", "optimizer": "adam"}, "weighting": "nova", "server": "sgd"})


def test_settings_of_a_named_method_are_checked_too():
    algorithm = named("fedavgm", beta=0.5, server_lr=2, lr=0.3)
    assert algorithm == Algorithm(Sgd(lr=0.3), Samples(), Momentum(2.0, 0.5))
    with pytest.raises(SpecError, match="algorithm 'fedprox': unknown argument 'nu'"):
        named("fedprox", nu=0.1)
    with pytest.raises(SpecError, match=r"algorithm 'fedprox'\.mu: expected a number, got 'big'"):
        named("fedprox", mu="big")


def test_a_union_reports_every_alternative():
    with pytest.raises(SpecError, match="expected a whole number, got 'x'; or expected a list, got 'x'"):
        convert("x", int | tuple[int, ...] | None, "here")
    assert convert(None, int | None, "here") is None
