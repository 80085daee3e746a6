"""The partitioners of Flower Datasets, by name or as objects."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedalloy.core.errors import DataError, SpecError, nearest
from fedalloy.core.keys import Key
from fedalloy.core.registry import register
from fedalloy.tasks.datasets.base import third_party
from fedalloy.tasks.partitions.base import Partition, check_clients
from fedalloy.tasks.partitions.natural import Natural

LABEL, OWNER, ROW = "label", "client", "row"
"""The columns that a partitioner can name: the label of an example, its natural client, its number."""


@register("partition", "flower_datasets")
@dataclass(frozen=True)
class FlowerDatasets(Partition):
    """A ``partitioner`` of Flower Datasets (``DirichletPartitioner``, ...) with its ``arguments``, or one as an object.

    ``partition_by`` is the label unless ``arguments`` say ``client``, the natural client. Partitioners draw from their
    own ``seed``, so that every seed of a recipe has the same partition. A recipe may name one directly:
    ``kind = "IidPartitioner"``, with its arguments beside it.
    """

    partitioner: Any
    arguments: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.partitioner, str) and not is_partitioner(self.partitioner):
            raise SpecError(
                f"partition 'flower_datasets': 'partitioner' is a {type(self.partitioner).__name__}; give one of "
                "Flower Datasets, or its name"
            )

    def clients_for(self, owner: Tensor | None) -> int | None:
        """The number of partitions, as far as the partitioner says it before it has seen the data."""
        number = self.arguments.get("num_partitions", getattr(self.partitioner, "_num_partitions", None))
        if isinstance(number, int) and number > 0:
            return number
        return len(owner.unique()) if owner is not None else None

    def assign(self, labels: Tensor, clients: int, key: Key, owner: Tensor | None = None) -> list[Tensor]:
        """The rows of every partition."""
        hub = third_party("datasets", "datasets", "partitioners of Flower Datasets")
        columns: dict[str, Any] = {LABEL: labels.tolist(), ROW: np.arange(len(labels))}
        if owner is not None:
            columns[OWNER] = owner.tolist()
        made = self._made()
        try:
            made.dataset = hub.Dataset.from_dict(columns)
            check_clients(f"flower_datasets ({type(made).__name__})", clients, made.num_partitions)
            hands = [torch.tensor(made.load_partition(k)[ROW], dtype=torch.int64) for k in range(clients)]
        except (ValueError, KeyError, TypeError) as cause:
            raise DataError(f"{type(made).__name__} cannot divide these data: {cause}") from cause
        return [hand.sort().values for hand in hands]

    def _made(self) -> Any:
        if not isinstance(self.partitioner, str):
            return copy.deepcopy(self.partitioner)  # one is given its dataset only once
        library = third_party("flwr_datasets.partitioner", "flwr-datasets", "partitioners of Flower Datasets")
        known = [name for name in dir(library) if name.endswith("Partitioner") and name != "Partitioner"]
        if self.partitioner not in known:
            advice = nearest(self.partitioner, known)
            raise SpecError(f"partition: Flower Datasets has no '{self.partitioner}': {advice}")
        kind = getattr(library, self.partitioner)
        try:
            return kind(**({"partition_by": LABEL} if _takes_column(kind) else {}) | self.arguments)
        except (TypeError, ValueError) as cause:
            raise SpecError(f"partition '{self.partitioner}': {cause}") from cause


def is_partitioner(value: Any) -> bool:
    """Whether a value is a partitioner of Flower Datasets, or a name that looks like one."""
    if isinstance(value, str):
        return value.endswith("Partitioner")
    kinds = type(value).__mro__
    return any(one.__module__.startswith("flwr_datasets.") and one.__name__ == "Partitioner" for one in kinds)


def uses_clients(partition: Any) -> bool:
    """Whether a rule, given as a value, a name or a spec, uses the clients that the data name."""
    if isinstance(partition, Natural):
        return True
    if isinstance(partition, FlowerDatasets):
        return uses_clients({**partition.arguments, "kind": partition.partitioner})
    spec = partition if isinstance(partition, Mapping) else {"kind": partition}
    kind = spec.get("kind")
    if kind == "flower_datasets":
        return uses_clients({**spec.get("arguments", {}), "kind": spec.get("partitioner")})
    by = spec.get("partition_by", getattr(kind, "_partition_by", None))
    return kind == "natural" or (is_partitioner(kind) and by == OWNER)


def _takes_column(kind: Any) -> bool:
    return "partition_by" in inspect.signature(kind).parameters
