"""What a replay says about a file: pass, fail, not built, or what is wrong with the file itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import torch

from fedalloy.core import registry
from fedalloy.core.errors import RegistryError, SpecError
from fedalloy.core.protocols import Weighting
from fedalloy.testing.vectors.files import VectorCase, flatten
from fedalloy.testing.vectors.replay import (
    FieldComparison,
    FieldResult,
    Fields,
    Report,
    Within,
    distance,
    exit_code,
    replay,
)

VECTORS = Path(__file__).resolve().parents[2] / "vectors"
Write = Callable[[Any], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(content: Any) -> Path:
        path = tmp_path / "file.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return write


def loaded(group: str) -> Any:
    return json.loads((VECTORS / f"{group}.json").read_text())


def statuses(report: Report) -> dict[str, str]:
    return {field.name: field.status for field in report.fields}


def single(expected: Any, group: str = "echo", rounds: int = 1) -> dict[str, Any]:
    """A file of one case whose rounds all expect the same."""
    one = {"inputs": {}, "expected": expected}
    return {"group": group, "dtype": "float64", "cases": [{"params": {}, "init": {}, "rounds": [one] * rounds}]}


def echoing(monkeypatch, *rounds: Any) -> None:
    """A group that answers with the given fields."""
    registry.everything("conform")
    monkeypatch.setitem(registry._rules["conform"], "echo", lambda case: iter(rounds))


def test_a_corrupted_value_fails_where_it_is(write):
    content = loaded("size_and_loss")
    content["cases"][1]["rounds"][2]["expected"]["fedavg_w"][0] += 1e-6
    report = replay(write(content))
    broken = next(field for field in report.fields if field.name == "fedavg_w")
    assert (broken.status, report.exit_code) == ("fail", 1)
    assert broken.error == pytest.approx(1e-6, rel=1e-3)
    assert broken.worst is not None
    assert (broken.worst.case, broken.worst.round) == (2, 3)
    assert statuses(report)["weights.fedavg"] == "pass"


@pytest.mark.parametrize(("off", "status"), [(0.9e-9, "pass"), (1.1e-9, "fail")])
def test_the_tolerance_is_absolute(monkeypatch, write, off, status):
    echoing(monkeypatch, {"x": off})
    assert statuses(replay(write(single({"x": 0.0})))) == {"x": status}


@pytest.mark.parametrize(("off", "status"), [(0.9e-7, "pass"), (1.1e-7, "fail")])
def test_a_replayer_may_ask_for_room(monkeypatch, write, off, status):
    echoing(monkeypatch, {"x": Within(1e-7, torch.tensor([off]))})
    report = replay(write(single({"x": [0.0]})))
    assert statuses(report) == {"x": status}
    assert report.fields[0].tolerance == 1e-7


def test_an_unknown_group_is_not_built(write):
    report = replay(write(single({"w": [1.0]}, group="nobody")))
    assert statuses(report) == {"w": "not built"}
    assert (report.exit_code, report.fields[0].error) == (3, None)


def test_what_is_computed_in_some_rounds_only_is_not_built(monkeypatch, write):
    echoing(monkeypatch, {"x": 1.0})
    assert statuses(replay(write(single({"x": 1.0}, rounds=2)))) == {"x": "not built"}


def test_a_mismatch_outweighs_what_is_not_built(monkeypatch, write):
    echoing(monkeypatch, {"x": 2.0})
    report = replay(write(single({"x": 1.0, "y": 1.0}, rounds=2)))
    assert statuses(report) == {"x": "fail", "y": "not built"}
    assert report.exit_code == 1


def test_nested_fields_and_clients_count_separately(monkeypatch, write):
    echoing(monkeypatch, {"errors": {"3": [0.0], "7": [1.0]}, "unasked": 1.0})
    report = replay(write(single({"errors": {"3": [0.0], "7": [0.0], "9": [0.0]}})))
    assert statuses(report) == {"errors.3": "pass", "errors.7": "fail", "errors.9": "not built"}


def test_another_shape_or_a_number_instead_of_none_fails(monkeypatch, write):
    echoing(monkeypatch, {"x": [1.0, 1.0], "y": 0.0, "z": nan})
    report = replay(write(single({"x": [1.0], "y": None, "z": None})))
    assert statuses(report) == {"x": "fail", "y": "fail", "z": "pass"}
    assert report.fields[0].error == inf


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [([inf], [inf], 0.0), ([inf], [-inf], inf), ([nan], [1.0], inf), ([1.0, 5.0], [1.0, 3.0], 2.0), ([], [], 0.0)],
)
def test_distance(one, other, expected):
    assert distance(torch.tensor(one), torch.tensor(other)) == expected


@pytest.mark.parametrize(
    ("errors", "code"), [([[0.0], [0.0]], 0), ([[0.0], [None]], 3), ([[None], [1.0]], 1), ([[1.0], [0.0]], 1), ([], 0)]
)
def test_the_exit_code_of_several_files(errors, code):
    fields = [[FieldResult("x", (FieldComparison(1, 1, error),)) for error in each] for each in errors]
    assert exit_code([Report(Path("a.json"), "g", each) for each in fields]) == code


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ([], "not an object"),
        ({"group": "fednova"}, "lacks 'dtype'"),
        ({"group": "fednova", "dtype": "float32", "cases": [1]}, "allowed: float64"),
        ({"group": "fednova", "dtype": "float64"}, "lacks 'cases'"),
        ({"group": "fednova", "dtype": "float64", "cases": []}, "is empty"),
        ({"group": "fednova", "dtype": "float64", "cases": {}}, "should be a list"),
        ({"group": 3, "dtype": "float64", "cases": [{}]}, "lacks 'params'"),
        ({"group": "g", "dtype": "float64", "cases": [{"params": {}, "init": {}, "rounds": [{}]}]}, "round 1 lacks"),
        (single({"x": [[1.0], [1.0, 2.0]]}), "round 1.expected.x is not a number"),
        (single({"x": "many"}), "expected.x is not a number"),
    ],
)
def test_a_malformed_file_is_named_with_its_fault(write, content, message):
    with pytest.raises(SpecError, match=r"file\.json") as caught:
        replay(write(content))
    assert message in str(caught.value)


def test_a_missing_file(tmp_path):
    with pytest.raises(SpecError, match="cannot be read"):
        replay(tmp_path / "none.json")


def test_bytes_that_are_not_text(tmp_path):
    (tmp_path / "file.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecError, match="is not JSON"):
        replay(tmp_path / "file.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda case: case["params"].pop("n"), "Nova needs num_examples"),
        (lambda case: case["rounds"][0]["inputs"].pop("tau"), "lacks 'tau'"),
        (lambda case: case["rounds"][0]["inputs"].update(ids=[0, 1, 2, 99]), "not among the 4 clients"),
        (lambda case: case["rounds"][0]["inputs"]["W"].pop(), "W is"),
        (lambda case: case["rounds"][0]["inputs"].update(w=1.0), "expected 1 axes"),
        (lambda case: case["rounds"][0]["inputs"]["tau"].pop(), "one per id"),
        (lambda case: case["params"].update(prox="much"), "expected a number"),
    ],
)
def test_a_file_whose_numbers_do_not_fit_says_which(write, change, message):
    content = loaded("fednova")
    change(content["cases"][0])
    with pytest.raises(SpecError, match=message) as caught:
        replay(write(content))
    assert "case 1" in "".join(caught.value.__notes__)


@pytest.mark.parametrize("name", ["term", "dr"])
def test_the_rule_that_is_registered_is_the_one_that_is_compared(monkeypatch, name):
    @dataclass(frozen=True)
    class Toy(Weighting):
        q: float = 0.0
        tilt: float = 0.0

        def weigh(self, cohort, state, ctx):
            return torch.zeros(len(cohort), dtype=torch.float64), state, {}

    before = statuses(replay(VECTORS / "size_and_loss.json"))
    monkeypatch.setitem(registry._rules["weighting"], name, Toy)
    after = statuses(replay(VECTORS / "size_and_loss.json"))
    assert {field for field in after if after[field] != before[field]} == {f"weights.{name}"}
    assert (before[f"weights.{name}"], after[f"weights.{name}"]) == ("pass", "fail")


def test_no_two_files_may_claim_a_group():
    registry.everything("conform")
    with pytest.raises(RegistryError, match="taken"):
        registry.register("conform", "fednova")(lambda case: iter(()))


def test_the_expected_values_do_not_reach_the_replayer(monkeypatch, write):
    seen: list[VectorCase] = []

    def watching(case: VectorCase) -> Iterator[Fields]:
        seen.append(case)
        yield {}

    registry.everything("conform")
    monkeypatch.setitem(registry._rules["conform"], "echo", watching)
    replay(write(single({"x": 12345.0})))
    assert seen[0].wanted == {"x"}
    assert "12345" not in repr(seen[0])


def test_flatten_keeps_empty_groups_out():
    assert flatten({"errors": {}, "w": 1}) == {"w": 1}
