"""The part of a recipe that clients get: what is sent to them, and what they refuse."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sottovoce.base.errors import InputError
from sottovoce.config import Recipe, validate_recipe
from sottovoce.config.sections import read_model
from sottovoce.data.population import PRIVACY_UNITS
from sottovoce.models.base_files import BaseModelName
from sottovoce.models.family import REGISTERED, find_family
from sottovoce.optimisers import OPTIMISERS
from sottovoce.privacy.plugins import PLUGIN_KEYS
from sottovoce.privacy.settings import Mode, Weighting

# What of a recipe is sent to clients, and what is not: every setting is in one of the two.
RECIPE = ("seed", "data", "model", "federation")
NOT_OF_RECIPE = ("about", "paper", "threads", "parent_overrides", "tokens", "central", "evaluation")
DATA = ("train", "people_seed", "longest_seconds")
NOT_OF_DATA = ("store", "prepare", "seed_part", "part", "dev", "test")
FEDERATION = (
    *("steps", "cohort_size", "trainable", "clients", "local", "privacy", "precision"),
    *("client_wer", "model_bits", "expected_answers", "training_seconds"),
)
# Of `federation`: left out where they are not set.
ONLY_WHERE_ASKED = frozenset({"client_wer", "model_bits", "expected_answers", "training_seconds"})
NOT_OF_FEDERATION = (
    *("seed_model", "rescale_norms", "server", "server_pass", "shared_dev", "engine", "stack_size", "workers"),
    *("evaluate_every", "checkpoint_every", "test_clients", "test_along", "measure", "patience"),
    *("estimate_bound", "personal", "staleness"),
)
NOT_OF_PRIVACY = ("population_size", "extrapolate")

# What a client's copy of a recipe says in their place.
_PLACEHOLDERS = {
    "about": "a federation over a network",
    "data": {"store": "own"},
    "federation": {"server": {"optimiser": {"name": "sgd"}, "schedule": {"name": "constant", "lr": 1.0}}},
}


def clients_part(recipe: Recipe) -> dict[str, Any]:
    """As plain data; what is not finite is written as a word, since JSON has no number for it.

    Files that the model is made from are named by their digest, since each client has them in another place.
    """
    base = find_family(recipe.model.family).base_files
    pinned = recipe if base is None else recipe.model_copy(update={"model": base.pin(recipe.model)})
    content = pinned.model_dump(mode="json")
    data = {name: content["data"].get(name) for name in DATA} | {"people_seed": recipe.people_seed}
    federation = {
        name: value
        for name in FEDERATION
        if (value := content["federation"].get(name)) is not None or name not in ONLY_WHERE_ASKED
    }
    private = {name: value for name, value in federation["privacy"].items() if name not in NOT_OF_PRIVACY}
    part = {
        "seed": recipe.seed,
        "data": data,
        "model": content["model"],
        "federation": federation | {"privacy": private},
    }
    plain: dict[str, Any] = _plain(part)
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(inside) for name, inside in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inside) for inside in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def client_recipe(part: Mapping[str, Any]) -> Recipe:
    """The recipe as a client has it."""
    content = {**_PLACEHOLDERS, **part, "data": _PLACEHOLDERS["data"] | part["data"]}
    content["federation"] = _PLACEHOLDERS["federation"] | part["federation"]
    return validate_recipe(content, where="of the invitation")


def check_loads_no_code(part: Mapping[str, Any]) -> None:
    """Refuse what would have a client open a file, or import a module, that the server names."""
    sections = {
        "": (part, RECIPE),
        "data": (part.get("data"), DATA),
        "federation": (part.get("federation"), FEDERATION),
    }
    for where, (section, known) in sections.items():
        # One that is there with nothing in it is found out by its spelling.
        if not isinstance(section, dict) or not set(known) - ONLY_WHERE_ASKED <= set(section) <= set(known):
            raise InputError(
                f"the invitation's recipe{where and f' ({where})'}: expected {', '.join(known)}, each once"
            )
    model, local = part["model"], part["federation"]["local"]
    family = model.get("family", next(iter(REGISTERED))) if isinstance(model, dict) else None
    if not isinstance(family, str) or family not in REGISTERED:
        raise InputError(
            f"the invitation's model: family={str(family)[:80]!r}, expected one of {', '.join(REGISTERED)}"
        )
    if (base := find_family(family).base_files) is not None:
        base.describe(_read_options(model))  # before the recipe is: that may open what the model is made from
    optimiser = local.get("optimiser") if isinstance(local, dict) else None
    name = optimiser.get("name") if isinstance(optimiser, dict) else None
    if not isinstance(name, str) or name not in OPTIMISERS:
        raise InputError(f"the invitation's optimiser: {str(name)[:80]!r}, expected one of {', '.join(OPTIMISERS)}")
    private = part["federation"]["privacy"]
    if isinstance(private, dict) and (outside := [name for name in PLUGIN_KEYS if name in private]):
        raise InputError(f"the invitation's privacy: {outside[0]} is code that the server names; expected none")


def base_model_of(recipe: Recipe) -> BaseModelName | None:
    """What a client's recipe is made from; None where nothing has to lie at clients."""
    base = find_family(recipe.model.family).base_files
    return None if base is None else base.describe(recipe.model)


def find_base_files(recipe: Recipe, folder: Path | None) -> None:
    """Refuse a client's recipe whose base model is not here: in the `folder` that was given, or where such are kept."""
    if (base := find_family(recipe.model.family).base_files) is not None:
        base.find(recipe.model, folder)


def _read_options(model: Mapping[str, Any]) -> Any:
    try:
        return read_model(model)
    except ValidationError as error:
        first = error.errors()[0]
        raise InputError(f"the invitation's {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def check_network_recipe(recipe: Recipe, *, population_size: int) -> None:
    """Refuse recipes whose clients need more of each other, or of the server, than an update can carry."""
    settings = recipe.federated
    private, rule = settings.privacy, settings.clients.rule
    if rule not in PRIVACY_UNITS:
        raise InputError(
            f"federation.clients.rule={rule}: over a network clients are who they are; expected speaker or silo"
        )
    if rule == "silo" and settings.clients.silos != population_size:
        raise InputError(f"federation.clients.silos={settings.clients.silos}: the roster has {population_size}")
    if settings.clients.balance is not None:
        raise InputError(f"federation.clients.balance={settings.clients.balance}: over a network silos are as they are")
    if private.population_size not in (None, population_size):
        raise InputError(
            f"federation.privacy.population_size={private.population_size}: the roster has {population_size}"
        )
    if math.isinf(private.clip_bound):
        raise InputError("federation.privacy.clip_bound=inf: over a network every update has a bound; set one")
    if private.adaptive is not None:
        raise InputError("federation.privacy.adaptive: people accept one clip bound, which a network cannot move")
    if outside := [name for name in PLUGIN_KEYS if getattr(private, name) is not None]:
        raise InputError(
            f"federation.privacy.{outside[0]}: people accept what this package does, and no code that a server names; "
            "expected none"
        )
    if private.noise_scope is not None:
        raise InputError("federation.privacy.noise_scope: that is for analysis, in a simulation")
    if private.weighting is not Weighting.UNIFORM and private.weight_cap is None:
        raise InputError(
            f"federation.privacy.weighting={private.weighting}: a share of the cohort hangs on what others send; "
            "expected uniform, or utterances or seconds with a weight_cap"
        )
    if private.mode is Mode.SECURE and settings.clients.min_seconds is not None:
        raise InputError(
            f"federation.clients.min_seconds={settings.clients.min_seconds:g}: in a release a node with less would "
            "have to tell the server so; expected no floor"
        )
    if settings.staleness is not None and private.mechanism is not None:
        raise InputError(
            f"federation.staleness={settings.staleness} with privacy.mechanism: a server that was killed has lost "
            "several rows of noise, and later noise can follow from one lost row at most; expected one of them"
        )
    if settings.staleness is not None and settings.client_wer is not None:
        raise InputError(
            f"federation.staleness={settings.staleness} with client_wer: over a network nodes that train for open "
            "rounds would measure it when they are done, and everybody would wait for them; expected one of them"
        )
    if settings.local.time_line is not None:
        raise InputError("federation.local.time_line: a server would learn who has how much left; expected none")
