"""Names that members and classes had in the last version: using one gives an error or a warning with the new name."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

SOLVER = {
    "conclude": "post_train",
    "fitted": "bind",
    "needs_facts": "needs_data_spec",
    "roles": "capabilities",
    "settle": "keep_local_buffers",
    "stays": "local_leaves",
}
SERVER = {"fitted": "bind"}
DATASET = {"usual": "defaults"}
MODEL = {"roles": "capabilities"}
OBJECTIVE = {"act": "apply_capability", "roles": "capabilities"}
TASK = {"facts": "data_spec", "newcomer_ids": "unseen_ids"}


def refuse_old_members(rule: type, members: Mapping[str, str]) -> None:
    """Raise for a class that defines or inherits a member by its old name, because it would silently be ignored."""
    written = {name for kind in rule.__mro__ for name in (*vars(kind), *vars(kind).get("__annotations__", {}))}
    _refuse(rule.__name__, written, members)


def refuse_old_attributes(thing: object, members: Mapping[str, str]) -> None:
    """Raise for an object with an attribute by its old name: one set in ``__init__``, or of a class without a base."""
    kind = thing if isinstance(thing, type) else type(thing)
    _refuse(kind.__name__, {old for old in members if hasattr(thing, old)}, members)


def _refuse(name: str, written: AbstractSet[str], members: Mapping[str, str]) -> None:
    for old, new in members.items():
        if old in written:
            raise TypeError(f"{name} defines '{old}', which is called '{new}' now: rename it")


def old_names(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """A module's ``__getattr__`` that resolves renamed members with a DeprecationWarning."""

    def found(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module '{module}' has no attribute '{name}'")
        text = f"{module}.{name} is now {names[name]}; the old name will be removed in the next version"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return getattr(sys.modules[module], names[name])

    return found
