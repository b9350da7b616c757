"""How a model's output becomes tokens: greedily, or by beam search as soon as one of its options is given.

By CTC a decoder turns log-probabilities into tokens; a family that has a search of its own takes a `Search` instead.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from sottovoce.base.errors import InputError
from sottovoce.models.attention_search import GREEDY, SearchOptions
from sottovoce.models.decoding import BeamSearch, Hypothesis, decode_greedily, read_word_list, whole_text_scorer
from sottovoce.models.family import Family

Decoder = Callable[[Tensor, Tensor], list[Hypothesis]]

DEFAULT_WIDTH = 50
DEFAULT_LM_WEIGHT = 1.0


def has_search(family: Family[Any, Any], settings: Any = None) -> bool:
    """Whether models of `family`, or those with these `settings`, have a search of their own."""
    return family.recognition is not None and family.recognition.search is not None and _has_decoder(family, settings)


def has_ctc(family: Family[Any, Any], settings: Any = None) -> bool:
    """Whether models of `family`, or those with these `settings`, can be decoded by CTC."""
    has_both = family.recognition is None or family.recognition.has_decoder is None or settings is None
    is_ctc = has_both or not _has_decoder(family, settings)
    return family.recognition is not None and family.recognition.emit is not None and is_ctc


def _has_decoder(family: Family[Any, Any], settings: Any) -> bool:
    assert family.recognition is not None
    decides = family.recognition.has_decoder
    return decides is None or settings is None or decides(settings)


def choose_greedy(family: Family[Any, Any], settings: Any = None) -> Decoder | SearchOptions:
    """Greedy, in the way of the family."""
    return GREEDY if has_search(family, settings) else decode_greedily


@dataclass(frozen=True)
class DecodingOptions:
    """What may be asked of a decoder; None and False are the family's usual way, which is greedy.

    The last four are settings of a `Search`, of families that search with attention.
    """

    beam_width: int | None = None
    language_model: Path | None = None
    lm_weight: float | None = None
    words: Path | None = None
    word_score: float | None = None
    by_ctc: bool = False
    ctc_weight: float | None = None
    temperature: float | None = None
    end_threshold: float | None = None
    longest_shift: int | None = None

    def search_settings(self) -> dict[str, Any]:
        names = ("ctc_weight", "temperature", "end_threshold", "longest_shift")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def as_text(self) -> str:
        """In a few words, for records and tables; the file names of language models and word lists are left out.

        >>> DecodingOptions(beam_width=80, temperature=1.5).as_text()
        'beam 80, temperature 1.5'
        """
        words = [] if self.beam_width is None else [f"beam {self.beam_width}"]
        words += ["CTC"] if self.by_ctc else []
        words += [f"{name.replace('_', ' ')} {value:g}" for name, value in self.search_settings().items()]
        return ", ".join(words) or "greedy"


USUAL = DecodingOptions()


def choose_decoder(
    family: Family[Any, Any], pieces: Sequence[str], options: DecodingOptions = USUAL, *, settings: Any = None
) -> Decoder | SearchOptions:
    """Greedy when nothing is asked for; otherwise beam search over the tokens `pieces`, as the options say.

    `settings` are the model's, where models of `family` are not all decoded alike.
    """
    if options.lm_weight is not None and options.language_model is None:
        raise InputError(f"lm_weight={options.lm_weight} needs a language model (--lm FILE)")
    if options.word_score is not None and options.words is None:
        raise InputError(f"word_score={options.word_score} needs a list of words (--words FILE)")
    if options.by_ctc and not has_ctc(family, settings):
        raise InputError(f"models of family={family.name} cannot be decoded by CTC: they have a search of their own")
    if has_search(family, settings) and not options.by_ctc:
        return _choose_search(family, pieces, options)
    for name, value in options.search_settings().items():
        raise InputError(f"{name}={value} is for models that search with attention, not for CTC (family={family.name})")
    if options.beam_width is None and options.language_model is None and options.words is None:
        return decode_greedily
    return BeamSearch(
        pieces,
        width=DEFAULT_WIDTH if options.beam_width is None else options.beam_width,
        language_model=options.language_model,
        lm_weight=_lm_weight(options),
        words=None if options.words is None else read_word_list(options.words),
        word_score=options.word_score or 0.0,
    )


def _choose_search(family: Family[Any, Any], pieces: Sequence[str], options: DecodingOptions) -> SearchOptions:
    """The family's own search, as the options say."""
    assert family.recognition is not None
    settings = options.search_settings()
    if options.words is not None:
        raise InputError(f"words={options.words}: only CTC can be kept to a list of words (--ctc)")
    for name in settings.keys() - family.recognition.options:
        raise InputError(f"{name}={settings[name]} means nothing to models of family={family.name}")
    if options.beam_width is None and options.language_model is None and not settings:
        return GREEDY
    if options.beam_width is not None:
        settings["width"] = options.beam_width
    if options.language_model is not None:
        settings["language_model"] = whole_text_scorer(options.language_model, pieces)
        settings["lm_weight"] = _lm_weight(options)
    return replace(family.recognition.beam, **settings)


def _lm_weight(options: DecodingOptions) -> float:
    if options.language_model is None:
        return 0.0
    return DEFAULT_LM_WEIGHT if options.lm_weight is None else options.lm_weight
