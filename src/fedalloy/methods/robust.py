"""Published methods that bound what a few clients can do, whatever they send."""

from __future__ import annotations

from typing import Unpack

from fedalloy.core.algorithm import Algorithm
from fedalloy.core.registry import register
from fedalloy.methods.servers.sgd import ServerSgd
from fedalloy.methods.solvers.settings import LocalSettings as Local
from fedalloy.methods.solvers.sgd import Sgd
from fedalloy.methods.weightings.krum import Krum, MultiKrum
from fedalloy.methods.weightings.robust import Median, TrimmedMean


@register("algorithm", "median")
def median(*, server_lr: float = 1.0, **local: Unpack[Local]) -> Algorithm:
    """The coordinate-wise median of the updates (Yin et al. 2018)."""
    return Algorithm(Sgd(**local), Median(), ServerSgd(server_lr))


@register("algorithm", "trimmed_mean")
def trimmed_mean(trim: float = 0.1, *, server_lr: float = 1.0, **local: Unpack[Local]) -> Algorithm:
    """The coordinate-wise mean of the updates without the extreme values (Yin et al. 2018)."""
    return Algorithm(Sgd(**local), TrimmedMean(trim), ServerSgd(server_lr))


@register("algorithm", "krum")
def krum(byzantine: int = 0, *, server_lr: float = 1.0, **local: Unpack[Local]) -> Algorithm:
    """The one update that is closest to its nearest neighbours (Blanchard et al. 2017)."""
    return Algorithm(Sgd(**local), Krum(byzantine), ServerSgd(server_lr))


@register("algorithm", "multi_krum")
def multi_krum(
    byzantine: int = 0, keep: int | None = None, *, server_lr: float = 1.0, **local: Unpack[Local]
) -> Algorithm:
    """The mean of the updates that are closest to their nearest neighbours (Blanchard et al. 2017)."""
    return Algorithm(Sgd(**local), MultiKrum(byzantine, keep), ServerSgd(server_lr))
