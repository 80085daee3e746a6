"""Both gradients against one autograd graph over all rounds, for every algorithm that is said to work."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fedalloy.algorithms import named
from fedalloy.core.errors import AlgorithmError, Diverged
from fedalloy.core.keys import Key
from fedalloy.core.program import BlockTraining, TrainingResult
from fedalloy.core.types import Tree
from fedalloy.engines.kernels import vmap_kernel
from fedalloy.engines.loop import Loop
from fedalloy.engines.workers import Workers
from fedalloy.studies.unfolding.gradient import outer_gradient
from fedalloy.studies.unfolding.settings import Learning
from fedalloy.studies.unfolding.shares import first_theta
from fedalloy.studies.unfolding.unrolled import UnrolledProblem, layer_names
from fedalloy.tasks.devices import DeviceProfile
from fedalloy.testing import small_task
from tests.studies.unfolding.reference import unrolled

LOCAL: dict[str, Any] = {"lr": 0.3, "batch_size": 3}
SIZES, ROUNDS, KEY = (4, 7, 5), 3, Key.of(5)
UNEVEN = DeviceProfile(epochs=(2, 1, 1))
FAILING = DeviceProfile(epochs=(2, 1, 1), success=(0.5, 0.5, 1.0))
ALGORITHMS: dict[str, tuple[str, dict[str, Any]]] = {
    "DUW-FedAvg": ("fedavg", {}),
    "DUW-FedNova": ("fednova", {}),
    "FedProx": ("fedprox", {"mu": 0.4}),
    "FedAdam": ("fedadam", {"server_lr": 0.1}),
    "momentum": ("fedavg", {"momentum": 0.7}),
    "momentum at the server": ("fedavgm", {"server_lr": 0.6}),
}


def problem(name: str, devices: DeviceProfile = UNEVEN, **settings: Any) -> UnrolledProblem:
    method, arguments = ALGORITHMS[name]
    task, learning = small_task("mlp", SIZES), Learning(**settings)
    layers = layer_names(task) if learning.level == "layer" else ()
    return UnrolledProblem(named(method, **{**LOCAL, **arguments}), task, ROUNDS, devices, learning, layers)


def theta_for(made: UnrolledProblem) -> torch.Tensor:
    theta = first_theta(torch.tensor(SIZES), made.rounds, made.learning.parametrisation, len(made.layers))
    return theta + 0.1 * Key.of(8).normal(*theta.shape, dtype=torch.float64)


def both(made: UnrolledProblem) -> tuple[Any, Any]:
    """What the room finds, and what one graph over all rounds finds."""
    theta, (params, buffers) = theta_for(made), made.task.objective.init(Key.of(1))
    found = outer_gradient(made, theta, params, buffers, KEY)
    return found, unrolled(made, theta, params, KEY, made.learning.gradient == "first_order")


def agree(made: UnrolledProblem) -> None:
    found, (loss, grad, final) = both(made)
    assert found.loss == pytest.approx(loss, rel=1e-12)
    assert found.by_theta.abs().max() > 1e-4
    torch.testing.assert_close(found.by_theta, grad, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(found.params, final, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("gradient", ["first_order", "exact"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_gradients_are_those_of_one_graph_over_all_rounds(name, gradient):
    agree(problem(name, gradient=gradient))


@pytest.mark.parametrize("gradient", ["first_order", "exact"])
@pytest.mark.parametrize("name", ["DUW-FedAvg", "DUW-FedNova", "FedProx", "FedAdam"])
def test_clients_whose_link_fails_keep_their_weight_and_their_losses(name, gradient):
    made = problem(name, FAILING, gradient=gradient)
    links = torch.stack([made.work(made.context(round, KEY)).active for round in range(1, ROUNDS + 1)])
    assert not links.all()
    agree(made)


@pytest.mark.parametrize("gradient", ["first_order", "exact"])
@pytest.mark.parametrize(
    "settings",
    [{"level": "layer"}, {"parametrisation": "softmax"}, {"loss": "mse"}, {"final": False}],
    ids=lambda settings: next(iter(settings)),
)
def test_options_change_the_gradient_as_they_say(settings, gradient):
    made = problem("DUW-FedNova", FAILING, gradient=gradient, **settings)
    found, (loss, grad, _) = both(made)
    assert found.loss == pytest.approx(loss, rel=1e-12)
    torch.testing.assert_close(found.by_theta, grad, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_exact_gradient_is_not_the_first_order_one(name):
    """A kernel that hides an autograd call gives the first-order gradient under the name of the exact one."""
    first, second = (both(problem(name, gradient=order))[0].by_theta for order in ("first_order", "exact"))
    assert (first - second).norm() > 0.02 * first.norm()


def test_the_check_on_the_exact_gradient_catches_a_hidden_detach(monkeypatch):
    honest = vmap_kernel.train

    def hiding(training: BlockTraining) -> TrainingResult:
        trained = honest(training)
        received = training.shared["params"]
        moved = trained.carry["params"]
        again = {name: received[name] + (leaf - received[name]).detach() for name, leaf in moved.items()}
        return replace(trained, carry={**trained.carry, "params": again})

    monkeypatch.setattr(vmap_kernel, "train", hiding)
    with pytest.raises(AssertionError):
        agree(problem("DUW-FedAvg", gradient="exact"))


def test_without_the_final_loss_the_last_row_learns_nothing():
    for gradient in ("first_order", "exact"):
        grad = both(problem("DUW-FedAvg", gradient=gradient, final=False))[0].by_theta
        assert grad[-1].abs().max() < 1e-12 < grad[0].abs().max()


def test_every_engine_gives_the_same_first_order_gradient():
    pool = Workers(2)
    for name in ("DUW-FedAvg", "FedProx"):
        made = problem(name, FAILING)
        theta, model = theta_for(made), made.task.objective.init(Key.of(1))
        mine, loop, workers = (outer_gradient(made, theta, *model, KEY, engine) for engine in (None, Loop(), pool))
        torch.testing.assert_close(mine.by_theta, loop.by_theta, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(workers.by_theta, loop.by_theta, rtol=1e-9, atol=1e-11)
    pool.close()


@pytest.mark.parametrize("model", ["batchnorm", "dropout"])
def test_models_whose_batches_matter_can_be_unfolded(model):
    task = small_task(model)
    made = UnrolledProblem(named("fedavg", **LOCAL), task, 2, DeviceProfile(success=(0.4,) * 5))
    theta = first_theta(task.block.size, 2, "square")
    found = outer_gradient(made, theta, *task.objective.init(Key.of(1)), KEY)
    assert found.by_theta.isfinite().all()
    assert found.by_theta.abs().sum() > 0


def test_a_stateful_solver_can_be_unfolded_in_both_orders():
    made = {
        gradient: UnrolledProblem(
            named("scaffold", **LOCAL), small_task("mlp", SIZES), ROUNDS, UNEVEN, Learning(gradient=gradient)
        )
        for gradient in ("first_order", "exact")
    }
    theta, model = theta_for(made["exact"]), small_task("mlp", SIZES).objective.init(Key.of(1))
    exact = outer_gradient(made["exact"], theta, *model, KEY).by_theta
    assert (outer_gradient(made["first_order"], theta, *model, KEY).by_theta - exact).norm() > 0
    for place in ((0, 1), (1, 0), (2, 2)):
        torch.testing.assert_close(_slope(made["exact"], theta, model, place), exact[place], rtol=1e-4, atol=1e-6)


def _slope(
    made: UnrolledProblem, theta: torch.Tensor, model: tuple[Tree, Tree], place: tuple[int, int]
) -> torch.Tensor:
    """The gradient by one parameter, by differences."""
    step, values = 1e-5, []
    for sign in (1, -1):
        moved = theta.clone()
        moved[place] += sign * step
        values.append(outer_gradient(made, moved, *model, KEY).loss)
    return torch.tensor((values[0] - values[1]) / (2 * step), dtype=torch.float64)


@pytest.mark.parametrize(
    ("method", "says"),
    [("drfedavg", "computes its weights itself"), ("fedper", "leaves a model"), ("fedcams", "changes what is sent")],
)
def test_what_cannot_be_unfolded_is_refused(method, says):
    with pytest.raises(AlgorithmError, match=says):
        UnrolledProblem(named(method), small_task(), ROUNDS)


def test_a_step_size_that_diverges_is_named():
    task = small_task("linear")
    made = UnrolledProblem(named("fedavg", lr=1e308, batch_size=3), task, ROUNDS)
    with pytest.raises(Diverged, match="smaller local step"):
        outer_gradient(made, first_theta(task.block.size, ROUNDS, "square"), *task.objective.init(KEY), KEY)
