"""FedEvg's client half: which way the energies move, what is sent, what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.func import vmap

from fedalloy.core.algorithm import Algorithm, data_spec_of
from fedalloy.core.applying import vmapped
from fedalloy.core.blocks import prepare
from fedalloy.core.client import Assignment, run_client
from fedalloy.core.errors import AlgorithmError
from fedalloy.core.keys import Key
from fedalloy.core.program import BlockTraining
from fedalloy.core.types import Context, Work
from fedalloy.engines.kernels import vmap_kernel
from fedalloy.engines.kernels.im2col import ConvolutionsAsProducts
from fedalloy.methods.servers.langevin import Langevin
from fedalloy.methods.servers.sgd import ServerSgd
from fedalloy.methods.solvers import energy
from fedalloy.methods.solvers.energy import Energy, chosen_logits, contrast, energy_gradient, factors
from fedalloy.methods.weightings.energies import Energies
from fedalloy.methods.weightings.fedadp import Angles
from fedalloy.methods.weightings.qfedavg import QFedAvg
from fedalloy.methods.weightings.samples import Samples
from fedalloy.tasks.assembly import make_task
from fedalloy.testing.comparing import differences
from fedalloy.testing.problems import small_task

TASK = small_task("mlp", sizes=(24, 18))


def energies_apart(solver: Energy) -> float:
    """How much more likely a trained model finds its real data than the samples it was given."""
    algorithm, task, ids = Algorithm(solver, Energies(), Langevin()).bind(TASK), TASK, torch.tensor([0])
    params, buffers = task.objective.init(Key.of(0))
    shared = algorithm.init(params, task.population, buffers)["shared"]
    state = algorithm.init_client(shared, Key.of(1), task.objective.init)
    kept = {}

    class Watching(Energy):
        def post_train(self, carry, shared, outputs):
            kept["params"] = carry["params"]
            return super().post_train(carry, shared, outputs)

    watching = Watching(**vars(algorithm.solver))
    examples = task.data("train", ids).client(0)
    ctx = Context(1, 2, Key.of(3), solver.lr, 10)
    with torch.no_grad():
        watched = replace(algorithm, solver=watching)
        run_client(watched, task.objective, shared, state, Assignment(examples), ctx.key.each(ids), ctx)
    real = chosen_logits(task.objective.outputs(kept["params"], {}, examples.x), examples.y)
    fake = chosen_logits(task.objective.outputs(kept["params"], {}, shared["samples"]["x"]), shared["labels"]["y"])
    return float(real.mean() - fake.mean())


SIGNED = Energy(per_class=8, epochs=30, batch_size=8, lr=0.05, synthetic=0.0, langevin=0)


def test_training_makes_real_data_likelier_than_the_chain():
    assert energies_apart(SIGNED) > 0.5


def test_the_printed_sign_would_do_the_opposite(monkeypatch):
    """The planted fault: f(x) - f(x_fake) instead of its negative lowers the logit of real data."""
    right = energies_apart(SIGNED)
    monkeypatch.setattr(energy, "contrast", lambda *logits: -contrast(*logits))
    assert energies_apart(SIGNED) < min(0.0, right)


def test_a_step_against_the_energy_gradient_raises_the_logit_and_one_along_it_lowers_it():
    params, _ = TASK.objective.init(Key.of(4))
    x, y = Key.of(5).normal(6, 4, dtype=torch.float64), torch.arange(6) % 3

    def model(z):
        return TASK.objective.outputs(params, {}, z)

    slope, before = energy_gradient(model, x, y, None)
    assert torch.equal(before, chosen_logits(model(x), y))
    assert bool((chosen_logits(model(x - 0.01 * slope), y) > before).all())
    assert bool((chosen_logits(model(x + 0.01 * slope), y) < before).all())
    cut, _ = energy_gradient(model, x, y, 0.05)
    assert float(cut.abs().max()) <= 0.05
    assert bool((cut.sign() == slope.sign()).all())


def test_langevin_steps_walk_down_the_energy_and_stay_inside_the_limits():
    solver = Energy(langevin=20, step_size=0.3, noise=0.0, bound=None, low=-0.5, high=0.5)
    params, _ = TASK.objective.init(Key.of(4))
    x, y = Key.of(6).uniform(9, 4, dtype=torch.float64) - 0.5, torch.arange(9) % 3

    def outputs(leaves, z):
        return TASK.objective.outputs(leaves, {}, z)

    end = solver.walk(x, y, params, outputs, Key.of(0))
    assert bool((chosen_logits(outputs(params, end), y) > chosen_logits(outputs(params, x), y)).all())
    assert float(end.abs().max()) == 0.5
    shaken = replace(solver, noise=0.1).walk(x, y, params, outputs, Key.of(0))
    assert not torch.equal(shaken, end)
    assert torch.equal(shaken, replace(solver, noise=0.1).walk(x, y, params, outputs, Key.of(0)))


def test_factors_know_only_the_sign():
    values = factors(torch.tensor([1e-9, 4.0, -7.0, 0.0], dtype=torch.float64))
    e = torch.e
    assert torch.allclose(values, torch.tensor([e, e, 1 / e, 1.0], dtype=torch.float64))


def test_only_what_is_known_of_the_samples_is_sent_and_only_they_are_received():
    algorithm = Algorithm(Energy(per_class=2), Energies(), Langevin()).bind(TASK)
    shared = algorithm.init(*TASK.objective.init(Key.of(0))[:1], 2)["shared"]
    assert shared["samples"]["x"].shape == (6, 4)
    assert shared["labels"]["y"].tolist() == [0, 0, 1, 1, 2, 2]
    assert algorithm.received(shared).keys() == {"samples", "labels", "buffers"}, (
        "buffers: the ones training begins with"
    )
    assert algorithm.parts(shared).keys() == {"energy_grad", "factors"}


def test_iterations_limit_the_local_steps():
    sizes, epochs, keys = torch.tensor([24, 3]), torch.tensor([-1, -1]), Key.of(0).each(torch.arange(2))
    assert Energy(batch_size=4, iterations=2).plan(sizes, epochs, keys).steps.tolist() == [2, 1]
    assert Energy(batch_size=4).plan(sizes, epochs, keys).steps.tolist() == [6, 1]


def test_data_outside_the_limits_and_single_outputs_are_refused():
    data_spec = data_spec_of(TASK, Key.of(0))
    with pytest.raises(ValueError, match=r"\[0.0, 1.0\], but the data reach from"):
        Energy().bind(replace(data_spec, bounds=(0.0, 1.0)))
    with pytest.raises(ValueError, match="one output per class"):
        Energy().bind(replace(data_spec, outputs=1))
    with pytest.raises(ValueError, match="is not bound to data yet"):
        Energy().init_shared({})
    assert Energy().bind(data_spec).low is None
    inside = Energy().bind(replace(data_spec, low=0.0, high=1.0, bounds=(0.0, 1.0)))
    assert (inside.shape, inside.low, inside.high) == ((4,), 0.0, 1.0)
    assert Energy(low=-9.0, high=9.0).bind(replace(data_spec, bounds=(0.0, 1.0))).high == 9.0
    assert Langevin(low=-2.0).bind(replace(data_spec, bounds=(0.0, 1.0))) == Langevin(low=-2.0, high=1.0)


def test_rules_that_need_a_model_are_refused_and_client_weights_are_not():
    solver = Energy()
    with pytest.raises(AlgorithmError, match="reads the part 'delta'"):
        Algorithm(solver, Angles(), Langevin())
    with pytest.raises(AlgorithmError, match="loss_before"):
        Algorithm(solver, QFedAvg(), Langevin())
    assert Algorithm(solver, Samples(), ServerSgd()).solver is solver


def test_the_noise_of_a_step_is_the_clients_own_under_vmap():
    """The walk is drawn from a key inside the mapped program: each client gets what it gets alone."""
    solver, params = Energy(noise=0.5), TASK.objective.init(Key.of(4))[0]
    x, y = torch.zeros(2, 3, 4, dtype=torch.float64), torch.arange(3)
    states = torch.as_tensor(Key.of(8).each(torch.arange(2)).state)

    def walk(start, state):
        return solver.walk(start, y, params, lambda leaves, z: TASK.objective.outputs(leaves, {}, z), Key(state))

    together = vmap(walk)(x, states)
    assert torch.allclose(together[1], walk(x[1], states[1]), atol=1e-12)
    assert not torch.allclose(together[0], together[1])


def test_convolutions_as_products_take_the_same_steps():
    """On a GPU convolutions of many clients become products: gradients by weights and by images alone must stay."""
    model = {"kind": "energy_cnn", "width": 4}
    task = make_task({"kind": "digits", "flat": False}, model, clients=2, dtype="float64")
    algorithm = Algorithm(Energy(per_class=1, batch_size=8, iterations=2), Energies(), Langevin()).bind(task)
    params, buffers = task.objective.init(Key.of(0))
    shared, work = algorithm.init(params, 2, buffers)["shared"], Work.of(torch.arange(2))
    states = [algorithm.init_client(shared, Key.of(seed), task.objective.init) for seed in range(2)]
    mine, ctx = vmapped.stack(states)["solver"], Context(1, 2, Key.of(1), 1e-3, 10)
    with torch.no_grad():
        block = prepare(algorithm, work, task.data("train", work.ids), shared, ctx)
        training = BlockTraining(algorithm, task.objective, shared, mine, block, ctx, vmapped)
        plain = vmap_kernel.train(training)
        with ConvolutionsAsProducts():
            products = vmap_kernel.train(training)
    assert list(differences(products.carry, plain.carry, 1e-9)) == []
    assert list(differences(plain.carry["params"], mine["fresh"], 1e-9)) != []
