"""One client's program: stages, statistics, wires, links that fail."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from fedalloy import algorithms
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.client import Assignment, run_client
from fedalloy.core.errors import ClientError
from fedalloy.core.keys import Key
from fedalloy.core.measuring import mean_loss
from fedalloy.core.protocols import Weighting, Wire
from fedalloy.core.types import Context, Contribution, Examples
from fedalloy.methods.servers.sgd import ServerSgd
from fedalloy.methods.solvers.scaffold import Scaffold
from fedalloy.methods.solvers.sgd import Sgd
from fedalloy.methods.weightings.uniform import Uniform
from fedalloy.methods.wires.topk import TopK
from fedalloy.testing import HalfWithMemory, Jitter, Lopsided, small_task
from fedalloy.testing.comparing import differences

TASK = small_task()


def run(algorithm: Algorithm, client: int = 3, state=None, task=TASK, **assignment) -> Contribution:
    params, buffers = task.objective.init(Key.of(1))
    shared = algorithm.init(params, task.population, buffers)["shared"]
    ctx = Context(1, task.population, Key.of(3), local_lr=algorithm.solver.lr_at(1))
    ids = torch.tensor([client])
    given = Assignment(task.data("train", ids).client(0), **assignment)
    state = state or algorithm.init_client(shared, Key.of(2))
    with torch.no_grad():
        return run_client(algorithm, task.objective, shared, state, given, ctx.key.each(ids), ctx)


@dataclass(frozen=True)
class BreaksAt(Sgd):
    """Raises at a stage of one's choice."""

    stage: str = "step"
    after: int = 1

    def plan(self, sizes, epochs, keys):
        self._try("plan")
        return super().plan(sizes, epochs, keys)

    def begin(self, shared, mine, ctx):
        self._try("begin")
        return super().begin(shared, mine, ctx) | {"taken": torch.tensor(0)}

    def step(self, carry, grad_at, draws, phase, ctx):
        if int(carry["taken"]) >= self.after:
            self._try("step")
        return super().step(carry, grad_at, draws, phase, ctx) | {"taken": carry["taken"] + 1}

    def end(self, carry, shared, mine, steps, ctx):
        self._try("end")
        return super().end(carry, shared, mine, steps, ctx)

    def _try(self, stage: str) -> None:
        if stage == self.stage:
            raise ArithmeticError("on purpose")


@pytest.mark.parametrize(
    ("stage", "named"), [("plan", "plan"), ("begin", "begin"), ("step", "step 2 of 4"), ("end", "end")]
)
def test_an_error_names_the_stage(stage, named):
    with pytest.raises(ClientError, match=f"at stage '{named}': ArithmeticError: on purpose") as caught:
        run(Algorithm(BreaksAt(batch_size=3, stage=stage), Uniform(), ServerSgd()))
    assert caught.value.stage == named
    assert isinstance(caught.value.cause, ArithmeticError)


def test_an_error_on_the_wire_names_its_place():
    @dataclass(frozen=True)
    class Cut(Wire):
        def encode(self, payload, mine, draws):
            raise ConnectionError("cut")

    with pytest.raises(ClientError, match="at stage 'wire 1': ConnectionError"):
        run(replace(algorithms.fedavg(), wire=(HalfWithMemory(), Cut())))


def test_statistics_are_measured_only_when_the_weighting_needs_them():
    plain = run(algorithms.fedavg()).stats
    assert plain.keys() == {"num_examples", "num_steps", "train_loss", "bytes_up"}
    nova = run(algorithms.fednova(momentum=0.5, batch_size=3)).stats
    assert nova["step_norm"] == pytest.approx(4 / 0.5 - 0.5 * (1 - 0.5**4) / 0.25)
    told = run(Algorithm(Sgd(lr=1.0), Lopsided(), ServerSgd())).stats
    params, buffers = TASK.objective.init(Key.of(1))
    examples = TASK.data("train", torch.tensor([3])).client(0)
    outputs = TASK.objective.outputs(params, buffers, examples.x)
    assert told["loss_before"] == pytest.approx(float(TASK.objective.losses(outputs, examples.y).mean()), abs=1e-12)
    assert told["accuracy_after"] * 12 == pytest.approx(round(told["accuracy_after"] * 12))


def test_the_accuracy_is_that_of_the_trained_model():
    @dataclass(frozen=True)
    class ByAccuracy(Weighting):
        @property
        def requires(self):
            return frozenset({"accuracy_after"})

        def weigh(self, cohort, state, ctx):
            raise NotImplementedError

    def accuracy(epochs: int) -> float:
        return run(Algorithm(Sgd(lr=0.5, epochs=epochs), ByAccuracy(), ServerSgd())).stats["accuracy_after"]

    assert accuracy(300) > accuracy(0) + 0.2


def test_the_training_loss_is_the_mean_over_the_examples_seen():
    """With a step too small to matter it is the loss of the received model, whatever the batches."""
    params, buffers = TASK.objective.init(Key.of(1))
    examples = TASK.data("train", torch.tensor([3])).client(0)
    expected = mean_loss(TASK.objective, params, buffers, examples)
    assert run(algorithms.fedavg(lr=1e-12, batch_size=5)).stats["train_loss"] == pytest.approx(expected, abs=1e-8)


def test_a_client_without_examples_or_epochs_sends_a_zero_update():
    for task, epochs in ((small_task(sizes=(3, 0)), -1), (small_task(sizes=(3, 5)), 0)):
        found = run(algorithms.scaffold(), 1, task=task, epochs=epochs)
        assert not any(bool(leaf.any()) for part in found.payload.values() for leaf in part.values())
        assert found.stats["num_steps"] == 0
        assert found.stats["train_loss"] != found.stats["train_loss"]


def test_the_mean_loss_of_nobody_is_not_a_number():
    params, buffers = TASK.objective.init(Key.of(1))
    nothing = Examples(torch.zeros(0, 4, dtype=torch.float64), torch.zeros(0, dtype=torch.int64))
    assert mean_loss(TASK.objective, params, buffers, nothing) != 0


def test_bytes_count_what_is_sent():
    params, _ = TASK.objective.init(Key.of(1))
    numbers = sum(leaf.numel() for leaf in params.values())
    assert run(algorithms.fedavg()).stats["bytes_up"] == 8 * numbers
    assert run(algorithms.scaffold()).stats["bytes_up"] == 16 * numbers

    @dataclass(frozen=True)
    class Unknown(Wire):
        def encode(self, payload, mine, draws):
            return payload, mine

    compressed = replace(algorithms.fedavg(), wire=(Unknown(), TopK(0.1)))
    assert run(compressed).stats["bytes_up"] == (numbers // 10) * (8 + 1)
    whole = replace(algorithms.fedavg(), wire=(TopK(0.1), Unknown()))  # who knows what it does to the zeros
    assert run(whole).stats["bytes_up"] == 8 * numbers


def test_buffers_travel_beside_the_update():
    found = run(algorithms.fedavg(batch_size=3, epochs=2), task=small_task("batchnorm"))
    assert found.payload.keys() == {"delta", "buffers"}
    assert int(found.payload["buffers"]["norm.num_batches_tracked"]) == 8


WIRED = Algorithm(Scaffold(batch_size=3), Lopsided(), ServerSgd(), (HalfWithMemory(), Jitter()))


def test_a_failed_link_plans_its_work_and_sends_nothing_new():
    used = run(WIRED).state
    assert bool(used["wire"]["0"]["memory"]["hidden.weight"].any())
    found = run(WIRED, state=used, active=False)
    assert not any(bool(leaf.any()) for part in found.payload.values() for leaf in part.values())
    assert list(differences(found.state, used)) == []
    assert found.stats["num_steps"] == 4
    assert found.stats["loss_before"] > 0


def test_a_failed_link_keeps_the_received_buffers():
    task = small_task("batchnorm")
    found = run(algorithms.fedavg(batch_size=3), task=task, active=False)
    _, buffers = task.objective.init(Key.of(1))
    assert list(differences(found.payload["buffers"], buffers)) == []


def test_wires_encode_in_order():
    """Half of a jittered update is remembered as it was after the jitter, not before."""
    one = run(replace(WIRED, wire=(HalfWithMemory(), Jitter())))
    other = run(replace(WIRED, wire=(Jitter(), HalfWithMemory())))
    first = one.state["wire"]["0"]["memory"]["output.bias"]
    second = other.state["wire"]["1"]["memory"]["output.bias"]
    assert not torch.allclose(first, second)
