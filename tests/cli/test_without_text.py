"""A model that writes no text, as a user meets it: figures for errors, probes, and a clear no to transcripts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from tests.tones import pack_tones

from sottovoce.base.seeds import torch_stream
from sottovoce.data.text.tokens import NO_TOKENS
from sottovoce.models.family import find_family
from sottovoce.models.recogniser import create_recogniser, save_recogniser

Command = Callable[..., Any]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("place")
    family = find_family("cpc")
    settings = family.Options(size="tiny").settings(tokens=1)
    (place / "model").mkdir()
    save_recogniser(
        create_recogniser(family, settings, NO_TOKENS, language="en", generator=torch_stream(3, "model")),
        place / "model",
    )
    pack_tones(place / "store")
    soundfile.write(place / "a.wav", np.zeros(16_000, dtype=np.int16), 16_000)
    return place


def test_evaluate_says_its_loss_and_accuracy(sottovoce: Command, place: Path) -> None:
    ended = sottovoce("evaluate", place / "model", "--on", f"{place / 'store'}:test", "--json")
    assert ended.code == 0
    found = json.loads(ended.out)
    assert found["loss"] > 0
    assert 0 <= found["accuracy"] <= 1
    assert (found["chance"], found["utterances"], found["speakers"]) == (1 / 128, 12, 3)
    ended = sottovoce("evaluate", place / "model", "--on", f"{place / 'store'}")
    assert f"loss {found['loss']:.0f}"[:7] in ended.out
    assert "by guessing 0.8%" in ended.out


@pytest.mark.parametrize("option", [("--beam-width", 4), ("--ctc",), ("--out", "texts.jsonl"), ("--plot", "wer.png")])
def test_evaluate_refuses_what_is_about_texts(option: tuple[Any, ...], sottovoce: Command, place: Path) -> None:
    ended = sottovoce("evaluate", place / "model", "--on", place / "store", *option)
    assert ended.code == 2
    assert "models of family=cpc write no text" in ended.err


def test_transcribe_refuses_it(sottovoce: Command, place: Path) -> None:
    ended = sottovoce("transcribe", place / "model", place / "a.wav")
    assert ended.code == 2
    assert "models of family=cpc write no text" in ended.err


def test_probe_says_what_it_tells(sottovoce: Command, place: Path) -> None:
    ended = sottovoce("probe", place / "model", "--on", f"{place / 'store'}:train")
    assert ended.code == 0
    assert "which of 9 speakers" in ended.out
    assert "5 letters: errors" in ended.out
    found = json.loads(sottovoce("probe", place / "model", "--on", f"{place / 'store'}:train", "--json").out)
    assert found["speaker"]["chance"] == pytest.approx(1 / 9)
    assert found["letters"]["chance"] == 1.0
    ended = sottovoce("probe", place / "model", "--on", f"{place / 'store'}:nowhere")
    assert ended.code == 2
    assert "split='nowhere' is not in" in ended.err
