"""Declarations of experiments: cases (recipes and their changes), published numbers and claims; and where the
declarations that come with fedalloy are."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError

from fedalloy.core.errors import SpecError, nearest
from fedalloy.experiment.recipe import Recipe, entry_names, parse, quick, read
from fedalloy.experiment.recipe.changes import assign, put
from fedalloy.experiment.recipe.resolving import scored

Relation = Literal["above", "below", "near", "bounded", "fails"]
DataKind = Literal["as published", "part of it", "stand-in"]
Stated = int | Literal["not stated", "with the data"]


class DeclaredTable(BaseModel):
    """A table of a claims file; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)


class Case(DeclaredTable):
    """One recipe with some values changed: a column or a block of a published table."""

    name: str
    """The name of the case."""
    recipe: str
    """The recipe, relative to the folder of recipes (or to that of the experiment's own file)."""
    set: dict[str, Any] = {}
    """What differs from the recipe: `{ "partition.classes" = 1 }`; a table replaces the whole table."""
    methods: list[str] | None = None
    """Entries of the recipe's comparison; default: all."""
    seconds_per_round: float | None = None
    """Measured on one core: the mean over the rounds of the methods that were run."""


class Claim(DeclaredTable):
    """One claim of a paper, as a comparison that data can decide."""

    text: str
    """The claim in a sentence."""
    cases: Annotated[list[str], Field(min_length=1)]
    """Where it is claimed: one verdict for each."""
    method: str
    """The method it is about."""
    score: str
    """What is compared (see `fedalloy.studies.reproduce.scoring`)."""
    relation: Relation
    """`above` or `below` all others (or a value), `near` them, `bounded`: at most `than` in every run, or `fails`: runs
    diverge or end worse than the value."""
    others: list[str] = []
    """The methods that the paper compares it with, and no others; paired by seed."""
    controls: list[str] = []
    """Methods that we compare it with and the paper does not: each has a line of its own, outside the verdict."""
    beside: bool = False
    """Whether it stands beside a claim of the paper, measured in another way, and is no part of the verdict."""
    than: str | None = None
    """Another score of the same method to compare with."""
    value: float | None = None
    """A number to compare with."""
    margin: float | None = None
    """For `near`: how far away is still near, written down before the runs."""
    length_tolerance: float = Field(default=0.0, ge=0.0, lt=1.0)
    """By which share rounds, clients and cohort may differ from the published ones; beyond it a run is preliminary."""
    source: str | None = None
    """The table, figure or theorem, where it is another than the experiment's."""
    note: str = ""
    """What readers must know to understand the verdict."""


class Published(DeclaredTable):
    """Numbers of a table: for every case and method one per score, in order."""

    scores: list[str] = []
    """The scores, in the order of the numbers."""
    cases: dict[str, dict[str, list[float | str]]] = {}
    """`cases.CASE.METHOD = [..]`; a text (such as "failed") where there is no number."""


class Protocol(DeclaredTable):
    """The published length of the runs, and how our data relate to the published ones."""

    rounds: Stated | None = None
    """The rounds of a run, or `"not stated"`: then the recipe's count."""
    clients: Stated | None = None
    """The number of clients; `"with the data"` where adapted data bring their own."""
    cohort: Stated | None = None
    """How many of them take part in a round."""
    data: DataKind | None = None
    """`"as published"`, `"part of it"` or `"stand-in"`; the last two are judged and labelled "adapted data"."""
    adapted: str | None = None
    """What else differs from the paper, in words: judged and labelled."""


class Protocols(Protocol):
    """The protocol of all cases, and where single cases differ from it."""

    cases: dict[str, Protocol] = {}
    """`cases.CASE`: the values that differ."""

    def of(self, case: str) -> Protocol:
        """The protocol of a case; what nobody declares is not stated, and the data are as published."""
        unknown = {"rounds": "not stated", "clients": "not stated", "cohort": "not stated", "data": "as published"}
        general = self.model_dump(exclude={"cases"}, exclude_none=True)
        special = self.cases[case].model_dump(exclude_none=True) if case in self.cases else {}
        return Protocol.model_validate(unknown | general | special)


class PaperExperiment(DeclaredTable):
    """An experiment of a paper: what is run, what was published, what is claimed."""

    name: str = ""
    title: str
    """One line."""
    paper: str = ""
    """The paper, by its authors and its method."""
    source: str
    """The table or figure."""
    setting: str = ""
    """What readers must know about the protocol, in Markdown."""
    reading: str = ""
    """An interpretation of the measured numbers, in Markdown; written by hand."""
    reference: str | None = None
    """The method to which differences are given; default: the first."""
    also: list[str] = []
    """Further scores that the page shows."""
    cases: list[Case] = []
    """The cases; none where another program makes the measurements."""
    published: Published = Published()
    protocol: Protocols = Protocols()
    claims: list[Claim] = []
    command: str | None = None
    """The command to measure it, if it is not `fedalloy reproduce NAME`."""
    _folder: Path | None = PrivateAttr(default=None)

    @property
    def scores(self) -> list[str]:
        """All scores that are used: the published ones, those of claims, and the further ones."""
        claimed = [score for claim in self.claims for score in (claim.score, claim.than) if score]
        return list(dict.fromkeys([*self.published.scores, *self.also, *claimed]))

    def case(self, name: str) -> Case:
        """One of the cases."""
        found = {case.name: case for case in self.cases}
        if name not in found:
            raise SpecError(f"{self.name} has no case '{name}': {nearest(name, found)}")
        return found[name]


def load_experiment(name: str) -> PaperExperiment:
    """The declaration of an experiment, by its name or from a file."""
    file = claims_file(name)
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SpecError(f"there is no experiment {file}; 'fedalloy reproduce --list' shows all") from None
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"{file} is not TOML: {error}") from None
    try:
        found = PaperExperiment.model_validate({**data, "name": file.stem})
    except ValidationError as error:
        said = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors(include_url=False))
        raise SpecError(f"{file}: {said}") from None
    found._folder = file.parent
    _check(found)
    return found


def target_of(experiment: PaperExperiment, case: str) -> str:
    """The metric of a case's scores, unless they name another; accuracy where another program measures."""
    if not experiment.cases:
        return "accuracy"
    return str(scored(declared_recipe(experiment, case)).run.target_metric)


def declared_recipe(experiment: PaperExperiment, case: str) -> Recipe:
    """The recipe of a case as it is declared, without changes of a user."""
    return recipe_of(experiment, experiment.case(case), near=experiment._folder)


def recipe_of(
    experiment: PaperExperiment,
    case: Case,
    changes: list[str] | None = None,
    short: bool = False,
    near: Path | None = None,
) -> Recipe:
    """The recipe of a case after its own changes, the user's, and (``short``) those of ``--quick``."""
    data = read(_recipe_file(case.recipe, near))
    for path, value in case.set.items():
        put(data, path, value)
    recipe = parse(assign(data, changes or []), f"{experiment.name}, case '{case.name}'")
    if case.methods is not None:
        known = {entry.name: entry for entry in recipe.compare}
        for name in case.methods:
            if name not in known:
                raise SpecError(f"{experiment.name}, case '{case.name}': no method '{name}': {nearest(name, known)}")
        recipe = recipe.model_copy(update={"compare": [known[name] for name in case.methods]})
    return quick(recipe) if short else recipe


def methods_of(recipe: Recipe) -> list[str]:
    """The names of the rows of a case."""
    return entry_names(recipe) or [recipe.name or recipe.algorithm.name or "fedavg"]


def _recipe_file(recipe: str, near: Path | None) -> Path:
    own = near / recipe if near else None
    return own if own is not None and own.is_file() else recipes_folder() / recipe


def _check(experiment: PaperExperiment) -> None:
    """Refuse claims that cannot be decided, before anything runs."""
    for number, claim in enumerate(experiment.claims):
        _check_claim(claim, f"{experiment.name}: claims.{number}")
        for case in claim.cases if experiment.cases else []:
            experiment.case(case)
    for case in experiment.protocol.cases if experiment.cases else []:
        experiment.case(case)
    for case, rows in experiment.published.cases.items():
        for method, numbers in rows.items():
            if len(numbers) != len(experiment.published.scores):
                raise SpecError(
                    f"{experiment.name}: published.cases.{case}.{method} has {len(numbers)} numbers for "
                    f"{len(experiment.published.scores)} scores"
                )


def _check_claim(claim: Claim, where: str) -> None:
    sides = sum((bool(claim.others or claim.controls), claim.than is not None, claim.value is not None))
    if claim.relation == "fails":
        if claim.others or claim.controls or claim.than is not None:
            raise SpecError(f"{where}: 'fails' is about the method alone: leave 'others', 'controls' and 'than' out")
    elif sides != 1:
        raise SpecError(f"{where}: give one of 'others', 'than' or 'value' to compare with, not {sides}")
    if claim.relation == "bounded" and claim.than is None:
        raise SpecError(f"{where}: 'bounded' needs the score of the bound in 'than'")
    if (claim.relation == "near") != (claim.margin is not None):
        raise SpecError(f"{where}: 'near' needs a margin, and no other relation has one")
    both = set(claim.others) & set(claim.controls)
    if both or claim.method in (*claim.others, *claim.controls):
        twice = ", ".join(sorted(both)) or claim.method
        raise SpecError(f"{where}: {twice} is on both sides: name each method once")


_PACKAGE = Path(__file__).resolve().parents[2]


def recipes_folder() -> Path:
    """``recipes`` of the checkout, or the copy inside the package of a wheel."""
    for place in (_PACKAGE / "recipes", _PACKAGE.parents[1] / "recipes"):
        if (place / "claims").is_dir():
            return place
    raise SpecError(
        "this installation of fedalloy contains no recipes: install it from its wheel, or work in a checkout of its "
        "repository"
    )


def experiment_names() -> list[str]:
    """The names of the experiments that come with fedalloy."""
    return sorted(file.stem for file in (recipes_folder() / "claims").glob("*.toml"))


def claims_file(name: str) -> Path:
    """The declaration of an experiment: one that comes with fedalloy, by its name, or any file."""
    if name.endswith(".toml"):
        return Path(name)
    known = experiment_names()
    if name not in known:
        raise SpecError(f"unknown experiment '{name}': {nearest(name, known)}")
    return recipes_folder() / "claims" / f"{name}.toml"
