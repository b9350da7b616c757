"""From log-probabilities to tokens: greedy, and beam search with an n-gram language model.

Shapes: B utterances, T frames, V outputs (the blank, then the tokens), N tokens found in the whole batch.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sottovoce.base.errors import InputError
from sottovoce.base.files import read_file
from sottovoce.data.text.tokens import WORD_START
from sottovoce.models.ctc import BLANK

WORD_BOUNDARY = " "
# Language-model files separate their entries by spaces, so there the boundary is written as the field usually does;
# over sentence pieces they have the pieces' own `WORD_START`.
BOUNDARY_IN_FILES = "|"
BLANK_IN_FILES = "<blank>"
MOST_WIDTH = 10_000
STUCK_TOKENS = 4  # nobody says so many tokens in one frame
UNKNOWN = "<unk>"


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One reading of an utterance: its tokens and the frame in which each begins, and its log-score.

    Of an attention decoder, `frames` are where the attention was at each token; `ended` unless it was cut off.
    """

    tokens: list[int]
    frames: list[int]
    score: float
    ended: bool = True

    @property
    def collapsed(self) -> bool:
        """Whether the attention is stuck: the text never ended, or all of it is aligned to one frame."""
        return not self.ended or (len(self.frames) >= STUCK_TOKENS and len(set(self.frames)) == 1)


def decode_greedily(log_probs_BTV: Tensor, lengths_B: Tensor) -> list[Hypothesis]:
    """The best token of every frame, repeats merged and blanks removed. The score is that one alignment's."""
    device = log_probs_BTV.device
    scores_BT, best_BT = log_probs_BTV.max(dim=-1)
    spoken_BT = torch.arange(best_BT.shape[1], device=device) < lengths_B.to(device)[:, None]
    new_BT = spoken_BT & (best_BT != BLANK)
    new_BT[:, 1:] &= best_BT[:, 1:] != best_BT[:, :-1]
    rows_N, frames_N = new_BT.nonzero(as_tuple=True)
    # From here on the host; these are the batch's only transfers.
    ends = new_BT.sum(dim=1).cumsum(dim=0).tolist()
    tokens, frames = best_BT[rows_N, frames_N].tolist(), frames_N.tolist()
    scores = scores_BT.masked_fill(~spoken_BT, 0).sum(dim=1).tolist()
    starts = [0, *ends[:-1]]
    return [
        Hypothesis(tokens[start:end], frames[start:end], score)
        for start, end, score in zip(starts, ends, scores, strict=True)
    ]


class BeamSearch:
    """CTC prefix beam search (flashlight-text), alone or with a KenLM n-gram model (ARPA or binary file).

    Without `words` the language model is over tokens and any spelling may come out. With `words` (`read_word_list`) it
    is over words, and nothing but these words comes out. A hypothesis scores ln p(tokens | speech) + lm_weight · log10
    p(tokens or words) + word_score · words.

    `pieces` are the texts of the model's outputs (`Tokens.pieces`), `width` the hypotheses kept after each frame. In a
    `language_model` over characters the word boundary is "|", over sentence pieces "▁".
    """

    def __init__(
        self,
        pieces: Sequence[str],
        *,
        width: int = 50,
        language_model: Path | None = None,
        lm_weight: float = 0.0,
        words: Iterable[str] | None = None,
        word_score: float = 0.0,
    ) -> None:
        if not 1 <= width <= MOST_WIDTH:
            raise InputError(f"beam search: width={width}, expected 1 to {MOST_WIDTH:,}")
        if word_score and words is None:
            raise InputError(f"beam search: word_score={word_score} needs a list of words")
        if language_model is not None:
            _check_file(language_model)
        decoder, dictionary = _import_flashlight()
        assert pieces[BLANK] == "", f"output {BLANK} is the blank, which has no text: {pieces[BLANK]!r}"
        self._outputs = len(pieces)
        self._boundary: int | None = None
        options: dict[str, Any] = {
            "beam_size": width,
            "beam_size_token": len(pieces),
            "beam_threshold": math.inf,
            "lm_weight": lm_weight,
            "sil_score": 0.0,
            "log_add": True,
            "criterion_type": decoder.CriterionType.CTC,
        }
        if words is None:
            lm = _language_model(decoder, dictionary.Dictionary(_as_in_files(pieces)), language_model)
            chosen = decoder.LexiconFreeDecoderOptions(**options)
            # flashlight takes "silence" to precede the first frame; were that the boundary, a first one would be lost.
            self._decoder = decoder.LexiconFreeDecoder(chosen, lm, BLANK, BLANK, [])
            return
        if WORD_BOUNDARY not in pieces or not _are_characters(pieces):
            raise InputError("beam search: a list of words needs character tokens with a word boundary")
        self._boundary = pieces.index(WORD_BOUNDARY)
        entries = sorted({*words} - {UNKNOWN})
        lexicon = dictionary.Dictionary([*entries, UNKNOWN])
        lexicon.set_default_index(len(entries))
        lm = _language_model(decoder, lexicon, language_model)
        trie = decoder.Trie(len(pieces), self._boundary)
        start = lm.start(False)
        for index, word in enumerate(entries):
            trie.insert([*_spell(word, pieces), self._boundary], index, lm.score(start, index)[1])
        trie.smear(decoder.SmearingMode.MAX)
        chosen = decoder.LexiconDecoderOptions(**options, word_score=word_score, unk_score=-math.inf)
        self._decoder = decoder.LexiconDecoder(chosen, trie, lm, self._boundary, BLANK, len(entries), [], False)

    def __call__(self, log_probs_BTV: Tensor, lengths_B: Tensor) -> list[Hypothesis]:
        """The best reading of each utterance."""
        assert log_probs_BTV.shape[-1] == self._outputs, (log_probs_BTV.shape, self._outputs)
        batch = log_probs_BTV.float().cpu().numpy()
        return [
            self._decode(log_probs_TV[:length]) for log_probs_TV, length in zip(batch, lengths_B.tolist(), strict=True)
        ]

    def _decode(self, log_probs_TV: NDArray[np.float32]) -> Hypothesis:
        if not len(log_probs_TV):
            return Hypothesis([], [], 0.0)
        frames = len(log_probs_TV)
        if self._boundary is not None:
            # The trie ends every word with the boundary, texts do not end with one: one certain boundary frame after
            # the last lets the last word end too.
            closing_1V = np.full_like(log_probs_TV[:1], -1e4)
            closing_1V[:, self._boundary] = 0
            log_probs_TV = np.concatenate([log_probs_TV, closing_1V])
        emissions_TV = np.ascontiguousarray(log_probs_TV)
        best = self._decoder.decode(emissions_TV.ctypes.data, *emissions_TV.shape)[0]
        # flashlight puts one boundary state before the first frame and one after the last.
        path_T = np.asarray(best.tokens)[1 : frames + 1]
        previous_T = np.concatenate([[BLANK], path_T[:-1]])
        begins = np.flatnonzero((path_T != BLANK) & (path_T != previous_T))
        return Hypothesis(path_T[begins].tolist(), begins.tolist(), float(best.score))


def whole_text_scorer(path: Path, pieces: Sequence[str]) -> Callable[[Sequence[int]], float]:
    """log10 p(tokens) of a whole text, by a KenLM file over tokens as `BeamSearch` takes it."""
    _check_file(path)
    with _extra():
        import kenlm
    entries, config = _as_in_files(pieces), kenlm.Config()
    config.show_progress = False
    try:
        model = kenlm.Model(str(path), config)
    except OSError as error:
        raise _unreadable(path, error) from None
    return lambda tokens: float(model.score(" ".join(entries[token] for token in tokens), bos=True, eos=True))


def read_word_list(path: Path) -> list[str]:
    """The words of a list (one a line; anything after the first field is ignored) or of an ARPA file's unigrams.

    A binary language model does not give its words away; keep a list beside it.
    """
    lines = _read_lines(path)
    if "\\1-grams:" not in lines:
        return sorted({line.split()[0] for line in lines if line.strip()})
    start = lines.index("\\1-grams:") + 1
    stop = next((i for i, line in enumerate(lines[start:], start) if line.startswith("\\")), len(lines))
    entries = {line.split()[1] for line in lines[start:stop] if len(line.split()) >= 2}
    return sorted(entries - {UNKNOWN, "<s>", "</s>"})


def _read_lines(path: Path) -> list[str]:
    try:
        return read_file(path).decode("utf-8").splitlines()
    except FileNotFoundError:
        raise InputError(f"words: {path} does not exist") from None
    except UnicodeDecodeError:
        raise InputError(f"words: {path} is no text file, expected a word list or an ARPA file") from None


def _are_characters(pieces: Sequence[str]) -> bool:
    return all(len(piece) <= 1 for piece in pieces)


def _as_in_files(pieces: Sequence[str]) -> list[str]:
    """How a language model over tokens writes the outputs of the model."""
    boundary = BOUNDARY_IN_FILES if _are_characters(pieces) else WORD_START
    return [piece.replace(WORD_BOUNDARY, boundary) or BLANK_IN_FILES for piece in pieces]


def _spell(word: str, pieces: Sequence[str]) -> list[int]:
    if foreign := sorted({*word} - {*pieces}):
        raise InputError(f"beam search: word={word!r} has characters {''.join(foreign)!r} that are no tokens")
    return [pieces.index(character) for character in word]


def _language_model(decoder: Any, dictionary: Any, path: Path | None) -> Any:
    if path is None:
        return decoder.ZeroLM()
    with _extra():
        from flashlight.lib.text.decoder.kenlm import KenLM
    try:
        return KenLM(str(path), dictionary)
    except RuntimeError as error:
        raise _unreadable(path, error) from None


def _check_file(path: Path) -> None:
    if not path.is_file():
        raise InputError(f"beam search: language_model={path}, expected a KenLM file (ARPA or binary)")


def _unreadable(path: Path, error: Exception) -> InputError:
    return InputError(f"beam search: language_model={path} cannot be read ({str(error).splitlines()[-1]})")


def _import_flashlight() -> tuple[Any, Any]:
    with _extra():
        from flashlight.lib.text import decoder, dictionary
    return decoder, dictionary


@contextmanager
def _extra() -> Iterator[None]:
    try:
        yield
    except ImportError:
        raise InputError("beam search needs flashlight-text and kenlm: pip install 'sottovoce[lm]'") from None
