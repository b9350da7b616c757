"""Models that search with attention, as a user asks for them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import soundfile
from tests.evaluation.attention_family import FAMILY, TOKENS, sound_of

from sottovoce.base.seeds import torch_stream
from sottovoce.data.corpora.corpus import Corpus, ProblemLog, RenderedSpeaker, RenderedUtterance
from sottovoce.data.store import pack_corpus
from sottovoce.models.recogniser import create_recogniser, save_recogniser
from sottovoce.models.transformer.settings import Settings

Command = Callable[..., Any]
TRUSTED = ("--family", "tests.evaluation.attention_family:FAMILY")


def identity(speaker: RenderedSpeaker) -> RenderedSpeaker:
    return speaker


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, a store in which one of two is not listened to, and a file of two words."""
    place = tmp_path_factory.mktemp("place")
    (place / "model").mkdir()
    settings = Settings(layers=1, width=32, tokens=TOKENS.size + 1)
    save_recogniser(
        create_recogniser(FAMILY, settings, TOKENS, language="en", generator=torch_stream(3, "model")), place / "model"
    )
    said = [
        RenderedUtterance("fine", sound_of("he.l. .o."), "hel o", "hel o"),
        RenderedUtterance("deaf", sound_of("....", deaf=True), "b", "b"),
    ]
    people = [RenderedSpeaker("ada", "test", said, {})]
    corpus = Corpus(name="made", language="en", speakers=people, render=identity, problems=ProblemLog())
    pack_corpus(corpus, place / "store", workers=1)
    soundfile.write(place / "two.wav", sound_of("..ab. .c."), 16_000)
    return place


def test_evaluate_counts_collapses(sottovoce: Command, place: Path) -> None:
    where = (place / "model", "--on", place / "store", *TRUSTED)
    for options in ((), ("--beam-width", 3, "--ctc-weight", 0.2, "--temperature", 1, "--end-threshold", 2)):
        done = sottovoce("evaluate", *where, *options, "--json")
        assert done.code == 0, done.err
        result = json.loads(done.out)
        assert (result["words"], result["substitutions"], result["collapsed"]) == (3, 1, 1)
        assert "the attention collapsed in 1 of 2 utterances" in done.err.replace("\n", " ")
    assert "collapsed" not in json.loads(sottovoce("evaluate", *where, "--ctc", "--json").out)


def test_transcribe_with_times(sottovoce: Command, place: Path) -> None:
    expected = [{"text": "ab", "start": 0.08, "end": 0.16}, {"text": "c", "start": 0.28, "end": 0.32}]
    for options in ((), ("--beam-width", 4, "--longest-shift", 20), ("--ctc",)):
        done = sottovoce("transcribe", place / "model", place / "two.wav", "--json", *TRUSTED, *options)
        assert done.code == 0, done.err
        assert json.loads(done.out)["transcripts"][0]["words"] == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ctc", "--ctc-weight", "0.3"], "error: ctc_weight=0.3 is for models that search with attention"),
        (["--ctc-weight", "2"], "error: attention search: ctc_weight=2.0, expected between 0 and 1"),
        (["--words", "words.txt"], "error: words=words.txt: only CTC can be kept to a list of words (--ctc)"),
        (["--lm", "gone.arpa"], "error: beam search: language_model=gone.arpa, expected a KenLM file"),
    ],
)
def test_mistakes_are_one_line(sottovoce: Command, place: Path, options: list[str], message: str) -> None:
    done = sottovoce("transcribe", place / "model", place / "two.wav", *TRUSTED, *options)
    assert done.code == 2
    assert done.err.startswith(message), done.err
    assert done.err.count("\n") == 1
