"""The server adds the combined update: FedAvg when the step is 1."""

from __future__ import annotations

from dataclasses import dataclass

from fedalloy.core import tree
from fedalloy.core.protocols import ServerOptimizer
from fedalloy.core.registry import register
from fedalloy.core.search import Range
from fedalloy.core.types import Context, Info, State, Tree


@register("server", "sgd", search={"lr": Range(0.1, 2.0, log=True)})
@dataclass(frozen=True)
class ServerSgd(ServerOptimizer):
    """``w <- w + lr * update``.

    When to use it: the default; ``lr = 1`` is the weighted average of the clients' models.
    """

    lr: float = 1.0

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ValueError(f"lr must be above 0, got {self.lr}")

    def apply(self, update: Tree, state: State, target: Tree, ctx: Context) -> tuple[Tree, State, Info]:
        return tree.add(target, update, self.lr), state, {}
