"""Streaming recognition: from a pipe to text, chunk by chunk, with causal models (`Recognition.stream`).

A chunk is `CHUNK_SECONDS` of sound; its text comes when it is complete and computed. All texts joined are those of the
whole recording, greedily decoded in one window.
"""

import struct
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch

from sottovoce.base.errors import InputError
from sottovoce.data.corpora.corpus import SAMPLE_RATE
from sottovoce.evaluation.recognise import require_recognition
from sottovoce.evaluation.windows import Samples
from sottovoce.models.decoding import WORD_BOUNDARY
from sottovoce.models.recogniser import Recogniser

CHUNK_SECONDS = 0.24
SAMPLE_BYTES = 2
EXPECTED = f"expected 16-bit mono PCM at {SAMPLE_RATE} Hz, raw or as WAV"
PCM, EXTENSIBLE = 1, 0xFFFE
MOST_BEFORE = 1 << 24  # bytes that may stand before the samples of a WAV file: names, dates, pictures


@dataclass(frozen=True, slots=True)
class StreamedText:
    """What a chunk has added to the text, the audio until then, and how long the chunk took to compute."""

    text: str
    audio_seconds: float
    compute_seconds: float


def transcribe_stream(
    recogniser: Recogniser, sound: Iterable[Samples], *, device: torch.device | str = "cpu"
) -> Iterator[StreamedText]:
    """The text of `sound`, chunk by chunk; all of it joined is the transcript."""
    family = recogniser.family
    if (stream := require_recognition(recogniser).stream) is None:
        raise InputError(f"models of family={family.name} need whole utterances: expected a causal (streaming) one")
    # Not in bfloat16: a row at a time is bound by launches, and the words should be those of a processor.
    recogniser = recogniser.to(device)
    pieces, spelling, state, samples = recogniser.tokens.pieces(), _Spelling(), None, 0
    for chunk in sound:
        began = time.perf_counter()
        tokens, state = stream(recogniser.parameters, chunk, state, settings=recogniser.settings)
        samples += len(chunk)
        text = spelling.add("".join(pieces[token] for token, _ in tokens))
        yield StreamedText(text, samples / SAMPLE_RATE, time.perf_counter() - began)


class _Spelling:
    """Pieces of text joined as they come, words by single spaces; a space waits for the word behind it."""

    def __init__(self) -> None:
        self._begun = self._waiting = False

    def add(self, text: str) -> str:
        """What `text` adds to what is there.

        >>> spelling = _Spelling()
        >>> [spelling.add(text) for text in (" a", "b ", " ", "c")]
        ['a', 'b', '', ' c']
        """
        words = text.split(WORD_BOUNDARY)
        added = ""
        for place, word in enumerate(words):
            self._waiting |= place > 0
            if word:
                added += WORD_BOUNDARY * (self._begun and self._waiting) + word
                self._begun, self._waiting = True, False
        return added


def open_pipe(place: Path) -> BinaryIO:
    """A file or a named pipe, whose writer is waited for. Devices, which give samples without end, are refused."""
    if place.is_char_device() or place.is_block_device() or place.is_socket():
        raise InputError(f"{place} is a device or a socket, expected a file or a pipe; `cat {place} |` and - read one")
    return place.open("rb")


def read_chunks(pipe: BinaryIO, *, chunk_seconds: float = CHUNK_SECONDS) -> Iterator[Samples]:
    """Samples from a pipe as they come, raw or behind a WAV header; the last chunk may be shorter.

    A pipe that ends within a sample ends before it.
    """
    size = round(chunk_seconds * SAMPLE_RATE) * SAMPLE_BYTES
    begun = pipe.read(4)
    left = None if begun != b"RIFF" else _data_bytes(pipe)
    held = b"" if begun == b"RIFF" else begun
    while left is None or left > 0:
        wanted = size - len(held)
        read = pipe.read(wanted if left is None else min(wanted, left))
        left = None if left is None else left - len(read)
        held += read
        if whole := len(held) // SAMPLE_BYTES * SAMPLE_BYTES:
            yield np.frombuffer(held[:whole], dtype="<i2").astype(np.int16)
        held = held[whole:]
        if not read:
            return


def _data_bytes(pipe: BinaryIO) -> int | None:
    """How many bytes of samples a WAV file has, whose first samples come next; None where it does not know.

    What is written to a pipe does not know its length: it has 0, or the largest number, instead.
    """
    header = pipe.read(8)  # the file's length, and what it is
    if header[4:] != b"WAVE":
        raise InputError(f"the stream is RIFF with {header[4:]!r} inside, {EXPECTED}")
    described, left = False, MOST_BEFORE
    while len(header := pipe.read(8)) == 8:
        name, length = struct.unpack("<4sI", header)
        if name == b"data":
            if not described:
                raise InputError(f"the stream is WAV without a description of its samples, {EXPECTED}")
            return None if length in (0, 0xFFFFFFFF) or length >= 0x7FFFF000 else length
        if (left := left - length) < 0:
            raise InputError(f"the stream is WAV with more than {MOST_BEFORE:,} bytes before its samples, {EXPECTED}")
        content = pipe.read(length + length % 2)
        if name == b"fmt " and len(content) >= 16:
            kind, channels, rate, _, _, bits = struct.unpack("<HHIIHH", content[:16])
            if kind not in (PCM, EXTENSIBLE) or (channels, rate, bits) != (1, SAMPLE_RATE, 8 * SAMPLE_BYTES):
                raise InputError(f"the stream is WAV with {channels} channels of {bits} bits at {rate} Hz, {EXPECTED}")
            described = True
    raise InputError(f"the stream is WAV that ends before its first sample, {EXPECTED}")
