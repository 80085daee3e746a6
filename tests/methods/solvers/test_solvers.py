"""The solvers against references written down step by step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedalloy.core.algorithm import Algorithm
from fedalloy.core.client import Assignment, run_client
from fedalloy.core.keys import Key
from fedalloy.core.objective import Objective
from fedalloy.core.types import Block, Context
from fedalloy.methods.servers.sgd import ServerSgd
from fedalloy.methods.solvers.prox import Prox
from fedalloy.methods.solvers.scaffold import Scaffold
from fedalloy.methods.solvers.sgd import Sgd
from fedalloy.methods.solvers.training import update_length
from fedalloy.methods.weightings.uniform import Uniform
from fedalloy.testing import SmallTask


class Quadratic(Objective):
    """``1/2 (w - mean(batch))^2`` per coordinate: gradients that can be written down by hand."""

    def init(self, key):
        return {"w": torch.tensor([1.0, -2.0], dtype=torch.float64)}, {}

    def loss(self, params, buffers, x, y, mask=None, draw=None):
        return 0.5 * ((params["w"] - x) ** 2).sum(1).mean(), {}

    def outputs(self, params, buffers, x):
        return x - params["w"]

    def losses(self, outputs, y):
        return 0.5 * (outputs**2).sum(1)

    def hits(self, outputs, y):
        return torch.zeros(len(y))


X = np.array([[0.5, 1.0], [2.0, -1.0], [3.0, 0.0], [-1.0, 4.0], [0.0, 0.5]])
SIZE = len(X)
TASK = SmallTask(
    Quadratic(),
    Block(torch.tensor(X), torch.zeros(SIZE, dtype=torch.int64), torch.tensor([0]), torch.tensor([SIZE])),
)
START = np.array([1.0, -2.0])
PLAIN: dict[str, Any] = {"lr": 0.2, "epochs": 2, "batch_size": 2, "shuffle": False}
BATCHES = [X[0:2], X[2:4], X[4:5]] * 2


def play(solver, state=None, shared=None):
    algorithm = Algorithm(solver, Uniform(), ServerSgd())
    params, buffers = TASK.objective.init(Key.of(0))
    shared = {**algorithm.init(params, 1, buffers)["shared"], **(shared or {})}
    mine = {"solver": state, "wire": {}} if state else algorithm.init_client(shared, Key.of(0))
    ctx = Context(1, 1, Key.of(1), local_lr=solver.lr_at(1))
    assignment = Assignment(TASK.data("train", torch.tensor([0])).client(0))
    with torch.no_grad():
        return run_client(algorithm, TASK.objective, shared, mine, assignment, Key.of(2).each(torch.tensor([0])), ctx)


def gradient(place, batch):
    return place - batch.mean(0)


def close(found, expected):
    np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=1e-13)


def test_plain_local_training():
    place = START
    for batch in BATCHES:
        place = place - 0.2 * gradient(place, batch)
    close(play(Sgd(**PLAIN)).payload["delta"]["w"], place - START)


def test_weight_decay_pulls_to_zero():
    place = START
    for batch in BATCHES:
        place = place - 0.2 * (gradient(place, batch) + 0.1 * place)
    close(play(Sgd(**PLAIN, weight_decay=0.1)).payload["delta"]["w"], place - START)


@pytest.mark.parametrize("mu", [0.0, 0.5, 2.0])
def test_the_proximal_term_pulls_to_the_received_model(mu):
    place = START
    for batch in BATCHES:
        place = place - 0.2 * (gradient(place, batch) + mu * (place - START))
    close(play(Prox(**PLAIN, mu=mu)).payload["delta"]["w"], place - START)


def test_the_proximal_term_with_momentum():
    place, velocity = START, np.zeros(2)
    for batch in BATCHES:
        velocity = 0.9 * velocity + gradient(place, batch) + 0.5 * (place - START)
        place = place - 0.2 * velocity
    close(play(Prox(**PLAIN, mu=0.5, momentum=0.9)).payload["delta"]["w"], place - START)


def test_scaffold_corrects_the_drift_and_counts_steps_not_epochs():
    mine, everyone = np.array([0.3, -0.1]), np.array([-0.2, 0.4])
    place = START
    for batch in BATCHES:
        place = place - 0.2 * (gradient(place, batch) - mine + everyone)
    new = mine - everyone + (START - place) / (len(BATCHES) * 0.2)
    state, shared = {"control": {"w": torch.tensor(mine)}}, {"control": {"w": torch.tensor(everyone)}}
    found = play(Scaffold(**PLAIN), state, shared)
    close(found.payload["delta"]["w"], place - START)
    close(found.state["solver"]["control"]["w"], new)
    close(found.payload["control"]["w"], new - mine)


def test_scaffolds_first_control_is_the_mean_gradient():
    """From zero controls option II keeps the average of the gradients on the way."""
    place, seen = START, []
    for batch in BATCHES:
        seen.append(gradient(place, batch))
        place = place - 0.2 * seen[-1]
    close(play(Scaffold(**PLAIN)).state["solver"]["control"]["w"], np.mean(seen, 0))


def test_scaffold_divides_by_the_length_that_momentum_gives():
    """Dividing by the steps alone would make the control variate ten times a gradient, and the run diverge."""
    place, velocity = START, np.zeros(2)
    for batch in BATCHES:
        velocity = 0.9 * velocity + gradient(place, batch)
        place = place - 0.2 * velocity
    length = float(update_length(torch.tensor([float(len(BATCHES))], dtype=torch.float64), 0.9)[0])
    found = play(Scaffold(**PLAIN, momentum=0.9)).state["solver"]["control"]["w"]
    close(found, (START - place) / (length * 0.2))


@pytest.mark.parametrize("settings", [{"optimizer": "adam"}, {"momentum": 0.9, "nesterov": True}])
def test_scaffold_refuses_steps_that_are_no_mean_gradients(settings):
    with pytest.raises(ValueError, match="mean gradients"):
        Scaffold(**settings)


def test_scaffold_sums_to_a_single_precision_model_in_single_precision():
    solver, params = Scaffold(), {"w": torch.ones(3)}
    shared = {"params": params, "buffers": {}, **solver.init_shared(params)}
    mine = solver.init_client(shared, Key.of(0))
    ctx = Context(1, 1, Key.of(0), local_lr=0.1)
    slope: Any = lambda at: {"w": torch.ones(3)}  # noqa: E731
    carry = solver.step(solver.begin(shared, mine, ctx), slope, {}, torch.tensor(0), ctx)
    payload, kept = solver.end(carry, shared, mine, torch.tensor(1.0, dtype=torch.float64), ctx)
    assert {leaf.dtype for part in (*payload.values(), kept["control"]) for leaf in part.values()} == {torch.float32}


def test_fednova_counts_plain_steps_with_a_proximal_term():
    ctx = Context(1, 1, Key.of(0), local_lr=0.1)
    steps = torch.tensor([0.0, 5.0], dtype=torch.float64)
    told = Prox(mu=2.0).describe(steps, ctx)
    assert told["effective_steps"].tolist() == [0, 5]
    assert told["step_norm"].tolist() == pytest.approx([0, (1 - 0.8**5) / 0.2])
    plain = Prox(mu=0.0, momentum=0.5).describe(steps, ctx)
    assert torch.equal(plain["effective_steps"], plain["step_norm"])


def test_a_negative_pull_is_refused():
    with pytest.raises(ValueError, match="mu must be 0 or more"):
        Prox(mu=-1)
    with pytest.raises(ValueError, match="lr must be above 0"):
        Prox(lr=0)
