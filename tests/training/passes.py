"""A server pass alone, on the speech of the fixture `public_stores`, and local training that it may be like."""

from collections.abc import Callable
from pathlib import Path

import torch

from sottovoce.config import Recipe
from sottovoce.data.population import Population, PopulationSettings, build_population
from sottovoce.data.store import Store
from sottovoce.flat.layout import Layout
from sottovoce.models.recogniser import Recogniser
from sottovoce.training import server_pass
from sottovoce.training.run_data import find_split_people
from sottovoce.training.start_model import build_start_model, split_trained_part

CPU = torch.device("cpu")
PUBLIC_UTTERANCES = 12  # of ten people three in five train, and each says two words
LOCAL = [
    "federation.local={batch_seconds: 3, lr: 0.2, local_epochs: 2, batch_utterances: 4, order: ascending, "
    "clip_gradients: 5, optimiser: {name: adam}, "
    "spec_augment: {frequency_masks: 2, frequency_width: 10, time_masks: 2, time_width: 40}}"
]


def beginning(recipe: Recipe, stores: Path) -> tuple[Recogniser, Population]:
    store = Store(stores / "tones")
    population = build_population(store, PopulationSettings(split=("train",)), seed=1)
    return build_start_model(recipe, None, store), population


def built(recipe: Recipe, stores: Path) -> tuple[torch.Tensor, Callable[[torch.Tensor, int], float]]:
    """The server's first model, and what is done to it after a round."""
    start, population = beginning(recipe, stores)
    initial = split_trained_part(recipe, start).initial
    speech = server_pass.load_public_speech(
        recipe, start, population, find_split_people(Store(stores / "public"), "train")
    )
    passes = server_pass.build_server_pass(recipe, start, speech, device=CPU)
    return Layout.of(initial).flatten(initial), lambda server_P, step: passes(server_P, step)["server_pass_loss"]
