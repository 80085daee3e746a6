"""The page of the Python interface has every public name, and every public name is typed and documented."""

from __future__ import annotations

import inspect
import re
import typing
from pathlib import Path

import pytest

import fedalloy
from scripts.docs.blocks import blocks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "api.md"
CALLABLE = [name for name in fedalloy.__all__ if callable(getattr(fedalloy, name))]


def test_the_page_has_every_public_name_with_its_home():
    text = PAGE.read_text(encoding="utf-8")
    for name in fedalloy.__all__:
        assert f"fedalloy.{name}" in text, name
    for name in CALLABLE:
        home, _, attribute = fedalloy._HOME[name].partition(":")
        assert f"::: {home}.{attribute}\n" in text, name


@pytest.mark.parametrize("name", CALLABLE)
def test_public_names_have_an_example_that_runs(name):
    """In their docstring, or on the page, whose blocks run (tests/site/test_examples.py)."""
    run = "".join(one.code for one in blocks(PAGE.read_text(encoding="utf-8")) if one.kind == "python")
    shown = re.search(rf"\b{name}\b", run) or (name == "Comparison" and "comparison = fedalloy.compare" in run)
    assert shown or ">>>" in (inspect.getdoc(getattr(fedalloy, name)) or ""), f"fedalloy.{name} has no example"


@pytest.mark.parametrize("name", CALLABLE)
def test_public_names_are_documented_and_typed(name):
    found = getattr(fedalloy, name)
    assert inspect.getdoc(found)
    functions = [found] if inspect.isfunction(found) else []
    if inspect.isclass(found):
        functions = [one for key, one in vars(found).items() if inspect.isfunction(one) and not key.startswith("_")]
    for one in functions:
        parameters = [p for p in inspect.signature(one).parameters.values() if p.name not in ("self", "cls")]
        assert all(p.annotation is not inspect.Parameter.empty for p in parameters), one
        assert inspect.signature(one).return_annotation is not inspect.Signature.empty, one
    assert typing.TYPE_CHECKING is False
