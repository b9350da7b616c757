"""What the best model of a run is chosen by, on its dev set."""

from sottovoce.config import Recipe
from sottovoce.errors import InputError
from sottovoce.evaluation.decoder import has_ctc, has_search
from sottovoce.evaluation.losses import select_speech
from sottovoce.evaluation.measures import LOSS, MEASURES, Measure
from sottovoce.models.saved import Recogniser
from sottovoce.training.keeper import Say
from sottovoce.training.places import Places
from sottovoce.training.stores import check_scored


def choose_measure(recipe: Recipe, start: Recogniser, places: Places, *, say: Say) -> Measure:
    """What the best model is chosen by. Refuses sets that cannot be scored before training, not at the first time."""
    writes = start.family.recognition is not None
    if recipe.measure == "wer" and not writes:
        raise InputError(f"measure=wer: models of family={start.family.name} write no text; expected loss or null")
    if recipe.measure == "ctc_wer" and not has_search(start.family):
        raise InputError(
            f"measure=ctc_wer: models of family={start.family.name} know no attention; expected wer or loss"
        )
    if recipe.measure == "ctc_wer" and not has_ctc(start.family):
        raise InputError(f"measure=ctc_wer: models of family={start.family.name} know no CTC; expected wer or loss")
    check_scored(places.evaluated.values(), start)
    if recipe.federation is not None and recipe.federation.test_along and not writes:
        raise InputError(f"federation.test_along: models of family={start.family.name} write no text")
    measure = MEASURES[recipe.measure or ("wer" if writes else "loss")]
    if measure is LOSS:
        store, split = places.dev
        say(f"chosen by the loss on {select_speech(start, store, split=split)}")
    return measure
