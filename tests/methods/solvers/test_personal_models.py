"""Ditto, APFL and pFedMe against rounds written with autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.func import vmap

from fedalloy.core import tree
from fedalloy.methods.solvers.apfl import Apfl
from fedalloy.methods.solvers.ditto import Ditto
from fedalloy.methods.solvers.finetune import FineTune
from fedalloy.methods.solvers.pfedme import PFedMe
from fedalloy.methods.solvers.sgd import Sgd
from tests.methods.solvers.bench import OneClient, changed, gap, leaves

LOCAL: dict[str, Any] = {"lr": 0.1, "batch_size": 4, "epochs": 2}


def grad(client, params, x, y):
    model = leaves(params)
    client.loss(model, x, y).backward()
    return {name: leaf.grad for name, leaf in model.items()}


def test_dittos_shared_model_is_fedavgs():
    client, plain = OneClient(Ditto(0.7, 3, momentum=0.9, **LOCAL)), OneClient(Sgd(momentum=0.9, **LOCAL))
    first = client.run()
    assert gap(first.payload["delta"], plain.run().payload["delta"]) < 1e-15
    assert gap(client.run(first.state, 2).payload["delta"], plain.run(round=2).payload["delta"]) < 1e-15


def test_dittos_personal_model_is_pulled_to_the_received_one():
    client = OneClient(Ditto(0.7, 3, momentum=0.9, weight_decay=0.05, **LOCAL))
    state = client.fresh
    own = client.params
    assert [phase for *_, phase, _ in client.steps()] == [0] * 6 + [1] * 9
    for round in (1, 2):
        found = client.run(state, round)
        v = leaves(own)
        torch_sgd = torch.optim.SGD(v.values(), lr=0.1, momentum=0.9, weight_decay=0.05)
        for x, y, phase, _ in client.steps(round):
            if phase == 1:
                torch_sgd.zero_grad()
                away = sum(((leaf - client.params[name]) ** 2).sum() for name, leaf in v.items())
                (client.loss(v, x, y) + 0.7 / 2 * away).backward()
                torch_sgd.step()
        state, own = found.state, {name: leaf.detach() for name, leaf in v.items()}
        assert gap(state["solver"]["personal"], own) < 1e-12
    assert gap(client.solver.personal(client.shared, state["solver"])[0], own) < 1e-12


def test_a_fine_tuned_model_is_the_received_one_after_all_local_epochs():
    client, plain = OneClient(FineTune(3, momentum=0.9, **LOCAL)), OneClient(Sgd(momentum=0.9, **LOCAL))
    longer = OneClient(Sgd(momentum=0.9, **{**LOCAL, "epochs": LOCAL["epochs"] + 3}))
    state = client.fresh
    for round in (1, 2):
        found = client.run(state, round)
        assert gap(found.payload["delta"], plain.run(round=round).payload["delta"]) < 1e-15, "FedAvg's"
        kept = tree.add(client.params, longer.run(round=round).payload["delta"])
        assert gap(client.solver.personal(client.shared, found.state["solver"])[0], kept) < 1e-15
        state = found.state
    idle = client.run(state, 3, epochs=0)
    assert gap(idle.state["solver"]["personal"], state["solver"]["personal"]) == 0.0
    only = OneClient(FineTune(0, **LOCAL)).run()
    assert gap(only.state["solver"]["personal"], tree.add(client.params, only.payload["delta"])) < 1e-15


def test_only_the_shared_models_batches_enter_the_statistics():
    client, plain = OneClient(Ditto(1.0, 4, **LOCAL), "batchnorm"), OneClient(Sgd(**LOCAL), "batchnorm")
    found, expected = client.run().payload["buffers"], plain.run().payload["buffers"]
    assert int(found["norm.num_batches_tracked"]) == 6
    assert gap(found, expected) < 1e-12


@pytest.mark.parametrize("adaptive", [False, True])
def test_apfl_mixes_parameters_and_may_learn_how_much(adaptive):
    client = OneClient(Apfl(0.4, adaptive, **LOCAL))
    state = client.fresh
    v, alpha = client.params, 0.4
    for round in (1, 2):
        found, w = client.run(state, round), client.params
        for x, y, *_ in client.steps(round):
            mixed = {name: alpha * v[name] + (1 - alpha) * w[name] for name in w}
            by_w, by_mixed = grad(client, w, x, y), grad(client, mixed, x, y)
            slope = sum(float(((v[name] - w[name]) * by_mixed[name]).sum()) for name in w)
            v = {name: v[name] - 0.1 * alpha * by_mixed[name] for name in v}
            w = {name: w[name] - 0.1 * by_w[name] for name in w}
            alpha = min(1.0, max(0.0, alpha - 0.1 * slope)) if adaptive else alpha
        state = found.state
        assert gap(tree.add(client.params, found.payload["delta"]), w) < 1e-12
        assert gap(state["solver"]["personal"], v) < 1e-12
        assert float(state["solver"]["alpha"]) == pytest.approx(alpha, abs=1e-12)
    assert (alpha != 0.4) == adaptive
    mine, personal = state["solver"], client.solver.personal
    own = {name: alpha * v[name] + (1 - alpha) * leaf for name, leaf in client.params.items()}
    assert gap(personal(client.shared, mine)[0], own) < 1e-12
    assert gap(personal(client.shared, mine, 1.0)[0], v) < 1e-12
    stacked = {"personal": tree.stack([v, v]), "alpha": torch.stack([mine["alpha"], torch.zeros_like(mine["alpha"])])}
    params, _ = vmap(lambda one: personal(client.shared, one))(stacked)
    assert gap(tree.rows(params, 1), client.params) < 1e-12


def test_apfls_shared_model_counts_for_fednova_as_sgd_does():
    assert Apfl().provides == Sgd().provides
    assert Ditto().provides == PFedMe().provides == frozenset()


def test_pfedme_by_hand():
    client = OneClient(PFedMe(2.0, 3, 0.05, lr=0.1, batch_size=4, epochs=2, decay=0.5))
    state = client.fresh
    for round, scale in ((1, 1.0), (2, 0.5)):
        found, w = client.run(state, round), client.params
        theta = w
        for x, y, *_ in client.steps(round):
            for _ in range(3):
                slope = grad(client, theta, x, y)
                theta = {
                    name: leaf - scale * 0.05 * (slope[name] + 2.0 * (leaf - w[name])) for name, leaf in theta.items()
                }
            w = {name: leaf - scale * 0.1 * 2.0 * (leaf - theta[name]) for name, leaf in w.items()}
        state = found.state
        assert gap(tree.add(client.params, found.payload["delta"]), w) < 1e-12
        assert gap(state["solver"]["personal"], theta) < 1e-12
        assert gap(client.solver.personal(client.shared, state["solver"])[0], theta) < 1e-12
    idle = client.run(state, 3, epochs=0)
    assert changed(idle.state["solver"]["personal"], theta) == changed(state["solver"]["personal"], theta)


@pytest.mark.parametrize("solver", [Ditto(**LOCAL), FineTune(**LOCAL), Apfl(**LOCAL), PFedMe(**LOCAL)])
def test_personal_models_never_travel_and_begin_with_the_received_one(solver):
    client = OneClient(solver)
    found = client.run()
    assert list(found.payload) == ["delta"]
    assert found.stats["bytes_up"] == tree.nbytes(client.params)
    assert gap(solver.personal(client.shared, client.fresh["solver"])[0], client.params) < 1e-15
    assert gap(solver.personal(client.shared, found.state["solver"])[0], client.params) > 1e-4


def test_senseless_settings_are_refused():
    with pytest.raises(ValueError, match="lam and personal_epochs must be 0 or more"):
        Ditto(lam=-1)
    with pytest.raises(ValueError, match="personal_epochs must be 0 or more"):
        FineTune(-1)
    with pytest.raises(ValueError, match="alpha must lie in"):
        Apfl(alpha=1.5)
    with pytest.raises(ValueError, match="inner of 1 or more"):
        PFedMe(inner=0)
