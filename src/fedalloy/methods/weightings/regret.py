"""Regret of a sequence of decisions against the best fixed one in hindsight, from a run's records.

``responses`` is ``[T, K]``: per round a row ``info["responses"]`` (AAggFF-S) or ``info["estimate"]`` (AAggFF-D up to
2000 clients); ``losses`` are the rounds' ``info["decision_loss"]``. Computed on demand, not during the run.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedalloy.methods.weightings.simplex import minimise


def regret(responses: Tensor, losses: Tensor) -> Tensor:
    """``sum_t loss_t - min_p sum_t -log(1 + <p, r_t>)``: how much a fixed p chosen in hindsight would have saved.

    >>> r = torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    >>> regret(r, decision_losses(r, torch.tensor([[0.5, 0.5], [0.0, 1.0]])))
    tensor(0.2877, dtype=torch.float64)
    """
    best = best_fixed(responses).expand(len(responses), -1)
    return losses.double().sum() - decision_losses(responses, best).sum()


def regret_bound(rounds: int, clients: int, low: float = 0.0, high: float | None = None) -> float:
    """What the regret of AAggFF-S cannot exceed (Hahn et al. 2024): ``2 L K (1 + log(1 + T / (16 K)))``.

    ``L`` is the largest gradient, ``high / (1 + low)`` for responses between ``low`` and ``high`` (default ``1 / K``).

    >>> round(regret_bound(100, 7), 3)
    3.276
    """
    largest = (1 / clients if high is None else high) / (1 + low)
    return 2 * largest * clients * (1 + math.log1p(rounds / (16 * clients)))


def decision_losses(responses: Tensor, decisions: Tensor) -> Tensor:
    """``-log(1 + <p_t, r_t>)`` for every round."""
    return -torch.log1p((responses.double() * decisions.double()).sum(1))


def best_fixed(responses: Tensor, tolerance: float = 1e-10, most: int = 100) -> Tensor:
    """The p of the simplex that maximises ``sum_t log(1 + <p, r_t>)``, to ``tolerance`` in that sum.

    Newton steps over the simplex with a line search. The largest gradient bounds what is left to gain, so the result is
    certified; ``most`` limits the steps in case rounding stops progress earlier.

    >>> best_fixed(torch.tensor([[0.1, 0.3], [0.3, 0.1]]))
    tensor([0.5000, 0.5000], dtype=torch.float64)
    """
    r = responses.double()
    p = torch.full((r.shape[1],), 1 / r.shape[1], dtype=torch.float64)
    for _ in range(most):
        left = _left_to_gain(r, p)
        moved = None if left <= tolerance else _climb(r, p, _newton(r, p) - p, left)
        if moved is None:
            break
        p = moved
    return p


def _left_to_gain(r: Tensor, p: Tensor) -> float:
    """An upper bound on what any other p gains, because the sum is concave."""
    gradients = (r / (1 + r @ p).unsqueeze(1)).sum(0)
    return float(gradients.max() - gradients @ p)


def _newton(r: Tensor, p: Tensor) -> Tensor:
    """The maximum over the simplex of the second-order model around p."""
    gradients = r / (1 + r @ p).unsqueeze(1)
    curvature = gradients.T @ gradients
    ridge = 1e-10 * curvature.diagonal().mean().clamp(min=1e-300)
    steady = curvature + ridge * torch.eye(len(p), dtype=p.dtype)
    return minimise(steady, -gradients.sum(0) - steady @ p)


def _climb(r: Tensor, p: Tensor, direction: Tensor, left: float) -> Tensor | None:
    """Halve the step until the sum improves or, where rounding hides that, until the bound on the gain halves."""
    before = torch.log1p(r @ p).sum()
    for halvings in range(40):
        tried = p + direction * 0.5**halvings
        if bool(torch.log1p(r @ tried).sum() > before) or _left_to_gain(r, tried) < left / 2:
            return tried
    return None
