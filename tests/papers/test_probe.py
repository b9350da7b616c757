"""Probes of an encoder: exact where the answer is known, better than chance where speech is told apart, repeatable."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.tones import pack_tones
from torch import Tensor

from sottovoce.base.errors import InputError
from sottovoce.base.seeds import torch_stream
from sottovoce.data.corpora.corpus import RenderedSpeaker
from sottovoce.data.loading import Speech
from sottovoce.data.store import Store
from sottovoce.data.text.tokens import NO_TOKENS
from sottovoce.models.family import find_family
from sottovoce.models.recogniser import Recogniser, create_recogniser
from sottovoce.papers.probe import choose_speech, probe_encoder, probe_letters, probe_speakers


@pytest.fixture(scope="module")
def encoder() -> Recogniser:
    family = find_family("cpc")
    settings = family.Options(size="tiny").settings(tokens=1)
    return create_recogniser(family, settings, NO_TOKENS, language="en", generator=torch_stream(1, "model"))


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("probed") / "tones"
    pack_tones(folder)
    return Store(folder)


def without_texts(rendered: RenderedSpeaker) -> RenderedSpeaker:
    return replace(rendered, utterances=[replace(own, text=None, raw_text=None) for own in rendered.utterances])


@pytest.fixture
def chosen(encoder: Recogniser, spoken: Store) -> tuple[Speech, np.ndarray]:
    return choose_speech(encoder, spoken, split="train", minutes=30, seed=1)


def test_who_lies_open_is_found_and_who_does_not_is_not(chosen: tuple[Speech, np.ndarray]) -> None:
    speech, owners = chosen
    plain = [torch.eye(9)[owner].expand(5, 9) for owner in owners.tolist()]
    mute = [torch.zeros(5, 9) for _ in owners]
    found = probe_speakers(plain, mute, speech, owners, seed=1)
    assert (found.accuracy, found.untrained) == (1.0, found.chance)
    assert (found.speakers, found.trained_on, found.tried_on) == (9, 27, 9)
    assert found.chance == pytest.approx(1 / 9)


def spelled(texts: Sequence[str]) -> list[Tensor]:
    """Two vectors a letter that say which it is, with a rest between letters."""
    letters = torch.eye(6)
    return [torch.stack([letters[place] for own in text for place in (*[ord(own) - 97] * 2, 5)]) for text in texts]


def test_what_lies_open_is_written_down_and_what_does_not_is_not(chosen: tuple[Speech, np.ndarray]) -> None:
    speech, owners = chosen
    texts = [speech.store.utterance(row).text or "" for row in speech.rows.tolist()]
    plain = spelled(texts)
    found = probe_letters(plain, [torch.zeros_like(own) for own in plain], speech, owners, seed=1)
    assert found.error_rate < 0.02
    assert found.untrained == found.chance == 1.0
    assert (found.letters, found.trained_on, found.tried_on) == (5, 28, 8)


def test_tones_and_pitches_are_told_by_an_encoder_and_repeatably(encoder: Recogniser, spoken: Store) -> None:
    told: list[tuple[int, int]] = []
    found = probe_encoder(encoder, spoken, split="train", on_progress=lambda done, total: told.append((done, total)))
    assert found.speaker is not None
    assert found.letters is not None
    assert found.speaker.accuracy > 3 * found.speaker.chance
    assert found.letters.error_rate < 0.7
    assert found.missing == {}
    assert told[-1] == (72, 72)
    assert found == probe_encoder(encoder, spoken, split="train")


def test_less_speech_is_fewer_people(encoder: Recogniser, spoken: Store) -> None:
    speech, owners = choose_speech(encoder, spoken, split="train", minutes=0.2, seed=1)
    assert 1 < len(np.unique(owners)) < 9
    assert speech.lengths.sum() <= 0.2 * 60 * 16_000
    again, _ = choose_speech(encoder, spoken, split="train", minutes=0.2, seed=2)
    assert set(again.rows.tolist()) != set(speech.rows.tolist())


def test_without_texts_there_are_no_letters_and_of_one_person_nothing(encoder: Recogniser, tmp_path: Path) -> None:
    pack_tones(tmp_path / "mute", people=range(5), change=without_texts)
    found = probe_encoder(encoder, Store(tmp_path / "mute"), split="train")
    assert found.letters is None
    assert "no utterance has a text" in found.missing["letters"]
    assert found.speaker is not None
    alone = probe_encoder(encoder, Store(tmp_path / "mute"), split="dev")
    assert alone.speaker is None
    assert "1 speakers with several utterances, expected at least 2" in alone.missing["speaker"]


def test_a_family_without_an_encoder_is_refused(encoder: Recogniser, spoken: Store) -> None:
    recogniser = replace(
        encoder, family=replace(encoder.family, inspection=replace(encoder.family.inspection, encode=None))
    )
    with pytest.raises(InputError, match="family=cpc have no encoder that can be probed"):
        probe_encoder(recogniser, spoken)
