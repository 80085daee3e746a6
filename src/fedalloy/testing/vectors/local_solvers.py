"""Replays ``local_solvers``: the local steps of quadratic clients, solver by solver."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fedalloy.core.algorithm import Algorithm
from fedalloy.core.registry import register
from fedalloy.core.spec import Spec, from_spec
from fedalloy.core.types import State
from fedalloy.methods.weightings.uniform import Uniform
from fedalloy.testing.vectors.cohorts import Quadratics, TrainedCohort, built, federate, flat, split
from fedalloy.testing.vectors.files import Values, VectorCase
from fedalloy.testing.vectors.replay import Fields


@dataclass(frozen=True)
class Method:
    """How a solver's fields are computed: its settings, its input, and its clients' initial and final states.

    ``begin`` turns a client's personal model from the file into its state; ``kept`` maps expected fields (after the
    solver's name) to paths in the state.
    """

    solver: Spec
    received: str
    server_lr: str = "server_lr"
    begin: Callable[[Tensor], State] | None = None
    kept: tuple[tuple[str, str], ...] = ()


def methods(params: Values) -> dict[str, Method]:
    """The solver behind the fields ``NAME_local``, ``NAME_w`` and so on, with its settings from the file."""
    steps: Spec = {"batch_size": None, **params.settings(lr="lr", epochs="steps")}
    personal = {"personal_epochs": steps["epochs"], **params.settings(lam="ditto_lambda")} if "epochs" in steps else {}
    mixing = {"adaptive": True, **params.settings(lr="apfl_lr", alpha="apfl_alpha")}
    envelope = params.settings(lam="pfedme_lambda", inner="pfedme_inner", inner_lr="pfedme_inner_lr", lr="pfedme_lr")
    return {
        "prox": Method({"kind": "prox", **steps, **params.settings(mu="mu")}, "prox_w"),
        "momentum": Method({"kind": "sgd", **steps, **params.settings(momentum="gamma_client")}, "momentum_w"),
        "scaffold": Method({"kind": "scaffold", **steps}, "scaffold_w", kept=(("c_local", "control"),)),
        "pfedme": Method(
            {"kind": "pfedme", **steps, **envelope}, "pfedme_w", "pfedme_beta", kept=(("theta", "personal"),)
        ),
        "ditto": Method(
            {"kind": "ditto", **steps, **personal},
            "prox_w",
            begin=lambda v: {"personal": split(v)},
            kept=(("personal", "personal"),),
        ),
        "apfl": Method(
            {"kind": "apfl", **steps, **mixing},
            "apfl_w",
            begin=lambda v: {"personal": split(v), "alpha": params.tensor("apfl_alpha", 0)},
            kept=(("personal", "personal"), ("alpha", "alpha")),
        ),
    }


@register("conform", "local_solvers")
def local_solvers(case: VectorCase) -> Iterator[Fields]:
    """Every method has its own model and states; all averages are unweighted."""
    asked = {
        name: method
        for name, method in methods(case.params).items()
        if built("solver", method.solver["kind"]) and any(field.startswith(f"{name}_") for field in case.wanted)
    }
    for fields in zip(*(run_case(case, name, method) for name, method in asked.items()), strict=True):
        yield {name: value for part in fields for name, value in part.items()}


def run_case(case: VectorCase, name: str, method: Method) -> Iterator[Fields]:
    """The rounds of one solver from the models the file gives it."""
    server = from_spec("server", {"kind": "sgd", **case.params.settings(lr=method.server_lr)})
    algorithm = Algorithm(from_spec("solver", method.solver), Uniform(), server)
    task = Quadratics(case.params.tensor("A", 3), case.params.tensor("c", 2))
    received = [inputs.tensor(method.received, 1) for inputs in case.rounds]
    for trained in federate(algorithm, task, received, _first_states(case, method)):
        moved = flat(trained.server.state["shared"]["params"])
        yield {f"{name}_local": trained.local, f"{name}_w": moved, **_states(name, method, trained)}


def _first_states(case: VectorCase, method: Method) -> dict[int, State] | None:
    if method.begin is None:
        return None
    models = case.init.tensor("personal", 2)
    return {client: {"solver": method.begin(model), "wire": {}} for client, model in enumerate(models)}


def _states(name: str, method: Method, trained: TrainedCohort) -> Fields:
    """The clients' states, and the server's control variate."""
    clients = [trained.states[client]["solver"] for client in sorted(trained.states)]
    found: dict[str, Tensor] = {}
    for field, place in method.kept:
        values = [state[place] for state in clients]
        found[f"{name}_{field}"] = torch.stack([one if isinstance(one, Tensor) else flat(one) for one in values])
    control = trained.server.state["shared"].get("control")
    return found if control is None else {**found, f"{name}_c": flat(control)}
