"""From free parameters theta to shares that sum to one over clients, and back to theta's gradient."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Parametrisation = Literal["square", "softmax"]


def shares_of(theta: Tensor, how: Parametrisation) -> Tensor:
    """Shares over clients (axis 1) of every round: ``theta^2 / sum theta^2``, or a softmax.

    >>> shares_of(torch.tensor([[1.0, -1.0]]), "square")
    tensor([[0.5000, 0.5000]])
    """
    if how == "softmax":
        return theta.softmax(1)
    squares = theta * theta
    return squares / squares.sum(1, keepdim=True)


def theta_of(shares: Tensor, how: Parametrisation) -> Tensor:
    """Parameters that give these shares: the inverse of ``shares_of``."""
    return shares.sqrt() if how == "square" else shares.clamp(min=1e-12).log()


def first_theta(sizes: Tensor, rounds: int, how: Parametrisation, layers: int = 0) -> Tensor:
    """The initial theta: shares proportional to the numbers of examples, in every round (and layer).

    >>> first_theta(torch.tensor([1, 3]), 1, "square")
    tensor([[0.5000, 0.8660]], dtype=torch.float64)
    """
    shares = sizes.double() / sizes.sum()
    rows = shares.expand(rounds, -1) if not layers else shares.reshape(1, -1, 1).expand(rounds, -1, layers)
    return theta_of(rows, how).contiguous()


def pull_back(theta: Tensor, how: Parametrisation, share_gradient: Tensor) -> Tensor:
    """The gradient by theta, from the gradient by the shares."""
    with torch.enable_grad():
        leaf = theta.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(shares_of(leaf, how), leaf, share_gradient)
    return gradient


def roughness(shares: Tensor) -> tuple[Tensor, Tensor]:
    """``sum_t |Theta[t+1] - Theta[t]|^2`` and its gradient by the shares.

    >>> [value.tolist() for value in roughness(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))]
    [2.0, [[2.0, -2.0], [-2.0, 2.0]]]
    """
    steps = shares[1:] - shares[:-1]
    share_gradient = torch.zeros_like(shares)
    share_gradient[1:] += 2 * steps
    share_gradient[:-1] -= 2 * steps
    return (steps * steps).sum(), share_gradient
