"""Where packages went: an import by the old name works for one version and says what to write instead."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MOVED = {
    "fedalloy.conform": "fedalloy.testing.vectors",
    "fedalloy.docs": "fedalloy.cli.docs",
    "fedalloy.export": "fedalloy.results.export",
    "fedalloy.recipe": "fedalloy.experiment.recipe",
    "fedalloy.records": "fedalloy.experiment.records",
    "fedalloy.reproduce": "fedalloy.studies.reproduce",
    "fedalloy.run": "fedalloy.experiment",
    "fedalloy.serve": "fedalloy.report.live",
    "fedalloy.servers": "fedalloy.methods.servers",
    "fedalloy.solvers": "fedalloy.methods.solvers",
    "fedalloy.synthetic": "fedalloy.studies.synthetic",
    "fedalloy.track": "fedalloy.results.track",
    "fedalloy.unfolding": "fedalloy.studies.unfolding",
    "fedalloy.weightings": "fedalloy.methods.weightings",
    "fedalloy.wire": "fedalloy.methods.wires",
}


class OldNames:
    """Finds and loads modules by their old names: what is loaded is the module of the new name, not a copy."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """A spec for a module that moved; nothing for any other."""
        return ModuleSpec(name, _LOADER, is_package=True) if new_name(name) else None

    @staticmethod
    def create_module(spec: ModuleSpec) -> ModuleType:
        """The module that is meant, with a warning for whoever wrote the import."""
        new = str(new_name(spec.name))
        warnings.warn(f"{spec.name} is now {new}; the old name goes with the next version", DeprecationWarning, 2)
        module = import_module(new)
        spec.loader_state = module.__spec__
        return module

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        """It has run already; Python has just given it the old name's spec."""
        spec: Any = module.__spec__
        module.__spec__ = spec.loader_state


_LOADER: Any = OldNames


def new_name(name: str) -> str | None:
    """Where a module is now.

    >>> new_name("fedalloy.solvers.sgd"), new_name("fedalloy.core.tree")
    ('fedalloy.methods.solvers.sgd', None)
    """
    for old, new in MOVED.items():
        if name == old or name.startswith(old + "."):
            return new + name.removeprefix(old)
    return None


def install() -> None:
    """Have Python look here first: below an old name it would find the files of the new one, and load them again."""
    if OldNames not in sys.meta_path:
        sys.meta_path.insert(0, OldNames)
