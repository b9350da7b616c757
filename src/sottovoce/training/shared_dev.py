"""The speech by which all clients' models are weighted (Gao et al. 2022, as released): public, and not too much."""

import numpy as np

from sottovoce.config import Recipe
from sottovoce.errors import InputError
from sottovoce.evaluation.score import select_utterances
from sottovoce.federated.client import SharedSpeech
from sottovoce.models.saved import Recogniser
from sottovoce.privacy.settings import Weighting
from sottovoce.seeds import derive, keyed_order
from sottovoce.store import Store
from sottovoce.users.used_utterances import utterance_keys


def choose_shared_dev(recipe: Recipe, place: tuple[Store, str]) -> SharedSpeech:
    """So many utterances of `place` as the recipe says: the same in all rounds, and in repeats with the same people."""
    asked = recipe.federated.weighed_on
    assert asked is not None
    store, split = place
    try:
        chosen = select_utterances(store, split=split)
    except InputError as error:
        raise InputError(f"federation.privacy.weighting=wer_released: {error}") from None
    spoken = [(row, text) for row, text in zip(chosen.rows.tolist(), chosen.references, strict=True) if text.split()]
    rows = np.array([row for row, _ in spoken], dtype=np.int64)
    order = keyed_order(utterance_keys(store, rows), derive(recipe.people_seed, "shared dev"), "utterances")
    places = np.sort(order[: asked.utterances])
    return SharedSpeech(store, rows[places], tuple(spoken[place][1] for place in places.tolist()))


def check_understood(recipe: Recipe, start: Recogniser) -> None:
    """Refuse to look at the errors of clients' models where models write no text."""
    settings = recipe.federated
    by_errors = settings.privacy.weighting in (Weighting.WER, Weighting.WER_RELEASED)
    asked = {
        f"privacy.weighting={settings.privacy.weighting}": by_errors,
        f"test_clients={settings.test_clients}": settings.test_clients is not None,
    }
    for what, is_asked in asked.items():
        if is_asked and start.family.recognition is None:
            raise InputError(f"federation.{what}: models of family={start.family.name} write no text")
