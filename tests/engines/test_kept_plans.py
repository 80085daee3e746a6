"""What rounds keep for rounds of the same sizes: no number depends on it, whatever changes in between."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from fedalloy import fit
from fedalloy.core import blocks, statistics, types
from fedalloy.core.algorithm import Algorithm, server_step
from fedalloy.core.keys import Key
from fedalloy.core.recount import recounted
from fedalloy.core.statistics import SizeLimits
from fedalloy.core.types import Plan, Work
from fedalloy.engines.batched import Batched
from fedalloy.methods.servers.sgd import ServerSgd
from fedalloy.methods.solvers import epoch_plans, training
from fedalloy.methods.solvers.ditto import Ditto
from fedalloy.methods.solvers.prox import Prox
from fedalloy.methods.solvers.sgd import Sgd
from fedalloy.methods.weightings.samples import Samples
from fedalloy.methods.weightings.uniform import Uniform
from fedalloy.testing import small_task, work
from fedalloy.testing.comparing import copied, differences
from tests.engines.rounds import context, play, shared_of, task_of, visible

KEPT = (
    (epoch_plans, "_kept_schedule"), (training, "count_steps"), (types, "_kept_defaults"), (statistics, "_limits"),
    (statistics, "_size_statistic"),
)  # fmt: skip
"""The functions whose answers are kept."""


@dataclass(frozen=True)
class Writes(Sgd):
    """Writes into its own plan, which may be one that is kept."""

    def plan(self, sizes: Tensor, epochs: Tensor, keys: Key) -> Plan:
        made = super().plan(sizes, epochs, keys)
        made.mask[:, 1:] = False
        made.phase.add_(1)
        return made


SIZES = ((5, 3, 6, 1), (6, 6, 6, 6), (3, 5, 1, 6))
SOLVERS: tuple[Sgd | Prox | Ditto, ...] = (
    Sgd(lr=0.3, batch_size=5), Sgd(lr=0.3, batch_size=2), Sgd(lr=0.3, batch_size=5, epochs=2),
    Sgd(lr=0.3, batch_size=5, leftover="drop"), Sgd(lr=0.3, batch_size=5, leftover="merge"),
    Writes(lr=0.3, batch_size=5), Sgd(lr=0.3, batch_size=5, momentum=0.9),
    Prox(mu=0.5, lr=0.3, batch_size=5, weight_decay=0.1), Sgd(lr=0.3, batch_size=None),
    Ditto(lr=0.3, batch_size=5, personal_epochs=1), Ditto(lr=0.3, batch_size=5, personal_epochs=2),
)  # fmt: skip
WORK = (work(0, 1, 2, 3), work(0, 2), work(0, 1, 2, 3, epochs=(2, 1, 0, 3)), work(0, 1, 2, 3, active=(True, False) * 2))


def rounds() -> list[Any]:
    """Rounds of all kinds one after another, as several runs in one process have them; every other one is the first
    again, so that it follows everything else."""
    tasks = [task_of(lambda: nn.Linear(4, 3), sizes) for sizes in SIZES]
    cases = [(tasks[0], solver, WORK[0]) for solver in SOLVERS]
    usual = [Work.undisturbed(torch.arange(clients)) for clients in (3, 2)]
    cases += [(task, SOLVERS[0], now) for task in tasks for now in (*WORK, *usual)]
    return [one_round(*case) for other in cases for case in (other, cases[0])]


def one_round(task: Any, solver: Any, now: Work) -> Any:
    """What clients send and what the server makes of it."""
    algorithm = Algorithm(solver, Samples() if solver.epochs > 1 else Uniform(), ServerSgd())
    ctx = context(algorithm, task)
    outcome = play(Batched(), algorithm, task, now)
    limits = SizeLimits(10.0 if solver.epochs > 1 else 5.5, whole=solver.momentum > 0)
    cohort = recounted(algorithm, outcome.cohort, now, ctx, SizeLimits())
    state = {"shared": shared_of(algorithm, task), "weighting": {}, "server": {}}
    step = server_step(algorithm, state, cohort, ctx, None, limits)
    said = {"steps": cohort.stats["num_steps"], "dropped": {str(client): why for client, why in step.dropped.items()}}
    return copied({**visible(outcome), **said, "model": step.state["shared"]["params"]})


class Nothing(WeakIdKeyDictionary):
    """Keeps nothing."""

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    """The same rounds with nothing kept."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name in KEPT:
            patch.setattr(module, name, getattr(module, name).__wrapped__)
        patch.setattr(epoch_plans, "_schedule", epoch_plans._kept_schedule)
        patch.setattr(types, "_defaults", types._kept_defaults)
        patch.setattr(blocks, "_known_steps", Nothing())
        return rounds()


def changed(found: list[Any], expected: list[Any]) -> list[str]:
    return [gap for one, other in zip(found, expected, strict=True) for gap in differences(one, other, 0.0)]


def test_rounds_after_others_are_what_they_are_alone(expected):
    assert changed(rounds(), expected) == []


def forgetful(function: Callable[..., Any], place: int) -> Callable[..., Any]:
    """A kept function that gives an earlier answer though one argument is another."""
    answers: dict[Any, Any] = {}

    def found(*given: Any) -> Any:
        known = given[:place] + given[place + 1 :]
        if known not in answers:
            answers[known] = function.__wrapped__(*given)  # type: ignore[attr-defined]
        return answers[known]

    found.cache_clear = lambda: None  # type: ignore[attr-defined]
    return found


def noticed(expected: list[Any]) -> bool:
    try:
        return changed(rounds(), expected) != []
    except (RuntimeError, IndexError, ValueError):  # torch's, where shapes do not fit
        return True


FORGOTTEN = [
    (epoch_plans, "_kept_schedule", 0), (epoch_plans, "_kept_schedule", 1), (epoch_plans, "_kept_schedule", 2),
    (epoch_plans, "_kept_schedule", 3), (training, "count_steps", 0), (training, "count_steps", 1),
    (training, "count_steps", 2), (training, "count_steps", 3), (training, "count_steps", 4),
    (training, "count_steps", 5),
    (types, "_kept_defaults", 0), (statistics, "_size_statistic", 0), (statistics, "_size_statistic", 1),
]  # fmt: skip


@pytest.mark.parametrize(("module", "name", "place"), FORGOTTEN)
def test_an_answer_for_another_question_is_noticed(module, name, place, expected, monkeypatch):
    monkeypatch.setattr(module, name, forgetful(getattr(module, name), place))
    assert noticed(expected)


def needs_are_told_apart() -> bool:
    stats = {"num_examples": torch.tensor([torch.nan, 3.0], dtype=torch.float64)}
    asked = [frozenset[str](), frozenset({"num_examples"})] * 2
    found = [statistics.out_of_range(stats, statistics.STATISTICS, needed)[0].tolist() for needed in asked]
    return found == [[False, False], [True, False]] * 2


def test_limits_of_another_rule_are_noticed(monkeypatch):
    assert needs_are_told_apart()
    monkeypatch.setattr(statistics, "_limits", forgetful(statistics._limits, 1))
    assert not needs_are_told_apart()


def names_are_told_apart() -> bool:
    """The last limits are kept by their question, before any are looked up."""
    far, near = (torch.tensor([value], dtype=torch.float64) for value in (7.0, 0.5))
    asked = ({"train_loss": far, "accuracy_after": near}, {"accuracy_after": far, "train_loss": near}) * 2
    return [statistics.all_in_range(stats, statistics.STATISTICS, frozenset()) for stats in asked] == [True, False] * 2


def test_limits_of_other_statistics_are_noticed(monkeypatch):
    assert names_are_told_apart()
    right = statistics._limits_of
    first = right(dict.fromkeys(("train_loss", "accuracy_after"), torch.zeros(1)), statistics.STATISTICS, frozenset())
    monkeypatch.setattr(statistics, "_limits_of", lambda *_: first)
    assert not names_are_told_apart()


def test_limits_of_other_declarations_are_noticed(monkeypatch):
    stats = {"num_examples": torch.tensor([7.0], dtype=torch.float64)}
    few = {"num_examples": statistics.Statistic("examples", 0, 5)}

    def good() -> list[bool]:
        declared = (statistics.STATISTICS, few) * 2
        return [statistics.all_in_range(stats, one, frozenset()) for one in declared]

    assert good() == [True, False] * 2
    monkeypatch.setattr(statistics, "_limits", forgetful(statistics._limits, 0))
    assert good() != [True, False] * 2


def test_plans_that_were_written_into_are_noticed(expected, monkeypatch):
    epoch_plans._kept_schedule.cache_clear()
    monkeypatch.setattr(epoch_plans, "_schedule", epoch_plans._kept_schedule)
    assert noticed(expected)
    epoch_plans._kept_schedule.cache_clear()


def test_steps_of_a_mask_that_was_written_since_are_read_again():
    mask = torch.ones(2, 3, 2, dtype=torch.bool)
    active = torch.ones(2, dtype=torch.bool)
    assert blocks._steps_of(mask, active).planned.tolist() == [3, 3]
    mask[1, 1:] = False
    assert blocks._steps_of(mask, active).planned.tolist() == [3, 1]
    assert blocks._steps_of(mask, torch.tensor([False, True])).running == [1]


def test_steps_of_another_mask_are_noticed(expected, monkeypatch):
    class ByShape(dict[Any, Any]):
        def get(self, mask: Any, otherwise: Any = None) -> Any:
            return super().get(tuple(mask.shape), otherwise)

        def __setitem__(self, mask: Any, known: Any) -> None:
            super().__setitem__(tuple(mask.shape), known)

    monkeypatch.setattr(blocks, "_known_steps", ByShape())
    assert noticed(expected)


def test_orders_that_were_written_into_are_made_again():
    first = Work.undisturbed(torch.arange(7))
    first.epochs[0], first.active[1] = 3, False
    again = Work.undisturbed(torch.arange(7))
    assert again.epochs.tolist() == [-1] * 7
    assert again.active.tolist() == [True] * 7


def forget() -> None:
    for module, name in KEPT:
        getattr(module, name).cache_clear()


def test_what_was_asked_in_inference_mode_is_asked_again():
    """Where torch does not count writes; an error there would come back in every later run of the process."""
    sizes = torch.tensor([3, 5], dtype=torch.float64)
    limits = SizeLimits(known=sizes.clone())

    def ask() -> list[Any]:
        plan = Sgd(batch_size=2).plan(sizes.long(), torch.tensor([-1, -1]), Key.of(1).each(torch.arange(2)))
        steps = blocks._steps_of(plan.mask, torch.ones(2, dtype=torch.bool))
        work = Work.undisturbed(torch.arange(2))
        return [plan.index, plan.mask, steps.planned, work.epochs, work.active, *limits.look(sizes)]

    forget()
    with torch.inference_mode():
        inside = ask()
    assert all(map(same, inside, ask()))
    forget()


def same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_a_run_in_inference_mode_is_the_run_outside(engine):
    """There nothing can be trained, so that a run leaves it; and it leaves nothing of it behind."""
    forget()
    with torch.inference_mode():
        inside = fit("fedavg", small_task(), rounds=2, engine=engine).ending.state
    outside = fit("fedavg", small_task(), rounds=2, engine=engine).ending.state
    assert list(differences(inside, outside)) == []
    forget()
