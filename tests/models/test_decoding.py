import math
import sys
from collections.abc import Sequence
from itertools import groupby, product
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sottovoce.base.errors import InputError
from sottovoce.models import ctc
from sottovoce.models.ctc import BLANK
from sottovoce.models.decoding import BeamSearch, Hypothesis, decode_greedily, read_word_list

PIECES = ["", *"abc", " "]


def random_batch(seed: int, sharpness: float = 2.0) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    log_probs_BTV = (sharpness * torch.randn(5, 12, len(PIECES), generator=random)).log_softmax(dim=-1)
    return log_probs_BTV, torch.tensor([12, 7, 3, 1, 0])


def spoken(path: str, *, probability: float = 0.9) -> tuple[Tensor, Tensor]:
    """Log-probabilities of one utterance that says `path` frame by frame; "-" is the blank."""
    symbols = [BLANK if character == "-" else PIECES.index(character) for character in path]
    probs_TV = torch.full((len(path), len(PIECES)), (1 - probability) / (len(PIECES) - 1))
    probs_TV[range(len(path)), symbols] = probability
    return probs_TV.log()[None], torch.tensor([len(path)])


def text(hypothesis: Hypothesis) -> str:
    return "".join(PIECES[token] for token in hypothesis.tokens)


@given(seed=st.integers(0, 2**30))
def test_greedy_is_the_definition_frame_by_frame(seed: int) -> None:
    log_probs_BTV, lengths_B = random_batch(seed)
    for found, log_probs_TV, length in zip(
        decode_greedily(log_probs_BTV, lengths_B), log_probs_BTV, lengths_B, strict=True
    ):
        path = log_probs_TV[:length].argmax(dim=-1).tolist()
        runs = [next(run) for _, run in groupby(enumerate(path), key=lambda frame: frame[1])]
        assert found.tokens == [symbol for _, symbol in runs if symbol != BLANK]
        assert found.frames == [frame for frame, symbol in runs if symbol != BLANK]
        assert found.score == pytest.approx(sum(log_probs_TV[t, s].item() for t, s in enumerate(path)), abs=1e-4)


def test_greedy_merges_repeats_but_not_across_a_blank() -> None:
    (found,) = decode_greedily(*spoken("aa-ab  -c"))
    assert (found.tokens, found.frames) == ([1, 1, 2, 4, 3], [0, 3, 4, 5, 8])
    assert found.score == pytest.approx(9 * math.log(0.9))


@pytest.fixture(scope="module")
def _extra() -> None:
    reason = "beam search needs the extra lm (flashlight-text, kenlm)"
    pytest.importorskip("flashlight.lib.text.decoder", reason=reason)
    pytest.importorskip("flashlight.lib.text.decoder.kenlm", reason=reason)


def arpa(path: Path, unigrams: dict[str, float]) -> Path:
    """A unigram model; log10 probabilities as given (ARPA files need not sum to one)."""
    entries = {"<s>": -99.0, "</s>": -1.0, "<unk>": -5.0, **unigrams}
    lines = [f"{score}\t{word}\t0" for word, score in entries.items()]
    head = ["\\data\\", f"ngram 1={len(lines)}", "ngram 2=1", "", "\\1-grams:"]
    bigrams = ["", "\\2-grams:", "-5.0\t<unk> <unk>", "", "\\end\\", ""]  # KenLM takes none without
    path.write_text("\n".join([*head, *lines, *bigrams]))
    return path


@pytest.mark.usefixtures("_extra")
@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**30))
def test_one_hypothesis_and_no_language_model_is_greedy(seed: int) -> None:
    batch = random_batch(seed)
    for beam, best in zip(BeamSearch(PIECES, width=1)(*batch), decode_greedily(*batch), strict=True):
        assert (beam.tokens, beam.frames) == (best.tokens, best.frames)
        assert beam.score == pytest.approx(best.score, abs=1e-4)


@pytest.mark.usefixtures("_extra")
def test_a_language_model_of_weight_zero_changes_nothing(tmp_path: Path) -> None:
    model = arpa(tmp_path / "characters.arpa", {"a": -1.0, "b": -3.0, "c": -2.0, "|": -0.5})
    batch = random_batch(3)
    for width in (1, 20):
        without = BeamSearch(PIECES, width=width)(*batch)
        weighted = BeamSearch(PIECES, width=width, language_model=model, lm_weight=0.0)(*batch)
        assert [h.tokens for h in weighted] == [h.tokens for h in without]


def log_probability(log_probs_TV: Tensor, tokens: Sequence[int]) -> float:
    tokens_1U = torch.tensor([tokens], dtype=torch.long)
    lengths_1, token_lengths_1 = torch.tensor([len(log_probs_TV)]), torch.tensor([len(tokens)])
    return -ctc.ctc_losses(log_probs_TV[None], lengths_1, tokens_1U, token_lengths_1).item()


@pytest.mark.usefixtures("_extra")
@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 2**30))
def test_a_beam_that_keeps_everything_finds_the_most_probable_text(seed: int) -> None:
    log_probs_BTV, _ = random_batch(seed, sharpness=1.0)
    log_probs_TV = log_probs_BTV[0, :4]
    (found,) = BeamSearch(PIECES, width=10_000)(log_probs_TV[None], torch.tensor([4]))
    readings: list[list[int]] = [[]] + [
        [*tokens] for size in (1, 2, 3, 4) for tokens in product(range(1, len(PIECES)), repeat=size)
    ]
    best = max(log_probability(log_probs_TV, tokens) for tokens in readings if ctc.required_frames(tokens) <= 4)
    assert log_probability(log_probs_TV, found.tokens) == pytest.approx(best, abs=1e-4)


@pytest.mark.usefixtures("_extra")
@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**30))
def test_a_wide_beam_scores_at_least_the_greedy_path(seed: int) -> None:
    batch = random_batch(seed)
    for wide, best in zip(BeamSearch(PIECES, width=200)(*batch), decode_greedily(*batch), strict=True):
        assert wide.score >= best.score - 1e-4


@pytest.mark.usefixtures("_extra")
def test_a_character_model_turns_a_doubtful_character(tmp_path: Path) -> None:
    log_probs_BTV, lengths_B = spoken("a-b-c")
    log_probs_BTV[0, 2, [1, 2]] = torch.tensor([0.45, 0.5]).log()  # a or b
    model = arpa(tmp_path / "characters.arpa", {"a": -0.3, "b": -3.0, "c": -0.3, "|": -0.3})
    assert text(decode_greedily(log_probs_BTV, lengths_B)[0]) == "abc"
    assert text(BeamSearch(PIECES, language_model=model, lm_weight=1.0)(log_probs_BTV, lengths_B)[0]) == "aac"


@pytest.mark.usefixtures("_extra")
def test_a_model_over_sentence_pieces_knows_them_by_their_word_start(tmp_path: Path) -> None:
    pieces = ["", " a", " ", "b", "c"]
    probs_TV = torch.tensor(
        [[0.02, 0.9, 0.03, 0.03, 0.02], [0.02, 0.02, 0.02, 0.5, 0.44], [0.02, 0.5, 0.44, 0.02, 0.02]]
    )
    model = arpa(tmp_path / "pieces.arpa", {"\u2581a": -3.0, "\u2581": -0.3, "b": -3.0, "c": -0.3})
    batch = probs_TV.log()[None], torch.tensor([3])
    assert [pieces[token] for token in decode_greedily(*batch)[0].tokens] == [" a", "b", " a"]
    # An unknown entry has -5: the last piece would not turn, or the score would not come out.
    (found,) = BeamSearch(pieces, language_model=model, lm_weight=1.0)(*batch)
    assert [pieces[token] for token in found.tokens] == [" a", "c", " "]
    log_probability_of_text = log_probability(probs_TV.log(), found.tokens)
    assert found.score == pytest.approx(log_probability_of_text - 3.0 - 0.3 - 0.3 - 1.0, abs=1e-4)


@pytest.mark.usefixtures("_extra")
def test_a_word_list_admits_only_its_words_and_the_model_chooses(tmp_path: Path) -> None:
    model = arpa(tmp_path / "words.arpa", {"ab": -0.5, "ac": -2.0, "ca": -2.0})
    words = read_word_list(model)
    assert words == ["ab", "ac", "ca"]
    (free,) = BeamSearch(PIECES, words=words)(*spoken("a-c- -ca"))
    assert text(free) == "ac ca"
    # A wrong character costs ln(0.9/0.025) = 3.6; "ac" instead of "ab" 4 x 1.5 = 6; leaving both out 7.2.
    search = BeamSearch(PIECES, words=words, language_model=model, lm_weight=4.0)
    log_probs_BTV, lengths_B = spoken("a-c")
    (chosen,) = search(log_probs_BTV, lengths_B)
    assert text(chosen) == "ab"
    assert chosen.frames == [0, 2]


@pytest.mark.usefixtures("_extra")
def test_the_language_models_share_of_the_score_is_its_decimal_logarithm(tmp_path: Path) -> None:
    model = arpa(tmp_path / "characters.arpa", {"a": -0.25, "b": -3.0, "c": -0.5, "|": -0.3})
    batch = spoken("a-c", probability=0.9999)
    (with_model,) = BeamSearch(PIECES, language_model=model, lm_weight=2.0)(*batch)
    (without,) = BeamSearch(PIECES)(*batch)
    end_of_sentence = -1.0
    assert with_model.score - without.score == pytest.approx(2 * (-0.25 - 0.5 + end_of_sentence), abs=1e-3)


@pytest.mark.usefixtures("_extra")
def test_a_word_score_splits_or_joins_words() -> None:
    log_probs_BTV, lengths_B = spoken("aabb")
    log_probs_BTV[0, 1:3, PIECES.index(" ")] = math.log(0.05)
    counts = {
        score: len(
            text(BeamSearch(PIECES, words=["a", "b", "ab"], word_score=score)(log_probs_BTV, lengths_B)[0]).split()
        )
        for score in (-10.0, 10.0)
    }
    assert counts == {-10.0: 1, 10.0: 2}


@pytest.mark.usefixtures("_extra")
def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="width=0"):
        BeamSearch(PIECES, width=0)
    with pytest.raises(InputError, match="expected a KenLM file"):
        BeamSearch(PIECES, language_model=tmp_path / "none.arpa")
    broken = tmp_path / "broken.arpa"
    broken.write_text("nothing of the kind")
    with pytest.raises(InputError, match=r"broken\.arpa cannot be read"):
        BeamSearch(PIECES, language_model=broken)
    with pytest.raises(InputError, match="word='add' has characters 'd'"):
        BeamSearch(PIECES, words=["ab", "add"])
    with pytest.raises(InputError, match="word_score"):
        BeamSearch(PIECES, word_score=1.0)
    with pytest.raises(InputError, match="word boundary"):
        BeamSearch(["", " a", " ", "a", "b"], words=["ab"])


def test_a_missing_extra_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashlight.lib.text", None)
    with pytest.raises(InputError, match=r"pip install 'sottovoce\[lm\]'"):
        BeamSearch(PIECES)


def test_a_word_list_is_read_by_its_first_field(tmp_path: Path) -> None:
    path = tmp_path / "words.txt"
    path.write_text("zwei z w e i |\n\neins\neins e i n s |\n")
    assert read_word_list(path) == ["eins", "zwei"]
    with pytest.raises(InputError, match="does not exist"):
        read_word_list(tmp_path / "none.txt")
    (tmp_path / "model.bin").write_bytes(b"mmap lm \xff\xfe")
    with pytest.raises(InputError, match="no text file"):
        read_word_list(tmp_path / "model.bin")
