"""Sottovoce: speech recognition trained on speech that never leaves its speaker.

What is named here is the public Python API (docs/api.md, docs/decisions/029-public-api.md). A name is loaded when it is
first asked for, so that neither `import sottovoce` nor the command line waits for what it does not need.
"""

from importlib import import_module

__version__ = "0.2.0"

# Where each name is at home; `__init__.pyi` says the same to type checkers.
_HOMES = {
    "Evaluation": "sottovoce.evaluation.score:Evaluation",
    "InputError": "sottovoce.base.errors:InputError",
    "Plan": "sottovoce.privacy.plan:Plan",
    "PlannedRun": "sottovoce.privacy.planner:PlannedRun",
    "Population": "sottovoce.data.population:Population",
    "PopulationSettings": "sottovoce.data.population:PopulationSettings",
    "PrivacySettings": "sottovoce.privacy.settings:PrivacySettings",
    "Recipe": "sottovoce.config.recipe:Recipe",
    "Recogniser": "sottovoce.models.recogniser:Recogniser",
    "SimulatedRound": "sottovoce.training.simulation:SimulatedRound",
    "Simulation": "sottovoce.training.simulation:Simulation",
    "Store": "sottovoce.data.store.reading:Store",
    "Transcript": "sottovoce.evaluation.transcripts:Transcript",
    "build_population": "sottovoce.data.population:build_population",
    "evaluate": "sottovoce.evaluation.score:evaluate_recogniser",
    "export_recogniser": "sottovoce.models.recogniser:export_recogniser",
    "load_recipe": "sottovoce.config.loading:load_recipe",
    "load_recogniser": "sottovoce.models.recogniser:load_recogniser",
    "plan_run": "sottovoce.privacy.planner:plan_run",
    "recipe_names": "sottovoce.config.reading:recipe_names",
    "transcribe": "sottovoce.evaluation.transcribe:transcribe_files",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _HOMES[name].partition(":")
    found = globals()[name] = getattr(import_module(module), attribute)
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
