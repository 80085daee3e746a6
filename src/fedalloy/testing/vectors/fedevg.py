"""Replays ``fedevg.json``: rounds of the Langevin server, its schedules, and the divergence of FedCVAE."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fedalloy.core import tree
from fedalloy.core.algorithm import Algorithm, server_step
from fedalloy.core.errors import SpecError
from fedalloy.core.keys import Key
from fedalloy.core.registry import register
from fedalloy.core.types import Cohort, Context
from fedalloy.methods.servers.langevin import Langevin
from fedalloy.methods.solvers.cvae import divergence
from fedalloy.methods.solvers.energy import Energy, contrast, factors
from fedalloy.methods.weightings.energies import Energies
from fedalloy.testing.vectors.files import Values, VectorCase
from fedalloy.testing.vectors.replay import Fields


@register("conform", "fedevg")
def fedevg(case: VectorCase) -> Iterator[Fields]:
    """Cases with client sizes run rounds, those with a number of rounds test schedules, others a divergence."""
    if "n" in case.params:
        return rounds(case)
    return schedules(case) if "T" in case.params else divergences(case)


def rounds(case: VectorCase) -> Iterator[Fields]:
    """The server's step on the clients' contributions; the step size of every round is given."""
    x = case.init.tensor("x", 2)
    for number, inputs in enumerate(case.rounds, 1):
        fields = _round(case, inputs, x, number)
        x = fields["x"]
        yield fields


def _round(case: VectorCase, inputs: Values, x: Tensor, number: int) -> dict[str, Tensor]:
    steps, (low, high) = case.params.tensor("beta", 1), case.params.tensor("clip", 1).tolist()
    server = Langevin(start=float(steps[number - 1]), schedule="constant", low=low, high=high)
    algorithm = Algorithm(Energy(), Energies(), server)
    logits, gradients = inputs.tensor("logits", 2), inputs.tensor("energy_grads", 3)
    # The server draws its own noise, the file has given noise: added to the samples before, it gives the same sum.
    shaken = x + case.params["delta"] * inputs.tensor("noise", 2)
    sent = {"energy_grad": {"x": gradients}, "factors": {"x": factors(logits)}}
    cohort = Cohort(torch.arange(len(logits)), sent, {"num_examples": case.params.tensor("n", 1)})
    shared = {"params": {}, "buffers": {}, "samples": {"x": shaken}, "factors": {"x": torch.ones(len(x))}}
    ctx = Context(number, len(logits), Key.of(0).fold("round", number), rounds=len(steps))
    done = server_step(algorithm, {"shared": shared, "weighting": {}, "server": {}}, cohort, ctx)
    return {
        "factors": done.info["factors"],
        "gradient": tree.combine(sent["energy_grad"], done.weights)["x"],
        "x": done.state["shared"]["samples"]["x"],
        "pcd": _contrast(logits[0], inputs.tensor("fake_logits", 1)),
    }


def _contrast(real: Tensor, made: Tensor) -> Tensor:
    """The contrastive loss of the first client, whose logits of the right class are given."""
    only = torch.zeros(len(real), dtype=torch.int64)
    return contrast(real.unsqueeze(1), only, made.unsqueeze(1), torch.zeros(len(made), dtype=torch.int64)).mean()


def schedules(case: VectorCase) -> Iterator[Fields]:
    """The steps of both schedules, ten of them spread over the run, and the last."""
    start, end, last = case.params["start"], case.params["end"], case.params["T"]
    if last < 1:
        raise SpecError(f"{case.params.where}.T is {last}: a schedule needs 1 round or more")
    for _ in case.rounds:
        smooth, half = (
            [Langevin(start, end, schedule=kind).step_at(round, last) for round in range(1, last + 1)]
            for kind in ("diffusion", "half_cosine")
        )
        every = max(1, last // 10)
        yield {
            "cosine_ddpm_every_tenth": torch.tensor(smooth[::every], dtype=torch.float64),
            "cosine_ddpm_last": smooth[-1],
            "half_cosine_every_tenth": torch.tensor(half[::every], dtype=torch.float64),
        }


def divergences(case: VectorCase) -> Iterator[Fields]:
    """FedCVAE's distance of the latent distribution from the standard normal, mean over the batch."""
    for inputs in case.rounds:
        yield {"cvae_kl": divergence(inputs.tensor("mu", 2), inputs.tensor("std", 2)).mean()}
