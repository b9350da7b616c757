from sottovoce.base.errors import InputError as InputError
from sottovoce.config.loading import load_recipe as load_recipe
from sottovoce.config.reading import recipe_names as recipe_names
from sottovoce.config.recipe import Recipe as Recipe
from sottovoce.data.population import Population as Population
from sottovoce.data.population import PopulationSettings as PopulationSettings
from sottovoce.data.population import build_population as build_population
from sottovoce.data.store.reading import Store as Store
from sottovoce.evaluation.score import Evaluation as Evaluation
from sottovoce.evaluation.score import evaluate_recogniser as evaluate
from sottovoce.evaluation.transcribe import transcribe_files as transcribe
from sottovoce.evaluation.transcripts import Transcript as Transcript
from sottovoce.models.recogniser import Recogniser as Recogniser
from sottovoce.models.recogniser import export_recogniser as export_recogniser
from sottovoce.models.recogniser import load_recogniser as load_recogniser
from sottovoce.privacy.plan import Plan as Plan
from sottovoce.privacy.planner import PlannedRun as PlannedRun
from sottovoce.privacy.planner import plan_run as plan_run
from sottovoce.privacy.settings import PrivacySettings as PrivacySettings
from sottovoce.training.simulation import SimulatedRound as SimulatedRound
from sottovoce.training.simulation import Simulation as Simulation

__version__: str
__all__ = [
    "Evaluation",
    "InputError",
    "Plan",
    "PlannedRun",
    "Population",
    "PopulationSettings",
    "PrivacySettings",
    "Recipe",
    "Recogniser",
    "SimulatedRound",
    "Simulation",
    "Store",
    "Transcript",
    "__version__",
    "build_population",
    "evaluate",
    "export_recogniser",
    "load_recipe",
    "load_recogniser",
    "plan_run",
    "recipe_names",
    "transcribe",
]
