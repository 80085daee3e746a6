"""What a source needs besides itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from fedalloy.core.errors import SpecError
from fedalloy.tasks.sources.columns import Columns
from fedalloy.tasks.sources.hugging_face import Tokenise

Collate = Callable[[list[Any]], Any]
"""A function from a list of rows to a batch, as that of a torch ``DataLoader``: ``(x, y)``, or a mapping whose
``labels`` (``label``, ``y``) are the targets."""


@dataclass(frozen=True)
class SourceOptions:
    """What a source needs besides itself.

    ``ids`` are the clients of the rows, or the name of the column that holds them, or where rows have no columns
    ``package.module:function``; ``columns`` the roles of columns;
    ``classes`` the number of classes where it cannot be known; ``lazy`` whether data are read on demand (default: if
    they are large); ``tokenise`` a function from a list of texts to numbers; ``clients`` the number of clients;
    ``dealt`` whether a partition is given, and ``natural`` whether it uses the clients that the data name; ``called``
    is the name of the function that returned the source; ``collate`` makes one batch of all rows
    (:mod:`fedalloy.tasks.sources.collating`).
    """

    ids: Any = None
    columns: Columns | None = None
    classes: int | None = None
    lazy: bool | None = None
    tokenise: Tokenise | None = None
    clients: int | None = None
    dealt: bool = False
    natural: bool = False
    called: str = ""
    collate: Collate | None = None

    @property
    def is_default(self) -> bool:
        """Whether the source is read as a recipe that names it alone would read it."""
        given = (self.ids, self.columns, self.classes, self.lazy, self.tokenise, self.collate)
        return all(one is None for one in given)

    @property
    def named(self) -> Columns:
        """The roles of columns, with the column of client ids."""
        columns = self.columns or Columns()
        if not isinstance(self.ids, str):
            if self.ids is not None and columns.client is not None:
                raise SpecError(f"ids and columns.client = '{columns.client}' both name the clients; give one of them")
            return columns
        if columns.client not in (None, self.ids):
            raise SpecError(
                f"ids names the column '{self.ids}' and columns.client '{columns.client}'; give one of them"
            )
        return replace(columns, client=self.ids)


def check_dealt(options: SourceOptions) -> None:
    """Refuse two statements about which client has which rows."""
    named = "columns.client" if options.columns and options.columns.client is not None else None
    named = "ids" if options.ids is not None else named
    if named and options.dealt and not options.natural:
        raise SpecError(f"{named} and partition both say which client has which rows; give one of them")


def refuse(options: SourceOptions, what: str, *names: str) -> None:
    """Refuse options that this kind of source would ignore; ``lazy = False`` is true of what is in memory."""
    for name in names:
        if getattr(options, name) not in (None, False):
            raise SpecError(f"{name} means nothing for {what}; leave it out")
