"""One outer iteration: the summed losses of all rounds and their gradient by the table's free parameters."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedalloy.core import tree
from fedalloy.core.keys import Key
from fedalloy.core.protocols import Engine
from fedalloy.core.types import Tree
from fedalloy.engines.batched import Batched, dense_of
from fedalloy.engines.kinds import is_fusible
from fedalloy.studies.unfolding.exact import exact
from fedalloy.studies.unfolding.first_order import first_order
from fedalloy.studies.unfolding.shares import pull_back, roughness, shares_of
from fedalloy.studies.unfolding.unrolled import UnrolledProblem

# Models that fit into the cache together are trained together, which saves calls; larger ones in smaller groups.
_CACHE = 4 << 20


@dataclass(frozen=True)
class OuterGradient:
    """``loss`` is the sum of all losses, plus the roughness penalty if it is used; ``by_theta`` its
    gradient, and ``params`` and ``buffers`` the model after the last round."""

    loss: float
    by_theta: Tensor
    params: Tree
    buffers: Tree


def outer_gradient(
    problem: UnrolledProblem, theta: Tensor, params: Tree, buffers: Tree, key: Key, engine: Engine | None = None
) -> OuterGradient:
    """The gradient for an outer step; ``key`` is that of the iteration."""
    learning = problem.learning
    shares = shares_of(theta, learning.parametrisation)
    if learning.gradient == "exact":
        found = exact(problem, shares, params, buffers, key)
    else:
        found = first_order(problem, shares, params, buffers, key, engine or make_engine(problem, params, buffers))
    loss, grad = found.loss, found.gradient
    if learning.smoothness:
        rough, by_shares = roughness(shares)
        loss, grad = loss + learning.smoothness * float(rough), grad + learning.smoothness * by_shares
    return OuterGradient(loss, pull_back(theta, learning.parametrisation, grad), found.params, found.buffers)


def make_engine(problem: UnrolledProblem, params: Tree, buffers: Tree) -> Engine:
    """The batched engine: fused if clients only do plain SGD on a chain of linear layers, on a GPU too."""
    first = next(iter(params.values()))
    shared = {"params": params, "buffers": buffers}
    fused = problem.plain and is_fusible(problem.algorithm) and not buffers
    kernel = "fused" if fused and dense_of(problem.task.objective, shared) is not None else "best"
    block = None if first.is_cuda else max(1, _CACHE // max(1, tree.nbytes(params)))
    return Batched(block=block, kernel=kernel)  # type: ignore[arg-type]
