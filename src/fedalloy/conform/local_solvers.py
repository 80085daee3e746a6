"""Replays ``local_solvers``: what quadratic clients do with the received model, solver by solver."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fedalloy.conform.cohorts import Quadratics, Trained, built, federate, flat
from fedalloy.conform.replay import Fields
from fedalloy.conform.vectors import Case, Values
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.registry import register
from fedalloy.core.spec import Spec, from_spec
from fedalloy.weightings.uniform import Uniform


def solvers(params: Values) -> dict[str, Spec]:
    """The solver behind the fields ``NAME_local`` and ``NAME_w``, with its settings from the file."""
    steps: Spec = {"batch_size": None, **params.settings(lr="lr", epochs="steps")}
    return {
        "prox": {"kind": "prox", **steps, **params.settings(mu="mu")},
        "momentum": {"kind": "sgd", **steps, **params.settings(momentum="gamma_client")},
        "scaffold": {"kind": "scaffold", **steps},
    }


@register("conform", "local_solvers")
def local_solvers(case: Case) -> Iterator[Fields]:
    """Every method carries its own model and its own states; all averages are unweighted."""
    chosen = {name: spec for name, spec in solvers(case.params).items() if built("solver", spec["kind"])}
    methods = [method(case, name, spec) for name, spec in chosen.items() if f"{name}_local" in case.wanted]
    for fields in zip(*methods, strict=True):
        yield {name: value for part in fields for name, value in part.items()}


def method(case: Case, name: str, spec: Spec) -> Iterator[Fields]:
    """The rounds of one solver from the models the file gives it."""
    server = from_spec("server", {"kind": "sgd", **case.params.settings(lr="server_lr")})
    algorithm = Algorithm(from_spec("solver", spec), Uniform(), server)
    task = Quadratics(case.params.tensor("A", 3), case.params.tensor("c", 2))
    for trained in federate(algorithm, task, [inputs.tensor(f"{name}_w", 1) for inputs in case.rounds]):
        moved = flat(trained.server.state["shared"]["params"])
        yield {f"{name}_local": trained.local, f"{name}_w": moved, **_controls(name, trained)}


def _controls(name: str, trained: Trained) -> Fields:
    """The control variates of the server and of the clients, where a solver has them."""
    if "control" not in trained.server.state["shared"]:
        return {}
    clients = [flat(trained.states[client]["solver"]["control"]) for client in sorted(trained.states)]
    shared = flat(trained.server.state["shared"]["control"])
    return {f"{name}_c_local": torch.stack(clients), f"{name}_c": shared}
