"""How a run is called, read from its recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

QUICK = " (quick)"
"""What is added to the name of a run that was shortened."""


def name_of(recipe: Mapping[str, Any]) -> str:
    """How a run is called: its own name, its method's, or its parts'.

    >>> name_of({"algorithm": {"name": "fedavg"}}), name_of({"weighting": {"kind": "uniform"}})
    ('fedavg', 'fedavg, uniform')

    A run that was shortened says so, so that nobody takes it for a result.

    >>> name_of({"name": "mine", "run": {"quick": True}})
    'mine (quick)'
    """
    return _own_name(recipe) + (QUICK if recipe.get("run", {}).get("quick") else "")


def seed_of(recipe: Mapping[str, Any]) -> int:
    """The seed of a one-run recipe; runs started from Python store it as a single number."""
    settings = recipe.get("run", {})
    seeds = settings.get("seeds", [settings.get("seed", 0)])
    return int(seeds[0])


def _own_name(recipe: Mapping[str, Any]) -> str:
    if recipe.get("name"):
        return str(recipe["name"])
    table = recipe.get("algorithm", {})
    inside = {**table, **recipe}
    parts = [str(inside[part]["kind"]) for part in ("solver", "weighting", "server") if _is_rule(inside.get(part))]
    named = table.get("name") or ("fedavg" if len(parts) < 3 else "")
    return ", ".join([str(named)] * bool(named) + parts)


def _is_rule(value: Any) -> bool:
    return isinstance(value, Mapping) and "kind" in value
