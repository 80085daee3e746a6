"""The conformance suite: every rule keeps its promises, and every check has failed once."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

import fedalloy
from fedalloy.core import registry, tree
from fedalloy.core.errors import SpecError
from fedalloy.core.protocols import ServerOptimizer, Weighting, Wire
from fedalloy.core.types import Cohort
from fedalloy.engines.batched import Batched
from fedalloy.engines.loop import Loop
from fedalloy.methods.solvers.sgd import Sgd
from fedalloy.testing import (
    FAULTS,
    HANDLE_FAULTS,
    HalfWithMemory,
    Jitter,
    Lopsided,
    Wavering,
    check_engine,
    check_rule,
    conformance_table,
    crossed_case,
    engine_cases,
    forgotten_mask,
    key_by_slot,
    lost_client_state,
    plain_case,
    run_row,
    shuffled_clients,
    work,
)
from fedalloy.testing.rules import CATEGORIES
from tests.engines.rounds import Called

CASES = {case.name: case for case in engine_cases()}
TABLE = list(conformance_table())


# ---------------------------------------------------------------------------------------------- the table


@pytest.mark.parametrize("row", TABLE, ids=lambda row: "-".join(row).replace(" ", "_"))
def test_every_rule_keeps_its_promises(row):
    assert run_row(row) == []


def test_the_table_has_every_registered_rule():
    everything = {(category, name) for category in CATEGORIES for name in registry.names(category)}
    # Laid beside the loop over nodes in tests/flower, over workers in test_ray.py.
    assert {(row.category, row.name) for row in TABLE} == everything - {("engine", "flower"), ("engine", "ray")}


def test_a_new_file_appears_in_the_table_by_itself(tmp_path):
    (tmp_path / "toy_halved.py").write_text(
        "from dataclasses import dataclass\n"
        "import torch\n"
        "from fedalloy.core.protocols import Weighting\n"
        "from fedalloy.core.registry import register\n\n"
        "@register('weighting', 'toy_halved')\n@dataclass(frozen=True)\n"
        "class ToyHalved(Weighting):\n"
        "    def weigh(self, cohort, state, ctx):\n"
        "        return torch.full((len(cohort),), 0.5 / len(cohort), dtype=torch.float64), state, {}\n"
    )
    program = (
        "import fedalloy.methods.weightings as room\n"
        f"room.__path__.append({str(tmp_path)!r})\n"
        "from fedalloy.testing import conformance_table, run_row\n"
        "rows = [row for row in conformance_table() if row.name == 'toy_halved']\n"
        "assert len(rows) == 7 and not any(map(run_row, rows)), rows\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(fedalloy.__path__[0]).parent)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_toys_keep_their_promises_too():
    assert check_rule("solver", Wavering()) == []
    assert check_rule("wire", HalfWithMemory()) == []
    assert check_rule("wire", Jitter()) == []


def test_a_room_without_checks():
    with pytest.raises(SpecError, match="there are no checks for the category 'weihgting': did you mean 'weighting'"):
        check_rule("weihgting", Lopsided())


# ---------------------------------------------------------------------------------------------- engines


CAUGHT_BY = {
    "key_by_slot": ("fedavg", "dropout", "wire with memory", "wavering steps"),
    "forgotten_mask": ("weight decay", "momentum", "adam", "fedprox"),
    "lost_client_state": ("scaffold", "wire with memory", "wavering steps", "a model at home", "leaves at home"),
    "shuffled_clients": ("lopsided weights", "fedavg"),
    "ignored_epochs": ("uneven epochs", "uneven epochs, normalised"),
    "ignored_links": ("failing links", "failing links, batchnorm"),
    "repeated_draws": ("fedavg", "dropout"),
    "kept_plan": ("fedavg", "uneven epochs"),
    "stale_buffers": ("batchnorm", "batchnorm and state", "two phases"),
    "call_order": ("fedavg", "wavering steps"),
    "written_inputs": ("fedavg", "batchnorm"),
    "false_statistics": ("fedavg", "uneven epochs, normalised"),
}


def test_every_planted_fault_has_cases_that_catch_it():
    assert CAUGHT_BY.keys() == FAULTS.keys()


@pytest.mark.parametrize(("fault", "case"), [(fault, case) for fault, cases in CAUGHT_BY.items() for case in cases])
def test_every_planted_fault_is_caught(fault, case):
    assert check_engine(FAULTS[fault](Loop()), [CASES[case]])


@pytest.mark.parametrize("fault", HANDLE_FAULTS)
def test_a_handle_that_answers_wrong_is_caught(fault):
    assert check_engine(HANDLE_FAULTS[fault](Loop()), [CASES["scaffold"]])


class Crossed(Loop):
    """Cross scores with a planted fault: the scores of the round before, or models and clients exchanged."""

    def __init__(self, fault: str) -> None:
        self.fault, self.last = fault, torch.zeros(0)

    def cross_score(self, algorithm, task, shared, cohort):
        scores, before = super().cross_score(algorithm, task, shared, cohort), self.last
        self.last = scores
        if self.fault == "stale buffer":
            return before if before.shape == scores.shape else scores
        if self.fault == "missing client":
            return torch.cat([scores[:-1], torch.zeros_like(scores[-1:])])
        return scores.T if self.fault == "wrong order" else scores


def test_cross_scores_of_engines_agree():
    for engine in (Crossed("none"), Batched(), Batched(block=2)):
        assert check_engine(engine, [crossed_case()]) == []


@pytest.mark.parametrize("fault", ["wrong order", "stale buffer", "missing client"])
def test_cross_scores_that_are_wrong_are_caught(fault):
    same = replace(crossed_case(), rounds=(work(0, 1, 2, 3),) * 3)
    found = check_engine(Crossed(fault), [same])
    assert any(one.what.startswith("cross") for one in found)


@pytest.mark.parametrize("fault", [key_by_slot, forgotten_mask, lost_client_state])
def test_fedavg_over_equal_clients_sees_nothing(fault):
    """Why the richer cases exist."""
    assert check_engine(fault(Loop()), [plain_case()]) == []


def test_plain_averages_of_equal_clients_do_not_even_see_shuffled_ones():
    """The rows give the fault away; the server alone would not."""
    problems = check_engine(shuffled_clients(Loop()), [plain_case()])
    assert problems
    assert not any("server" in problem.what for problem in problems)
    lopsided = check_engine(shuffled_clients(Loop()), [CASES["lopsided weights"]])
    assert any("server" in problem.what for problem in lopsided)


def test_a_problem_says_where():
    first = check_engine(forgotten_mask(Loop()), [CASES["fedprox"]])[0]
    assert str(first).startswith("case 'fedprox', round 1: payload.delta.")


def test_an_engine_that_raises_is_a_problem_not_a_crash():
    def broken(*_):
        raise MemoryError("too many")

    assert [problem.what for problem in check_engine(Called(broken), [plain_case()])] == ["MemoryError: too many"]


def test_the_tolerance_is_tight():
    def nearly(*given):
        outcome = Loop()(*given)
        moved = {name: leaf + 1e-8 for name, leaf in outcome.cohort.payload["delta"].items()}
        return replace(outcome, cohort=Cohort(outcome.cohort.ids, {"delta": moved}, outcome.cohort.stats))

    assert check_engine(Called(nearly), [plain_case()])
    assert check_engine(Called(nearly), [plain_case()], tolerance=1e-6) == []


# ---------------------------------------------------------------------------------------------- broken rules


@dataclass(frozen=True)
class Broken(Weighting):
    """A weighting with one fault of one's choice."""

    fault: str = ""

    @property
    def requires(self):
        return frozenset({"num_examples", "loss_before"})

    @property
    def weight_bound(self):
        return 0.01 if self.fault == "bound" else None

    def init(self, population):
        return {"seen": torch.zeros(population, dtype=torch.float64)}

    def weigh(self, cohort, state, ctx):
        count, losses = len(cohort), cohort.stats["loss_before"]
        weights = torch.full((count,), 1.0 / count, dtype=torch.float64)
        if self.fault == "state":
            state["seen"] += 1
        if self.fault == "global generator":
            weights = torch.rand(count, dtype=torch.float64)
        if self.fault == "order":
            weights = torch.arange(count, dtype=torch.float64)
        if self.fault == "positions in the state":
            seen = state["seen"].clone()
            seen[:count] += losses
            return weights, {"seen": seen}, {}
        if self.fault == "overflow":
            weights = losses.exp() / losses.exp().sum()
        if self.fault == "one client":
            weights = 1 / losses.std(correction=0) + 0 * losses
        if self.fault == "zero norms":
            weights = 1 / tree.norms(cohort.payload["delta"])
        if self.fault == "undeclared":
            weights = cohort.stats["accuracy_after"]
        if self.fault == "payload":
            weights = tree.norms(cohort.payload["delta"]).clamp(max=1)
        if self.fault == "shape":
            weights = weights.reshape(-1, 1)
        return weights, state, {}


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        ("state", "same again: changed its state"),
        ("global generator", "same again: a second call differs"),
        ("order", "order of clients: weights"),
        ("positions in the state", "order of clients: state"),
        ("overflow", "finite: extreme losses"),
        ("one client", "finite: one client"),
        ("zero norms", "nobody moved"),
        (
            "undeclared",
            "same again, order of clients, finite, nobody moved, shapes, declared: AlgorithmError: the rule reads the "
            "statistic 'accuracy_after' and does not declare it",
        ),
        ("payload", "declared: AlgorithmError"),
        ("shape", "shapes: the weight of"),
        ("bound", "declared: a weight of 0.2 is above the declared bound 0.01"),
    ],
)
def test_a_broken_weighting_is_caught(fault, check):
    assert any(problem.startswith(check) for problem in check_rule("weighting", Broken(fault)))


def test_the_same_weighting_without_a_fault_passes():
    assert check_rule("weighting", Broken()) == []


@dataclass(frozen=True)
class BrokenSolver(Sgd):
    """A solver with one fault of one's choice."""

    fault: str = ""

    @property
    def stateful(self):
        return True

    def init_client(self, shared, key):
        return {"count": torch.zeros((), dtype=torch.float64)}

    def plan(self, sizes, epochs, keys):
        plan = super().plan(sizes, epochs, keys)
        # A stride that depends on the longest client of the block.
        return replace(plan, index=plan.index.flip(2)) if self.fault == "block" else plan

    def draws(self, plan, keys, shared):
        scale = keys.uniform(plan.index.shape[1], dtype=torch.float64)
        return {"scale": scale.flip(1) if self.fault == "draws" else scale}

    def begin(self, shared, mine, ctx):
        return super().begin(shared, mine, ctx) | {"count": mine["count"]}

    def step(self, carry, grad_at, draws, phase, ctx):
        if self.fault == "branch" and float(carry["count"]) > 3:
            return carry
        if self.fault == "in place":
            for leaf in carry["params"].values():
                leaf.mul_(0.9)
        return super().step(carry, grad_at, draws, phase, ctx) | {"count": carry["count"] + 1}

    def end(self, carry, shared, mine, steps, ctx):
        payload, _ = super().end(carry, shared, mine, steps, ctx)
        count = carry["count"] + (1 if self.fault == "counts anyway" else 0)
        if self.fault == "extra part":
            payload["more"] = payload["delta"]
        if self.fault == "restless":
            payload["delta"] = {name: leaf + 0.1 for name, leaf in payload["delta"].items()}
        return payload, {"count": count}

    def absorb(self, shared, aggregate, cohort, ctx):
        if self.fault == "looks again":
            cohort.combine("delta", torch.ones(len(cohort)))
        return super().absorb(shared, aggregate, cohort, ctx)

    def describe(self, steps, ctx):
        told = super().describe(steps, ctx)
        return {"step_norm": told["step_norm"]} if self.fault == "silent" else told


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        ("extra part", "parts: client 0: sent the parts delta, more"),
        ("restless", "no steps: fresh state: the update"),
        ("restless", "nobody moved: params"),
        ("counts anyway", "no steps: fresh state changed"),
        ("in place", "same again: "),
        ("block", "alone or in a block: plan of client"),
        ("draws", "alone or in a block: draws of client"),
        ("branch", "vectorised: fails under vmap"),
        ("silent", "statistics: describes step_norm but provides"),
        ("looks again", "absorbed: AlgorithmError"),
    ],
)
def test_a_broken_solver_is_caught(fault, check):
    problems = check_rule("solver", BrokenSolver(fault=fault, batch_size=4))
    assert any(problem.startswith(check) for problem in problems), problems


def test_the_same_solver_without_a_fault_passes():
    assert check_rule("solver", BrokenSolver(batch_size=4)) == []


@dataclass(frozen=True)
class BrokenServer(ServerOptimizer):
    fault: str = ""

    def init(self, target):
        return {"rounds": torch.zeros(())}

    def apply(self, update, state, target, ctx):
        if self.fault == "in place":
            state["rounds"] += 1
        if self.fault == "drifts":
            return tree.map_leaves(lambda leaf: 0.9 * leaf, target), state, {}
        if self.fault == "precision":
            return tree.map_leaves(lambda a, b: a.float() + b.float(), target, update), state, {}
        return tree.add(target, update), state, {}


@pytest.mark.parametrize(
    ("fault", "check"),
    [("", ""), ("in place", "same again: "), ("drifts", "nobody moved: "), ("precision", "kept form: target in")],
)
def test_a_broken_server_is_caught(fault, check):
    problems = check_rule("server", BrokenServer(fault))
    assert any(problem.startswith(check) for problem in problems) if fault else problems == []


@dataclass(frozen=True)
class BrokenWire(Wire):
    fault: str = ""

    def init_client(self, shared, key):
        return {"memory": tree.zeros_like(shared["params"])}

    def encode(self, payload, mine, draws):
        delta = payload["delta"]
        if self.fault == "in place":
            for leaf in delta.values():
                leaf.clamp_(max=0.1)
        if self.fault == "shape":
            return {"delta": {name: leaf.reshape(-1) for name, leaf in delta.items()}}, mine
        if self.fault == "noise":
            return {"delta": tree.map_leaves(lambda leaf: leaf + 0.1, delta)}, mine
        if self.fault == "branch" and float(tree.norm(delta)) > 1:
            return {"delta": tree.zeros_like(delta)}, mine
        return payload, {"memory": delta} if self.fault != "none" else mine

    def after(self, aggregate, cohort, weights, ctx):
        if self.fault == "looks again":
            cohort.norms("delta")
        return aggregate


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        ("", ""),
        ("in place", "same again: "),
        ("shape", "kept form: part 'delta': hidden.weight has shape"),
        ("noise", "nobody moved: sent"),
        ("branch", "vectorised: fails under vmap"),
        ("looks again", "afterwards: AlgorithmError"),
    ],
)
def test_a_broken_wire_is_caught(fault, check):
    problems = check_rule("wire", BrokenWire(fault))
    assert any(problem.startswith(check) for problem in problems) if fault else problems == []
