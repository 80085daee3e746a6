"""Data that stay on the nodes: the recipe of a real federation declares only their shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedalloy.core.errors import DataError, SpecError
from fedalloy.core.keys import Key
from fedalloy.core.registry import register
from fedalloy.tasks.datasets.base import Dataset, DatasetLoader


@register("dataset", "nodes")
@dataclass(frozen=True)
class OnNodes(DatasetLoader):
    """Examples of this ``shape`` on the nodes; ``classes`` is 0 for regression. ``clients`` are the names of the nodes,
    in the order of their numbers; without them, ``clients`` of ``[partition]`` gives their number. ``bounds`` are the
    lowest and highest value of the features, for methods that make samples. ``targets`` is the shape of an example's
    targets (empty: one number); they are ``real`` numbers or class numbers (default: classes if ``classes`` is not 0),
    of which ``ignore_index`` does not count."""

    shape: tuple[int, ...]
    classes: int = 0
    clients: tuple[str, ...] = ()
    bounds: tuple[float, float] | None = None
    targets: tuple[int, ...] = ()
    real: bool | None = None
    ignore_index: int = -100

    summary: ClassVar[str] = "data on the nodes of a real federation: only their shape is known here"

    def __post_init__(self) -> None:
        if self.classes < 0 or not all(side > 0 for side in (*self.shape, *self.targets)):
            raise SpecError(
                f"dataset 'nodes': classes must be 0 or more and every side of shape and targets 1 or more, got "
                f"{self.classes}, {list(self.shape)} and {list(self.targets)}"
            )
        if len(set(self.clients)) < len(self.clients):
            raise SpecError("dataset 'nodes': two of the clients have the same name; give every node its own")

    def load(self, key: Key) -> Dataset:
        """Refused: the data are on the nodes."""
        raise DataError(
            "dataset 'nodes': these data are on the nodes of a federation. Run the recipe there (fedalloy flower "
            "--help), or name data of this machine in [task] dataset"
        )
