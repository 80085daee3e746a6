"""Personal solvers in whole federations: on every engine, under any weighting and server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fedalloy.core.algorithm import Algorithm, server_step
from fedalloy.core.keys import Key
from fedalloy.core.types import Context
from fedalloy.engines.batched import Batched
from fedalloy.engines.loop import Loop
from fedalloy.engines.workers import Workers
from fedalloy.methods.servers.adaptive import Adam
from fedalloy.methods.servers.sgd import ServerSgd
from fedalloy.methods.solvers.apfl import Apfl
from fedalloy.methods.solvers.ditto import Ditto
from fedalloy.methods.solvers.personal import Personal
from fedalloy.methods.solvers.pfedme import PFedMe
from fedalloy.methods.solvers.prox import Prox
from fedalloy.methods.solvers.sgd import Sgd
from fedalloy.methods.solvers.superfed import SuPerFed
from fedalloy.methods.weightings.aaggff_d import AaggffD
from fedalloy.methods.weightings.ewwa import Ewwa
from fedalloy.methods.weightings.fedadp import Angles
from fedalloy.methods.weightings.samples import Samples
from fedalloy.testing import EngineCase, HalfWithMemory, Jitter, Lopsided, check_engine, small_task
from fedalloy.testing.cases import CHANGING, FAILING, UNEVEN
from tests.methods.solvers.bench import gap

LOCAL: dict[str, Any] = {"lr": 0.05, "batch_size": 3, "momentum": 0.5, "weight_decay": 0.1}
SOLVERS: dict[str, Any] = {
    "superfed_mm": (SuPerFed(0.3, 1.5, start=2, **LOCAL), "mlp", CHANGING),
    "superfed_lm": (SuPerFed(0.3, 1.5, "layer", start=0, **LOCAL), "batchnorm", CHANGING),
    "superfed_adam": (SuPerFed(start=0, batch_size=3, optimizer="adam", lr=0.01), "mlp", UNEVEN),
    "ditto": (Ditto(personal_epochs=2, **LOCAL), "batchnorm", FAILING),
    "apfl": (Apfl(adaptive=True, **LOCAL), "dropout", CHANGING),
    "pfedme": (PFedMe(inner=2, **LOCAL), "mlp", UNEVEN),
    "fedper": (Personal(Sgd(**LOCAL)), "dropout", CHANGING),
    "lgfedavg": (Personal(Sgd(**LOCAL), keep="others"), "batchnorm", UNEVEN),
    "fedrep": (Personal(Sgd(**LOCAL), shared_epochs=2), "mlp", FAILING),
    "fedbn": (Personal(Sgd(**LOCAL), ("norm*",)), "batchnorm", CHANGING),
    "local_only": (Personal(Sgd(**LOCAL), ("*",)), "batchnorm", CHANGING),
}


@pytest.fixture(scope="module", params=["mapped", "small blocks", "workers"])
def engine(request) -> Iterator[Any]:
    """The engines beside the loop; one that gives up batching warns, which fails the test."""
    made: Any = {
        "mapped": Batched(kernel="mapped"),
        "small blocks": Batched(block=2),
        "workers": Workers(processes=2),
    }[request.param]
    yield made
    if isinstance(made, Workers):
        made.close()


@pytest.mark.parametrize("name", SOLVERS)
def test_states_and_updates_are_the_loops(engine, name):
    solver, model, rounds = SOLVERS[name]
    algorithm = Algorithm(solver, Lopsided(), Adam(0.1), (HalfWithMemory(), Jitter()))
    case = EngineCase(name, "partial cohorts, states over rounds", algorithm, small_task(model), rounds)
    assert check_engine(engine, [case]) == []


def federate(algorithm, engine=None, model="mlp", rounds=CHANGING):
    """Rounds of changing cohorts: every server state, the last states of the clients and all steps."""
    task, engine = small_task(model), engine or Loop()
    params, buffers = task.objective.init(Key.of(1))
    state, clients, steps = algorithm.init(params, task.population, buffers), {}, []
    for number, work in enumerate(rounds, 1):
        ctx = Context(
            number, task.population, Key.of(3).fold("round", number), algorithm.solver.lr_at(number), len(rounds)
        )
        for client in work.ids.tolist():
            if client not in clients:
                key = Key.of(2).fold(client)
                clients[client] = algorithm.init_client(state["shared"], key, task.objective.init)
        outcome = engine(algorithm, task, state["shared"], {k: clients[k] for k in work.ids.tolist()}, work, ctx)
        clients |= outcome.states
        steps.append(server_step(algorithm, state, outcome.cohort, ctx))
        state = steps[-1].state
    return steps, clients


def test_superfed_with_aaggff():
    weighting, server = AaggffD(), ServerSgd()
    steps, clients = federate(Algorithm(SuPerFed(0.3, 1.5, start=3, **LOCAL), weighting, server))
    plain, _ = federate(Algorithm(Prox(0.3, **LOCAL), weighting, server))
    for step, other in zip(steps[:2], plain[:2], strict=True):
        assert gap(step.state["shared"]["params"], other.state["shared"]["params"]) == 0
    assert gap(steps[2].state["shared"]["params"], plain[2].state["shared"]["params"]) > 1e-5
    for step, work in zip(steps, CHANGING, strict=True):
        assert float(torch.as_tensor(step.weights).sum()) == pytest.approx(1.0)
        assert step.ids.tolist() == work.ids.tolist()
    sizes = small_task().block.size[CHANGING[0].ids]
    assert not torch.allclose(torch.as_tensor(steps[0].weights), sizes.double() / sizes.sum(), atol=1e-3)
    ready = {client: float(state["solver"]["ready"]) for client, state in clients.items()}
    assert ready == {0: 1, 1: 1, 4: 1, 2: 0, 3: 0}


def test_ditto_with_fedadam():
    """Whatever happens to the personal models, the shared one goes FedAdam's way."""
    steps, clients = federate(Algorithm(Ditto(0.5, 2, **LOCAL), Samples(), Adam(0.05)))
    plain, _ = federate(Algorithm(Sgd(**LOCAL), Samples(), Adam(0.05)))
    for step, other in zip(steps, plain, strict=True):
        assert gap(step.state["shared"]["params"], other.state["shared"]["params"]) < 1e-12
    personal = [state["solver"]["personal"] for state in clients.values()]
    assert all(gap(personal[0], one) > 1e-3 for one in personal[1:])


@pytest.mark.parametrize("weighting", [AaggffD(), Angles("layer"), Ewwa()], ids=["aaggff", "layers", "elements"])
@pytest.mark.parametrize("name", ["superfed_mm", "fedper", "fedbn", "local_only"])
def test_any_weighting_combines_with_parts_of_a_model(name, weighting):
    solver, model, _ = SOLVERS[name]
    steps, _ = federate(Algorithm(solver, weighting, Adam(0.05)), model=model)
    before, after = steps[0].state["shared"]["params"], steps[-1].state["shared"]["params"]
    assert all(bool(leaf.isfinite().all()) for leaf in after.values())
    assert (gap(before, after) > 0) == (name != "local_only")
