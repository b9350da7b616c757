"""From a public model and a folder of one's own recordings to a part that `transcribe` uses; what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch
from tests.tones import pack_tones, say

from sottovoce.data.corpora.corpus import SAMPLE_RATE
from sottovoce.data.text.tokens import CharacterTokens
from sottovoce.models.family import find_family
from sottovoce.models.recogniser import create_recogniser, export_recogniser

# One word is learnt by heart by all of a model that knows nothing.
TRAINING = ("--part", "*", "--steps", 60, "--lr", 0.01)


def make_model(place: Path, *, seed: int = 1) -> Path:
    """A model that has learnt nothing."""
    family = find_family("ctc_transformer")
    tokens = CharacterTokens("abcde ")
    options = family.Options(size="tiny", layers=1, width=32, dropout=0.0, layer_drop=0.0)  # type: ignore[call-arg]
    settings = options.settings(tokens=tokens.size + 1)
    generator = torch.Generator().manual_seed(seed)
    export_recogniser(create_recogniser(family, settings, tokens, language="en", generator=generator), place)
    return place


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("public") / "model")


def record(folder: Path, *texts: str) -> Path:
    """One's own recordings."""
    folder.mkdir()
    for number, text in enumerate(texts):
        soundfile.write(folder / f"{number}.wav", say(text, pitch=1.0), SAMPLE_RATE)
        (folder / f"{number}.txt").write_text(text)
    return folder


def test_a_part_is_trained_kept_and_used(sottovoce: Callable[..., Any], model: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    speech, part = record(tmp_path / "speech", *["dab"] * 4), tmp_path / "part"
    done = sottovoce("personalise", model, "--data", speech, "--out", part, *TRAINING)
    assert done.code == 0, done.err
    assert "on 4 utterances that it had not seen, 4 words: 4 errors by the public model, 0 with" in done.err
    assert "the part is kept" in done.err
    file = speech / "0.wav"
    assert sottovoce("transcribe", model, file).out.split() != ["dab"]
    assert sottovoce("transcribe", model, file, "--personal", part).out == "dab\n"
    assert sottovoce("prepare", "folder", speech, "--out", tmp_path / "store").code == 0
    rates = [
        json.loads(sottovoce("evaluate", model, "--on", tmp_path / "store", "--json", *own).out)
        for own in ((), ("--personal", part))
    ]
    assert [rate["wer"] for rate in rates] == [1.0, 0.0]
    assert [rate.get("personal") for rate in rates] == [None, str(part)]
    other = make_model(tmp_path / "other", seed=2)
    refused = sottovoce("transcribe", other, file, "--personal", part)
    assert refused.code == 2
    assert "part belongs to another model" in refused.err
    again = sottovoce("personalise", model, "--data", speech, "--out", part, *TRAINING)
    assert again.code == 2
    assert "is there already: expected a new folder" in again.err


def test_too_little_speech_keeps_the_public_model(sottovoce: Callable[..., Any], model: Path, tmp_path: Path) -> None:
    speech, part = record(tmp_path / "speech", "dab"), tmp_path / "part"
    done = sottovoce("personalise", model, "--data", speech, "--out", part, "--steps", 2, "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert (found["is_kept"], found["guard"]["utterances"]) == (False, 1)
    public = sottovoce("transcribe", model, speech / "0.wav")
    own = sottovoce("transcribe", model, speech / "0.wav", "--personal", part)
    assert own.out == public.out
    assert "the guard has kept the public model" in own.err


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("--part", "lora(r=0)"), "expected a rank r of at least 1"),
        (("--part", "nowhere"), "'nowhere' matches no parameter of the model"),
        (("--lr", "-1"), "lr=-1.0, expected a positive number"),
        (("--user", "nobody"), "has no speaker 'nobody'"),
        ((), "9 speakers: expected --user, whose speech it is"),
    ],
)
def test_mistakes_are_one_line(
    sottovoce: Callable[..., Any], model: Path, tones: Path, tmp_path: Path, given: tuple[Any, ...], expected: str
) -> None:
    user = () if "--user" in given or not given else ("--user", "s00")
    done = sottovoce("personalise", model, "--data", tones, "--out", tmp_path / "part", *user, *given)
    assert done.code == 2
    assert expected in done.err
    assert not (tmp_path / "part").exists()


@pytest.fixture(scope="module")
def tones(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("stores") / "tones"
    pack_tones(place, people=[number for number in range(15) if number % 5 < 3])
    return place
