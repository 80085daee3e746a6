"""What the advice knows beforehand: every method has notes, and facts are those of docs/results."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedalloy.core import registry
from fedalloy.core.errors import SpecError
from fedalloy.studies.advise.facts import FILE, gathered, known_facts, text_of
from fedalloy.studies.advise.measuring import NAMES, Measures
from fedalloy.studies.advise.shortlist import ALWAYS, Aim, MethodChoice, method_notes, shortlist

RESULTS = Path(__file__).parents[3] / "docs" / "results"
NOTHING = Measures(dict.fromkeys(NAMES, 0.0), 10, 10, (), 2, False, 100)
SKEWED = Measures({**dict.fromkeys(NAMES, 0.0), "label_skew": 0.8, "drift": 2.0}, 10, 10, (), 2, False, 100)


def _listed(found: Measures, aim: Aim = "mean", **more: object) -> list[MethodChoice]:
    return shortlist(found, known_facts(), aim, 6, lambda name: "", **more)  # type: ignore[arg-type]


def test_the_file_of_facts_is_that_of_the_results() -> None:
    assert FILE.read_text(encoding="utf-8") == text_of(gathered(RESULTS)), "run python -m scripts.knowledge"


def test_a_federation_can_be_left_out() -> None:
    everything, without = known_facts(), known_facts(["heart"])
    assert {one.federation for one in everything} - {one.federation for one in without} == {"heart"}
    with pytest.raises(SpecError, match="nothing is known about 'hart'"):
        known_facts(["hart"])


def test_every_method_has_notes_that_the_measures_can_meet() -> None:
    notes = method_notes()
    assert set(notes) == set(registry.names("algorithm"))
    for name, one in notes.items():
        assert one.kind in ("shared", "personal", "fair"), name
        assert set(one.signs) <= set(NAMES), name
        assert one.never or one.why, name
        assert one.never or one.signs or name in ALWAYS, name


def test_the_baselines_are_always_tried_and_nothing_without_a_reason() -> None:
    tried = [one.name for one in _listed(NOTHING) if not one.refused]
    assert tried == list(ALWAYS)
    assert all(one.refused for one in _listed(NOTHING) if one.name not in ALWAYS)
    assert {one.name for one in _listed(NOTHING)} == set(method_notes())
    skewed = [one for one in _listed(SKEWED) if not one.refused]
    assert [one.name for one in skewed[:2]] == list(ALWAYS)
    assert len(skewed) == 6
    assert {"personal", "shared"} <= {one.kind for one in skewed[2:]}
    assert all("(" in one.reason for one in skewed[2:]), "each says which measure speaks for it"


def test_one_model_and_an_aim_change_what_is_tried() -> None:
    assert "personal" not in {one.kind for one in _listed(SKEWED, one_model=True) if not one.refused}
    assert "fair" in {one.kind for one in _listed(NOTHING, "worst") if not one.refused}
    absent = Measures({**NOTHING.values, "absent": 0.5}, 10, 10, (), 2, False, 100)
    why = {one.name: one.refused for one in _listed(absent, "worst")}
    assert why["afl"] == "needs every client in every round"
    named = [one.name for one in _listed(NOTHING, named=("scaffold",)) if not one.refused]
    assert named == ["fedavg", "scaffold"]
    refusing = shortlist(
        NOTHING, [], "mean", 6, lambda name: f"no {name}" if name == "scaffold" else "", False, ["scaffold"]
    )
    assert next(one for one in refusing if one.name == "scaffold").refused == "no scaffold"
    with pytest.raises(SpecError, match="unknown 'skaffold'"):
        _listed(NOTHING, named=("skaffold",))


def test_what_our_runs_found_moves_a_method() -> None:
    """The facts of a federation that is left out must not matter."""
    rich = Measures({**NOTHING.values, "label_skew": 0.9, "drift": 4.0, "absent": 0.0}, 10, 10, (), 2, True, 100)
    with_facts = [one.name for one in shortlist(rich, known_facts(), "mean", 9, lambda name: "") if not one.refused]
    none = [one.name for one in shortlist(rich, [], "mean", 9, lambda name: "") if not one.refused]
    assert with_facts != none
