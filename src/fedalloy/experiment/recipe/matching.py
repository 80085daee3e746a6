"""Whether two one-run recipes are the same experiment, and their differences as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from fedalloy.core.errors import FedalloyError
from fedalloy.experiment.recipe.tables import Recipe

FREE = (
    "name", "description", "imports", "run.rounds", "run.checkpoint_every", "run.client_memory_mb", "run.threads",
    "run.profile", "engine.threads", "engine.contributions_mb", "engine.contributions_folder",
)  # fmt: skip
"""Fields that may change when a run is resumed; the number of rounds is checked separately."""
ENGINE = ("engine", "run.engine", "run.device")
_ALL = ["*"]
"""What earlier versions stored where a recipe does not say what is trained. Where that is another model than without
it, because of parameters that need no gradient, the values of the initial model differ."""
_ALGORITHM = ("algorithm", "solver", "weighting", "server", "wire")


def mismatches(found: Mapping[str, Any], wanted: Mapping[str, Any], free: tuple[str, ...] = FREE) -> list[str]:
    """Where two recipes differ, after defaults are filled in and the ``free`` fields are removed.

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
    """The recipe with its defaults; unchanged if it is not a full recipe (a run started from Python)."""
    try:
        checked = Recipe.model_validate(_listed(recipe))
    except ValidationError:
        plain: dict[str, Any] = _listed(recipe)
        return plain
    plain = checked.model_dump(exclude_none=True, exclude={"compare", "grid"})
    if plain.get("task", {}).get("trainable") == _ALL:
        del plain["task"]["trainable"]
    return plain


def _same_algorithm(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """A method given by name equals the same method given by its parts."""
    from fedalloy.experiment.recipe.resolving import algorithm_of

    try:
        there, here = (algorithm_of(Recipe.model_validate(recipe)) for recipe in (found, wanted))
        return bool(there == here)
    except (ValidationError, FedalloyError):
        return False


def _below(path: str, tables: tuple[str, ...]) -> bool:
    return any(path == table or path.startswith(f"{table}.") for table in tables)


def _listed(value: Any) -> Any:
    """As stored in a file: tuples become lists."""
    if isinstance(value, Mapping):
        return {str(key): _listed(item) for key, item in value.items() if item is not None}
    return [_listed(item) for item in value] if isinstance(value, list | tuple) else value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
