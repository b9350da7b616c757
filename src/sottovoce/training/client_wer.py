"""Clients' word error rate in a run: whether it can be measured, by whom here, and what was found."""

from typing import Any

import torch

from sottovoce.config import Recipe
from sottovoce.errors import InputError
from sottovoce.federated.client_wer import ListenersHere
from sottovoce.models.saved import Recogniser
from sottovoce.training.run_folder import RunFolder
from sottovoce.training.trained_part import trained_part
from sottovoce.users.population import Population


def check_client_wer(recipe: Recipe, start: Recogniser, population: Population, *, speech_is_here: bool) -> None:
    """Refuse to measure what a model does not do, or on speech that nobody has."""
    check_writes(recipe, start)
    asked = recipe.federated.client_wer is not None
    if asked and speech_is_here and population.left_out.clients_without_holdout == len(population):
        raise InputError(
            f"federation.client_wer: none of {len(population):,} clients has enough utterances to hold some out"
        )


def check_writes(recipe: Recipe, start: Recogniser) -> None:
    if recipe.federated.client_wer is not None and start.family.recognition is None:
        raise InputError(f"federation.client_wer: models of family={start.family.name} write no text")


def listeners_here(
    recipe: Recipe, population: Population, start: Recogniser, *, device: torch.device
) -> ListenersHere | None:
    """Clients that are measured in this process; None where that is not asked for."""
    if recipe.federated.client_wer is None:
        return None
    return ListenersHere(population, start, trained_part(recipe, start).frozen, device)


def measured_wers(run: RunFolder) -> list[dict[str, Any]]:
    """For `results.json`: every one that was measured, by step; of a release as of a simulation, since ε covers it."""
    return [
        {
            "step": record["step"],
            "wer": record["client_wer"],
            "wer_interval": record["client_wer_interval"],
            "words": record["client_words"],
        }
        for record in run.metrics.read()
        if "client_wer" in record
    ]
