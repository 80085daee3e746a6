"""Selections of leaves by name patterns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor

from fedalloy.core.tree import Tree


@dataclass(frozen=True)
class Names:
    """The leaves whose names match a pattern (``head.*``), or with ``others`` those that match none. Empty: no leaf.

    >>> Names(("head.*",)).split({"body.weight": 1, "head.weight": 2})
    ({'head.weight': 2}, {'body.weight': 1})
    >>> "body.weight" in Names(("head.*",), others=True), bool(Names())
    (True, False)
    """

    patterns: tuple[str, ...] = ()
    others: bool = False

    def __contains__(self, name: object) -> bool:
        return any(fnmatchcase(str(name), pattern) for pattern in self.patterns) != self.others

    def __bool__(self) -> bool:
        return bool(self.patterns) or self.others

    def split(self, tree: Mapping[str, Tensor]) -> tuple[Tree, Tree]:
        """The selected leaves, and the others."""
        meant = {name: leaf for name, leaf in tree.items() if name in self}
        return meant, {name: leaf for name, leaf in tree.items() if name not in meant}


NO_NAMES = Names()
"""No leaf at all."""
