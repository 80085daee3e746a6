"""SuPerFed against its written loss: gradients by autograd, rounds by torch's own optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.func import vmap

from fedalloy.core import tree
from fedalloy.core.errors import AlgorithmError
from fedalloy.core.keys import Key
from fedalloy.core.layer_names import layer_of
from fedalloy.core.objective import BatchGradient
from fedalloy.core.types import Context
from fedalloy.methods.solvers.prox import Prox
from fedalloy.methods.solvers.superfed import SuPerFed
from tests.methods.solvers.bench import CLIENT, OneClient, gap, leaves

LOCAL: dict[str, Any] = {"lr": 0.1, "batch_size": 4, "epochs": 2}


def flat(model):
    return torch.cat([leaf.reshape(-1) for leaf in model.values()])


def written_loss(client, f, own, mix, x, y, mu, nu, *, prox="squared", cosine="squared"):
    """Section 3.1 of the method sheet, by the letter; the other readings are the ones found in the wild."""
    layers = list(tree.layers(f))
    shares = {name: mix if mix.dim() == 0 else mix[layers.index(layer_of(name))] for name in f}
    mixed = {name: (1 - shares[name]) * f[name] + shares[name] * own[name] for name in f}
    away, cos = flat(f) - flat(client.params), torch.nn.functional.cosine_similarity(flat(f), flat(own), dim=0)
    pulls = {"squared": mu / 2 * away @ away, "unsquared": mu * away.norm()}
    angles = {"squared": nu * cos**2, "unsquared": nu * cos}
    return client.loss(mixed, x, y) + pulls[prox] + angles[cosine]


def gradients(client, f, own, mix, x, y, **reading):
    f, own = leaves(f), leaves(own)
    solver = client.solver
    written_loss(client, f, own, mix, x, y, solver.mu, solver.nu, **reading).backward()
    return {name: leaf.grad for name, leaf in f.items()}, {name: leaf.grad for name, leaf in own.items()}


def moved_away(client):
    """A federated model that has left the received one, so that the proximal term has something to say."""
    return {
        name: leaf + 0.3 * Key.of(9).fold(name).normal(*leaf.shape, dtype=leaf.dtype)
        for name, leaf in client.params.items()
    }


def one_step(client, f, own, mix, x, y):
    """The gradients the solver's step descended along."""
    solver, ctx = client.solver, client.context()
    mine = {"local": own, "ready": torch.zeros((), dtype=torch.float64)}
    carry = {**solver.begin(client.shared, mine, ctx), "params": f}
    grad_at = BatchGradient(client.task.objective, x, y, None, {}, None)
    moved = solver.step(carry, grad_at, {"mix": mix}, torch.tensor(0), ctx)
    by_f = tree.map_leaves(lambda a, b: (a - b) / solver.lr, f, moved["params"])
    return by_f, tree.map_leaves(lambda a, b: (a - b) / solver.lr, own, moved["local"])


@pytest.mark.parametrize("mixing", ["model", "layer"])
@pytest.mark.parametrize(("mu", "nu"), [(0.0, 0.0), (0.7, 0.0), (0.0, 2.0), (0.3, 1.5)])
def test_the_step_descends_along_the_gradient_of_the_written_loss(mixing, mu, nu):
    client = OneClient(SuPerFed(mu, nu, mixing, start=0, **LOCAL))
    x, y, _, draws = client.steps()[0]
    assert draws["mix"].shape == (() if mixing == "model" else (2,))
    f, own = moved_away(client), client.fresh["solver"]["local"]
    found, expected = one_step(client, f, own, draws["mix"], x, y), gradients(client, f, own, draws["mix"], x, y)
    assert gap(found[0], expected[0]) < 1e-12
    assert gap(found[1], expected[1]) < 1e-12


def test_norms_without_their_square_are_something_else():
    client = OneClient(SuPerFed(0.3, 1.5, start=0, **LOCAL))
    x, y, _, draws = client.steps()[0]
    f, own = moved_away(client), client.fresh["solver"]["local"]
    found = one_step(client, f, own, draws["mix"], x, y)
    wrong_pull = gradients(client, f, own, draws["mix"], x, y, prox="unsquared")
    wrong_angle = gradients(client, f, own, draws["mix"], x, y, cosine="unsquared")
    assert gap(found[0], wrong_pull[0]) > 1e-2
    assert gap(found[1], wrong_angle[1]) > 1e-2


@pytest.mark.parametrize("mixing", ["model", "layer"])
def test_two_rounds_with_momentum_and_weight_decay_in_both_models(mixing):
    local = {**LOCAL, "momentum": 0.9, "weight_decay": 0.05, "decay": 0.5}
    client = OneClient(SuPerFed(0.3, 1.5, mixing, start=0, **local))
    state = client.fresh
    own = client.fresh["solver"]["local"]
    for round in (1, 2):
        found = client.run(state, round)
        f, home = leaves(client.params), leaves(own)
        torch_sgd = torch.optim.SGD(
            [*f.values(), *home.values()], lr=0.1 * 0.5 ** (round - 1), momentum=0.9, weight_decay=0.05
        )
        for x, y, _, draws in client.steps(round):
            torch_sgd.zero_grad()
            written_loss(client, f, home, draws["mix"], x, y, 0.3, 1.5).backward()
            torch_sgd.step()
        state, own = found.state, {name: leaf.detach() for name, leaf in home.items()}
        assert gap(tree.add(client.params, found.payload["delta"]), f) < 1e-12
        assert gap(state["solver"]["local"], own) < 1e-12


def test_before_the_start_it_is_fedprox_and_the_local_model_rests():
    client, prox = OneClient(SuPerFed(0.3, start=0.5, **LOCAL)), OneClient(Prox(0.3, **LOCAL))
    for round in (1, 5):
        found = client.run(round=round)
        assert gap(found.payload["delta"], prox.run(round=round).payload["delta"]) == 0
        assert gap(found.state["solver"]["local"], client.fresh["solver"]["local"]) == 0
        assert float(found.state["solver"]["ready"]) == 0
    late = client.run(round=6)
    assert gap(late.payload["delta"], prox.run(round=6).payload["delta"]) > 1e-4
    assert gap(late.state["solver"]["local"], client.fresh["solver"]["local"]) > 1e-4
    assert float(late.state["solver"]["ready"]) == 1


@pytest.mark.parametrize(
    ("start", "rounds", "first"),
    [(0, 10, 1), (0.4, 10, 5), (0.6, 50, 31), (0.29, 100, 30), (0.01, 10, 1), (1, 10, 1), (4, 10, 4), (4, None, 4)],
)
def test_the_first_round_of_the_local_model(start, rounds, first):
    solver = SuPerFed(start=start)
    started = [solver.started(Context(round, 1, Key.of(0), rounds=rounds)) for round in range(1, 40)]
    assert started == [round >= first for round in range(1, 40)]


def test_a_share_of_an_unknown_run_is_refused():
    with pytest.raises(ValueError, match="unknown length"):
        SuPerFed(start=0.4).started(Context(1, 1, Key.of(0)))


def test_every_client_begins_with_a_local_model_of_its_own():
    client = OneClient(SuPerFed())
    init, algorithm, key = client.task.objective.init, client.algorithm, Key.of(2)
    one, again, other = (
        algorithm.init_client(client.shared, key.fold(who), init)["solver"]["local"] for who in (CLIENT, CLIENT, 4)
    )
    assert gap(one, again) == 0
    assert all(float((one[name] - other[name]).abs().max()) > 0.01 for name in one)
    assert all(float((one[name] - client.params[name]).abs().max()) > 0.01 for name in one)
    with pytest.raises(AlgorithmError, match="'init' of the task's objective"):
        algorithm.init_client(client.shared, key)


def test_the_coefficients_are_uniform_and_new_in_every_step():
    client = OneClient(SuPerFed(mixing="layer", epochs=500, batch_size=4, start=0))
    mixes = torch.stack([draws["mix"] for *_, draws in client.steps()])
    assert mixes.shape == (1500, 2)
    assert len(mixes.unique()) == mixes.numel()
    assert 0 <= float(mixes.min()) < 0.01
    assert 0.99 < float(mixes.max()) < 1
    assert mixes.mean(0).tolist() == pytest.approx([0.5, 0.5], abs=0.03)
    assert mixes.var(0).tolist() == pytest.approx([1 / 12, 1 / 12], abs=0.01)


def test_the_local_model_never_travels():
    client = OneClient(SuPerFed(start=0, **LOCAL))
    found = client.run()
    assert list(found.payload) == ["delta"]
    assert found.stats["bytes_up"] == tree.nbytes(client.params)


def test_the_model_a_client_uses():
    client = OneClient(SuPerFed(start=0, **LOCAL))
    personal, fresh, used = client.solver.personal, client.fresh["solver"], client.run().state["solver"]
    middle = tree.map_leaves(lambda f, own: 0.5 * f + 0.5 * own, client.params, used["local"])
    assert gap(personal(client.shared, used, 0.0)[0], client.params) == 0
    assert gap(personal(client.shared, used, 1.0)[0], used["local"]) == 0
    assert gap(personal(client.shared, used)[0], middle) < 1e-15
    assert gap(personal(client.shared, fresh)[0], client.params) == 0, "a local model nobody trained is of no use"
    both = {
        "local": tree.stack([fresh["local"], used["local"]]),
        "ready": torch.stack([fresh["ready"], used["ready"]]),
    }
    params, buffers = vmap(lambda mine: personal(client.shared, mine))(both)
    assert buffers == {}
    assert gap(tree.rows(params, 1), middle) < 1e-15


def test_models_in_single_precision_stay_there():
    client = OneClient(SuPerFed(start=0, mixing="layer", momentum=0.9, **LOCAL))
    single = {name: leaf.float() for name, leaf in client.params.items()}
    shared, solver, ctx = {"params": single, "buffers": {}, "fresh": single}, client.solver, client.context()
    carry = solver.begin(shared, solver.init_client(shared, Key.of(0)), ctx)
    draws = {"mix": torch.tensor([0.3, 0.6], dtype=torch.float64)}
    carry = solver.step(carry, lambda at: tree.map_leaves(torch.ones_like, at), draws, torch.tensor(0), ctx)
    _, mine = solver.end(carry, shared, solver.init_client(shared, Key.of(0)), torch.tensor(1.0).double(), ctx)
    kept = [carry["params"], carry["memory"]["velocity"], mine["local"], {"ready": mine["ready"]}]
    assert {leaf.dtype for part in kept for leaf in part.values()} == {torch.float32}


def test_senseless_settings_are_refused():
    for mu, nu, start in ((-1, 0, 0), (0, -1, 0), (0, 0, -0.1)):
        with pytest.raises(ValueError, match="must be 0 or more"):
            SuPerFed(mu, nu, start=start)
