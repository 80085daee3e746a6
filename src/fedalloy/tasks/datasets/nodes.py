"""Data that stay on the nodes: the recipe of a real federation declares only their shape."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from fedalloy.core.errors import DataError, SpecError
from fedalloy.core.keys import Key
from fedalloy.core.registry import register
from fedalloy.tasks.datasets.base import Dataset, DatasetLoader


@register("dataset", "nodes")
@dataclass(frozen=True)
class OnNodes(DatasetLoader):
    """Examples of this ``shape`` on the nodes (several inputs have one by name, ``{ input_ids = [8], ... }``, or a list
    of them); ``classes`` is 0 for regression. ``clients`` are the names of the nodes, in the order of their numbers;
    without them, ``clients`` of ``[partition]`` gives their number. ``bounds`` are the
    lowest and highest value of the features, for methods that make samples. ``targets`` is the shape of an example's
    targets (empty: one number); they are ``real`` numbers or class numbers (default: classes if ``classes`` is not 0),
    of which ``ignore_index`` does not count."""

    shape: tuple[int, ...] | tuple[tuple[int, ...], ...] | dict[str, tuple[int, ...]]
    classes: int = 0
    clients: tuple[str, ...] = ()
    bounds: tuple[float, float] | None = None
    targets: tuple[int, ...] = ()
    real: bool | None = None
    ignore_index: int = -100

    summary: ClassVar[str] = "data on the nodes of a real federation: only their shape is known here"

    def __post_init__(self) -> None:
        if isinstance(self.shape, dict):
            named = {name: tuple(sides) if isinstance(sides, list) else sides for name, sides in self.shape.items()}
            object.__setattr__(self, "shape", named)
        if self.classes < 0 or not all(_is_side(side) for side in (*_sides(self.shape), *self.targets)):
            raise SpecError(
                f"dataset 'nodes': classes must be 0 or more and every side of shape and targets 1 or more, got "
                f"{self.classes}, {self.shape} and {list(self.targets)}"
            )
        if len(set(self.clients)) < len(self.clients):
            raise SpecError("dataset 'nodes': two of the clients have the same name; give every node its own")

    def load(self, key: Key) -> Dataset:
        """Refused: the data are on the nodes."""
        raise DataError(
            "dataset 'nodes': these data are on the nodes of a federation. Run the recipe there (fedalloy flower "
            "--help), or name data of this machine in [task] dataset"
        )


def _sides(shape: Any) -> Iterator[Any]:
    """Every side of every shape; a table that has none, or something else than shapes, has a side that is refused."""
    if isinstance(shape, dict):
        parts = list(shape.values())
        yield from (0,) if not parts or not all(isinstance(part, tuple) for part in parts) else ()
    else:
        parts = list(shape)
    for part in parts:
        yield from part if isinstance(part, tuple) else (part,)


def _is_side(side: Any) -> bool:
    return isinstance(side, int) and not isinstance(side, bool) and side > 0
