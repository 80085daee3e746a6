"""The client of every row, from ids that are given beside the rows."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fedalloy.core.errors import DataError, SpecError
from fedalloy.core.own_code import own_code
from fedalloy.tasks.datasets.base import indexes_differ
from fedalloy.tasks.datasets.callable import required_arguments, resolve
from fedalloy.tasks.sources.columns import numbered


def named_ids(ids: Any) -> Any:
    """Ids that a recipe names as ``package.module:function``: what it returns, or itself if it takes an example."""
    if not isinstance(ids, str) or ":" not in ids:
        return ids
    function = resolve(ids)
    if required_arguments(function):
        return function
    with own_code(ids, DataError):
        return function()


def owners_of(ids: Any, rows: int, *beside: Any) -> tuple[Tensor, tuple[str, ...]]:
    """The number of every row's client, and the clients' names; ``beside`` holds the rows, if they may have names.

    >>> owners_of(["b", "a", "b"], 3)
    (tensor([1, 0, 1]), ('a', 'b'))
    """
    ids = named_ids(ids)
    if isinstance(ids, str) or callable(ids):
        raise SpecError(f"ids must be one client id per row here ({rows} rows), got {ids!r}")
    if any(indexes_differ(one, ids) for one in beside):
        raise DataError(
            "ids and the rows have different indexes, so it is not known which client has which row. Bring them in one "
            "order, ids = ids.loc[rows.index], or give ids without an index, which are taken in their order: "
            "ids.to_numpy()"
        )
    owner, names = numbered(ids, "ids")
    if len(owner) != rows:
        raise DataError(f"ids has {len(owner)} client ids for {rows} rows; give one per row")
    return owner, names
