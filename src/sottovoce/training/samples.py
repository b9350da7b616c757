"""A few transcripts for a report, of voices that nobody owns."""

from collections.abc import Sequence

from sottovoce.config import Recipe, SyntheticCorpus
from sottovoce.evaluation.evaluate import Selection
from sottovoce.store import Store

SAMPLES = 8


def shows_texts(recipe: Recipe, store: Store) -> bool:
    """Whether a report may quote from `store`: only where the recipe itself has made it, of synthetic voices."""
    made = recipe.data.prepare
    return isinstance(made, SyntheticCorpus) and store.name == f"synthetic-{made.task}"


def samples(chosen: Selection, hypotheses: Sequence[str], *, count: int = SAMPLES) -> list[dict[str, str]]:
    """Up to `count` utterances, evenly spread over the set, so that they come from different speakers."""
    picked = sorted({position * len(hypotheses) // count for position in range(count)})
    return [{"reference": chosen.references[row], "hypothesis": hypotheses[row]} for row in picked]
