"""How a model's output becomes tokens: greedily, or by beam search as soon as one of its options is given.

By CTC a decoder turns log-probabilities into tokens; a family that has a search of its own takes a `Search` instead.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from sottovoce.errors import InputError
from sottovoce.models.attention_search import GREEDY, SearchOptions
from sottovoce.models.decoding import BeamSearch, Hypothesis, decode_greedily, read_word_list, whole_text_scorer
from sottovoce.models.family import Family

Decoder = Callable[[Tensor, Tensor], list[Hypothesis]]

DEFAULT_WIDTH = 50
DEFAULT_LM_WEIGHT = 1.0


def searches(family: Family[Any, Any]) -> bool:
    """Whether models of `family` have a search of their own."""
    return family.recognition is not None and family.recognition.search is not None


def emits(family: Family[Any, Any]) -> bool:
    """Whether models of `family` can be decoded by CTC."""
    return family.recognition is not None and family.recognition.emit is not None


def usual_decoder(family: Family[Any, Any]) -> Decoder | SearchOptions:
    """Greedy, in the way of the family."""
    return GREEDY if searches(family) else decode_greedily


def choose_decoder(
    family: Family[Any, Any],
    pieces: Sequence[str],
    *,
    beam_width: int | None = None,
    language_model: Path | None = None,
    lm_weight: float | None = None,
    words: Path | None = None,
    word_score: float | None = None,
    by_ctc: bool = False,
    **attention: float | None,
) -> Decoder | SearchOptions:
    """Greedy when nothing is asked for; otherwise beam search over the tokens `pieces`, with what is asked for.

    `attention` are settings of a `Search`; without them (None) they are as released.
    """
    if lm_weight is not None and language_model is None:
        raise InputError(f"lm_weight={lm_weight} needs a language model (--lm FILE)")
    if word_score is not None and words is None:
        raise InputError(f"word_score={word_score} needs a list of words (--words FILE)")
    recognition = family.recognition
    if by_ctc and not emits(family):
        raise InputError(f"models of family={family.name} cannot be decoded by CTC: they have a search of their own")
    wanted: dict[str, Any] = {name: value for name, value in attention.items() if value is not None}
    weight = 0.0 if language_model is None else DEFAULT_LM_WEIGHT if lm_weight is None else lm_weight
    if searches(family) and not by_ctc:
        if words is not None:
            raise InputError(f"words={words}: only CTC can be kept to a list of words (--ctc)")
        assert recognition is not None
        for name in wanted.keys() - recognition.options:
            raise InputError(f"{name}={wanted[name]} means nothing to models of family={family.name}")
        if beam_width is None and language_model is None and not wanted:
            return GREEDY
        if beam_width is not None:
            wanted["width"] = beam_width
        if language_model is not None:
            wanted |= {"language_model": whole_text_scorer(language_model, pieces), "lm_weight": weight}
        return replace(recognition.beam, **wanted)
    for name, value in wanted.items():
        raise InputError(f"{name}={value} is for models that search with attention, not for CTC (family={family.name})")
    if beam_width is None and language_model is None and words is None:
        return decode_greedily
    return BeamSearch(
        pieces,
        width=DEFAULT_WIDTH if beam_width is None else beam_width,
        language_model=language_model,
        lm_weight=weight,
        words=None if words is None else read_word_list(words),
        word_score=word_score or 0.0,
    )
