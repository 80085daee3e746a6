"""Published methods that make labelled samples; ``fedalloy.methods.published`` lists them with the others."""

from __future__ import annotations

from typing import Any, Unpack

from fedalloy.core.algorithm import Algorithm
from fedalloy.core.registry import register
from fedalloy.methods.servers.langevin import Langevin, Schedule
from fedalloy.methods.servers.sgd import ServerSgd
from fedalloy.methods.solvers.cgan import Cgan
from fedalloy.methods.solvers.cvae import Cvae
from fedalloy.methods.solvers.energy import Energy
from fedalloy.methods.solvers.settings import LocalSettings
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
    """Labelled synthetic samples from energies and their gradients (Hahn's thesis). Samples are clipped to
    ``[low, high]``; the default is the bounds declared for the data. ``start``, ``end`` and ``noise`` set the server's
    step sizes and noise, ``local_step`` and ``local_noise`` those of the clients' chains."""
    defaults = {"optimizer": "adam", "lr": 1e-3, "betas": (0.5, 0.999), "weight_decay": 1e-4, "batch_size": 64}
    solver = Energy(
        per_class, synthetic, langevin, local_step, local_noise, bound, low, high, iterations,
        **{**defaults, "decay": 0.9, "decay_every": 50, **local},
    )  # fmt: skip
    return Algorithm(solver, Energies(), Langevin(start, end, noise, schedule, low, high))


@register("algorithm", "fedcgan")
def fedcgan(official: bool = False, *, server_lr: float = 1.0, **local: Unpack[LocalSettings]) -> Algorithm:
    """FedAvg of conditional GANs, which generate labelled data (AC-GAN, Odena et al. 2017); local Adam."""
    return Algorithm(Cgan(official=official, **_generative({**local})), Samples(), ServerSgd(server_lr))


@register("algorithm", "fedcvae")
def fedcvae(official: bool = False, *, server_lr: float = 1.0, **local: Unpack[LocalSettings]) -> Algorithm:
    """FedAvg of conditional VAEs, which generate labelled data (Kingma & Welling 2014); local Adam."""
    return Algorithm(Cvae(official=official, **_generative({**local})), Samples(), ServerSgd(server_lr))


def _generative(local: dict[str, Any]) -> dict[str, Any]:
    """Local settings with the usual defaults for generative models."""
    return {"optimizer": "adam", "lr": 1e-3, "betas": (0.5, 0.999), "batch_size": 64, **local}
