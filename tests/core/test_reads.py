"""How often updates are read once the engine has noted norms: by the server's step, and from the notes on."""

from __future__ import annotations

import pytest
import torch

from fedalloy.core import registry, tree
from fedalloy.core.algorithm import Algorithm, server_step
from fedalloy.core.contributions import Notes
from fedalloy.core.keys import Key
from fedalloy.core.protocols import Weighting
from fedalloy.core.types import Cohort, Context
from fedalloy.engines import shared_cohort
from fedalloy.engines.batched import Batched
from fedalloy.engines.loop import Loop
from fedalloy.engines.shared_cohort import SharedCohort, split_columns, sum_columns
from fedalloy.engines.workers import Workers
from fedalloy.methods.servers.sgd import ServerSgd
from fedalloy.methods.solvers.sgd import Sgd
from fedalloy.methods.weightings.fedadp import Angles
from fedalloy.testing import small_task, specimen, work
from tests.core.reading import Reads
from tests.engines.rounds import context, play

CLIENTS, PARAMETERS, CHUNK = 6, 300, 256
RAGGED = (9, 2, 6, 4)
COUNTS = {"num_examples", "num_steps", "step_norm", "effective_steps"}
OTHER_PARTS = {"energies"}
"""Weightings of something else than updates."""


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    """Every leaf has several chunks, so that none stays the current one over a whole pass."""
    monkeypatch.setattr(tree, "_ELEMENTS", CHUNK)


def updates() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    matrix = Key.of(1).normal(CLIENTS, PARAMETERS)
    weight, bias, head = matrix.split((200, 10, 90), dim=1)
    return matrix, {"a.weight": weight.unflatten(1, (10, 20)), "a.bias": bias, "b.weight": head}


def cohort_for(rule: Weighting, leaves: dict[str, torch.Tensor]) -> Cohort:
    drawn = {name: 0.1 + 0.8 * Key.of(2).fold(name).uniform(CLIENTS, dtype=torch.float64) for name in rule.requires}
    stats = {name: (100 * values).ceil() if name in COUNTS else values for name, values in drawn.items()}
    cross = Key.of(3).uniform(CLIENTS, CLIENTS, dtype=torch.float64)
    needs_cross = "cross_score" in rule.requires
    return Cohort(torch.arange(CLIENTS), {"delta": leaves}, stats, cross if needs_cross else None)


def passes_of_the_server(rule: Weighting) -> list[float]:
    """Over the updates, in each of two rounds; the second finds a state."""
    algorithm, found = Algorithm(Sgd(), rule, ServerSgd()), []
    matrix, leaves = updates()
    cohort = cohort_for(rule, leaves)
    state = algorithm.init({name: torch.zeros(leaf.shape[1:]) for name, leaf in leaves.items()}, CLIENTS)
    for round in (1, 2):
        with Reads([matrix], CHUNK) as reads:
            step = server_step(algorithm, state, cohort, Context(round, CLIENTS, Key.of(round), local_lr=0.1))
        assert len(step.ids) == CLIENTS
        state = step.state
        found.append(reads.passes)
    return found


@pytest.mark.parametrize("name", sorted({*registry.names("weighting")} - OTHER_PARTS))
def test_updates_are_read_once_and_twice_where_the_rule_reads_them(name):
    rule = specimen("weighting", name)
    allowed = 3 if isinstance(rule, Angles) else 2 if rule.reads_payload else 1
    found = passes_of_the_server(rule)
    assert max(found) <= allowed
    assert min(found) >= 1, "every update counts"


@pytest.mark.parametrize("level", ["client", "layer"])
def test_mean_products_and_combining_are_three_passes(level):
    assert passes_of_the_server(Angles(level=level)) == [3.0, 3.0]


@pytest.mark.parametrize(
    ("engine", "sizes"),
    [(Loop(), RAGGED), (Batched(), (6, 6, 6)), (Batched(), RAGGED), (Batched(block=2), RAGGED)],
    ids=["one client at a time", "a block in order", "a block sorted by work", "several blocks"],
)
@pytest.mark.parametrize(("name", "server"), [("samples", 1), ("median", 1), ("krum", 2), ("angles", 3)])
def test_notes_are_one_pass_and_engines_hide_none(engine, sizes, name, server, monkeypatch):
    """From the notes on: rows are put beside each other, in the order of ids, before that."""
    monkeypatch.setattr(tree, "_ELEMENTS", 24)
    task, rule = small_task(sizes=sizes), specimen("weighting", name)
    algorithm = Algorithm(Sgd(lr=0.1, batch_size=4), rule, ServerSgd())
    state = algorithm.init(task.objective.init(Key.of(1))[0], task.population)
    with Reads([], 24) as reads:
        watch_when_noted(reads, monkeypatch)
        cohort = play(engine, algorithm, task).cohort
        for leaf in cohort.payload["delta"].values():
            reads.watch(leaf)
        step = server_step(algorithm, state, cohort, context(algorithm, task))
    assert len(step.ids) == task.population
    elements = sum(leaf.numel() for leaf in cohort.payload["delta"].values())
    assert reads.elements / elements == 1 + server, reads.log


@pytest.fixture
def workers():
    engine = Workers(2)
    yield engine
    engine.close()


@pytest.mark.parametrize(("name", "server"), [("samples", 1), ("median", 1), ("krum", 2), ("angles", 3)])
def test_workers_note_a_row_once_where_it_lies_and_hide_no_pass(workers, name, server, monkeypatch):
    """A process notes the row that it wrote; whoever steps the server reads what the rule asks for, and no more."""
    monkeypatch.setattr(tree, "_ELEMENTS", 24)
    task, rule = small_task(sizes=RAGGED), specimen("weighting", name)
    algorithm = Algorithm(Sgd(lr=0.1, batch_size=4), rule, ServerSgd())
    state, ctx = algorithm.init(task.objective.init(Key.of(1))[0], task.population), context(algorithm, task)
    cohort = play(workers, algorithm, task).cohort
    assert isinstance(cohort, SharedCohort)
    elements = sum(leaf.numel() for leaf in cohort.payload["delta"].values())
    with Reads(cohort.payload["delta"].values(), 24) as reads:
        step = server_step(algorithm, state, cohort, ctx)
    assert len(step.ids) == task.population
    assert reads.elements / elements == server, reads.log
    with Reads([], 24) as noting:
        watch_when_noted(noting, monkeypatch)
        assert not isinstance(workers._crew.run(1, work(1), ctx), str)
    assert noting.elements == elements / task.population, noting.log


def test_what_processes_sum_is_read_by_them_alone_and_once(workers, monkeypatch):
    monkeypatch.setattr(shared_cohort, "SHARED_FROM", 1)
    task, algorithm = (
        small_task(sizes=RAGGED),
        Algorithm(Sgd(batch_size=4), specimen("weighting", "samples"), ServerSgd()),
    )
    cohort = play(workers, algorithm, task).cohort
    leaves, weights = cohort.payload["delta"], torch.full((4,), 0.25, dtype=torch.float64)
    with Reads(leaves.values(), CHUNK) as reads:
        found = cohort.combine("delta", weights)
    assert reads.elements == 0, reads.log
    crew, layout = workers._crew, workers._crew.layouts["payload"]
    with Reads(leaves.values(), CHUNK) as reads:
        for columns in split_columns({name: leaf[0].numel() for name, leaf in leaves.items()}, 2):
            sum_columns(crew.payload, crew.sums[0].clone(), layout, "delta", weights.tolist(), columns)
    assert reads.elements == sum(leaf.numel() for leaf in leaves.values()), reads.log
    assert found.keys() == leaves.keys()


def watch_when_noted(reads: Reads, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was made counts from the moment at which its norms are noted."""
    noted = Notes.of

    def watched(payload, *, exact=True):
        for leaf in payload["delta"].values():
            reads.watch(leaf)
        return noted(payload, exact=exact)

    monkeypatch.setattr(Notes, "of", staticmethod(watched))


class TestTheCounter:
    def test_a_pass_counts_and_a_second_one_too(self):
        matrix, _ = updates()
        with Reads([matrix], CHUNK) as reads:
            matrix.sum()
            matrix.sum()
        assert reads.passes == 2

    def test_the_current_chunk_counts_once_and_an_earlier_one_again(self):
        matrix, _ = updates()
        one, other = matrix[:, :40], matrix[:, 40:80]
        with Reads([matrix], CHUNK) as reads:
            (one.double() * one).sum()
            one[:2].abs()
            assert reads.elements == one.numel()
            other.abs()
            one.abs()
        assert reads.elements == 3 * one.numel()

    def test_views_and_forms_are_free_and_copies_are_others_business(self):
        matrix, _ = updates()
        with Reads([matrix], CHUNK) as reads:
            matrix.t()[3:].unflatten(1, (2, 3)).unsqueeze(0).expand(4, -1, -1, -1)
            torch.zeros_like(matrix)
            matrix.new_empty(3)
            assert reads.elements == 0
            copy = matrix.clone()
            copy.abs().sum()
        assert reads.passes == 1

    def test_repeated_numbers_are_read_once(self):
        row = torch.arange(100.0)
        with Reads([row], 10) as reads:
            row.expand(7, 100).sum()
        assert reads.passes == 1
