"""Recipes: YAML in, one validated object out. Every setting of a run is named here."""

from sottovoce.config.federation import (
    ClientSettings,
    Extrapolation,
    FederationSettings,
    PrivacySection,
    ServerPassSettings,
    SharedDevSettings,
)
from sottovoce.config.loading import as_yaml, load_experiment, load_recipe, validate_recipe
from sottovoce.config.reading import is_collection, is_recipe, plain_name, public_name, recipe_names
from sottovoce.config.recipe import Experiment, Paper, Recipe, Suite, SuiteRun
from sottovoce.config.sections import (
    Augmentation,
    CentralSettings,
    CentralSteps,
    DataSettings,
    ManifestCorpus,
    Patience,
    PatienceSettings,
    SyntheticCorpus,
    TokenSettings,
)

__all__ = [
    "Augmentation",
    "CentralSettings",
    "CentralSteps",
    "ClientSettings",
    "DataSettings",
    "Experiment",
    "Extrapolation",
    "FederationSettings",
    "ManifestCorpus",
    "Paper",
    "Patience",
    "PatienceSettings",
    "PrivacySection",
    "Recipe",
    "ServerPassSettings",
    "SharedDevSettings",
    "Suite",
    "SuiteRun",
    "SyntheticCorpus",
    "TokenSettings",
    "as_yaml",
    "is_collection",
    "is_recipe",
    "load_experiment",
    "load_recipe",
    "plain_name",
    "public_name",
    "recipe_names",
    "validate_recipe",
]
