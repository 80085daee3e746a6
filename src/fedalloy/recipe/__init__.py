"""Recipes: one TOML file says everything about an experiment."""

from fedalloy.recipe.changes import assign, literal
from fedalloy.recipe.reading import load, parse, read, without_imports
from fedalloy.recipe.reopening import reopen
from fedalloy.recipe.resolving import Experiment, entry_names, quick, resolve
from fedalloy.recipe.schema import schema
from fedalloy.recipe.tables import Recipe

__all__ = [
    "Experiment",
    "Recipe",
    "assign",
    "entry_names",
    "literal",
    "load",
    "parse",
    "quick",
    "read",
    "reopen",
    "resolve",
    "schema",
    "without_imports",
]
