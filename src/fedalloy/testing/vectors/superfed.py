"""Replays ``superfed``: single steps of SuPerFed on one quadratic client, and averages of parts of a model."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fedalloy.core.algorithm import Algorithm, server_step
from fedalloy.core.errors import SpecError
from fedalloy.core.keys import Key
from fedalloy.core.objective import BatchGradient
from fedalloy.core.registry import register
from fedalloy.core.types import Cohort, Context, Tree
from fedalloy.methods.servers.sgd import ServerSgd
from fedalloy.methods.solvers.mixing import mixture
from fedalloy.methods.solvers.personal import Personal
from fedalloy.methods.solvers.superfed import SuPerFed, angle
from fedalloy.methods.weightings.samples import Samples
from fedalloy.testing.vectors.cohorts import Quadratics, flat, split
from fedalloy.testing.vectors.files import Values, VectorCase
from fedalloy.testing.vectors.replay import Fields


@register("conform", "superfed")
def superfed(case: VectorCase) -> Iterator[Fields]:
    """Cases with a ``head`` average parts of a model; the others take steps."""
    return averages(case) if "head" in case.params else steps(case)


def steps(case: VectorCase) -> Iterator[Fields]:
    """One step of the solver from the models of every round; gradients are the change of the model divided by the step
    size."""
    params = case.params
    layers = params.get("layers")
    settings = params.settings(mu="mu", nu="nu", lr="lr")
    solver = SuPerFed(mixing="layer" if layers else "model", start=0, **settings)
    task = Quadratics(params.tensor("A", 2).unsqueeze(0), params.tensor("c", 1).unsqueeze(0))
    received, mix = split(case.init.tensor("global", 1), layers), params.tensor("lambda", 1 if layers else 0)
    for number, inputs in enumerate(case.rounds, 1):
        ctx = Context(number, 1, Key.of(0), local_lr=solver.lr)
        models = split(inputs.tensor("federated", 1), layers), split(inputs.tensor("local", 1), layers)
        yield _step(solver, task, received, *models, mix, ctx)


def _step(
    solver: SuPerFed, task: Quadratics, received: Tree, federated: Tree, local: Tree, mix: Tensor, ctx: Context
) -> Fields:
    block = task.data("train", torch.tensor([0]))
    grad_at = BatchGradient(task, block.x, block.y, None, {}, None)
    mine = {"local": local, "ready": torch.zeros_like(mix.sum())}
    carry = {**solver.begin({"params": received, "buffers": {}}, mine, ctx), "params": federated}
    moved = solver.step(carry, grad_at, {"mix": mix}, torch.tensor(0), ctx)
    loss = torch.as_tensor(grad_at.loss) + solver.penalty(federated, local, received)
    return {
        "mixed": flat(mixture(federated, local, solver.shares(federated, mix))),
        "cosine": angle(federated, local)[0],
        "loss": loss,
        "grad_federated": (flat(federated) - flat(moved["params"])) / ctx.local_lr,
        "grad_local": (flat(local) - flat(moved["local"])) / ctx.local_lr,
    }


def averages(case: VectorCase) -> Iterator[Fields]:
    """The server's average of the clients' models when the head, or the body, is local."""
    kept = {"fedper_fedrep_w": Personal(names=("head.*",)), "lgfedavg_w": Personal(names=("head.*",), keep="others")}
    models = {name: case.init.tensor("w", 1) for name in kept}
    for number, inputs in enumerate(case.rounds, 1):
        ctx = Context(number, len(case.params.tensor("n", 1)), Key.of(0).fold("round", number))
        models = {name: _average(case, inputs, solver, models[name], ctx) for name, solver in kept.items()}
        yield models


def _average(case: VectorCase, inputs: Values, solver: Personal, w: Tensor, ctx: Context) -> Tensor:
    algorithm, head = Algorithm(solver, Samples(), ServerSgd()), case.params.tensor("head", 1).bool()
    trained = inputs.tensor("W", 2)
    if trained.shape != (ctx.population, len(head)):
        raise SpecError(f"{inputs.where}.W is {list(trained.shape)}, expected {[ctx.population, len(head)]}")
    sent = solver.local_leaves.split(_parts(trained - w, head))[1]
    cohort = Cohort(torch.arange(ctx.population), {"delta": sent}, {"num_examples": case.params.tensor("n", 1)})
    shared = server_step(algorithm, algorithm.init(_parts(w, head), ctx.population), cohort, ctx).state["shared"]
    moved = torch.empty_like(w)
    moved[head], moved[~head] = shared["params"]["head.weight"], shared["params"]["body.weight"]
    return moved


def _parts(model: Tensor, head: Tensor) -> Tree:
    return {"body.weight": model[..., ~head], "head.weight": model[..., head]}
