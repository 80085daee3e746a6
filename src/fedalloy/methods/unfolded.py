"""FedAvg and FedNova with weights learned in advance; ``fedalloy.methods.published`` lists them with the others."""

from __future__ import annotations

from typing import Unpack

from fedalloy.core.algorithm import Algorithm
from fedalloy.core.registry import register
from fedalloy.methods.servers.sgd import ServerSgd
from fedalloy.methods.solvers.prox import Prox
from fedalloy.methods.solvers.settings import LocalSettings
from fedalloy.methods.solvers.sgd import Sgd
from fedalloy.methods.weightings.unfolded import LayerRows, Rows, Unfolded


@register("algorithm", "duw_fedavg")
def duw_fedavg(
    table: Rows | LayerRows | str = (),
    layers: tuple[str, ...] = (),
    sizes: tuple[int, ...] = (),
    *,
    server_lr: float = 1.0,
    **local: Unpack[LocalSettings],
) -> Algorithm:
    """FedAvg with weights learned in advance (Nakai-Kasai and Wadayama 2022); ``fedalloy unfold`` learns the table."""
    rule = Unfolded(table, layers, sizes)
    return Algorithm(Sgd(**local), rule, ServerSgd(server_lr), on_failure="resend")


@register("algorithm", "duw_fednova")
def duw_fednova(
    table: Rows | LayerRows | str = (),
    layers: tuple[str, ...] = (),
    sizes: tuple[int, ...] = (),
    mu: float = 0.0,
    *,
    server_lr: float = 1.0,
    **local: Unpack[LocalSettings],
) -> Algorithm:
    """FedNova with shares learned in advance (Nakai-Kasai and Wadayama 2022); ``fedalloy unfold`` learns the table."""
    rule, solver = Unfolded(table, layers, sizes, normalise=True), Prox(mu, **local) if mu else Sgd(**local)
    return Algorithm(solver, rule, ServerSgd(server_lr), on_failure="resend")
