"""Your own data from Python: a function named by ``package.module:function``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from fedalloy.core.errors import DataError, SpecError, nearest
from fedalloy.core.keys import Key
from fedalloy.core.own_code import import_own, own_code
from fedalloy.core.registry import register
from fedalloy.tasks.datasets.base import Dataset, DatasetLoader, from_clients


@register("dataset", "callable")
@dataclass(frozen=True)
class FromFunction(DatasetLoader):
    """The result of a function: a ``Dataset``, or a list with one ``(x, y)`` per client.

    The function is called without arguments, or with ``key=`` when it has a parameter of that name.
    """

    function: str

    summary: ClassVar[str] = "your own data: a Python function 'package.module:function'"

    def __post_init__(self) -> None:
        module, _, name = self.function.partition(":")
        if not (module and name):
            raise SpecError(f"dataset 'callable': '{self.function}' must read 'package.module:function'")

    def load(self, key: Key) -> Dataset:
        """Call the function."""
        function = resolve(self.function)
        with own_code(self.function, DataError):
            takes_key = "key" in inspect.signature(function).parameters
            made = function(key=key) if takes_key else function()
        return made if isinstance(made, Dataset) else self._from_list(made)

    def _from_list(self, made: Any) -> Dataset:
        pairs = list(made) if isinstance(made, list | tuple) else None
        if pairs is None or not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
            raise DataError(
                f"{self.function} returned {type(made).__name__}; "
                "it must return a fedalloy Dataset or a list with one pair (x, y) per client"
            )
        return from_clients([(x, y) for x, y in pairs])


def resolve(path: str) -> Callable[..., Any]:
    """The function a dotted path names.

    >>> resolve("math:sqrt")(9.0)
    3.0
    """
    module_name, _, name = path.partition(":")
    module = import_own(module_name, f"'{path}': module {module_name}", DataError)
    found = getattr(module, name, None)
    if not callable(found):
        functions = [public for public in dir(module) if callable(getattr(module, public)) and public[0] != "_"]
        raise DataError(f"'{path}': module {module_name} has no function '{name}': {nearest(name, functions)}")
    function: Callable[..., Any] = found
    return function
