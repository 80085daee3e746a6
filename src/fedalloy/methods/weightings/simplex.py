"""The probability simplex: the nearest point on it, and the exact minimum of a convex quadratic over it."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedalloy.core.errors import AlgorithmError, RoundRefused

# Entries of the interior-point solution closer than this to a bound are taken to lie on it; linear algebra then finds
# the exact minimum on that face.
_NEAR = 1e-6
# Tolerances for clarabel, tried in turn: it can fail on ill-conditioned programmes unless the tolerance is larger.
_TOLERANCES = (1e-12, 1e-8, 1e-5)


def project(point: Tensor) -> Tensor:
    """The point of the simplex nearest to ``point``, exactly, by sorting.

    Only differences matter, so the largest entry is subtracted first, which keeps precision for entries of any size.

    >>> project(torch.tensor([0.5, 0.5, 1.5]))
    tensor([0., 0., 1.])
    """
    shifted = point - point.max()
    ordered = shifted.sort(descending=True).values
    excess = ordered.cumsum(0) - 1
    counts = torch.arange(1, len(point) + 1, dtype=point.dtype, device=point.device)
    kept = int((ordered * counts > excess).sum())
    return (shifted - excess[kept - 1] / kept).clamp(min=0)


def minimise(P: Tensor, q: Tensor, lower: Tensor | None = None, upper: Tensor | None = None) -> Tensor:
    """``argmin 1/2 x'Px + q'x`` over ``sum x = 1``, ``lower <= x <= upper`` (default: 0 and 1).

    ``P`` is symmetric and positive definite. Clarabel finds which bounds are active; a linear system then gives the
    other entries to rounding error.

    >>> minimise(torch.eye(2), torch.tensor([0.0, 0.5]))
    tensor([0.7500, 0.2500], dtype=torch.float64)
    """
    P, q = P.detach().to("cpu", torch.float64), q.detach().to("cpu", torch.float64)
    low = torch.zeros_like(q) if lower is None else lower.to(q)
    high = torch.ones_like(q) if upper is None else upper.to(q)
    if len(q) == 1:
        return torch.ones_like(q)
    size = P.abs().max().clamp(min=1e-300)
    P, q = P / size, q / size
    inside = _interior(P, q, low, high).clamp(min=low, max=high)
    try:
        exact = _on_face(P, q, low, high, inside)
    except RuntimeError:  # a flat direction: P was not positive definite
        exact = None
    return inside / inside.sum() if exact is None else exact


def require_solver() -> Any:
    """The packages that ``minimise`` needs, imported on first use; a missing one raises an error with the fix."""
    try:
        import clarabel  # noqa: F401
        import qpsolvers
    except ImportError as error:
        raise AlgorithmError(
            f"this rule solves a quadratic programme and needs qpsolvers and clarabel, but {error.name} is not "
            "installed: pip install qpsolvers clarabel"
        ) from error
    return qpsolvers


def _interior(P: Tensor, q: Tensor, low: Tensor, high: Tensor) -> Tensor:
    from scipy.sparse import csc_matrix

    if not float(low.sum()) <= 1 + 1e-12 or not float(high.sum()) >= 1 - 1e-12:
        sums = f"{float(low.sum()):g} to {float(high.sum()):g}"
        raise ValueError(f"the bounds allow sums from {sums}, but a point of the simplex has the sum 1")
    solve, one = require_solver().solve_qp, np.ones(1)
    quadratic, sums_up = csc_matrix(P.numpy()), csc_matrix(np.ones((1, len(q))))
    bounds = {"lb": low.numpy(), "ub": high.numpy()}
    for tolerance in _TOLERANCES:
        asked = dict.fromkeys(("tol_gap_abs", "tol_gap_rel", "tol_feas"), tolerance)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a failure is retried with a larger tolerance
            found = solve(quadratic, q.numpy(), A=sums_up, b=one, solver="clarabel", **bounds, **asked)
        if found is not None:
            return torch.from_numpy(found)
    raise RoundRefused("clarabel found no solution of a quadratic programme over the simplex: are all numbers finite?")


def _on_face(P: Tensor, q: Tensor, low: Tensor, high: Tensor, start: Tensor) -> Tensor | None:
    """The minimum by an active-set method, starting from the bounds that are active at ``start``; None if it fails."""
    at_low, at_high = start - low < _NEAR, high - start < _NEAR
    at_high &= ~at_low
    for _ in range(2 * len(q) + 10):
        x = torch.where(at_low, low, high)
        free = ~(at_low | at_high)
        if not bool(free.any()):
            if _corner(P @ x + q, at_low, at_high):
                return x if abs(float(x.sum()) - 1) < 1e-12 else None
            at_low, at_high = _opened(P @ x + q, at_low, at_high)
            continue
        x[free], grad = _equalised(P, q, torch.where(free, 0.0, x), free)
        pull = P @ x + q - grad
        below, above = free & (x < low), free & (x > high)
        wrong = (at_low & (pull < -1e-13)) | (at_high & (pull > 1e-13))
        if not bool((below | above | wrong).any()):
            return x
        at_low, at_high = (at_low | below) & ~wrong, (at_high | above) & ~wrong
    return None


def _corner(gradient: Tensor, at_low: Tensor, at_high: Tensor) -> bool:
    """Whether moving weight from entries at their upper bound to entries at their lower one gains nothing."""
    if not bool(at_high.any()) or not bool(at_low.any()):
        return True
    return bool(gradient[at_high].max() <= gradient[at_low].min() + 1e-13)


def _opened(gradient: Tensor, at_low: Tensor, at_high: Tensor) -> tuple[Tensor, Tensor]:
    """Free the two entries between which moving weight gains most."""
    giver = torch.where(at_high, gradient, -torch.inf).argmax()
    taker = torch.where(at_low, gradient, torch.inf).argmin()
    at_low, at_high = at_low.clone(), at_high.clone()
    at_high[giver] = at_low[taker] = False
    return at_low, at_high


def _equalised(P: Tensor, q: Tensor, fixed: Tensor, free: Tensor) -> tuple[Tensor, Tensor]:
    """The values of the free entries at which all their gradients are equal, and that gradient."""
    n = int(free.sum())
    system = P.new_zeros(n + 1, n + 1)
    system[:n, :n] = P[free][:, free]
    system[:n, n] = -1
    system[n, :n] = 1
    right = torch.cat([-(q + P @ fixed)[free], (1 - fixed.sum()).reshape(1)])
    solved = torch.linalg.solve(system, right)
    return solved[:n], solved[n]
