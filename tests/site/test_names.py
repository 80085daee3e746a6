"""Names on the pages about the code: files, functions, classes and members exist, and no package is left out."""

from __future__ import annotations

import ast
import importlib
import re
from functools import cache
from typing import Any

import pytest

from scripts.docs.blocks import ROOT
from tests.test_house import ORDER

SOURCE = ROOT / "src" / "fedalloy"
PAGES = ("design.md", "how-to/extend.md")
"""The pages about the code; others name little of it."""
SPEAK_OF_OTHERS = {"corrections.md", "reference.md", "reproduce.md"}
OTHERS = sorted(
    page
    for page in (ROOT / "docs").rglob("*.md")
    if page.name not in SPEAK_OF_OTHERS and not {"results", "coming-from"} & {*page.parts}
)
PLACES = (SOURCE, ROOT, ROOT / "docs")
TOP = "|".join(sorted(path.stem for path in SOURCE.iterdir() if not path.name.startswith("_")))
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
FILE = re.compile(r"[\w.-]+(?:/[\w.-]+)*\.py|(?:[\w.-]+/)+(?:[\w-]+\.(?:md|toml|json|sh|js))?")
DOTTED = re.compile(rf"(?:fedalloy\.)?(?:{TOP})(?:\.\w+)+|fedalloy\.\w+")
MEMBER = re.compile(r"[A-Z]\w*[a-z]\w*(?:\.\w+)?")
NOT_OURS = {"BatchNorm", "BatchNorm1d", "ClassVar", "ClientApp", "Context.state", "FedAvg", "GroupNorm", "NaN"}
NOT_OURS |= {"NumPyClient", "ServerApp", "SuperLink", "SuperNode", "True", "False", "None"}
NOT_OURS |= {"RUN/bundle/", "federation/", "fedalloy.rules"}
"""Classes of other libraries that these pages speak of, folders of users, and the name of an entry-point group."""


def spans(text: str) -> list[str]:
    """Everything in backticks outside of code blocks."""
    return SPAN.findall(FENCED.sub("", text))


def is_wrong(name: str) -> bool:
    """Whether a span names something of the code that is not there. Spans that name nothing of it are right."""
    name = name.removesuffix("()")
    if name in NOT_OURS:
        return False
    if FILE.fullmatch(name):
        return not any((place / name).exists() for place in PLACES)
    if DOTTED.fullmatch(name):
        return not _found(name if name.startswith("fedalloy.") else f"fedalloy.{name}")
    if MEMBER.fullmatch(name):
        kind, _, member = name.partition(".")
        found = [getattr(importlib.import_module(module), kind) for module in _classes().get(kind, ())]
        return not any(not member or _has(one, member) for one in found)
    return False


def _found(dotted: str) -> bool:
    """A module, something in it, or a member of a class in it."""
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for name in parts[end:]:
            if not _has(found, name):
                return False
            found = getattr(found, name, None)
        return True
    return False


def _has(thing: Any, name: str) -> bool:
    """Fields without a default and declared members have no value on their class."""
    kinds = thing.__mro__ if isinstance(thing, type) else ()
    return hasattr(thing, name) or any(name in {**vars(k), **vars(k).get("__annotations__", {})} for k in kinds)


@cache
def _classes() -> dict[str, list[str]]:
    """The modules in which a class, or another name for a type, is defined."""
    found: dict[str, list[str]] = {}
    for file in sorted(SOURCE.rglob("*.py")):
        module = ".".join(file.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.parse(file.read_text()).body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            for name in [node.name] if isinstance(node, ast.ClassDef) else [t.id for t in targets if hasattr(t, "id")]:
                found.setdefault(name, []).append(module)
    return found


def packages() -> list[str]:
    """Every package, as the map writes it."""
    return sorted(f"{file.parent.relative_to(SOURCE)}/" for file in SOURCE.rglob("*/__init__.py"))


@pytest.mark.parametrize("page", PAGES)
def test_every_name_is_there(page):
    found = spans((ROOT / "docs" / page).read_text())
    assert len(found) > 50
    assert sorted({name for name in found if is_wrong(name)}) == []


@pytest.mark.parametrize("page", [*OTHERS, ROOT / "README.md"], ids=lambda page: str(page.relative_to(ROOT)))
def test_other_pages_name_nothing_that_is_gone(page):
    assert sorted({name for name in spans(page.read_text()) if is_wrong(name)}) == []


def test_the_map_has_every_package():
    named = set(spans((ROOT / "docs" / "design.md").read_text()))
    assert [package for package in packages() if package not in named] == []


def test_the_order_of_packages_is_the_one_that_is_tested():
    text = (ROOT / "docs" / "design.md").read_text().partition("From low to high:")[2]
    lines = text.partition("```text\n")[2].partition("```")[0].replace("\n ", " ").splitlines()
    assert [tuple(line.split()) for line in lines] == list(ORDER)


@pytest.mark.parametrize(
    "name",
    [
        "core/nowhere.py",
        "nowhere/",
        "docs/nowhere.md",
        "core.algorithm.nothing",
        "fedalloy.core.nothing",
        "fedalloy.nothing",
        "core.engine.Engine.nothing()",
        "Engine.nothing",
        "Nothing",
    ],
)
def test_a_name_that_is_not_there_is_noticed(name):
    assert spans(f"The `{name}`.\n```\n`Nowhere`\n```\n") == [name]
    assert is_wrong(name)


@pytest.mark.parametrize(
    "name",
    [
        "core/algorithm.py",
        "recipes/claims/",
        "core.algorithm.server_step()",
        "fedalloy.fit",
        "Weighting.requires",
        "Outcome.cohort",
        "rounds.jsonl",
        "num_examples",
        "[C, n]",
    ],
)
def test_a_name_that_is_there_passes(name):
    assert not is_wrong(name)
