"""What tasks, objectives and engines may say is declared in their classes: nobody looks whether they have an attribute.

A probe is ``getattr`` or ``hasattr`` with a name written out, on something that is a task, an objective or an engine.
Which that is, is read off the source: a parameter or variable annotated as one, a name or attribute called ``task``,
``objective`` or ``engine``, or any value asked for a member that only these classes declare.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from fedalloy import algorithms, fit, unfold
from fedalloy.core import registry
from fedalloy.core.engine import Engine, Outcome
from fedalloy.core.errors import SpecError
from fedalloy.core.keys import Key
from fedalloy.core.objective import Objective
from fedalloy.core.task import Task
from fedalloy.core.types import Block, Cohort
from fedalloy.engines.loop import Loop
from fedalloy.experiment.config import RunConfig
from fedalloy.experiment.round import Federation
from fedalloy.tasks.objective import ModuleObjective
from fedalloy.testing import small_task
from fedalloy.testing.rules import specimen

SOURCE = Path(__file__).resolve().parents[1] / "src" / "fedalloy"
KINDS = (Task, Objective, Engine)
NAMES = frozenset({"task", "objective", "engine"})
MEMBERS = frozenset(name for kind in KINDS for name in vars(kind) if not name.startswith("_")) - {"data", "init", "to"}
ALLOWED = {
    ("tasks/objective.py", "training", "capabilities"): "a torch module of the user's, which may have roles",
    ("tasks/objective.py", "training", "classes"): "the same",
    ("tasks/losses/model_loss.py", "returned", "loss"): "what a user's model returned",
}


def probes(code: str) -> Iterator[tuple[str, str]]:
    """Of what is asked which attribute, for every probe of a source text."""
    tree = ast.parse(code)
    typed = _typed(tree)
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) >= 2):
            continue
        if node.func.id not in {"getattr", "hasattr"} or not isinstance(node.args[1], ast.Constant):
            continue
        owner, name = _last(node.args[0]), str(node.args[1].value)
        if owner.lstrip("_") in NAMES | typed or name in MEMBERS:
            yield owner, name


def _typed(tree: ast.Module) -> frozenset[str]:
    """Names that are annotated as a task, an objective or an engine anywhere in the file."""
    kinds, found = {kind.__name__ for kind in KINDS}, set()
    for node in ast.walk(tree):
        hint = node.annotation if isinstance(node, ast.arg | ast.AnnAssign) else None
        said = {part.id for part in ast.walk(hint) if isinstance(part, ast.Name)} if hint is not None else set()
        if any(kind == one or one.endswith(kind) for kind in kinds for one in said):
            found.add(node.arg if isinstance(node, ast.arg) else _last(node.target))  # type: ignore[attr-defined]
    return frozenset(found)


def _last(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def test_nobody_looks_whether_a_task_an_objective_or_an_engine_has_an_attribute():
    files = sorted(SOURCE.rglob("*.py"))
    assert files
    found = {(str(file.relative_to(SOURCE)), *probe) for file in files for probe in probes(file.read_text())}
    assert found == ALLOWED.keys(), "declare the member in core.task, core.objective or core.engine"


@pytest.mark.parametrize(
    "code",
    [
        "getattr(task, 'names', None)",
        "hasattr(self.fed.engine, 'close')",
        "getattr(trained.fed.task.objective, 'anything', None)",
        "def f(there: Task) -> None:\n    hasattr(there, 'anything')",
        "def f(one: ModuleObjective | None) -> None:\n    getattr(one, 'anything', 0)",
        "crew: Engine = make()\ngetattr(crew, 'anything')",
        "getattr(whatever, 'needs_full_batches', False)",
    ],
)
def test_a_planted_probe_is_caught(code):
    assert len(list(probes(code))) == 1


@pytest.mark.parametrize("code", ["getattr(loss, 'reduction', None)", "getattr(task, part)", "task.names"])
def test_other_questions_are_allowed(code):
    assert list(probes(code)) == []


@pytest.mark.parametrize("kind", KINDS)
def test_every_member_is_documented(kind):
    members = [name for name in vars(kind) if not name.startswith("_")]
    source = ast.parse((SOURCE / "core" / f"{kind.__name__.lower()}.py").read_text())
    body = next(node for node in source.body if isinstance(node, ast.ClassDef) and node.name == kind.__name__).body
    said = {node.name for node in body if isinstance(node, ast.FunctionDef) and ast.get_docstring(node)}
    after = pairwise(body)
    said |= {_last(one.target) for one, text in after if isinstance(one, ast.AnnAssign) and isinstance(text, ast.Expr)}
    assert set(members) - said == set()


CATEGORIES = ("methods", "testing")
COMPUTED = {
    ("methods/solvers/training.py", "second_epochs"): "a subclass computes it from its settings",
    ("testing/handles.py", "cross"): "it raises",
    ("testing/handles.py", "payload"): "it raises",
}


def constants(code: str) -> Iterator[str]:
    """Properties that return the same for every object of their class."""
    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, ast.FunctionDef) or "property" not in map(_last, node.decorator_list):
            continue
        returned = [one.value for one in ast.walk(node) if isinstance(one, ast.Return) and one.value is not None]
        if returned and "self" not in {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}:
            yield node.name


def test_what_a_rule_declares_once_for_all_is_a_class_variable():
    files = [file for category in CATEGORIES for file in sorted((SOURCE / category).rglob("*.py"))]
    found = {(str(file.relative_to(SOURCE)), name) for file in files for name in constants(file.read_text())}
    assert found == COMPUTED.keys(), "write 'name: ClassVar[...] = ...' in place of such a property"


@pytest.mark.parametrize(("value", "caught"), [("True", ["name"]), ("self.power > 1", [])])
def test_a_planted_constant_is_caught(value, caught):
    assert list(constants(f"class A:\n    @property\n    def name(self) -> bool:\n        return {value}\n")) == caught


@pytest.mark.parametrize("category", ["solver", "weighting", "server", "wire"])
def test_no_declaration_has_become_an_argument(category):
    """An annotation without ClassVar would make it a field, and so a setting of recipes."""
    declared = {"parts", "target", "update", "stateful", "requires", "reads_payload", "weight_bound", "counts_idle"}
    declared |= {"asks", "guards_all_parts", "needs_everyone", "roles", "provides", "kind", "linear", "clips"}
    for name in registry.names(category):
        assert {one.name for one in fields(type(specimen(category, name)))} & declared == set()


WORDS = {"term"}  # which is also the name of a method


def methods_named(code: str) -> set[str]:
    """Published methods whose names stand in a text, however they are written."""
    words = set(re.findall("[a-z0-9]+", code.lower().replace("_", "")))
    published = {name.replace("_", "") for name in registry.names("algorithm")} | {"superfed", "acgan", "cvae", "cgan"}
    return (published - WORDS) & words


def test_core_knows_no_method_by_its_name():
    found = {file.name: methods_named(file.read_text()) for file in (SOURCE / "core").glob("*.py")}
    assert {name: said for name, said in found.items() if said} == {}


def test_a_method_named_in_core_is_caught():
    assert methods_named("needs a generative model ('acgan' for FedCGAN), see SuPerFed") == {
        "acgan",
        "fedcgan",
        "superfed",
    }


class Foreign:
    """A task in all but name."""

    population = 2
    objective = ModuleObjective(lambda: nn.Linear(3, 2))

    def data(self, part: str, ids: Tensor) -> Block:
        """Four examples for everybody."""
        return Block(torch.zeros(8, 3), torch.zeros(8, dtype=torch.int64), ids * 4, torch.full_like(ids, 4))


class Own(Foreign, Task):
    """The same as a task."""


@dataclass(frozen=True)
class Elsewhere(Task):
    """A task with an objective of one's choice."""

    objective: Any
    population: int = 2

    def data(self, part: str, ids: Tensor) -> Block:
        """Four examples for everybody."""
        return Foreign().data(part, ids)


def test_a_task_that_inherits_needs_three_members():
    assert len(list(fit(algorithms.fedavg(), Own(), rounds=1, engine="loop").rounds())) == 1


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (Foreign(), r"got Foreign: a custom task inherits from fedalloy\.core\.task\.Task"),
        (Elsewhere(Foreign()), r"got Foreign: a custom objective inherits from fedalloy\.core\.objective"),
        (type("Short", (Task,), {"data": Foreign.data})(), "task Short has no 'objective'"),
    ],
)
def test_what_lacks_members_is_refused_at_the_door(task, said):
    with pytest.raises(SpecError, match=said):
        fit(algorithms.fedavg(), task, rounds=1)


def test_an_engine_that_is_none_is_refused_at_the_door():
    with pytest.raises(SpecError, match=r"inherits from fedalloy\.core\.engine\.Engine"):
        fit(algorithms.fedavg(), small_task(), rounds=1, engine=lambda *given: None)  # type: ignore[arg-type]


def test_what_is_no_engine_is_refused_where_a_federation_is_built():
    nobody: Any = lambda *given: None  # noqa: E731
    with pytest.raises(SpecError, match=r"the engine of a federation must be .* got function.*core\.engine\.Engine"):
        Federation(algorithms.fedavg(), small_task(), nobody, RunConfig(), Key.of(0))
    with pytest.raises(SpecError, match="unfold: engine must be an engine, got function"):
        unfold("fedavg", small_task(), rounds=1, engine=nobody)


def test_an_engine_far_away_must_say_how_clients_are_scored():
    class Far(Engine):
        data_at_hand = False

        def __call__(self, *given: Any) -> Any:
            return None

    with pytest.raises(SpecError, match="Far declares that the clients' data are not at hand"):
        Far().scores(algorithms.fedavg(), {}, {}, torch.arange(1), ("loss",), ["global"])


class Answering(Loop):
    """A loop whose answer is changed."""

    def __init__(self, change: Callable[[Outcome], Any]) -> None:
        self.change = change

    def __call__(self, *given: Any) -> Any:
        return self.change(super().__call__(*given))


def _with_rows(*rows: int) -> Callable[[Outcome], Outcome]:
    return lambda outcome: replace(outcome, cohort=cast(Cohort, outcome.cohort).take(torch.tensor(rows)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_with_rows(0, 1, 2, 3, 4, 4), r"returned the clients \[0, 1, 2, 3, 4, 4\]: allowed are those of"),
        (_with_rows(1, 0, 2, 3, 4), "each at most once and in ascending order"),
        (lambda one: replace(one, cohort=replace(one.cohort, ids=one.cohort.ids + 1)), r"\[1, 2, 3, 4, 5\]: allowed"),
        (lambda one: replace(one, cohort=replace(one.cohort, stats={})), "returned no 'bytes_up' for its clients"),
        (lambda one: one.cohort, r"must return a fedalloy\.core\.engine\.Outcome, got Cohort"),
    ],
)
def test_an_answer_that_would_be_counted_wrongly_is_refused(change, said):
    with pytest.raises(SpecError, match=said):
        fit(algorithms.fedavg(), small_task(), rounds=1, engine=Answering(change))


def test_an_engine_may_leave_clients_out():
    (row,) = fit(algorithms.fedavg(), small_task(), rounds=1, engine=Answering(_with_rows(0, 3))).rounds()
    assert row["ids"] == [0, 3]
