"""The fused kernel: equal to the loop for every chain, option and shape it takes, and never a word to the server."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fedalloy
from fedalloy import algorithms
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.errors import ClientError
from fedalloy.core.keys import Key
from fedalloy.core.native import library
from fedalloy.engines.batched import Batched, dense_of
from fedalloy.engines.kernels import cuda_graphs, fused, fused_logistic, inplace_sgd, vmap_kernel
from fedalloy.engines.loop import Loop
from fedalloy.engines.one_by_one import KernelFor, run_clients
from fedalloy.methods.servers.sgd import ServerSgd
from fedalloy.methods.solvers.prox import Prox
from fedalloy.methods.solvers.sgd import Sgd
from fedalloy.methods.weightings.uniform import Uniform
from fedalloy.tasks.objective import ModuleObjective
from fedalloy.testing import work
from fedalloy.testing.comparing import copied, differences
from fedalloy.testing.toys import Lopsided
from tests.engines.rounds import Called, context, gaps, play, shared_of, task_of

ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh, "sigmoid": nn.Sigmoid, "none": nn.Identity}


@dataclass(frozen=True)
class Shape:
    """A chain: its inputs, and for each layer its width, whether it has a bias and what comes after it."""

    inputs: int
    layers: tuple[tuple[int, bool, str], ...]
    loss: str

    def build(self) -> nn.Module:
        parts: list[nn.Module] = []
        before = self.inputs
        for depth, (width, bias, after) in enumerate(self.layers):
            last = depth == len(self.layers) - 1
            parts += [nn.Linear(before, width, bias=bias), nn.Identity() if last else ACTIVATIONS[after]()]
            before = width
        return nn.Sequential(*parts)

    @property
    def classes(self) -> int:
        return 2 if self.loss == "binary" else self.layers[-1][0]


@st.composite
def shapes(draw) -> Shape:
    layer = st.tuples(st.integers(1, 4), st.booleans(), st.sampled_from(sorted(ACTIVATIONS)))
    layers = draw(st.lists(layer, min_size=1, max_size=3))
    loss = draw(st.sampled_from(["cross_entropy", "binary"]))
    layers[-1] = (1 if loss == "binary" else draw(st.integers(2, 4)), *layers[-1][1:])
    return Shape(draw(st.integers(1, 4)), tuple(layers), loss)


@st.composite
def solvers(draw) -> Sgd | Prox:
    momentum = draw(st.sampled_from([0.0, 0.7]))
    options = {
        "lr": 0.3,
        "epochs": draw(st.integers(0, 2)),
        "batch_size": draw(st.sampled_from([1, 2, 3, 5, None])),
        "momentum": momentum,
        "nesterov": bool(momentum) and draw(st.booleans()),
        "weight_decay": draw(st.sampled_from([0.0, 0.2])),
    }
    return Prox(mu=0.4, **options) if draw(st.booleans()) else Sgd(**options)


@st.composite
def federations(draw):
    """Sizes, and every client's epochs (-1: the solver's own) and link; a single client is a federation too."""
    sizes = draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    epochs = draw(st.lists(st.integers(-1, 2), min_size=len(sizes), max_size=len(sizes)))
    active = draw(st.lists(st.sampled_from([True, True, False]), min_size=len(sizes), max_size=len(sizes)))
    return tuple(sizes), work(*range(len(sizes)), epochs=tuple(epochs), active=tuple(active))


@settings(max_examples=80)
@given(shapes(), solvers(), federations(), st.sampled_from([None, 2]))
def test_it_is_the_loop(shape, solver, federation, block):
    sizes, now = federation
    task = task_of(shape.build, sizes, (shape.inputs,), shape.classes, shape.loss)
    algorithm = Algorithm(solver, Uniform(), ServerSgd())
    found = play(Batched(kernel="fused", block=block), algorithm, task, now)
    assert gaps(found, play(Loop(), algorithm, task, now)) == []


FAULTS: dict[str, tuple[str, Any]] = {
    "no activation on the way back": ("through", lambda right: lambda grad, value, activation: grad),
    "biases stay": ("move_bias", lambda right: lambda *_: None),
    "velocity is forgotten": (
        "momentum_step",
        lambda right: lambda memory, leaf, sgd, *rest: right(memory, leaf, replace(sgd, momentum=0.0), *rest),
    ),
    "the pull is forgotten": (
        "move_weight",
        lambda right: lambda memory, leaf, sgd, *rest: right(memory, leaf, replace(sgd, pull=0.0), *rest),
    ),
    "losses are added twice": ("loss_totals", lambda right: lambda *given: 2 * right(*given)),
    "padding counts": (
        "Passes",
        lambda right: lambda layers, loss, block: right(layers, loss, replace(block, full=[True] * len(block.full))),
    ),
    "labels of other examples": ("batches", lambda right: lambda block: [(x, y.flip(0)) for x, y in right(block)]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_kernel_is_noticed(monkeypatch, fault):
    shape = Shape(4, ((5, True, "tanh"), (3, True, "none")), "cross_entropy")
    task, name = task_of(shape.build), FAULTS[fault][0]
    options = {"mu": 0.4, "lr": 0.3, "batch_size": 2, "weight_decay": 0.1}
    solver = Prox(**options, momentum=0.7) if name == "momentum_step" else Prox(**options)  # type: ignore[arg-type]
    algorithm = Algorithm(solver, Uniform(), ServerSgd())
    expected = play(Loop(), algorithm, task)
    assert gaps(play(Batched(kernel="fused"), algorithm, task), expected) == []
    monkeypatch.setattr(fused, name, FAULTS[fault][1](getattr(fused, name)))
    assert gaps(play(Batched(kernel="best"), algorithm, task), expected) != []


MODELS: dict[str, Any] = {
    "one layer": lambda: nn.Linear(4, 3),
    "two layers": lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)),
}


def of_round_three(model: str, engine: Any) -> list[str]:
    """Where an engine leaves the loop in a round whose step size is a quarter of the solver's."""
    task, algorithm = task_of(MODELS[model]), algorithms.fedavg(lr=0.4, batch_size=2, decay=0.5)
    return gaps(play(engine, algorithm, task, round=3), play(Loop(), algorithm, task, round=3))


@pytest.mark.parametrize("kernel", ["in place", "fused", "compiled", "mapped"])
@pytest.mark.parametrize("model", MODELS)
def test_the_step_size_is_that_of_the_round(model, kernel, monkeypatch):
    """A kernel that takes it from the solver, or keeps that of an earlier round, is right in the first round alone."""
    alone: Any = Called(partial(run_clients, kernel=KernelFor(plain_sgd=True)))
    engine = alone if kernel == "in place" else Batched(kernel="mapped" if kernel == "mapped" else "best")
    if kernel == "fused":
        monkeypatch.setattr(fused_logistic, "library", lambda: None)
    assert of_round_three(model, engine) == []


LATE: dict[str, tuple[str, Any, str, Any]] = {
    "compiled": (
        "one layer", fused_logistic, "_job",
        lambda right: lambda *given: right(*given[:5], 0.4, *given[6:]),
    ),
    "fused": (
        "two layers", fused, "backward",
        lambda right: lambda *given, **named: right(*given[:6], 0.4, *given[7:], **named),
    ),
    "in place": (
        "one layer", inplace_sgd.InplaceModel, "descend", lambda right: lambda self, loss, lr: right(self, loss, 0.4)
    ),
}  # fmt: skip


@pytest.mark.parametrize("kernel", LATE)
def test_the_step_size_of_the_first_round_is_noticed_later(kernel, monkeypatch):
    model, owner, name, breaks = LATE[kernel]
    if kernel == "compiled" and library() is None:
        pytest.skip("the kernels are not compiled in this installation")
    monkeypatch.setattr(owner, name, breaks(getattr(owner, name)))
    alone: Any = Called(partial(run_clients, kernel=KernelFor(plain_sgd=True)))
    assert of_round_three(model, alone if kernel == "in place" else Batched()) != []


@settings(max_examples=15)
@given(shapes(), federations())
def test_statistics_of_demanding_weightings_agree(shape, federation):
    sizes, now = federation
    task = task_of(shape.build, sizes, (shape.inputs,), shape.classes, shape.loss)
    algorithm = Algorithm(Sgd(lr=0.2, batch_size=3), Lopsided(), ServerSgd())
    found = play(Batched(kernel="fused"), algorithm, task, now)
    assert {"loss_before", "accuracy_after"} <= found.cohort.stats.keys()
    assert gaps(found, play(Loop(), algorithm, task, now)) == []


@pytest.mark.parametrize("clients", [1, 2, 4])
@pytest.mark.parametrize("kernel", ["fused", "mapped"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_servers_model_is_not_written(clients, kernel, momentum):
    """With one client, an expanded leaf that is made contiguous is the server's own memory."""
    task = task_of(lambda: nn.Linear(4, 3))
    algorithm = algorithms.fedavg(lr=0.5, batch_size=2, momentum=momentum)
    shared, now = shared_of(algorithm, task), work(*range(clients))
    before = copied(shared)
    states = {client: algorithm.init_client(shared, Key.of(2)) for client in range(clients)}
    call = (algorithm, task, shared, states, now, context(algorithm, task))
    outcome = Batched(kernel=kernel)(*call)
    assert list(differences(shared, before)) == []
    for name, leaf in outcome.cohort.payload["delta"].items():
        assert bool(leaf.any())
        leaf.fill_(7.0)
        assert not bool((shared["params"][name] == 7.0).any())


def test_a_client_without_examples_is_no_reason_to_give_up():
    task = task_of(lambda: nn.Linear(4, 3), sizes=(4, 2, 0))
    algorithm = algorithms.fedavg(batch_size=3)
    expected = play(Loop(), algorithm, task)
    for kernel in ("fused", "mapped"):
        assert gaps(play(Batched(kernel=kernel), algorithm, task), expected) == []
    lopsided = Algorithm(Sgd(batch_size=3), Lopsided(), ServerSgd())
    assert gaps(play(Batched(), lopsided, task), play(Loop(), lopsided, task)) == []


def test_inputs_in_another_precision_are_converted_as_the_model_does():
    task = task_of(lambda: nn.Linear(4, 3))
    single = replace(task, block=replace(task.block, x=task.block.x.float()))
    algorithm = algorithms.fedavg(batch_size=3)
    assert gaps(play(Batched(kernel="fused"), algorithm, single), play(Loop(), algorithm, single)) == []


# ---------------------------------------------------------------------------------------------- what can be fused


class Tied(nn.Module):
    """One layer used twice: its two gradients belong together."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.layer(torch.tanh(self.layer(x)))))


class Skips(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.two(torch.relu(self.one(x)) + x)


class Functions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.two(nn.functional.relu(self.one(torch.flatten(x, 1))))


class Stopped(Functions):
    """No gradient reaches the first layer, which a traced graph does not show."""

    def forward(self, x):
        with torch.no_grad():
            x = torch.relu(self.one(x))
        return self.two(x)


class Narrow(Functions):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


def hooked() -> nn.Module:
    layer = nn.Linear(4, 3)
    layer.register_forward_pre_hook(lambda module, given: (2 * given[0],))
    return layer


def hooked_outside() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    model.register_forward_hook(lambda module, given, made: 2 * made)
    return model


def hooked_backward() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    halved: Any = lambda module, inner, outer: (inner[0] / 2,)  # noqa: E731
    model[2].register_full_backward_hook(halved)
    return model


def replaced() -> nn.Module:
    model: Any = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    first = model[0]
    model.forward = lambda x: model[2](-torch.relu(first(x)))
    return cast(nn.Module, model)


@pytest.mark.parametrize(
    ("factory", "possible"),
    [
        (lambda: nn.Linear(4, 3), True),
        (Functions, True),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), True),
        (Tied, False),
        (Skips, False),
        (hooked, False),
        (hooked_outside, False),
        (Stopped, False),
        (Narrow, False),
        (lambda: nn.Sequential(nn.Linear(4, 3), nn.Softplus()), False),
        (lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh()), False),
        (lambda: nn.Sequential(nn.Tanh(), nn.Linear(4, 3)), False),
        (lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Tanh(), nn.Linear(5, 3)), False),
        (lambda: nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3)), False),
    ],
)
def test_only_plain_chains_are_fused_and_others_still_agree(factory, possible):
    task, algorithm = task_of(factory), algorithms.fedavg(lr=0.3, batch_size=2)
    assert (dense_of(task.objective, shared_of(algorithm, task)) is not None) is possible
    assert gaps(play(Batched(), algorithm, task), play(Loop(), algorithm, task)) == []


def test_what_changes_gradients_alone_is_not_fused():
    """The batched engine cannot run it, and gives the loop's numbers."""
    task, algorithm = task_of(hooked_backward), algorithms.fedavg(lr=0.3, batch_size=2)
    with pytest.warns(RuntimeWarning, match="cannot be batched"):
        found = play(Batched(), algorithm, task)
    assert gaps(found, play(Loop(), algorithm, task)) == []


def test_a_function_in_place_of_forward_is_not_a_chain():
    task = task_of(replaced)
    assert dense_of(task.objective, shared_of(algorithms.fedavg(), task)) is None


def test_frozen_leaves_are_not_fused():
    task = task_of(Functions)
    objective = type(task.objective)(Functions, trainable=("two.*",), dtype=torch.float64)  # type: ignore[call-arg]
    algorithm = algorithms.fedavg()
    assert dense_of(objective, shared_of(algorithm, replace(task, objective=objective))) is None


REFUSED: dict[str, Any] = {
    "fewer features than the examples": (lambda: nn.Linear(4, 3), lambda x: torch.cat([x, x], 1)),
    "more features than the examples": (lambda: nn.Linear(6, 3), lambda x: x),
    "examples that are not flattened": (lambda: nn.Linear(4, 3), lambda x: x.unsqueeze(1)),
    "a square that is not flattened": (lambda: nn.Linear(4, 3), lambda x: x.reshape(-1, 2, 2)),
    "whole numbers": (lambda: nn.Linear(4, 3), lambda x: x.long()),
}


def refused(kind: str, engine: Any, algorithm: Algorithm) -> None:
    factory, changed = REFUSED[kind]
    task = task_of(factory)
    data = replace(task.block, x=changed(task.block.x))
    with pytest.raises(ClientError, match="client 0 failed in round 1 at stage 'step 1"):
        play(engine, algorithm, replace(task, block=data))


@pytest.mark.parametrize("kind", REFUSED)
def test_what_the_model_refuses_is_refused_with_kernels_too(kind):
    """A kernel reads plain memory, and would train on whatever lies there."""
    for engine in (Loop(), Batched()):
        refused(kind, engine, algorithms.fedavg(batch_size=2))
    pair = algorithms.superfed_mm(start=0, batch_size=2)
    kernel = KernelFor.of(pair, *model_of(kind, pair))
    for other in (Loop(), Batched(), Called(partial(run_clients, kernel=kernel))):
        refused(kind, other, pair)


def model_of(kind: str, algorithm: Algorithm) -> tuple[Any, Any]:
    task = task_of(REFUSED[kind][0])
    return task.objective, shared_of(algorithm, task)


@pytest.mark.parametrize("kind", [*REFUSED][2:])
def test_a_kernel_that_does_not_ask_is_noticed(kind, monkeypatch):
    monkeypatch.setattr(fused, "accepts", lambda *_: True)
    with pytest.raises(pytest.fail.Exception):
        refused(kind, Batched(), algorithms.fedavg(batch_size=2))


@pytest.mark.skipif(library() is None, reason="the kernels are not compiled in this installation")
def test_a_compiled_kernel_that_takes_other_rows_is_noticed(monkeypatch):
    fits = fused_logistic._fits
    monkeypatch.setattr(fused, "accepts", lambda *_: True)
    monkeypatch.setattr(fused_logistic, "_fits", lambda params, block, _: fits(params, block, 8))
    with pytest.raises(pytest.fail.Exception):
        refused("fewer features than the examples", Batched(), algorithms.fedavg(batch_size=2))


@pytest.mark.parametrize("shape", [(4,), (2, 2), (1, 4)])
def test_examples_of_any_shape_are_flattened_where_the_model_does(shape):
    task = task_of(lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), shape=shape)
    algorithm = algorithms.fedavg(lr=0.3, batch_size=2)
    layers = dense_of(task.objective, shared_of(algorithm, task))
    assert layers is not None
    assert fused.accepts(layers, task.block, False)
    assert gaps(play(Batched(kernel="fused"), algorithm, task), play(Loop(), algorithm, task)) == []


def test_kernels_say_whether_they_can_be_differentiated():
    assert (vmap_kernel.DIFFERENTIABLE, fused.DIFFERENTIABLE, cuda_graphs.DIFFERENTIABLE) == (True, False, False)


def test_a_step_that_would_be_captured_may_not_read_what_changes_from_round_to_round():
    seen = cuda_graphs.StepContext(3, 5, Key.of(0), local_lr=0.2, rounds=9)
    assert (seen.local_lr, seen.population, seen.rounds) == (0.2, 5, 9)
    for name in ("round", "key", "absent"):
        with pytest.raises(AttributeError, match=f"a local step reads ctx.{name}: read it in 'begin'"):
            getattr(seen, name)


class HalvedLoss(ModuleObjective):
    def loss(self, *given, **more):
        value, buffers = super().loss(*given, **more)
        return value / 2, buffers


def test_a_loss_of_a_subclass_is_what_is_trained():
    """No kernel that knows the loss by its name takes the place of one that a subclass computes."""
    objective = HalvedLoss(lambda: nn.Linear(64, 10))
    assert objective.loss_name is None
    assert ModuleObjective(lambda: nn.Linear(64, 10)).loss_name == "cross_entropy"
    task = replace(fedalloy.task("digits", clients=3), objective=objective)
    algorithm = algorithms.fedavg(lr=0.1, batch_size=32)
    loop, batched, whole = (
        fedalloy.fit(algorithm, one, rounds=2, engine=engine).last("loss")
        for one, engine in ((task, "loop"), (task, "batched"), (fedalloy.task("digits", "logistic", clients=3), "loop"))
    )
    assert batched == pytest.approx(loop, rel=1e-5)
    assert whole != pytest.approx(loop, rel=1e-3)
