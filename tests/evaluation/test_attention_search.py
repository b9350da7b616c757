"""A family with a search of its own: stores and files are read by it, unless CTC is asked for."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st
from tests.evaluation.attention_family import FAMILY, FRAME_SAMPLES, TOKENS, sound_of
from tests.evaluation.conftest import identity

from sottovoce.base.errors import InputError
from sottovoce.base.seeds import torch_stream
from sottovoce.data.corpora.corpus import Corpus, ProblemLog, RenderedSpeaker, RenderedUtterance
from sottovoce.data.store import Store, pack_corpus
from sottovoce.evaluation.decoder import DecodingOptions, choose_decoder, choose_greedy
from sottovoce.evaluation.recognise import recognise_utterances
from sottovoce.evaluation.score import evaluate_recogniser
from sottovoce.evaluation.transcribe import transcribe_files
from sottovoce.evaluation.transcripts import TimedWord, Transcript
from sottovoce.evaluation.windows import WindowWords, align_attended_tokens, stitch_untimed_words, stitch_words
from sottovoce.models.attention_search import GREEDY, SearchOptions
from sottovoce.models.ctc import AlignedWord
from sottovoce.models.decoding import BeamSearch, decode_greedily
from sottovoce.models.family import find_family
from sottovoce.models.recogniser import Recogniser, create_recogniser
from sottovoce.models.transformer.settings import Settings

SAID = ["..ab.c. .d", "go. .on", ". .", "x..........", "no w. .then"]
TEXTS = ["abc d", "go on", "", "x", "no w then"]
FRAME_SECONDS = FRAME_SAMPLES / 16_000


@pytest.fixture(scope="module")
def attending() -> Recogniser:
    settings = Settings(layers=1, width=32, tokens=TOKENS.size + 1)
    return create_recogniser(FAMILY, settings, TOKENS, language="en", generator=torch_stream(3, "model"))


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Store:
    said = [
        RenderedUtterance(str(i), sound_of(frames), text, text)
        for i, (frames, text) in enumerate(zip(SAID, TEXTS, strict=True))
    ]
    people = [RenderedSpeaker("ada", "test", said, {})]
    folder: Path = tmp_path_factory.mktemp("spoken")
    corpus = Corpus(name="made", language="en", speakers=people, render=identity, problems=ProblemLog())
    pack_corpus(corpus, folder, workers=1)
    return Store(folder)


@pytest.mark.parametrize(
    "decode", [None, GREEDY, SearchOptions(width=5), SearchOptions(width=3, ctc_weight=0.3), decode_greedily]
)
def test_a_store_is_read(attending: Recogniser, spoken: Store, decode: Any) -> None:
    collapsed: list[int] = []
    rows = np.arange(spoken.utterance_count)
    for batch_seconds in (0.5, None):
        options: dict[str, Any] = {"batch_seconds": batch_seconds, "on_collapse": collapsed.append}
        found = recognise_utterances(attending, spoken, rows, decode=decode, **options)
        texts = [spoken.utterance(row).text for row in rows.tolist()]
        assert found == [text or "" for text in texts]
    assert collapsed == ([] if decode is decode_greedily else [0, 0])  # CTC has no attention
    assert evaluate_recogniser(attending, spoken, decode=decode).wer == 0


def write(path: Path, frames: str, **options: Any) -> Path:
    soundfile.write(path, sound_of(frames, **options), 16_000)
    return path


def test_words_are_timed_by_the_attention(attending: Recogniser, tmp_path: Path) -> None:
    (found,) = transcribe_files(attending, [write(tmp_path / "short.wav", "..ab.c. .d")])
    assert isinstance(found, Transcript)
    expected = [("abc", 2, 6), ("d", 9, 10)]
    assert found.words == tuple(
        TimedWord(text, round(start * FRAME_SECONDS, 3), round(end * FRAME_SECONDS, 3)) for text, start, end in expected
    )
    assert found.collapsed == 0


@pytest.mark.parametrize("decode", [None, SearchOptions(width=4, longest_shift=None)])
@pytest.mark.parametrize("window_seconds", [1.3, 2.2])
def test_windows_are_stitched_by_word(
    attending: Recogniser, tmp_path: Path, decode: SearchOptions | None, window_seconds: float
) -> None:
    """Words of at most three frames, with pauses between: an overlap has a pause in its middle half."""
    random = np.random.default_rng(5)
    letters = list("abcdefghijklmnopqrstuvwxyz")
    frames = "".join(
        "." * int(random.integers(1, 3)) + " " + "".join(random.choice(letters, int(random.integers(1, 4))))
        for _ in range(120)
    )
    path = write(tmp_path / "long.wav", frames)
    (whole,) = transcribe_files(attending, [path], decode=decode, window_seconds=60.0)
    (pieces,) = transcribe_files(attending, [path], decode=decode, window_seconds=window_seconds)
    assert isinstance(whole, Transcript)
    assert len(whole.words) == 120
    assert pieces == whole


def test_an_attention_that_stops_listening_is_counted(attending: Recogniser, tmp_path: Path) -> None:
    paths = [write(tmp_path / "deaf.wav", "ab", deaf=True), write(tmp_path / "fine.wav", "ab.")]
    deaf, fine = transcribe_files(attending, paths)
    assert isinstance(deaf, Transcript)
    assert isinstance(fine, Transcript)
    assert (deaf.text, deaf.collapsed, fine.collapsed) == ("aaa", 1, 0)
    assert (deaf.as_json()["collapsed_windows"], fine.as_json().get("collapsed_windows")) == (1, None)


def test_a_recording_shorter_than_a_frame_says_nothing(attending: Recogniser, tmp_path: Path) -> None:
    soundfile.write(tmp_path / "short.wav", np.zeros(100), 16_000)
    (found,) = transcribe_files(attending, [tmp_path / "short.wav"])
    assert isinstance(found, Transcript)
    assert found.words == ()


@given(st.lists(st.integers(0, 20), max_size=8))
def test_spans_are_in_order(frames: list[int]) -> None:
    spans = align_attended_tokens(list(range(len(frames))), frames)
    times = [time for span in spans for time in (span.start, span.end)]
    assert times == sorted(times)
    assert [span.token for span in spans] == list(range(len(frames)))


def test_a_word_that_both_windows_hear_is_written_once() -> None:
    first = WindowWords(0, 20, [AlignedWord("a", 3, 6), AlignedWord("b", 13, 15), AlignedWord("cut", 18, 20)])
    second = WindowWords(12, 32, [AlignedWord("t", 12, 13), AlignedWord("b", 13, 16), AlignedWord("cute", 18, 22)])
    assert [word.text for word in stitch_words([first, second])] == ["a", "b", "cute"]


def spread(text: str, *, start: int, end: int) -> WindowWords:
    """A window whose words have guessed places: evenly between its ends."""
    words, frames = text.split(), end - start
    places = [start + frames * i // max(len(words), 1) for i in range(len(words) + 1)]
    return WindowWords(start, end, [AlignedWord(*word) for word in zip(words, places, places[1:], strict=False)])


@pytest.mark.parametrize(
    ("windows", "expected"),
    [
        # What both have said is written once, in whatever capitals, although the guesses differ by words.
        (
            ["one two three four five six", "Four five, six seven eight nine"],
            "one two three four five, six seven eight nine",
        ),
        (["a a a b the dog ran far", "the dog ran far away then"], "a a a b the dog ran far away then"),
        # A word cut by the end of the window is the next one's.
        (["one two three four fi", "three four five six seven"], "one two three four five six seven"),
        # Nothing in common: the guesses decide.
        (["one two three four", "five six seven eight"], "one two three six seven eight"),
        (["one two three", "three four", "four five"], "one two three four five"),
        (["", "one", ""], "one"),
    ],
)
def test_words_without_times_are_joined_by_what_windows_share(windows: list[str], expected: str) -> None:
    placed = [spread(text, start=100 * i, end=100 * i + 150) for i, text in enumerate(windows)]
    assert " ".join(word.text for word in stitch_untimed_words(placed)) == expected


def test_which_decoder() -> None:
    pieces = TOKENS.pieces()
    transformer = find_family("ctc_transformer")
    assert choose_greedy(FAMILY) is choose_decoder(FAMILY, pieces) is GREEDY
    assert choose_greedy(transformer) is choose_decoder(transformer, pieces) is decode_greedily
    assert choose_decoder(FAMILY, pieces, DecodingOptions(by_ctc=True)) is decode_greedily
    assert choose_decoder(FAMILY, pieces, DecodingOptions(beam_width=7)) == SearchOptions(width=7)
    assert choose_decoder(
        FAMILY, pieces, DecodingOptions(temperature=2.0, ctc_weight=0.5, longest_shift=None)
    ) == SearchOptions(temperature=2.0, ctc_weight=0.5)
    with pytest.raises(InputError, match="temperature=2 is for models that search with attention"):
        choose_decoder(transformer, pieces, DecodingOptions(temperature=2))
    with pytest.raises(InputError, match=r"words=w\.txt: only CTC can be kept"):
        choose_decoder(FAMILY, pieces, DecodingOptions(words=Path("w.txt")))


def test_a_language_model_is_the_same_file_for_both(tmp_path: Path) -> None:
    pytest.importorskip("flashlight.lib.text.decoder.kenlm", reason="language models need the extra `lm`")
    file = tmp_path / "letters.arpa"
    entries = {"<s>": -99, "</s>": -1, "<unk>": -5, "a": -0.25, "|": -0.5}
    lines = [f"{score}\t{entry}\t0" for entry, score in entries.items()]
    bigrams = ["", "\\2-grams:", "-5.0\t<unk> <unk>", "", "\\end\\", ""]
    file.write_text("\n".join(["\\data\\", f"ngram 1={len(lines)}", "ngram 2=1", "", "\\1-grams:", *lines, *bigrams]))
    pieces = TOKENS.pieces()
    chosen = choose_decoder(FAMILY, pieces, DecodingOptions(language_model=file, lm_weight=0.5))
    assert isinstance(chosen, SearchOptions)
    assert chosen.language_model is not None
    assert (chosen.width, chosen.lm_weight) == (80, 0.5)
    assert chosen.language_model(TOKENS.encode("a ab")) == pytest.approx(-0.25 - 0.5 - 0.25 - 5 - 1)
    assert isinstance(choose_decoder(FAMILY, pieces, DecodingOptions(language_model=file, by_ctc=True)), BeamSearch)
    file.write_text("nothing")
    with pytest.raises(InputError, match=r"letters\.arpa cannot be read"):
        choose_decoder(FAMILY, pieces, DecodingOptions(language_model=file))


def test_a_transformer_has_no_search(recogniser: Recogniser, store: Store) -> None:
    with pytest.raises(InputError, match="models of family=ctc_transformer have no search but CTC's"):
        recognise_utterances(recogniser, store, np.array([0]), decode=GREEDY)
