"""A recipe made so small that one step of it runs in seconds anywhere: the same path, on a synthetic stand-in.

It shows that a recipe's settings fit together, and nothing about its result.
"""

import re
from typing import Any

from sottovoce.config.loading import validate_recipe
from sottovoce.config.recipe import Recipe
from sottovoce.models.family import find_family

_SPLITS = {"train": ["train"], "dev": "dev", "test": ["test"]}
# Other people than the clients: a private run refuses a seed model that was trained on some of them.
_CENTRAL = {
    "store": "smoke-central",
    "prepare": {"task": "digits-studio", "users": 24, "hours": 0.03, "seed": 1},
    **_SPLITS,
}
_FEDERATED = {"store": "smoke", "prepare": {"task": "digits", "users": 24, "hours": 0.03, "seed": 1}, **_SPLITS}


def shrink_recipe(recipe: Recipe, *, seed_model: str | None = None, tokens_from: str | None = None) -> Recipe:
    """`recipe` with one step, a tiny model, the stand-in's people, and these folders in place of its own parents."""
    content = recipe.model_dump(mode="json")
    content.pop("parent_overrides", None)  # the folders are made already
    content["data"] |= _CENTRAL if recipe.federation is None else _FEDERATED
    if recipe.data.seed_part is not None:
        content["data"]["seed_part"] = {"fraction": 0.3}
    if recipe.reads_texts:
        content["tokens"] = {"kind": "characters", "take_from": tokens_from}
    content["model"] |= find_family(recipe.model.family).smoke_options
    if recipe.evaluation is not None:
        content["evaluation"]["beam_width"] = min(recipe.evaluation.beam_width, 3)
    if recipe.central is not None:
        content["central"] |= {"steps": 1, "epochs": None, "batches": None, "batch_seconds": 8.0}
        content["central"] |= {"start_from": seed_model}
        content["central"] |= {"evaluate_every": 1, "checkpoint_every": 1}
    if recipe.federation is not None:
        _shrink(content["federation"], seed_model)
        if content["paper"] is not None:  # the stand-in's people are not those of any paper
            content["paper"].pop("population_size", None)
        if recipe.federation.server_pass is not None:
            content["federation"]["server_pass"] |= {"batch_seconds": 8.0, "order": None, "steps": 1, "epochs": None}
            if not recipe.federation.server_pass.is_of_seed_part:
                # Three splits for four purposes: the server's own people are those it would be chosen by.
                content["federation"]["server_pass"]["data"] = "dev"
                content["data"]["dev"] = "test"
        if recipe.federation.shared_dev is not None:
            content["federation"]["shared_dev"] = {"utterances": 4}
    return validate_recipe(content, where=f"{recipe.about} (smoke)")


def _shrink(federation: dict[str, Any], seed_model: str | None) -> None:
    federation |= {"steps": 1, "cohort_size": 3, "seed_model": seed_model, "evaluate_every": 1, "checkpoint_every": 1}
    local, privacy, clients = federation["local"], federation["privacy"], federation["clients"]
    local["batch_seconds"] = 8.0
    for amount in ("local_steps", "local_epochs"):
        if local[amount] is not None:
            local[amount] = 1
    if privacy["noise_multiplier"] or privacy["sigma_dp"]:
        # With so few clients the recipe's own noise would be next to none, which is slow to account for.
        privacy |= {"noise_multiplier": 8.0, "sigma_dp": None}
        if privacy["adaptive"] is not None:  # a twentieth of so few clients would spend more than that
            privacy["adaptive"]["count_noise_std"] = 8.0
    elif privacy.get("target_epsilon"):
        # Another noise follows from so few clients, and another ε by the accountant of budgets.
        privacy["epsilon_budget"] = None
        if privacy["adaptive"] is not None:  # whatever follows, the count must spend less
            privacy["adaptive"]["count_noise_std"] = 1e6
    if (mechanism := privacy.get("mechanism")) is not None:  # so few clients make few groups, or as many as cohorts
        mechanism |= {name: min(mechanism[name], 3) for name in ("bands", "cycle") if name in mechanism}
        if mechanism["kind"] == "blt":
            mechanism.pop("cycle", None)
    privacy |= {"population_size": None, "extrapolate": privacy["extrapolate"][:1]}
    if clients["silos"] is not None:
        clients["silos"] = 3
    clients |= {"min_seconds": None, "max_seconds": None}
    if federation.get("test_clients") is not None:
        federation["test_clients"] = 4
    if federation.get("personal") is not None:
        federation["personal"] |= {"part": "biases", "steps": 1, "people": 2, "folds": 2, "amounts": []}
    if federation["trainable"] is not None:
        # A tiny model has few blocks, and narrow ones.
        blocks = re.sub(r"blocks\.[^.,]+", "blocks.*", federation["trainable"])
        federation["trainable"] = re.sub(r"lora\([^)]*?(, factors=\w+)?\)", r"lora(r=2\1)", blocks)
