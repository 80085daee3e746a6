"""The reference page, generated from the registry, the recipe tables and the commands: ``python -m fedalloy.cli.docs``.

``--check`` writes nothing and fails when the page in the repository is out of date.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedalloy.core import registry
from fedalloy.core.errors import RegistryError, nearest

CATEGORIES = (
    "algorithm", "solver", "weighting", "server", "wire", "dataset", "partition", "model", "loss", "metric",
    "engine", "tracker",
)  # fmt: skip
CITED = ("solver", "weighting", "server", "wire")
"""Categories with one file per idea; the file's docstring begins with the idea and its source."""
PAGE = Path("docs") / "reference.md"
_FOLLOWS = "local training"
_WAYS = {
    True: "Higher is better.",
    False: "Lower is better.",
    None: "No direction: it cannot be tuned on, targeted or waited for.",
}


@dataclass(frozen=True)
class Argument:
    """An argument of a rule: the values it allows and its default."""

    name: str
    kind: str
    default: str


@dataclass(frozen=True)
class RuleText:
    """Everything that is documented about a rule."""

    category: str
    name: str
    text: str
    arguments: tuple[Argument, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return dataclasses.asdict(self)


def describe(category: str, name: str) -> RuleText:
    """A rule's docstring and arguments, preceded by the idea and its source unless the docstring names a source."""
    name = registry.canonical(category, name)
    rule = registry.find(category, name)
    own, idea = inspect.cleandoc(own_docstring(rule)), _idea(rule)
    text = f"{idea}\n\n{own}" if category in CITED and not cites(own) and cites(idea) else own
    text += f"\n\n{_WAYS[registry.direction(name)]}" if category == "metric" else ""
    return RuleText(category, name, text, tuple(_arguments(rule)))


def find_rules(name: str) -> list[RuleText]:
    """Every rule of that name, or ``category:name`` for one of them."""
    category, colon, short = name.partition(":")
    if colon:
        return [describe(category, short)]
    found = [describe(category, name) for category in CATEGORIES if registry.knows(category, name)]
    if not found:
        known = {one for category in CATEGORIES for one in registry.names(category)}
        raise RegistryError(f"there is no run folder and no rule '{name}': {nearest(name, known)}")
    return found


def summary(rule: Callable[..., Any]) -> str:
    """One line about a rule: its own summary, or the first line of its docstring."""
    own = getattr(rule, "summary", "")
    line = own if isinstance(own, str) and own else inspect.cleandoc(own_docstring(rule)).partition("\n")[0]
    return line.replace("``", "`")


def own_docstring(rule: Callable[..., Any]) -> str:
    """A rule's docstring; empty where it is the one that ``dataclass`` generates from the fields."""
    text = rule.__doc__ or ""
    return "" if dataclasses.is_dataclass(rule) and text.startswith(f"{rule.__name__}(") else text


def cites(text: str) -> bool:
    """Whether a text names a source: a paper's number, or authors and a year.

    >>> cites("FedAvg (McMahan et al. 2017)"), cites("see arXiv:1602.05629"), cites("the usual 20 rounds")
    (True, True, False)
    """
    return bool(re.search(r"arXiv:\d{4}\.\d{4,5}|[A-Z][\w-]+ (et al\.|and [A-Z][\w-]+) (19|20)\d\d", text))


def _idea(rule: Callable[..., Any]) -> str:
    """The docstring of a rule's module, up to and including the paragraph that names a source."""
    paragraphs = inspect.cleandoc(sys.modules[rule.__module__].__doc__ or "").split("\n\n")
    citing = next((place for place, text in enumerate(paragraphs) if cites(text)), 0)
    return "\n\n".join(" ".join(text.split()) for text in paragraphs[: citing + 1])


def words(hint: Any) -> str:
    """A type in words.

    >>> words(int | None), words(Literal["drop", "resend"]), words(tuple[float, ...])
    ('whole number or nothing', "'drop' or 'resend'", 'list of number')
    """
    plain: dict[Any, str] = {int: "whole number", float: "number", bool: "true or false", str: "text", Any: "anything"}
    if hint in plain:
        return plain[hint]
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is type(None):
        return "nothing"
    if origin is Literal:
        return " or ".join(map(repr, inner))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(words, inner))
    if origin is not None and inner and isinstance(origin, type) and issubclass(origin, typing.Sequence):
        kinds = dict.fromkeys(words(one) for one in inner if one is not Ellipsis)
        return f"list of {' and '.join(kinds)}"
    return getattr(hint, "__name__", str(hint)).lower()


def _arguments(rule: Callable[..., Any]) -> Iterator[Argument]:
    hints = typing.get_type_hints(rule if dataclasses.is_dataclass(rule) else inspect.unwrap(rule))
    for one in inspect.signature(rule).parameters.values():
        if one.kind is one.VAR_KEYWORD:
            yield Argument(_FOLLOWS, "every setting of the method's solver", "")
        else:
            default = "(needed)" if one.default is one.empty else _default(one.default)
            yield Argument(one.name, words(hints.get(one.name, Any)), default)


def _default(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_default, value))}]"
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)


def page() -> str:
    """The whole reference page."""
    parts = ["# Reference\n\nGenerated by `python -m fedalloy.cli.docs`; do not edit by hand.\n"]
    parts += ["## Rules\n\n`fedalloy list` and `fedalloy show NAME` print the same in a terminal.\n"]
    parts += [_category(category) for category in CATEGORIES]
    parts += ["## Recipes\n\nA recipe is a TOML file. Every table is optional.\n", *_recipe()]
    parts += ["## Command line\n", *_commands()]
    return "\n".join(parts)


def _category(category: str) -> str:
    rules = [describe(category, name) for name in registry.names(category)]
    body = "\n".join(map(_rule, rules)) or "None yet.\n"
    return f"### {category.capitalize()}{'' if category.endswith('s') else 's'}\n\n{body}"


def _rule(rule: RuleText) -> str:
    also = "".join(f", `{alias}`" for alias in registry.aliases_of(rule.category, rule.name))
    lines = [f"#### `{rule.name}`{also}\n", rule.text.partition("\n>>>")[0].strip(), ""]
    if rule.arguments:
        lines += ["| argument | allowed | default |", "|---|---|---|"]
        lines += [f"| `{one.name}` | {_cell(one.kind)} | {_code(one.default)} |" for one in rule.arguments]
        lines.append("")
    return "\n".join(lines)


def _recipe() -> Iterator[str]:
    from fedalloy.experiment.recipe.tables import Recipe
    from fedalloy.experiment.recipe.walking import fields, tables

    yield _fields_table("Top level", Recipe.__doc__ or "", fields(Recipe))
    for heading, table in tables(Recipe):
        yield _fields_table(f"`{heading}`", table.__doc__ or "", fields(table))


def _fields_table(heading: str, text: str, rows: list[tuple[str, str, str]]) -> str:
    lines = [f"### {heading}\n", inspect.cleandoc(text), "", "| key | default | meaning |", "|---|---|---|"]
    return "\n".join(
        [*lines, *(f"| `{name}` | {_code(default)} | {_cell(said)} |" for name, default, said in rows), ""]
    )


def _commands() -> Iterator[str]:
    import click
    from typer.main import get_command

    from fedalloy.cli.app import EXIT_CODES, app

    def walk(command: click.Command, path: str) -> Iterator[str]:
        if isinstance(command, click.Group):
            for name, inner in command.commands.items():
                yield from walk(inner, f"{path} {name}")
        elif not command.hidden:
            yield _command(command, path)

    yield f"{EXIT_CODES}\n"
    yield from walk(get_command(app), "fedalloy")


def _command(command: Any, path: str) -> str:
    lines = [
        f"### `{path}`\n",
        inspect.cleandoc(command.help or ""),
        "",
        "| argument or option | meaning |",
        "|---|---|",
    ]
    for parameter in command.params:
        if parameter.name == "help":
            continue
        name = (
            ", ".join(parameter.opts)
            if parameter.param_type_name == "option"
            else (parameter.metavar or parameter.name.upper())
        )
        lines.append(f"| `{name}` | {_cell(getattr(parameter, 'help', '') or '')} |")
    return "\n".join([*lines, ""])


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def main(arguments: list[str]) -> int:
    """Write the page, or check it."""
    made = page()
    if "--check" not in arguments:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(made, encoding="utf-8")
        return 0
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == made:
        return 0
    print(f"{PAGE} is out of date: run 'python -m fedalloy.cli.docs' and commit the result", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
