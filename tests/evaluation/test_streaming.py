"""Speech from a pipe: the words of the whole recording, whatever the pipe does."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from tests.evaluation.streaming_recogniser import noise, talkative, wav

from sottovoce.base.errors import InputError
from sottovoce.evaluation.streaming import read_chunks, transcribe_stream
from sottovoce.evaluation.transcribe import transcribe_files
from sottovoce.evaluation.transcripts import Transcript
from sottovoce.models.recogniser import Recogniser

TALKATIVE, SPEECH = talkative(), noise()


def heard(recogniser: Recogniser, sound: bytes, **options: Any) -> str:
    return "".join(
        increment.text for increment in transcribe_stream(recogniser, read_chunks(io.BytesIO(sound), **options))
    )


def test_the_words_are_those_of_the_whole_recording(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "speech.wav", SPEECH, 16_000)
    (whole,) = transcribe_files(TALKATIVE, [tmp_path / "speech.wav"])
    assert isinstance(whole, Transcript)
    assert len(whole.words) > 3
    for chunk_seconds in (0.02, 0.24, 9.0):
        assert heard(TALKATIVE, SPEECH.tobytes(), chunk_seconds=chunk_seconds) == whole.text
    for data_bytes in (None, 0, 0xFFFFFFFF, 0x7FFFF024):
        assert heard(TALKATIVE, wav(SPEECH, data_bytes=data_bytes)) == whole.text


def test_text_comes_while_somebody_speaks() -> None:
    """Not one chunk is read ahead."""
    pipe = io.BytesIO(SPEECH.tobytes())
    increments = transcribe_stream(TALKATIVE, read_chunks(pipe))
    for number in range(1, 11):
        assert next(increments).audio_seconds == pytest.approx(0.24 * number)
        assert pipe.tell() == number * 2 * 3_840


def test_a_stream_that_stops_in_mid_sentence_has_its_words_so_far() -> None:
    whole, sound = heard(TALKATIVE, SPEECH.tobytes()), SPEECH.tobytes()
    for stop in (0, 1, 3, 700, 50_001, 100_000):
        assert whole.startswith(heard(TALKATIVE, sound[:stop]))
    assert len(heard(TALKATIVE, sound[:100_000])) > 5
    assert whole.startswith(heard(TALKATIVE, wav(SPEECH)[:50_001]))


def test_chunks_are_the_samples() -> None:
    for sound in (SPEECH.tobytes(), SPEECH.tobytes() + b"x", wav(SPEECH), wav(SPEECH) + b"behind the samples"):
        assert np.array_equal(np.concatenate(list(read_chunks(io.BytesIO(sound)))), SPEECH)


@pytest.mark.parametrize(
    ("sound", "message"),
    [
        (wav(np.zeros(4, np.int16), channels=2), "WAV with 2 channels of 16 bits at 16000 Hz, expected 16-bit mono"),
        (wav(np.zeros(4, np.int16), rate=8_000), "at 8000 Hz"),
        (b"RIFF1234WAVEfmt ", "ends before its first sample"),
    ],
)
def test_what_is_no_such_sound_is_refused(sound: bytes, message: str) -> None:
    with pytest.raises(InputError, match=message):
        list(read_chunks(io.BytesIO(sound)))


def test_a_model_that_needs_whole_utterances_is_refused(recogniser: Recogniser) -> None:
    with pytest.raises(InputError, match="family=ctc_transformer need whole utterances"):
        next(transcribe_stream(recogniser, read_chunks(io.BytesIO(b"\0\0" * 9_000))))
