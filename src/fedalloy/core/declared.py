"""Members that a class declares with a default, and that dataclasses may override with fields."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    declared = property
else:

    class declared:  # noqa: N801 - used as a decorator, like property
        """A property that a subclass may replace by a field, a class variable, an attribute or a property.

        An inherited property does not work with dataclasses: the property object would become the default of the field
        of the same name, and the value could not be set. This one has no value on the class, and a value on the object
        takes precedence.

        >>> import dataclasses
        >>> class Named:
        ...     @declared
        ...     def name(self) -> str:
        ...         return "nobody"
        >>> @dataclasses.dataclass(frozen=True)
        ... class Person(Named):
        ...     name: str
        >>> Named().name, Person("Ada").name
        ('nobody', 'Ada')
        """

        def __init__(self, default: Callable[[Any], Any]) -> None:
            self.default = default
            self.__doc__ = default.__doc__

        def __set_name__(self, owner: type, name: str) -> None:
            self.name = name

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            if instance is None:
                raise AttributeError(f"'{self.name}' is declared for objects of {owner.__name__}, not for the class")
            return self.default(instance)
