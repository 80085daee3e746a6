"""Names and phrases of the first edition do not come back: ``old_words.toml`` lists them, and where one may stay."""

from __future__ import annotations

import ast
import io
import re
import tokenize
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LIST = tomllib.loads((Path(__file__).parent / "old_words.toml").read_text(encoding="utf-8"))
IDENTIFIERS: dict[str, str] = LIST["identifiers"]
PHRASES = {re.compile(old, re.IGNORECASE | re.MULTILINE): new for old, new in LIST["phrases"].items()}
CODE = ("src/fedalloy", "benchmarks", "scripts")
PAGES = ("README.md", "docs", "recipes", "src/fedalloy/flower/templates", "src/fedalloy/report/live/assets/live.js")


def allowed(word: str, place: str) -> bool:
    return any(word in one["words"] and any(fnmatch(place, path) for path in one["in"]) for one in LIST["allowed"])


def below(*places: str, endings: tuple[str, ...]) -> list[Path]:
    """The files at and below some places, apart from what others wrote."""
    found = [path for place in places for path in (ROOT / place, *(ROOT / place).rglob("*"))]
    return sorted(path for path in found if path.suffix in endings and "vendor" not in path.parts)


def identifiers(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every name that code gives or uses, with its line."""
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name", "asname", "module", "names", "kwd_attrs", "rest"):
            given = getattr(node, field, None)
            for name in given if isinstance(given, list) else [given]:
                if isinstance(name, str):
                    yield from ((part, getattr(node, "lineno", 0)) for part in name.split("."))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr"):
            yield from ((str(one.value), node.lineno) for one in node.args if isinstance(one, ast.Constant))


def prose(source: str) -> Iterator[tuple[str, int]]:
    """Comments, docstrings and messages, without what they quote as code."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield without_code(token.string), token.start[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):  # f-strings have their pieces as constants
            yield without_code(node.value), node.lineno


def without_code(text: str) -> str:
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    text = re.sub(r"``.*?``|`[^`\n]*`|\w+ = \w+", "", text)
    return re.sub(r"(?<=\w)\s*\n\s*(?=\w)", " ", text)  # a phrase may be broken over lines


def old_identifiers(source: str, place: str) -> list[str]:
    found = [(name, line) for name, line in identifiers(ast.parse(source)) if name in IDENTIFIERS]
    return [f"{place}:{line}: {name} is {IDENTIFIERS[name]}" for name, line in found if not allowed(name, place)]


def old_phrases(text: str, place: str, line: int) -> list[str]:
    return [
        f"{place}:{line}: '{found[0]}' is '{new}'"
        for phrase, new in PHRASES.items()
        for found in phrase.finditer(text)
        if not allowed(found[0].lower(), place)
    ]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", below(*CODE, endings=(".py",)), ids=name_of)
def test_code_uses_the_new_names(path: Path):
    source, place = path.read_text(encoding="utf-8"), name_of(path)
    wrong = old_identifiers(source, place)
    for text, line in prose(source):
        wrong += old_phrases(text, place, line)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", below(*PAGES, endings=(".md", ".toml", ".js")), ids=name_of)
def test_pages_use_the_new_words(path: Path):
    text, place = path.read_text(encoding="utf-8"), name_of(path)
    wrong = old_phrases(without_code(text) if path.suffix == ".md" else text, place, 0)
    quoted = re.findall(r"(?<!`)`([A-Z]\w+)`(?!`)", text)
    wrong += [f"{place}: {name} is {IDENTIFIERS[name]}" for name in quoted if name in IDENTIFIERS]
    assert not wrong, "\n".join(wrong)


def test_no_module_has_its_old_name():
    back = [old for old in LIST["modules"] if (ROOT / "src/fedalloy" / f"{old}.py").exists()]
    assert not back, f"these have new names: {back}"
    assert all((ROOT / "src/fedalloy" / f"{new}.py").exists() for new in LIST["modules"].values())


@pytest.mark.parametrize(
    "source",
    [
        "class Story: ...", "def f(slope): ...", "x.stays", "f(usual=1)", "import a.folio", "from a.folio import b",
        "getattr(x, 'stays', None)", "global story",
    ],
)  # fmt: skip
def test_an_old_name_is_found(source: str):
    assert old_identifiers(source, "anywhere.py")


@pytest.mark.parametrize("text", ["model; left out: mlp", "starts anew", "the run goes on with it", "Left out: one"])
def test_an_old_phrase_is_found(text: str):
    assert old_phrases(text, "anywhere.md", 1)
    assert not old_phrases(without_code(f"`{text}`"), "anywhere.md", 1)
