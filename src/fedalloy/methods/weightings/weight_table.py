"""A learned table as data: averaged, described, and turned into a weighting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedalloy.core.errors import SpecError
from fedalloy.methods.weightings.unfolded import Unfolded

FORMAT = "fedalloy weights 1"


@dataclass(frozen=True, eq=False, repr=False)
class WeightTable:
    """Weights of rounds x clients (x layers), the clients' data sizes, and how the weights were learned.

    ``losses`` holds the summed loss of every outer iteration, ``learned`` the settings; ``runs`` is the number of
    learned tables whose mean this is.

    >>> WeightTable(torch.tensor([[0.5, 0.5], [0.25, 0.75]])).variance
    0.015625
    """

    weights: Tensor
    layers: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    normalise: bool = False
    losses: tuple[float, ...] = ()
    learned: dict[str, Any] = field(default_factory=dict)
    runs: int = 1

    def __repr__(self) -> str:
        layers = f" and {len(self.layers)} layers" if self.layers else ""
        return f"<weights of {self.rounds} rounds, {self.clients} clients{layers}; mean of {self.runs} learned>"

    @property
    def rounds(self) -> int:
        """How many rounds there are weights for."""
        return self.weights.shape[0]

    @property
    def clients(self) -> int:
        """How many clients there are weights for."""
        return self.weights.shape[1]

    @property
    def variance(self) -> float:
        """How much the weights change from round to round: their variance over rounds, averaged over clients (and
        layers). The method's analysis requires it to stay below the order of ``1 / sqrt(T)``."""
        return float(self.weights.double().var(0, correction=0).mean())

    def weighting(self) -> Unfolded:
        """The weighting that uses this table."""
        return Unfolded(_tuples(self.weights.tolist()), self.layers, self.sizes, self.normalise)

    def arguments(self) -> dict[str, Any]:
        """The arguments of that weighting as plain lists, for recipes."""
        found = {"table": self.weights.tolist(), "layers": list(self.layers), "sizes": list(self.sizes)}
        return {name: value for name, value in found.items() if value}

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON values, format and shape first."""
        return {
            "format": FORMAT, "rounds": self.rounds, "clients": self.clients, "layers": list(self.layers),
            "sizes": list(self.sizes), "normalise": self.normalise, "runs": self.runs, "variance": self.variance,
            "weights": self.weights.tolist(), "losses": list(self.losses), "learned": self.learned,
        }  # fmt: skip

    @staticmethod
    def from_json(found: Mapping[str, Any]) -> WeightTable:
        """A table from the result of ``to_json``."""
        return WeightTable(
            torch.tensor(found["weights"], dtype=torch.float64), tuple(found["layers"]), tuple(found["sizes"]),
            bool(found["normalise"]), tuple(found["losses"]), found["learned"], int(found["runs"]),
        )  # fmt: skip


def average(tables: Sequence[WeightTable]) -> WeightTable:
    """The mean of tables that were learned for the same clients; every learned run has the same weight.

    >>> tables = [WeightTable(torch.tensor([[1.0, 0.0]])), WeightTable(torch.tensor([[0.5, 0.5]]))]
    >>> average(tables).weights
    tensor([[0.7500, 0.2500]], dtype=torch.float64)
    """
    if not tables:
        raise SpecError("there is no table to average: give one or more")
    first, runs = tables[0], sum(table.runs for table in tables)
    for number, table in enumerate(tables[1:], 2):
        for name in ("layers", "sizes", "normalise"):
            if getattr(table, name) != getattr(first, name):
                raise SpecError(
                    f"table {number} has {name} = {getattr(table, name)}, the first {getattr(first, name)}: only "
                    "tables for the same clients and algorithm can be averaged"
                )
        if table.weights.shape != first.weights.shape:
            raise SpecError(f"table {number} is {list(table.weights.shape)}, the first {list(first.weights.shape)}")
    mean = torch.stack([table.weights.double() * table.runs for table in tables]).sum(0) / runs
    learned = {"mean_of": [table.learned for table in tables]}
    return WeightTable(mean, first.layers, first.sizes, first.normalise, (), learned, runs)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(one) for one in value) if isinstance(value, list) else value
