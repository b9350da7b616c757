"""Recipes: YAML in, one validated object out. Everything a run can be told is named here."""

from sottovoce.config.federation import Clients, Extrapolation, Federation, PassSettings, Privacy, SharedDev
from sottovoce.config.loading import as_yaml, load_experiment, load_recipe, validate
from sottovoce.config.reading import is_recipe, plain_name, public_name, recipe_names
from sottovoce.config.recipe import Experiment, Paper, Recipe, Suite, SuiteRun
from sottovoce.config.sections import (
    Augmentation,
    Central,
    Data,
    ManifestCorpus,
    SyntheticCorpus,
    TokenSettings,
)

__all__ = [
    "Augmentation",
    "Central",
    "Clients",
    "Data",
    "Experiment",
    "Extrapolation",
    "Federation",
    "ManifestCorpus",
    "Paper",
    "PassSettings",
    "Privacy",
    "Recipe",
    "SharedDev",
    "Suite",
    "SuiteRun",
    "SyntheticCorpus",
    "TokenSettings",
    "as_yaml",
    "is_recipe",
    "load_experiment",
    "load_recipe",
    "plain_name",
    "public_name",
    "recipe_names",
    "validate",
]
