"""Leaves that stay at the client: what is sent, what is kept, and the published methods as compositions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.func import vmap

from fedalloy import algorithms
from fedalloy.core import aspects, tree
from fedalloy.core.algorithm import Algorithm, server_step
from fedalloy.core.errors import AlgorithmError, SpecError
from fedalloy.core.keys import Key
from fedalloy.core.measuring import mean_loss
from fedalloy.core.names import Names
from fedalloy.core.types import Cohort
from fedalloy.methods.servers.adaptive import Adam
from fedalloy.methods.servers.sgd import ServerSgd
from fedalloy.methods.solvers.ditto import Ditto
from fedalloy.methods.solvers.personal import HEAD, Personal
from fedalloy.methods.solvers.prox import Prox
from fedalloy.methods.solvers.scaffold import Scaffold
from fedalloy.methods.solvers.sgd import Sgd
from fedalloy.methods.weightings import mirror
from fedalloy.methods.weightings.boosting import Boosting
from fedalloy.methods.weightings.samples import Samples
from fedalloy.methods.wires.topk import TopK
from tests.methods.solvers.bench import CLIENT, OneClient, changed, gap, leaves

LOCAL: dict[str, Any] = {"lr": 0.1, "batch_size": 4, "epochs": 2}
FULL: dict[str, Any] = {**LOCAL, "momentum": 0.9, "weight_decay": 0.05}
BODY, TOP = {"hidden.weight", "hidden.bias"}, {"output.weight", "output.bias"}
NORM = {"norm.weight", "norm.bias"}


@pytest.mark.parametrize(
    ("keep", "sent", "kept"), [("named", BODY, TOP), ("others", TOP, BODY)], ids=["fedper", "lgfedavg"]
)
def test_only_what_is_shared_is_sent_and_counted(keep, sent, kept):
    client = OneClient(Personal(Sgd(**LOCAL), keep=keep))
    found = client.run()
    assert set(found.payload["delta"]) == sent
    assert set(found.state["solver"]["params"]) == kept
    assert found.stats["bytes_up"] == tree.nbytes({name: client.params[name] for name in sent})
    together = OneClient(Sgd(**LOCAL)).run().payload["delta"]
    assert gap(found.payload["delta"], {name: together[name] for name in sent}) == 0
    trained = {name: client.params[name] + together[name] for name in kept}
    assert gap(found.state["solver"]["params"], trained) < 1e-15


def test_the_head_goes_on_where_it_was_left():
    """Two rounds by torch: the body starts again from what is received, the head from the client's own."""
    client = OneClient(Personal(Sgd(**FULL)))
    state = client.fresh
    head = {name: client.params[name] for name in TOP}
    for round in (1, 2):
        found = client.run(state, round)
        model = leaves({**client.params, **head})
        torch_sgd = torch.optim.SGD(model.values(), lr=0.1, momentum=0.9, weight_decay=0.05)
        for x, y, *_ in client.steps(round):
            torch_sgd.zero_grad()
            client.loss(model, x, y).backward()
            torch_sgd.step()
        state, head = found.state, {name: model[name].detach() for name in TOP}
        assert (
            gap(found.payload["delta"], {name: (model[name] - client.params[name]).detach() for name in BODY}) < 1e-12
        )
        assert gap(state["solver"]["params"], head) < 1e-12


def test_fedrep_trains_the_head_first_and_then_the_body():
    client = OneClient(Personal(Sgd(**FULL), shared_epochs=3))
    state = client.fresh
    head = {name: client.params[name] for name in TOP}
    assert [phase for *_, phase, _ in client.steps()] == [0] * 6 + [1] * 9
    for round in (1, 2):
        found = client.run(state, round)
        model = leaves({**client.params, **head})
        optimizers = [
            torch.optim.SGD([model[name] for name in names], lr=0.1, momentum=0.9, weight_decay=0.05)
            for names in (TOP, BODY)
        ]
        for x, y, phase, _ in client.steps(round):
            for one in optimizers:
                one.zero_grad()
            client.loss(model, x, y).backward()
            optimizers[phase].step()
        state, head = found.state, {name: model[name].detach() for name in TOP}
        assert (
            gap(found.payload["delta"], {name: (model[name] - client.params[name]).detach() for name in BODY}) < 1e-12
        )
        assert gap(state["solver"]["params"], head) < 1e-12


def test_a_device_without_time_does_nothing_in_either_phase():
    client = OneClient(Personal(Sgd(**FULL), shared_epochs=3))
    assert client.run(epochs=0).stats["num_steps"] == 0
    assert client.run(epochs=1).stats["num_steps"] == 3 + 9
    assert client.solver.provides == frozenset()
    assert Personal(Sgd()).provides == Sgd().provides


def test_fedbn_keeps_scales_and_statistics():
    client = OneClient(Personal(Sgd(**LOCAL), ("*norm*",)), "batchnorm")
    found = client.run()
    assert set(found.payload["delta"]) == BODY | TOP
    assert found.payload["buffers"] == {}
    mine = found.state["solver"]
    assert set(mine["params"]) == NORM
    assert changed(mine["buffers"], client.shared["buffers"]) == set(client.shared["buffers"])
    params, buffers = client.solver.personal(client.shared, mine)
    assert gap({name: params[name] for name in NORM}, mine["params"]) == 0
    assert gap(buffers, mine["buffers"]) == 0
    second = client.run(found.state, round=2)
    counted = second.state["solver"]["buffers"]["norm.num_batches_tracked"]
    assert int(counted) == found.stats["num_steps"] + second.stats["num_steps"]


def served(algorithm, client, *contributions):
    state = algorithm.init(client.params, client.task.population, client.shared["buffers"])
    cohort = Cohort.gather(list(range(len(contributions))), list(contributions))
    return server_step(algorithm, state, cohort, client.context(), max_norm=1e6).state


@pytest.mark.parametrize("server", [ServerSgd(), Adam(0.1)])
def test_the_server_never_moves_what_stays(server):
    client = OneClient(Personal(Sgd(**LOCAL), ("norm*",)), "batchnorm")
    after = served(Algorithm(client.solver, Samples(), server), client, client.run())
    assert changed(after["shared"]["params"], client.params) == BODY | TOP
    assert list(after["shared"]["params"]) == list(client.params)
    assert changed(after["shared"]["buffers"], client.shared["buffers"]) == set()
    for part in after["server"].values():
        assert not isinstance(part, dict) or set(part) == BODY | TOP


def test_local_training_shares_nothing_and_is_training_alone():
    client = OneClient(algorithms.local_only(**LOCAL).solver)
    first = client.run()
    assert first.payload == {"delta": {}}
    assert first.stats["bytes_up"] == 0
    assert served(client.algorithm, client, first)["shared"]["params"] is client.params
    alone = OneClient(Sgd(**LOCAL))
    alone.shared = {**alone.shared, "params": first.state["solver"]["params"]}
    expected = tree.add(alone.params, alone.run(round=2).payload["delta"])
    assert gap(client.run(first.state, round=2).state["solver"]["params"], expected) < 1e-15


def test_nothing_to_send_is_nothing_to_compress():
    client = OneClient(algorithms.local_only(**LOCAL).solver)
    client.algorithm = Algorithm(client.solver, Samples(), ServerSgd(), (TopK(),))
    client.fresh = client.algorithm.init_client(client.shared, Key.of(2))
    assert client.run().stats["bytes_up"] == 0


def test_a_compressed_update_is_that_of_the_shared_leaves():
    client, wire = OneClient(Personal(Sgd(**LOCAL))), TopK(ratio=0.2)
    client.algorithm = Algorithm(client.solver, Samples(), ServerSgd(), (wire,))
    client.fresh = client.algorithm.init_client(client.shared, Key.of(2))
    found = client.run()
    assert set(found.state["wire"]["0"]["residual"]) == BODY
    numbers = tree.count({name: client.params[name] for name in BODY})
    assert found.stats["bytes_up"] == wire.compressed_bytes(numbers, width=8)


def test_the_loss_before_is_that_of_the_received_model_with_the_clients_own_head():
    client = OneClient(Personal(Sgd(**LOCAL)), weighting=mirror.qffl())
    first = client.run()
    found = client.run(first.state, round=2).stats["loss_before"]
    examples = client.task.data("train", torch.tensor([CLIENT])).client(0)
    whole = {**client.params, **first.state["solver"]["params"]}
    assert found == pytest.approx(mean_loss(client.task.objective, whole, {}, examples), abs=1e-12)
    assert found != pytest.approx(mean_loss(client.task.objective, client.params, {}, examples), abs=1e-3)


def test_any_plain_solver_can_leave_leaves_at_home():
    client, whole = OneClient(Personal(Prox(0.5, **LOCAL))), OneClient(Prox(0.5, **LOCAL))
    expected = whole.run().payload["delta"]
    assert gap(client.run().payload["delta"], {name: expected[name] for name in BODY}) == 0


def test_a_client_that_never_took_part_uses_the_first_head():
    client = OneClient(Personal(Sgd(**LOCAL)))
    assert gap(client.solver.personal(client.shared, client.fresh["solver"])[0], client.params) == 0
    states = [client.fresh["solver"], client.run().state["solver"]]
    both = {"params": tree.stack([state["params"] for state in states]), "buffers": {}, "solver": {}}
    params, _ = vmap(lambda mine: client.solver.personal(client.shared, mine))(both)
    assert gap({name: params[name][1] for name in TOP}, states[1]["params"]) == 0
    assert torch.equal(params["hidden.weight"][0], params["hidden.weight"][1])


def test_names_that_mean_nothing_are_refused_before_the_first_round():
    with pytest.raises(SpecError, match=r"names = haed\.\* matches none of hidden\.weight, hidden\.bias"):
        OneClient(Personal(Sgd(), ("haed.*",)))
    with pytest.raises(SpecError, match="no parameter stays local"):
        OneClient(Personal(Sgd(), ("*",), keep="others"))


@pytest.mark.parametrize("inner", [Scaffold(), Ditto(), Personal()])
def test_solvers_with_a_model_or_controls_of_their_own_are_refused(inner):
    with pytest.raises(ValueError, match="cannot keep parts of its model at the client"):
        Personal(inner)


def test_phases_need_epochs_of_sgd():
    with pytest.raises(ValueError, match="shared_epochs needs"):
        Personal(Sgd(optimizer="adam"), shared_epochs=1)


def test_models_in_parts_cannot_be_tried_at_other_clients():
    with pytest.raises(AlgorithmError, match="no client sends a whole model"):
        Algorithm(Personal(), Boosting(), ServerSgd())


def test_the_published_methods_are_compositions():
    names = ("fedper", "lgfedavg", "fedrep", "fedbn", "local_only")
    kept = {name: aspects.local_leaves(algorithms.named(name).solver) for name in names}
    assert kept["fedper"] == kept["fedrep"] == Names(HEAD)
    assert kept["lgfedavg"] == Names(HEAD, others=True)
    assert "features.1.bn.running_mean" in kept["fedbn"]
    assert "conv1.weight" not in kept["fedbn"]
    assert "anything" in kept["local_only"]
    assert "classifier.hidden3.weight" in kept["fedper"]
    assert algorithms.fedrep(tau=7, lr=0.3).solver == Personal(Sgd(lr=0.3), shared_epochs=7)
