"""Names that rules had in the last version: whoever still writes one is told the new one, and never ignored."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
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
    """An error for a class that writes a member by its old name, which nobody would ask for any more."""
    for old, new in members.items():
        if old in vars(rule):
            raise TypeError(f"{rule.__name__} writes '{old}', which is called '{new}' now: rename it")


def old_names(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """A module's ``__getattr__`` that finds what has been renamed there, with a DeprecationWarning."""

    def found(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module '{module}' has no attribute '{name}'")
        text = f"{module}.{name} is now {names[name]}; the old name goes with the next version"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return getattr(sys.modules[module], names[name])

    return found
