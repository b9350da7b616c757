"""Transcribing while somebody speaks, as a user asks for it."""

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.evaluation.streaming_recogniser import noise, talkative, wav

from sottovoce.evaluation.streaming import read_chunks, transcribe_stream
from sottovoce.models.recogniser import save_recogniser


def test_the_command_hears_a_pipe_and_refuses_what_it_would_not_do(
    sottovoce: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_recogniser(talkative(), tmp_path)
    sound = noise().tobytes()
    expected = "".join(increment.text for increment in transcribe_stream(talkative(), read_chunks(io.BytesIO(sound))))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(sound)))
    done = sottovoce("transcribe", tmp_path, "-", "--stream")
    assert (done.code, done.out) == (0, expected + "\n")
    assert "5.0 s of audio" in done.err
    (tmp_path / "speech.wav").write_bytes(wav(noise()))
    assert sottovoce("transcribe", tmp_path, tmp_path / "speech.wav", "--stream").out == expected + "\n"
    assert "no other option than --device" in sottovoce("transcribe", tmp_path, "-", "--stream", "--json").err
    assert "expected - or one file" in sottovoce("transcribe", tmp_path, "-", "-", "--stream").err
    assert "cannot be read" in sottovoce("transcribe", tmp_path, tmp_path / "none", "--stream").err
