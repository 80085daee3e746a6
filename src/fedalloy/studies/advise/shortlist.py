"""Which methods are worth trying on a federation, and why the others are not."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any, Literal

from fedalloy.core import registry
from fedalloy.core.errors import FedalloyError, SpecError, nearest
from fedalloy.studies.advise.facts import REFERENCE, Fact
from fedalloy.studies.advise.measuring import NAMES, Measures

FILE = Path(__file__).with_name("methods.toml")
Aim = Literal["mean", "worst"]
ALWAYS = (REFERENCE, "fedavg_ft")
"""The method that others are compared with, and the simplest one with personal models."""
_ORDER = {"mean": ("personal", "shared", "fair"), "worst": ("fair", "fair", "personal", "shared")}
"""The kinds in whose turn the next method is chosen."""
_NEEDS = {
    "all_clients": "needs every client in every round",
    "head": "needs a model with more than one layer",
    "norm": "needs a model with normalisation layers",
    "valid": "needs validation parts",
}


@dataclass(frozen=True)
class MethodNotes:
    """What is known about a method before it is tried; the fields are explained in ``methods.toml``."""

    name: str
    kind: str
    why: str = ""
    signs: Mapping[str, float] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    work: float = 1.0
    upload: float = 1.0
    never: str = ""


@dataclass(frozen=True)
class MethodChoice:
    """A method that is tried, or not (then ``refused`` says why): the reason, what our runs say, and its cost."""

    name: str
    kind: str
    reason: str
    facts: tuple[str, ...]
    work: float
    upload: float
    refused: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**vars(self), "facts": list(self.facts)}


@cache
def method_notes() -> dict[str, MethodNotes]:
    """The notes of all methods, by name."""
    tables = tomllib.loads(FILE.read_text(encoding="utf-8"))
    return {name: _notes(name, table) for name, table in tables.items()}


def _notes(name: str, table: dict[str, Any]) -> MethodNotes:
    renamed: dict[str, Any] = {"never" if key == "not" else key: one for key, one in table.items()}
    renamed["needs"] = tuple(table.get("needs", ()))
    return MethodNotes(name, **renamed)


def shortlist(
    found: Measures,
    facts: Sequence[Fact],
    aim: Aim,
    most: int,
    refusal: Callable[[str], str],
    one_model: bool = False,
    named: Sequence[str] = (),
) -> list[MethodChoice]:
    """All methods, those to be tried first, in the order of what speaks for them.

    ``refusal`` says why a method cannot run with the recipe. With ``named`` methods these are tried, and no others but
    those that always are.
    """
    check_named(named, one_model)
    known = {name: _candidate(one, found, facts, aim, one_model, refusal) for name, one in method_notes().items()}
    for name in set(named):
        known[name] = _asked(known[name], refusal(name))
    open_ones = [one for one in known.values() if not one.refused]
    first = [one for one in open_ones if one.name in (ALWAYS if not named else (*ALWAYS[:1], *named))]
    first.sort(key=lambda one: (one.name not in ALWAYS, one.name != REFERENCE))
    rest = _by_turns([one for one in open_ones if one not in first], found, facts, aim) if not named else []
    chosen = [*first, *rest][: max(most, len(first))]
    left = [one for one in known.values() if one not in chosen]
    said = "was not named" if named else f"others had more in favour (the {len(chosen)} most promising are tried)"
    return [*chosen, *(one if one.refused else _refused(one, said) for one in left)]


def check_named(named: Sequence[str], one_model: bool) -> None:
    """Refuse methods that do not exist, or that the question rules out."""
    for name in named:
        if name not in registry.names("algorithm"):
            raise SpecError(f"methods: unknown '{name}': {nearest(name, registry.names('algorithm'))}")
        if one_model and method_notes()[name].kind == "personal":
            raise SpecError(
                f"methods: '{name}' gives every client a model of its own, and one model for all is asked for "
                "(one_model): leave out one of the two"
            )


def _candidate(
    one: MethodNotes, found: Measures, facts: Sequence[Fact], aim: Aim, one_model: bool, refusal: Callable[[str], str]
) -> MethodChoice:
    met = _met(one, found)
    told = [fact.text() for fact in facts if fact.method == one.name and fact.outcome in ("better", "worse")]
    undecided = sum(fact.method == one.name and fact.outcome == "undecided" for fact in facts)
    told += [f"undecided in {undecided} comparisons"] if undecided else []
    seen = f" ({', '.join(met)})" if met else ""
    made = MethodChoice(one.name, one.kind, f"{one.why}{seen}", tuple(told), one.work, one.upload)
    return _refused(made, _why_not(one, found, aim, one_model, bool(met)) or refusal(one.name))


def _asked(one: MethodChoice, refused: str) -> MethodChoice:
    """A method that the user names is tried unless it cannot run."""
    return MethodChoice(one.name, one.kind, "named by you", one.facts, one.work, one.upload, refused)


def _refused(one: MethodChoice, why: str) -> MethodChoice:
    return MethodChoice(one.name, one.kind, one.reason, one.facts, one.work, one.upload, why)


def _met(one: MethodNotes, found: Measures) -> list[str]:
    """The measures that speak for a method, in words."""
    values = {name: found.values.get(name) for name in one.signs}
    return [
        f"{NAMES[name].partition(' (')[0]} {value:.2g}"
        for name, value in values.items()
        if value is not None and value >= one.signs[name]
    ]


def _why_not(one: MethodNotes, found: Measures, aim: Aim, one_model: bool, met: bool) -> str:
    if one.never:
        return one.never
    if one_model and one.kind == "personal":
        return "every client would have a model of its own, and one for all is wanted"
    lacks = {"all_clients": bool(found.values.get("absent")), "head": found.layers < 2, "norm": not found.normalised}
    if missing := next((name for name in one.needs if lacks.get(name)), None):
        return _NEEDS[missing]
    if one.name in ALWAYS or met or (aim == "worst" and one.kind == "fair"):
        return ""
    wanted = " or ".join(f"{NAMES[name].partition(' (')[0]} of {least:g}" for name, least in one.signs.items())
    return f"nothing in the measures speaks for it (it asks for {wanted})" if wanted else "nothing speaks for it"


def _by_turns(some: Sequence[MethodChoice], found: Measures, facts: Sequence[Fact], aim: Aim) -> list[MethodChoice]:
    """The best of every kind, then the next best of every kind, and so on, so that all kinds are tried."""
    notes = method_notes()

    def favour(one: MethodChoice) -> tuple[float, float]:
        mine = [fact for fact in facts if fact.method == one.name and fact.part == 1.0]
        ahead = {fact.federation for fact in mine if fact.outcome == "better"}
        behind = {fact.federation for fact in mine if fact.outcome == "worse"}
        return -(len(_met(notes[one.name], found)) + len(ahead) - len(behind)), one.work * max(one.upload, 1.0)

    queues = {kind: sorted((one for one in some if one.kind == kind), key=favour) for kind in set(_ORDER[aim])}
    ordered: list[MethodChoice] = []
    for kind in cycle(_ORDER[aim]):
        if len(ordered) == len(some):
            break
        ordered += [queues[kind].pop(0)] if queues[kind] else []
    return ordered


def refusal_of(build: Callable[[str], object]) -> Callable[[str], str]:
    """Why a method cannot be built with a recipe, in the words of the error."""

    def refusal(name: str) -> str:
        try:
            build(name)
        except (FedalloyError, ValueError) as error:
            return f"cannot run here: {error}"
        return ""

    return refusal
