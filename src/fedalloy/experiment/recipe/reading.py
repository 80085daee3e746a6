"""From a TOML file to a checked recipe; every error names the field, what is allowed and the nearest spelling."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from fedalloy.core.errors import SpecError, nearest
from fedalloy.core.own_code import import_own
from fedalloy.experiment.recipe.changes import assign
from fedalloy.experiment.recipe.tables import Recipe
from fedalloy.experiment.recipe.walking import table_of
from fedalloy.experiment.records.reading import GIVEN

_PLAINER = re.compile(r"a valid dictionary( or instance of \w+)?")
Problem = Mapping[str, Any]
_importing: ContextVar[bool] = ContextVar("importing", default=True)


def load(path: str | Path, changes: list[str] | None = None) -> Recipe:
    """The recipe in a file, after ``a.b=value`` changes."""
    found = read(path)
    given = found.get("task", {}) == {"dataset": GIVEN} or ("task" not in found and "seed" in found.get("run", {}))
    if Path(path).is_dir() and given:
        raise SpecError(
            f"{path} is a run that was begun in Python, and its data and model are not in its folder: continue it in "
            "Python, with the call of fedalloy.fit that began it and resume=True, or of fedalloy.compare"
        )
    return parse(assign(found, changes or []), str(path))


def read(path: str | Path) -> dict[str, Any]:
    """The tables of a recipe file, unchecked; for a run folder, those of the recipe inside it."""
    file = Path(path)
    file = file / "recipe.toml" if file.is_dir() else file
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SpecError(f"there is no recipe {file}; {_neighbours(file)}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SpecError(f"{file} is not TOML: {error}") from None
    except RecursionError:
        raise SpecError(f"{file} is nested too deeply for a recipe") from None
    except OSError as error:
        raise SpecError(f"{file} cannot be read: {error.strerror}") from None


def parse(data: Mapping[str, Any], source: str = "recipe") -> Recipe:
    """Check the tables of a recipe.

    >>> parse({"run": {"ronds": 3}})
    Traceback (most recent call last):
    fedalloy.core.errors.SpecError: recipe: run.ronds: unknown key; did you mean 'rounds'? allowed: ...
    """
    try:
        recipe = Recipe.model_validate(data)
    except ValidationError as error:
        problems = dict.fromkeys(_sentences([dict(one) for one in error.errors(include_url=False)], data))
        raise SpecError(f"{source}: " + "\n".join(problems)) from None
    for module in recipe.imports if _importing.get() else ():
        _import(module, source)
    return recipe


@contextmanager
def without_imports() -> Iterator[None]:
    """Inside this block, parsing a recipe does not import the modules that it names."""
    before = _importing.set(False)
    try:
        yield
    finally:
        _importing.reset(before)


def _import(module: str, source: str) -> None:
    """Import a module, whose rules register themselves."""
    import_own(module, f"{source}: imports: '{module}'", SpecError)


def _elsewhere(key: str) -> str:
    """The tables that have a key which another one does not know."""
    kinds = {name: one.annotation for name, one in Recipe.model_fields.items()}
    homes = [name for name, kind in kinds.items() if key in getattr(kind, "model_fields", ())]
    return f"it belongs to {' or '.join(f'[{name}]' for name in homes)}; " if homes else ""


def _sentences(problems: list[dict[str, Any]], data: Mapping[str, Any]) -> Iterator[str]:
    """One sentence per field; the alternatives of a union are combined."""
    wanted: dict[str, list[str]] = {}
    meaning: dict[str, str] = {}
    for problem in problems:
        model, path, rest = _walk(problem["loc"])
        where = ".".join(map(str, path))
        if problem["type"] == "extra_forbidden" and len(rest) <= 1:
            key = str(rest[0]) if rest else str(path[-1])
            place = ".".join(map(str, [*path, *rest]))
            yield f"{place}: unknown key; {_elsewhere(key)}{nearest(key, model.model_fields)}"
        elif problem["type"] == "missing" and len(rest) <= 1:
            yield f"{where}: the key '{rest[0] if rest else path[-1]}' is missing"
        else:
            wanted.setdefault(where, []).append(_words(problem, rest))
            known = model.model_fields.get(str(path[-1])) if path else None
            meaning[where] = (known.description if known else None) or ""
    for where, words in wanted.items():
        different = list(dict.fromkeys(words))
        allowed = different[0] if len(different) == 1 else meaning[where] or ", or ".join(different)
        yield f"{where or 'everything'}: got {_value(data, where)!r}; {allowed}"


def _walk(loc: tuple[int | str, ...]) -> tuple[type[BaseModel], list[int | str], tuple[int | str, ...]]:
    """The innermost table of a location, the path to its field, and the rest (list positions, union members)."""
    model: type[BaseModel] = Recipe
    path: list[int | str] = []
    for position, part in enumerate(loc):
        if isinstance(part, int) and path and table_of(model, path[-1]) is not None:
            path.append(part)
            continue
        inner = table_of(model, path[-1] if path and isinstance(path[-1], str) else path[-2] if path else "")
        model = inner or model
        if part not in model.model_fields:
            return model, path, loc[position:]
        path.append(part)
        if table_of(model, part) is None:
            return model, path, loc[position + 1 :]
    return model, path, ()


def _words(problem: Problem, rest: tuple[int | str, ...]) -> str:
    """Pydantic's message, with a hint for a misspelt choice."""
    words = _PLAINER.sub("a table", str(problem["msg"]).removeprefix("Input "))
    words = words.replace("a valid integer", "a whole number").replace("a valid list", "a list")
    if problem["type"] == "literal_error":
        choices = str(problem["ctx"]["expected"]).replace(" or ", ", ").split(", ")
        return nearest(str(problem["input"]), [choice.strip("'") for choice in choices])
    inside = [str(part) for part in rest if isinstance(part, int)]
    return f"entry {inside[-1]} {words}" if inside else words


def _value(data: Any, where: str) -> Any:
    for step in where.split(".") if where else []:
        try:
            data = data[int(step)] if isinstance(data, list) else data[step]
        except (KeyError, IndexError, TypeError, ValueError):
            return None
    return data


def _neighbours(file: Path) -> str:
    found = sorted(other.name for other in file.parent.glob("*.toml")) if file.parent.is_dir() else []
    return nearest(file.name, found) if found else f"the folder {file.parent} holds no .toml file"
