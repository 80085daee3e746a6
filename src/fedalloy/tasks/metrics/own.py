"""A user's own metric: a function, or an object of torchmetrics, with its direction."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from fedalloy.core.errors import SpecError, nearest
from fedalloy.core.own_code import own_code
from fedalloy.core.protocols import Objective
from fedalloy.core.registry import register
from fedalloy.tasks.metrics.metric import Metric, means

Own = Callable[[Tensor, Tensor], Any]
"""``(outputs, y)`` to one value for all examples, or to one for each."""
Per = Literal["client", "example"]


def own_metric(name: str, metric: Own, *, higher_is_better: bool | None, per: Per = "client") -> None:
    """Register a metric under ``name``; from then on it is used by this name like any other.

    ``metric`` is a function of ``(outputs, y)`` or an object of torchmetrics. It is called once for every client, with
    the outputs and targets of all of its examples, and once for the global test set. With ``per = "example"`` a
    function returns one value per example instead, of which the mean is taken: then outputs need not be kept.
    """
    if not callable(metric):
        raise SpecError(
            f"metric '{name}' is a {type(metric).__name__}: give a function of (outputs, y) or a torchmetrics object"
        )

    if per not in get_args(Per):
        raise SpecError(f"metric '{name}': per is {per!r}; {nearest(str(per), get_args(Per))}")
    if per == "example" and _is_torchmetric(metric):
        raise SpecError(f"metric '{name}' is an object of torchmetrics and has no values per example: leave 'per' out")

    def make() -> OwnMetric:
        return OwnMetric(name, metric, per)

    make.__module__, make.__qualname__ = getattr(metric, "__module__", __name__), f"own_metric.{name}"
    make.__doc__ = getattr(metric, "__doc__", None) or f"The user's own metric {name}."
    register("metric", name, higher_is_better=higher_is_better)(make)


@dataclass(frozen=True)
class OwnMetric(Metric):
    """A function of outputs and targets."""

    name: str
    function: Own
    per: Per = "client"

    def evidence(self, objective: Objective, outputs: Tensor, y: Tensor) -> Tensor:
        """One value per example, or outputs and targets themselves."""
        if self.per == "client":
            return packed(outputs, y)
        with own_code(f"metric '{self.name}'", SpecError):
            found = self.function(outputs, y)
        if not isinstance(found, Tensor) or found.dim() != 1 or len(found) != len(outputs):
            got = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise SpecError(
                f"metric '{self.name}' returned {got} for {len(outputs)} examples: with per='example' it must return "
                "one value for each"
            )
        return found.double()

    def score(self, evidence: Tensor, owner: Tensor, clients: int) -> Tensor:
        """The mean per client, or the function's value for each; NaN for a client without examples."""
        if evidence.dim() == 1:
            return means(evidence, owner, clients)
        scores = torch.full((clients,), torch.nan, dtype=torch.float64)
        for client in owner.unique().tolist():
            outputs, y = unpacked(evidence[owner == client])
            with own_code(f"metric '{self.name}', which must return one number,", SpecError):
                scores[client] = float(self._value(outputs, y))
        return scores

    def _value(self, outputs: Tensor, y: Tensor) -> Any:
        if not _is_torchmetric(self.function):
            return self.function(outputs, y)
        fresh: Any = copy.deepcopy(self.function)  # the user's object keeps its own state
        fresh.reset()
        fresh.update(outputs, y)
        return fresh.compute()


def packed(outputs: Tensor, y: Tensor) -> Tensor:
    """Outputs and targets of every example as one row, which begins with their shapes; :func:`unpacked` reads it."""
    head = [
        float(y.is_floating_point()),
        *(float(n) for part in (outputs, y) for n in (part.dim() - 1, *part.shape[1:])),
    ]
    prefix = torch.tensor(head, dtype=torch.float64, device=outputs.device).expand(len(outputs), -1)
    return torch.cat([prefix, *(part.reshape(len(part), -1).double() for part in (outputs, y))], 1)


def unpacked(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The outputs in float64, and the targets.

    >>> unpacked(packed(torch.ones(2, 3), torch.tensor([4, 5])))[1]
    tensor([4, 5])
    """
    numbers = iter(rows[0].tolist())
    real = bool(next(numbers))
    shapes = [_shape(numbers) for _ in range(2)]
    begin = 3 + sum(map(len, shapes))
    width = torch.Size(shapes[0]).numel()
    outputs = rows[:, begin : begin + width].reshape(len(rows), *shapes[0])
    y = rows[:, begin + width :].reshape(len(rows), *shapes[1])
    return outputs, y if real else y.long()


def _shape(numbers: Iterator[float]) -> list[int]:
    return [int(next(numbers)) for _ in range(int(next(numbers)))]


def _is_torchmetric(function: object) -> bool:
    return isinstance(function, nn.Module) and all(hasattr(function, name) for name in ("update", "compute", "reset"))
