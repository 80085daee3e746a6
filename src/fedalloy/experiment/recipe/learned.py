"""Weight tables that a recipe names by file: read here, so that rules never read files and a run's stored recipe
holds the numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedalloy.core.errors import SpecError
from fedalloy.experiment.recipe.reading import parse
from fedalloy.experiment.recipe.tables import Recipe
from fedalloy.experiment.weight_files import load_table

_PLACES = ("algorithm", "weighting")


SEED = "{seed}"
"""In the name of a table: every seed has its own."""


def table_file(recipe: Recipe, seed: int | None = None) -> Path | None:
    """The file of weights that a one-run recipe names, whether it is there or not; the seed fills in ``{seed}``."""
    for place in _PLACES:
        table = getattr(recipe, place)
        named = table.arguments.get("table") if table is not None else None
        if isinstance(named, str):
            return Path(named if seed is None else named.replace(SEED, str(seed)))
    return None


def with_table(recipe: Recipe, seed: int) -> Recipe:
    """The recipe of a seed with the numbers of its table instead of the file name. A table that is not learned yet
    stays a name; running such a recipe is refused."""
    file = table_file(recipe, seed)
    if file is None:
        return recipe
    data = recipe.model_dump(exclude_none=True)
    place = data[next(name for name in _PLACES if isinstance(data.get(name, {}).get("table"), str))]
    if file.exists():
        table = load_table(file)
        _check_kind(place, table.normalise, file)
        place |= {name: value for name, value in table.arguments().items() if name == "table" or name not in place}
    else:
        place["table"] = str(file)
    return parse(data, str(file))


def _check_kind(place: dict[str, Any], normalise: bool, file: Path) -> None:
    """Refuse a table that was learned for normalised updates where plain ones are used, and the reverse."""
    if "kind" in place:
        place.setdefault("normalise", normalise)
    wanted = place.get("normalise", place.get("name") == "duw_fednova")
    if wanted != normalise:
        made, asked = ("FedNova", "plain") if normalise else ("plain", "FedNova")
        raise SpecError(f"{file} was learned for {made} updates, the recipe runs {asked} ones: learn another table")
