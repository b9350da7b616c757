"""A streaming recogniser that says something, noise for it to hear, and WAV files as pipes carry them."""

import struct

import numpy as np
from numpy.typing import NDArray

from sottovoce.base.seeds import stream, torch_stream
from sottovoce.data.text.tokens import CharacterTokens
from sottovoce.models.recogniser import Recogniser
from sottovoce.models.speech_lstm import EncoderSettings
from sottovoce.models.transducer import FAMILY
from sottovoce.models.transducer.network import Settings, init

TOKENS = CharacterTokens.seen_in(["ab cd"])


def talkative() -> Recogniser:
    """Untrained, but with weights large enough to write something now and then."""
    encoder = EncoderSettings(dense_layers=1, dense_width=12, lstm_layers=1, lstm_width=12)
    settings = Settings(tokens=TOKENS.size + 1, encoder=encoder, embedding=6, predictor_layers=1)
    parameters = {name: 5 * p for name, p in init(settings, generator=torch_stream(2, "init")).items()}
    parameters["output.bias"][0] += 2
    return Recogniser(FAMILY, settings, TOKENS, parameters, "en")


def noise() -> NDArray[np.int16]:
    """Five seconds, louder and softer."""
    level = 10.0 ** (2 + 2 * np.sin(np.arange(80_000) / 900))
    return (level * stream(1, "noise").uniform(-1, 1, size=80_000)).astype(np.int16)


def wav(samples: NDArray[np.int16], *, data_bytes: int | None = None, channels: int = 1, rate: int = 16_000) -> bytes:
    """With a chunk in front that nobody knows, and the length that is given."""
    sound = samples.tobytes()
    form = struct.pack("<HHIIHH", 1, channels, rate, 2 * rate, 2, 16)
    parts = b"WAVE" + b"LIST" + struct.pack("<I", 3) + b"abc\0" + b"fmt " + struct.pack("<I", 16) + form
    parts += b"data" + struct.pack("<I", len(sound) if data_bytes is None else data_bytes) + sound
    return b"RIFF" + struct.pack("<I", 0xFFFFFFFF) + parts
