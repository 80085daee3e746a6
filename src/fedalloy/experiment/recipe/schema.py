"""The recipe as a JSON schema, so that an editor completes and checks it; names of rules come from the registry."""

from __future__ import annotations

from typing import Any

from fedalloy.core import registry
from fedalloy.experiment.recipe.tables import Recipe

_NAMES = {
    ("PartitionTable", "kind"): "partition",
    ("AlgorithmTable", "name"): "algorithm",
    ("EngineTable", "kind"): "engine",
}


def schema() -> dict[str, Any]:
    """JSON schema (draft 2020-12) of a recipe."""
    made = Recipe.model_json_schema()
    made["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    for (table, field), room in _NAMES.items():
        made["$defs"][table]["properties"][field]["examples"] = registry.names(room)
    for room in ("solver", "weighting", "server"):
        made["properties"][room]["examples"] = [{"kind": name} for name in registry.names(room)]
    return made
