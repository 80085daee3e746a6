"""Recipes: one TOML file describes a whole experiment."""

from fedalloy.experiment.recipe.changes import assign, literal
from fedalloy.experiment.recipe.reading import load, parse, read, without_imports
from fedalloy.experiment.recipe.reopening import reopen
from fedalloy.experiment.recipe.resolving import Experiment, entry_names, quick, resolve
from fedalloy.experiment.recipe.tables import Recipe, schema

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
