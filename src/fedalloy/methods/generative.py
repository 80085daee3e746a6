"""Published methods whose result is data: the lines of ``fedalloy.methods.published`` that make labelled samples."""

from __future__ import annotations

from typing import Any

from fedalloy.core.algorithm import Algorithm
from fedalloy.core.registry import register
from fedalloy.methods.servers.langevin import Langevin, Schedule
from fedalloy.methods.servers.sgd import ServerSgd
from fedalloy.methods.solvers.cgan import Cgan
from fedalloy.methods.solvers.cvae import Cvae
from fedalloy.methods.solvers.energy import Energy
from fedalloy.methods.weightings.energies import Energies
from fedalloy.methods.weightings.samples import Samples


@register("algorithm", "fedevg")
def fedevg(
    per_class: int = 10,
    start: float = 10.0,
    end: float = 0.01,
    noise: float = 0.01,
    schedule: Schedule = "diffusion",
    low: float | None = None,
    high: float | None = None,
    bound: float | None = 3.0,
    synthetic: float = 0.1,
    langevin: int = 1,
    local_step: float = 1.0,
    local_noise: float = 0.01,
    iterations: int | None = None,
    **local: Any,
) -> Algorithm:
    """Labelled synthetic samples from energies and their gradients (Hahn's thesis). They lie in ``[low, high]``, or in
    the bounds declared for the data. ``start``, ``end`` and ``noise`` are the server's steps and noise, ``local_step``
    and ``local_noise`` those of the clients' chains."""
    defaults = {"optimizer": "adam", "lr": 1e-3, "betas": (0.5, 0.999), "weight_decay": 1e-4, "batch_size": 64}
    solver = Energy(
        per_class, synthetic, langevin, local_step, local_noise, bound, low, high, iterations,
        **{**defaults, "decay": 0.9, "decay_every": 50, **local},
    )  # fmt: skip
    return Algorithm(solver, Energies(), Langevin(start, end, noise, schedule, low, high))


@register("algorithm", "fedcgan")
def fedcgan(official: bool = False, server_lr: float = 1.0, **local: Any) -> Algorithm:
    """Averaged conditional GANs: a model that makes labelled data (AC-GAN, Odena et al. 2017); local Adam."""
    return Algorithm(Cgan(official=official, **_generative(local)), Samples(), ServerSgd(server_lr))


@register("algorithm", "fedcvae")
def fedcvae(official: bool = False, server_lr: float = 1.0, **local: Any) -> Algorithm:
    """Averaged conditional VAEs: a model that makes labelled data (Kingma & Welling 2014); local Adam."""
    return Algorithm(Cvae(official=official, **_generative(local)), Samples(), ServerSgd(server_lr))


def _generative(local: dict[str, Any]) -> dict[str, Any]:
    """Adam as generative models are trained with it, where nothing else is said."""
    return {"optimizer": "adam", "lr": 1e-3, "betas": (0.5, 0.999), "batch_size": 64, **local}
