"""Whether two one-run recipes are the same experiment, and where they differ, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from fedalloy.core.errors import FedalloyError
from fedalloy.experiment.recipe.tables import Recipe

FREE = (
    "name", "description", "imports", "run.rounds", "run.checkpoint_every", "run.client_memory_mb", "run.threads",
    "run.profile", "engine.threads",
)  # fmt: skip
"""What a run may be resumed with although it began with something else; the number of rounds is looked at apart."""
ENGINE = ("engine", "run.engine", "run.device")
_ALGORITHM = ("algorithm", "solver", "weighting", "server", "wire")


def mismatches(found: Mapping[str, Any], wanted: Mapping[str, Any], free: tuple[str, ...] = FREE) -> list[str]:
    """Where two recipes differ, after what they leave out is filled in and what may differ is left out.

    >>> mismatches({"run": {"seeds": [0], "target": 0.5}}, {"run": {"seeds": [1]}, "engine": {"threads": 3}})
    ['run.seeds is [0] there, [1] here', 'run.target is 0.5 there, None here']
    """
    there, here = _filled(found), _filled(wanted)
    told = differences(there, here)
    if any(_below(path, _ALGORITHM) for path in told) and _same_algorithm(there, here):
        free = (*free, *_ALGORITHM)
    return [said for path, said in told.items() if not _below(path, free)]


def differences(found: Mapping[str, Any], wanted: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Where two nested mappings differ, by path, for an error message.

    >>> differences({"run": {"rounds": 5}}, {"run": {"rounds": 9}})
    {'run.rounds': 'run.rounds is 5 there, 9 here'}
    """
    said: dict[str, str] = {}
    for key in sorted({*found, *wanted}):
        there, here, path = found.get(key), wanted.get(key), f"{prefix}{key}"
        if isinstance(there, Mapping) and isinstance(here, Mapping):
            said |= differences(there, here, f"{path}.")
        elif there != here:
            said[path] = f"{path} is {_short(there)} there, {_short(here)} here"
    return said


def _filled(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe with its defaults; what is none (a run started from Python) as it is."""
    try:
        checked = Recipe.model_validate(_listed(recipe))
    except ValidationError:
        plain: dict[str, Any] = _listed(recipe)
        return plain
    return checked.model_dump(exclude_none=True, exclude={"compare", "grid"})


def _same_algorithm(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """A method by its name and the same one by its parts are one algorithm."""
    from fedalloy.experiment.recipe.resolving import algorithm_of

    try:
        there, here = (algorithm_of(Recipe.model_validate(recipe)) for recipe in (found, wanted))
        return bool(there == here)
    except (ValidationError, FedalloyError):
        return False


def _below(path: str, tables: tuple[str, ...]) -> bool:
    return any(path == table or path.startswith(f"{table}.") for table in tables)


def _listed(value: Any) -> Any:
    """As a file would hold it: tuples are lists there."""
    if isinstance(value, Mapping):
        return {str(key): _listed(item) for key, item in value.items() if item is not None}
    return [_listed(item) for item in value] if isinstance(value, list | tuple) else value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
