"""The structure of a recipe: which field holds which table, and what each key means."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

Model = type[BaseModel]


def table_of(model: Model, field: int | str) -> Model | None:
    """The one table that a field holds, alone or in a list; None where plain values are allowed as well."""
    known = model.model_fields.get(str(field))
    found = inner_tables(known.annotation) if known else []
    plain = known is not None and any(kind in (int, float, str) for kind in _kinds(known.annotation))
    return found[0] if len(found) == 1 and not plain else None


def tables(model: Model, prefix: str = "") -> Iterator[tuple[str, Model]]:
    """Every nested table, with its TOML heading."""
    for name, field in model.model_fields.items():
        for table in inner_tables(field.annotation):
            path = f"{prefix}{name}"
            many = any(get_origin(kind) is list and table in get_args(kind) for kind in _kinds(field.annotation))
            yield (f"[[{path}]]" if many else f"[{path}]"), table
            yield from tables(table, f"{path}.")


def fields(model: Model) -> list[tuple[str, str, str]]:
    """Name, default and meaning of every key that is not a table."""
    return [
        (name, _default(field.default), field.description or "")
        for name, field in model.model_fields.items()
        if table_of(model, name) is None
    ]


def inner_tables(annotation: Any) -> list[Model]:
    """The tables that an annotation mentions."""
    return [kind for kind in _kinds(annotation) if isinstance(kind, type) and issubclass(kind, BaseModel)]


def _kinds(annotation: Any) -> Iterator[Any]:
    yield annotation
    for one in get_args(annotation):
        yield from _kinds(one)


def _default(value: Any) -> str:
    if value is PydanticUndefined:
        return "(needed)"
    if value is None:
        return ""
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value).replace("'", '"')
