"""PropFair at the client: the gradient of the logarithm, with its two branches."""

from __future__ import annotations

import pytest
import torch
from torch.func import grad

from fedalloy.core.algorithm import Algorithm
from fedalloy.core.client import Assignment, run_client
from fedalloy.core.keys import Key
from fedalloy.core.objective import BatchGradient
from fedalloy.core.types import Context
from fedalloy.methods.servers.sgd import ServerSgd
from fedalloy.methods.solvers.propfair import PropFair
from fedalloy.methods.solvers.sgd import Sgd
from fedalloy.methods.weightings.samples import Samples
from fedalloy.testing.problems import small_task


def test_the_slope_is_one_over_the_gap_until_the_gap_is_small():
    slope = grad(PropFair(M=2.0, gap=0.2).welfare)
    for loss, expected in ((0.5, 1 / 1.5), (1.79, 1 / 0.21), (1.81, 0.5), (2.0, 0.5), (50.0, 0.5)):
        assert float(slope(torch.tensor(loss, dtype=torch.float64))) == pytest.approx(expected)


def delta(solver, task, client: int = 3) -> dict[str, torch.Tensor]:
    algorithm, ids = Algorithm(solver, Samples(), ServerSgd()), torch.tensor([client])
    params, buffers = task.objective.init(Key.of(1))
    shared = algorithm.init(params, task.population, buffers)["shared"]
    ctx = Context(1, task.population, Key.of(2), solver.lr_at(1))
    mine = Assignment(task.data("train", ids).client(0))
    found = run_client(
        algorithm, task.objective, shared, algorithm.init_client(shared, ctx.key), mine, ctx.key.each(ids), ctx
    )
    return found.payload["delta"]


def first_loss(task, client: int = 3) -> float:
    examples = task.data("train", torch.tensor([client])).client(0)
    params, buffers = task.objective.init(Key.of(1))
    grad_at = BatchGradient(task.objective, examples.x, examples.y, None, buffers, None)
    grad_at(params, of=lambda loss: 3 * loss)
    assert grad_at.loss is not None
    return float(grad_at.loss)


@pytest.mark.parametrize(("M", "scale"), [(10.0, lambda loss: 1 / (10 - loss)), (0.5, lambda loss: 1 / 0.5)])
def test_one_step_is_a_scaled_step_of_sgd(M, scale):
    task = small_task()
    plain, scaled = (delta(solver, task) for solver in (Sgd(batch_size=None), PropFair(batch_size=None, M=M)))
    for name, leaf in plain.items():
        assert torch.allclose(scaled[name], leaf * scale(first_loss(task)), atol=1e-12)


def test_senseless_limits_are_refused():
    with pytest.raises(ValueError, match="gap must lie"):
        PropFair(M=0.1, gap=0.2)
    with pytest.raises(ValueError, match="lr must be"):
        PropFair(lr=0.0)
