"""Your own data from Python: a function named by ``package.module:function``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from fedalloy.core.errors import DataError, SpecError, nearest
from fedalloy.core.keys import Key
from fedalloy.core.own_code import import_own
from fedalloy.core.registry import register
from fedalloy.tasks.datasets.base import Dataset, DatasetLoader, check_count
from fedalloy.tasks.sources.columns import Columns

if TYPE_CHECKING:
    from fedalloy.tasks.sources.options import SourceOptions


@register("dataset", "callable")
@dataclass(frozen=True)
class FromFunction(DatasetLoader):
    """The result of a function: a ``Dataset``, a list with the data of every client, or anything else that
    :func:`fedalloy.task` takes.

    The function is called without arguments, or with ``key=`` when it has a parameter of that name. A function of a
    client's number returns that client's data; then ``clients`` is their number. ``ids``, ``columns``, ``classes``,
    ``lazy`` and ``tokenise`` are as in :func:`fedalloy.task`; ``tokenise``, and ``ids`` where rows have no columns, are
    written ``package.module:function``.
    """

    function: str
    clients: int | None = None
    ids: str | None = None
    columns: Columns | None = None
    classes: int | None = None
    lazy: bool | None = None
    tokenise: str | None = None

    summary: ClassVar[str] = "your own data: a Python function 'package.module:function'"

    def __post_init__(self) -> None:
        module, _, name = self.function.partition(":")
        if not (module and name):
            raise SpecError(f"dataset 'callable': '{self.function}' must read 'package.module:function'")
        check_count("callable", "clients", self.clients, least=1)
        check_count("callable", "classes", self.classes)

    def load(self, key: Key) -> Dataset:
        """Call the function; the result must be in memory."""
        made = self.open(key)
        if not isinstance(made, Dataset):
            raise DataError(f"{self.function} is read on demand, which is not possible here; set lazy = false")
        return made

    def open(self, key: Key) -> Any:
        """Call the function and open what it returns."""
        from fedalloy.tasks.sources.options import SourceOptions  # imports datasets.base

        return self.open_for(key, SourceOptions())

    def open_for(self, key: Key, asked: SourceOptions) -> Any:
        """The same for the clients and the partition that the task asks for."""
        from fedalloy.tasks.sources.opening import open_source

        tokenise = resolve(self.tokenise) if self.tokenise else None
        options = replace(
            asked, ids=self.ids, columns=self.columns, classes=self.classes, lazy=self.lazy, tokenise=tokenise,
            clients=asked.clients or self.clients, called=self.function,
        )  # fmt: skip
        return open_source(resolve(self.function), options, key)


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


def required_arguments(function: Callable[..., Any]) -> list[str]:
    """The names of the arguments that a call must give."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return ["client"]
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [one.name for one in signature.parameters.values() if one.kind in plain and one.default is one.empty]
