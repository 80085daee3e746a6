"""The compiled kernel for one linear layer: equal to the loop, with torch in its place where it is missing, and every
fault planted in its source is seen."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from fedalloy import algorithms
from fedalloy.core import native
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.native import building
from fedalloy.engines.batched import Batched
from fedalloy.engines.kernels import fused_logistic
from fedalloy.engines.loop import Loop
from fedalloy.methods.servers.sgd import ServerSgd
from fedalloy.methods.solvers.prox import Prox
from fedalloy.methods.solvers.sgd import Sgd
from fedalloy.methods.weightings.uniform import Uniform
from fedalloy.tasks.objective import ModuleObjective
from fedalloy.testing import work
from tests.engines.kernels import compiled, needs_compiler, widths
from tests.engines.rounds import gaps, play, task_of


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    return native.library() or compiled(tmp_path_factory.mktemp("kernels"), every_width=True)


@st.composite
def federations(draw):
    sizes = draw(st.lists(st.integers(0, 40), min_size=1, max_size=5))
    epochs = draw(st.lists(st.integers(-1, 2), min_size=len(sizes), max_size=len(sizes)))
    active = draw(st.lists(st.sampled_from([True, True, False]), min_size=len(sizes), max_size=len(sizes)))
    return tuple(sizes), work(*range(len(sizes)), epochs=tuple(epochs), active=tuple(active))


@st.composite
def solvers(draw) -> Sgd | Prox:
    options = {"lr": 0.3, "batch_size": draw(st.sampled_from([1, 3, 8, 11, None]))}
    options["weight_decay"] = draw(st.sampled_from([0.0, 0.2]))
    options["momentum"] = draw(st.sampled_from([0.0, 0.5, 0.9]))
    return Prox(mu=0.4, **options) if draw(st.booleans()) else Sgd(**options)


@needs_compiler
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 40), st.integers(2, 12), st.booleans(), solvers(), federations())
def test_it_is_the_loop(kernels, monkeypatch, inputs, classes, bias, solver, federation):
    sizes, now = federation
    task = task_of(lambda: nn.Linear(inputs, classes, bias=bias), sizes, (inputs,), classes)
    algorithm = Algorithm(solver, Uniform(), ServerSgd())
    expected = play(Loop(), algorithm, task, now)
    for width in (*widths(), None):
        monkeypatch.setattr(fused_logistic, "library", lambda width=width: kernels if width else None)
        monkeypatch.setattr(fused_logistic, "_NAMES", {torch.float64: f"steps_double_{width}"})
        found = play(Batched(), algorithm, task, now)
        assert gaps(found, expected) == []
        assert torch.allclose(found.cohort.notes.squares, expected.cohort.notes.squares)
        assert torch.equal(found.cohort.notes.finite, expected.cohort.notes.finite)


def one_round(kernels, monkeypatch, task, algorithm, now):
    used = []

    def noted(*given):
        used.append(fused_logistic_train(*given))
        return used[-1]

    fused_logistic_train = fused_logistic.train
    monkeypatch.setattr(fused_logistic, "library", lambda: kernels)
    monkeypatch.setattr(fused_logistic, "train", noted)
    return play(Batched(), algorithm, task, now), used


FAULTS = {
    "unused slots count": ("if (used && !used[b]) continue;", ""),
    "unused slots train": ("if (!used[b]) out[k * lead + b] = 0;", ";"),
    "the mean of a partial batch is over all slots": ("job->lr / seen);", "job->lr / job->batch);"),
    "decay is ignored": ("job->lr * (job->decay + job->pull)", "job->lr * job->pull"),
    "the pull is ignored": ("job->lr * job->pull, job->momentum);", "0, job->momentum);"),
    "a client takes the steps of others": ("client < job->running[step]", "1"),
    "examples beside whole tiles are left out": ("        TILES(1)\n", "        b++;\n"),
    "an odd class sees one example": ("width, lead, some, 1);", "width, lead, 1, 1);"),
    "the bias stays": ("bias[k] = moved;", ";"),
}
WITH_MOMENTUM = {
    "weights have no momentum": ("a[i * wide + j] += momentum * speed[i * width + d + j];", ";"),
    "the bias has no momentum": ("momentum * bias_speed[k] + moved", "moved"),
    "speed is not kept": ("speed[i * width + d + j] = a[i * wide + j];", ";"),
    "a client begins with the speed of the one before": ("memset(bias_speed, 0,", "if (0) memset(bias_speed, 0,"),
    "decay is that of a step without momentum": ("speed ? -less : 1 - less", "1 - less"),
}


@needs_compiler
@pytest.mark.parametrize("fault", [*FAULTS, *WITH_MOMENTUM])
def test_every_planted_fault_is_seen(fault, tmp_path, monkeypatch):
    task = task_of(lambda: nn.Linear(5, 3), (7, 4, 9, 2), (5,))
    momentum = 0.5 if fault in WITH_MOMENTUM else 0.0
    solver = Prox(mu=0.4, lr=0.3, batch_size=3, weight_decay=0.2, momentum=momentum)
    algorithm = Algorithm(solver, Uniform(), ServerSgd())
    now = work(0, 1, 2, 3, active=(True, True, True, False))
    planted = {**FAULTS, **WITH_MOMENTUM}[fault]
    found, used = one_round(compiled(tmp_path, *planted), monkeypatch, task, algorithm, now)
    assert used[0] is not None
    assert gaps(found, play(Loop(), algorithm, task, now)) != []


@needs_compiler
def test_labels_and_numbers_that_are_wrong_are_told_as_by_torch(kernels, monkeypatch):
    task = task_of(lambda: nn.Linear(4, 3), (5, 3))
    broken = replace(task, block=replace(task.block, y=task.block.y + 2))
    with pytest.raises(Exception, match="client 0 failed"):
        one_round(kernels, monkeypatch, broken, algorithms.fedavg(), work(0, 1))
    x = task.block.x.clone()
    x[0, 0] = torch.nan
    strange = replace(task, block=replace(task.block, x=x))
    found, used = one_round(kernels, monkeypatch, strange, algorithms.fedavg(), work(0, 1))
    assert used[0].notes is None
    assert found.cohort.notes.finite.all(0).tolist() == [False, True]


@needs_compiler
@pytest.mark.parametrize("why", ["nesterov", "half", "strided", "wide"])
def test_what_it_cannot_do_is_left_to_torch(why, kernels, monkeypatch):
    task = task_of(lambda: nn.Linear(4, 3), (5, 3))
    algorithm = algorithms.fedavg(momentum=0.5, nesterov=why == "nesterov")
    x = {"half": task.block.x.float(), "strided": task.block.x.T.contiguous().T}.get(why, task.block.x)
    if why == "wide":
        monkeypatch.setattr(fused_logistic, "MOST_WEIGHTS", 11)
    task = replace(task, block=replace(task.block, x=x))
    found, used = one_round(kernels, monkeypatch, task, algorithm, work(0, 1))
    assert used == [None]
    assert gaps(found, play(Loop(), algorithm, task, work(0, 1))) == []


@needs_compiler
@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("size", [1.0, 80.0])
@pytest.mark.parametrize("width", widths())
def test_float32_agrees_within_its_rounding(width, size, momentum, kernels, monkeypatch):
    """With large inputs too, whose exponentials overflow unless the largest output is subtracted first."""
    task = task_of(lambda: nn.Linear(60, 10), (20, 13, 8), (60,), 10)
    objective = ModuleObjective(lambda: nn.Linear(60, 10), "cross_entropy")
    single = replace(task, objective=objective, block=replace(task.block, x=size * task.block.x.float()))
    algorithm = algorithms.fedavg(lr=0.1 / size, batch_size=5, momentum=momentum)
    monkeypatch.setattr(fused_logistic, "_NAMES", {torch.float32: f"steps_float_{width}"})
    found, used = one_round(kernels, monkeypatch, single, algorithm, work(0, 1, 2))
    assert used[0] is not None
    assert gaps(found, play(Loop(), algorithm, single, work(0, 1, 2)), 1e-5 * size) == []


@needs_compiler
@pytest.mark.parametrize("width", widths())
def test_float32_passes_on_what_is_not_finite(width, kernels, monkeypatch):
    task = task_of(lambda: nn.Linear(60, 10), (20, 13, 8), (60,), 10)
    x = task.block.x.float()
    x[0, 0], x[25, 3] = torch.nan, -torch.inf
    objective = ModuleObjective(lambda: nn.Linear(60, 10), "cross_entropy")
    strange = replace(task, objective=objective, block=replace(task.block, x=x))
    monkeypatch.setattr(fused_logistic, "_NAMES", {torch.float32: f"steps_float_{width}"})
    found, used = one_round(kernels, monkeypatch, strange, algorithms.fedavg(batch_size=5), work(0, 1, 2))
    assert used[0] is not None
    assert found.cohort.notes.finite.all(0).tolist() == [False, False, True]


@needs_compiler
def test_kernels_of_other_sources_are_not_used(tmp_path, monkeypatch):
    assert building.build(tmp_path / building.LIBRARY, optimise="-O1") is None
    monkeypatch.setattr(native, "HERE", tmp_path)
    assert native.library.__wrapped__() is not None
    monkeypatch.setattr(native, "fingerprint", lambda: "another one")
    assert native.library.__wrapped__() is None
    other = tmp_path / "other"
    other.mkdir()
    (other / building.LIBRARY).write_bytes(b"no library")
    monkeypatch.setattr(native, "HERE", other)
    assert native.library.__wrapped__() is None


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_compiler_the_build_goes_on_without_kernels(compiler, tmp_path, monkeypatch):
    monkeypatch.setenv("CC", compiler)
    reason = building.build(tmp_path / building.LIBRARY)
    assert reason is not None
    assert list(tmp_path.iterdir()) == []
