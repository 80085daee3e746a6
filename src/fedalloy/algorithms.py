"""Published methods, one line each: a named composition of solver, weighting, server and wire.

Every function takes the settings of its parts by keyword; local-training settings (``lr``, ``epochs``,
``batch_size``, ...) go to the solver. ``fedavg(lr=0.05)`` is ``Algorithm(Sgd(lr=0.05), Samples(), ServerSgd())``.
"""

from __future__ import annotations

from typing import Any, cast

from fedalloy.core import registry
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.registry import register
from fedalloy.core.spec import build
from fedalloy.servers.momentum import Momentum
from fedalloy.servers.sgd import ServerSgd
from fedalloy.solvers.prox import Prox
from fedalloy.solvers.scaffold import Scaffold
from fedalloy.solvers.sgd import Sgd
from fedalloy.solvers.training import LocalTraining
from fedalloy.weightings.nova import Nova
from fedalloy.weightings.samples import Samples
from fedalloy.weightings.uniform import Uniform


@register("algorithm", "fedavg")
def fedavg(server_lr: float = 1.0, **local: Any) -> Algorithm:
    """Average by data size (McMahan et al. 2017)."""
    return Algorithm(Sgd(**local), Samples(), ServerSgd(server_lr))


@register("algorithm", "fedprox")
def fedprox(mu: float = 0.01, server_lr: float = 1.0, **local: Any) -> Algorithm:
    """FedAvg whose clients are pulled towards the received model (Li et al. 2020)."""
    return Algorithm(Prox(mu, **local), Samples(), ServerSgd(server_lr))


@register("algorithm", "fednova")
def fednova(mu: float = 0.0, server_lr: float = 1.0, **local: Any) -> Algorithm:
    """Updates normalised by the clients' own numbers of steps (Wang et al. 2020); ``mu`` adds a proximal term."""
    solver = Prox(mu, **local) if mu else Sgd(**local)
    return Algorithm(solver, Nova(), ServerSgd(server_lr))


@register("algorithm", "scaffold")
def scaffold(server_lr: float = 1.0, **local: Any) -> Algorithm:
    """Control variates at every client (Karimireddy et al. 2020); clients count equally."""
    return Algorithm(Scaffold(**local), Uniform(), ServerSgd(server_lr))


@register("algorithm", "fedavgm")
def fedavgm(beta: float = 0.9, server_lr: float = 1.0, **local: Any) -> Algorithm:
    """FedAvg with momentum at the server (Hsu et al. 2019)."""
    return Algorithm(Sgd(**local), Samples(), Momentum(server_lr, beta))


def named(name: str, **settings: Any) -> Algorithm:
    """A published method by name; settings its function does not name go to local training.

    >>> named("fedprox", mu=0.1, lr=0.05).solver
    Prox(lr=0.05, epochs=1, batch_size=32, shuffle=True, momentum=0.0, nesterov=False, weight_decay=0.0, \
optimizer='sgd', betas=(0.9, 0.999), eps=1e-08, decay=1.0, decay_every=1, milestones=(), mu=0.1)
    """
    make = registry.find("algorithm", name)
    return cast(Algorithm, build(make, settings, f"algorithm '{name}'", extra=LocalTraining))
