"""The tables of contracts on the design page name the members that the classes have: all of them, and no others."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

import pytest

from scripts.docs.blocks import ROOT
from tests.site.test_names import SPAN, _classes, _has

ROW = re.compile(r"^\| `(\w+)` \|([^|]*)\|([^|]*)\|[^|]*\|$", re.MULTILINE)
TYPES = {"LocalSolver", "Weighting", "ElementWeighting", "ElementRound", "ServerOptimizer", "Wire"}
TYPES |= {"Objective", "Task", "Engine", "Outcome", "Contributions", "ClientStore"}


def rows(text: str) -> dict[str, tuple[set[str], set[str]]]:
    """What each class must have and may say, as the page has it."""
    contracts = text.partition("\n## The contracts")[2].partition("\n### Formats")[0]
    return {name: (set(SPAN.findall(must)), set(SPAN.findall(may))) for name, must, may in ROW.findall(contracts)}


def of_name(name: str) -> Any:
    """The class."""
    (module,) = _classes()[name]
    return getattr(importlib.import_module(module), name)


def members(kind: type) -> set[str]:
    """What a class says in public, fields included."""
    names = {*vars(kind), *inspect.get_annotations(kind)}
    return {name for name in names if not name.startswith("_")} | set(getattr(kind, "__abstractmethods__", ()))


CONTRACTS = rows((ROOT / "docs" / "design.md").read_text())


def test_every_contract_has_its_row():
    assert set(CONTRACTS) == TYPES


def mistakes(kind: type, must: set[str], may: set[str], inherited: frozenset[str] = frozenset()) -> list[str]:
    """Where a row and a class differ."""
    gone = [f"there is no {name}" for name in sorted(must | may) if not _has(kind, name)]
    abstract = set(getattr(kind, "__abstractmethods__", ())) - must
    missing = members(kind) - must - may - inherited
    return gone + [f"{name} must be written" for name in sorted(abstract)] + [f"{name} is left out" for name in missing]


@pytest.mark.parametrize("name", sorted(TYPES))
def test_the_row_is_the_class(name):
    inherited = frozenset({"weigh", "asks", "reads_payload"} if name == "ElementWeighting" else ())
    assert mistakes(of_name(name), *CONTRACTS[name], inherited) == []


@pytest.mark.parametrize(
    ("must", "may", "mistake"),
    [
        ({"init", "losses"}, {"apply", "bind"}, "there is no losses"),
        ({"init"}, {"apply", "bind"}, "apply must be written"),
        ({"apply"}, {"init"}, "bind is left out"),
    ],
)
def test_a_row_that_is_not_the_class_is_noticed(must, may, mistake):
    assert mistake in mistakes(of_name("ServerOptimizer"), must, may)
