"""The client's program: written once, the same plainly and under vmap, doing nothing that nobody asked for."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedalloy import algorithms
from fedalloy.core import program
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.applying import Applied, led, plain, vmapped
from fedalloy.core.aspects import OwnStart
from fedalloy.core.blocks import prepare
from fedalloy.core.client import train
from fedalloy.core.keys import Key
from fedalloy.core.program import Finished, Kernel, run_block
from fedalloy.core.types import Context
from fedalloy.engines.batched import Batched
from fedalloy.engines.kernels import fused, vmap_kernel
from fedalloy.engines.loop import Loop
from fedalloy.experiment.fit import fit
from fedalloy.methods.servers.sgd import ServerSgd
from fedalloy.methods.solvers.scaffold import Scaffold
from fedalloy.methods.solvers.sgd import Sgd
from fedalloy.testing import HalfWithMemory, Jitter, Lopsided, small_task, work
from fedalloy.testing.comparing import differences
from tests.engines.rounds import gaps, play

SOURCE = Path(program.__file__).parents[1]
WIRED = Algorithm(Scaffold(batch_size=3), Lopsided(), ServerSgd(), (HalfWithMemory(), Jitter()))


def done(algorithm: Algorithm, kernel: Kernel, apply: Applied, *ids: int, model: Any = "dropout") -> Finished:
    task, now = small_task(model), work(*ids)
    params, buffers = task.objective.init(Key.of(1))
    shared = algorithm.init(params, task.population, buffers)["shared"]
    ctx = Context(1, task.population, Key.of(3), local_lr=0.1)
    states = {client: algorithm.init_client(shared, Key.of(2).fold(client)) for client in ids}
    block = prepare(algorithm, now, task.data("train", now.ids), shared, ctx)
    with torch.no_grad():
        return run_block(algorithm, task.objective, shared, states, block, ctx, kernel, apply)


@pytest.mark.parametrize("model", ["dropout", "batchnorm"])
def test_a_block_of_one_is_the_same_plainly_and_under_vmap(model):
    algorithm = WIRED if model == "dropout" else replace(WIRED, wire=())
    one, other = (done(algorithm, kernel, apply, 3, model=model) for kernel, apply in
                  ((train, plain), (vmap_kernel.train, vmapped)))  # fmt: skip
    same = replace(one, payload=led(one.payload), states=led(one.states))
    assert list(differences(vars(same), vars(other), 1e-12)) == []


@pytest.mark.parametrize(
    "call", [r"solver\.begin\(", r"solver\.end\(", r"aspects\.post_train\(", r"wire\.encode\b", r"[^_.]run_block\(\n"]
)
def test_the_program_is_written_once(call):
    """Outside of the rules themselves, the conformance suite and golden vectors of single formulas."""
    rules = ("methods", "testing", "core/aspects.py", "core/wrappers.py", "studies/unfolding/recording.py")
    files = [file for file in SOURCE.rglob("*.py") if not str(file.relative_to(SOURCE)).startswith(rules)]
    found = [file.name for file in files for _ in re.findall(call, file.read_text())]
    assert found == ["program.py"]


class Counting:
    """Plain calls, noted by the name of what is applied."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.stack, self.unstack, self.same = plain.stack, plain.unstack, plain.same
        self.split, self.rows = plain.split, plain.rows

    def __call__(self, function: Callable[..., Any], clients: int, *trees: Any) -> Any:
        self.calls.append(function.__name__)
        return plain(function, clients, *trees)


def test_without_wires_nothing_is_encoded():
    counting = Counting()
    done(algorithms.fedavg(batch_size=3), train, counting, 3)
    assert counting.calls == ["<lambda>", "end"]
    done(WIRED, train, counting, 3)
    assert counting.calls.count("encode") == 2


def test_plain_descent_pays_for_neither_begin_nor_end(monkeypatch):
    monkeypatch.setattr(Sgd, "begin", lambda *_: pytest.fail("begun"))
    monkeypatch.setattr(Sgd, "end", lambda *_: pytest.fail("ended"))
    engine = Batched()
    play(engine, algorithms.fedavg(batch_size=3), small_task())
    assert not engine._unbatchable
    assert fused.DIFFERENTIABLE is False


def test_plain_evaluation_asks_nobody_for_samples(monkeypatch):
    monkeypatch.setattr("fedalloy.experiment.trained.synthetic_set", lambda *_: pytest.fail("asked"))
    (row,) = fit(algorithms.fedavg(batch_size=3), small_task(), rounds=1).rounds()
    assert row["evaluation"]["accuracy"]["mean"] > 0
    with pytest.raises(pytest.fail.Exception, match="asked"):
        fit(algorithms.fedevg(per_class=2), small_task(), rounds=1)


@dataclass(frozen=True)
class Elsewhere(OwnStart, Sgd):
    """Begins a little beside what was received."""

    def start_model(self, shared, mine):
        return {name: leaf + 0.5 for name, leaf in shared["params"].items()}, shared["buffers"]

    def begin(self, shared, mine, ctx):
        return super().begin({**shared, "params": self.start_model(shared, mine)[0]}, mine, ctx)


def test_the_loss_before_is_that_of_the_clients_own_start():
    task = small_task()
    elsewhere, defaults = (Algorithm(kind(batch_size=3), Lopsided(), ServerSgd()) for kind in (Elsewhere, Sgd))
    found = play(Loop(), elsewhere, task)
    assert gaps(play(Batched(), elsewhere, task), found) == []
    assert not torch.allclose(
        found.cohort.stats["loss_before"], play(Loop(), defaults, task).cohort.stats["loss_before"]
    )


@dataclass(frozen=True)
class Counts(Sgd):
    """Keeps a plain number, which no block of several clients can stack."""

    @property
    def stateful(self):
        return True

    def init_client(self, shared, key):
        return {"rounds": 0}

    def begin(self, shared, mine, ctx):
        return {**super().begin(shared, mine, ctx), "rounds": mine["rounds"] + 1}

    def step(self, carry, grad_at, draws, phase, ctx):
        rounds = carry.pop("rounds")
        return {**super().step(carry, grad_at, draws, phase, ctx), "rounds": rounds}

    def end(self, carry, shared, mine, steps, ctx):
        payload, _ = super().end(carry, shared, mine, steps, ctx)
        return payload, {"rounds": carry["rounds"]}


def test_plain_numbers_pass_through_a_block_of_one():
    found = done(Algorithm(Counts(batch_size=3), Lopsided(), ServerSgd()), train, plain, 2)
    assert found.states["solver"] == {"rounds": 1}
