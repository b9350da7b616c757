"""Which decoder turns log-probabilities into tokens: greedy, or beam search as soon as one of its options is given."""

from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from sottovoce.errors import InputError
from sottovoce.models.decoding import BeamSearch, Hypothesis, greedy, read_words

Decoder = Callable[[Tensor, Tensor], list[Hypothesis]]

DEFAULT_WIDTH = 50
DEFAULT_LM_WEIGHT = 1.0


def choose_decoder(
    pieces: Sequence[str],
    *,
    beam_width: int | None = None,
    language_model: Path | None = None,
    lm_weight: float | None = None,
    words: Path | None = None,
    word_score: float | None = None,
) -> Decoder:
    """Greedy when nothing is asked for; otherwise beam search over the tokens `pieces`, with what is asked for."""
    if lm_weight is not None and language_model is None:
        raise InputError(f"lm_weight={lm_weight} needs a language model (--lm FILE)")
    if word_score is not None and words is None:
        raise InputError(f"word_score={word_score} needs a list of words (--words FILE)")
    if beam_width is None and language_model is None and words is None:
        return greedy
    return BeamSearch(
        pieces,
        width=DEFAULT_WIDTH if beam_width is None else beam_width,
        language_model=language_model,
        lm_weight=0.0 if language_model is None else DEFAULT_LM_WEIGHT if lm_weight is None else lm_weight,
        words=None if words is None else read_words(words),
        word_score=word_score or 0.0,
    )
