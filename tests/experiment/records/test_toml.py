"""What the writer writes, the standard library reads back as the same value."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedalloy.core.errors import SpecError
from fedalloy.experiment.records.toml import dumps

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
scalars = st.booleans() | st.integers() | st.floats(allow_nan=False) | text
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner | st.none(), max_size=3),
    max_leaves=12,
)
tables = st.dictionaries(text, values | st.none(), max_size=5)


def without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    return [without_none(item) for item in value] if isinstance(value, list) else value


def typed(value: Any) -> Any:
    """Tells 1 from 1.0 from True, and 0.0 from -0.0, where == does not."""
    if isinstance(value, dict):
        return {key: typed(item) for key, item in value.items()}
    return [typed(item) for item in value] if isinstance(value, list) else (type(value), repr(value))


@given(table=tables)
def test_tomllib_reads_back_what_was_written(table: dict[str, Any]) -> None:
    assert typed(tomllib.loads(dumps(table))) == typed(without_none(table))


def test_a_recipe_reads_like_one() -> None:
    recipe = {
        "name": "demo", "task": {"dataset": "digits"}, "run": {"rounds": 3, "target": None, "seeds": [1, 2]},
        "wire": [{"kind": "clip", "norm": 1.5}, {"kind": "sign"}], "grid": {"solver.lr": [0.1, 1e-5]},
    }  # fmt: skip
    expected = """name = "demo"

[task]
dataset = "digits"

[run]
rounds = 3
seeds = [1, 2]

[[wire]]
kind = "clip"
norm = 1.5

[[wire]]
kind = "sign"

[grid]
"solver.lr" = [0.1, 1e-05]
"""
    assert dumps(recipe) == expected


def test_numbers_that_are_not_finite() -> None:
    read = tomllib.loads(dumps({"up": float("inf"), "down": -float("inf"), "none": float("nan")}))
    assert (read["up"], read["down"]) == (float("inf"), -float("inf"))
    assert read["none"] != read["none"]


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"run": {"seeds": [1, None]}}, r"'run\.seeds' is None"),
        ({"run": {"when": object()}}, r"'run\.when'"),
        ({"run": {3: 1}}, "'run' has the key 3"),
        ({"a": "\ud800"}, "surrogate"),
    ],
)
def test_what_toml_cannot_say_is_named(table: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        dumps(table)
