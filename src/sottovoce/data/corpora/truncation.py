"""Recordings that stop before their end, as an interrupted download or a full disk leaves them.

libsndfile trusts what it finds: it shortens the header of a cut WAV or AIFF to fit, guesses an MP3's length from the
size of the file, and takes the last whole page of an Ogg stream for its end. So the container itself is asked here.
FLAC announces a length that the decoder must reach, and needs no help.
"""

import re
from dataclasses import dataclass
from functools import cache
from typing import Literal

# Layer III, kbit/s by the header's index: MPEG-1, then MPEG-2 and 2.5. Index 0 ("free") and 15 give no length.
_MPEG1_KBITS = (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 0)
_MPEG2_KBITS = (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160, 0)
_MPEG1_RATES = (44_100, 48_000, 32_000, 0)
_RATE_DIVISORS = {0b11: 1, 0b10: 2, 0b00: 4}  # version bits: MPEG-1, 2, 2.5
_LAYER_III = 0b01
_MOST_CHUNKS = 10_000  # files have about ten; noise read as chunks has millions
_OGG_HEADER_BYTES = 27
_OGG_LAST_PAGE = 0x04


def is_truncated(data: bytes) -> bool:
    """Whether the bytes of a WAV, AIFF, CAF, W64, AU, MP3 or Ogg file end in the middle; False for all others.

    An MP3 with no frame count in its header, cut exactly between two frames, cannot be told from a whole one.
    """
    for chunks in _CONTAINERS:
        if chunks.start.fullmatch(data[: chunks.first]):
            return _chunks_cut_short(data, chunks)
    if data[:4] == b".snd":
        size = int.from_bytes(data[8:12], "big")
        return size < _STREAMED and int.from_bytes(data[4:8], "big") + size > len(data)
    if data[:4] == b"OggS":
        return _ogg_cut_short(data)
    return _mp3_cut_short(data)


@dataclass(frozen=True, kw_only=True)
class _Chunks:
    """A container: after its first bytes pieces with a name, a length and what it counts; one of them is the sound."""

    start: re.Pattern[bytes]
    first: int
    order: Literal["little", "big"] = "little"
    name_bytes: int = 4
    length_bytes: int = 4
    alignment: int = 2
    counts_itself: bool = False
    sound: bytes = b"data"


_STREAMED = 0x7FFF_0000  # writers that cannot seek back leave 0x7FFF… or 0xFFFF… as the length
_CONTAINERS = (
    _Chunks(start=re.compile(rb"RIFF....WAVE", re.DOTALL), first=12),
    _Chunks(start=re.compile(rb"RF64....WAVE", re.DOTALL), first=12),
    _Chunks(start=re.compile(rb"FORM....AIF[FC]", re.DOTALL), first=12, order="big", sound=b"SSND"),
    _Chunks(start=re.compile(rb"caff....", re.DOTALL), first=8, order="big", length_bytes=8, alignment=1),
    _Chunks(
        start=re.compile(rb"riff.{36}", re.DOTALL),
        first=40,
        name_bytes=16,
        length_bytes=8,
        alignment=8,
        counts_itself=True,
    ),  # W64
)


def _chunks_cut_short(data: bytes, chunks: _Chunks) -> bool:
    position, head, long_sound = chunks.first, chunks.name_bytes + chunks.length_bytes, None
    for _ in range(_MOST_CHUNKS):
        name = data[position : position + 4]
        length = int.from_bytes(data[position + chunks.name_bytes : position + head], chunks.order)
        if position + head > len(data):
            break
        if chunks.counts_itself:
            length = max(length - head, 0)
        if name == b"ds64":  # RF64 gives the length of a sound of more than 4 GB here
            long_sound = int.from_bytes(data[position + head + 8 : position + head + 16], "little")
        if name == chunks.sound:
            if long_sound is not None:
                length = long_sound
            elif length >= _STREAMED:
                return chunks.length_bytes == 8 and length < 1 << 62 and position + head + length > len(data)
            return position + head + length > len(data)
        position += head + length + -length % chunks.alignment
    return True  # not even the sound is there


def _ogg_cut_short(data: bytes) -> bool:
    page = data.rfind(b"OggS")
    header = data[page : page + _OGG_HEADER_BYTES]
    if len(header) < _OGG_HEADER_BYTES or not header[5] & _OGG_LAST_PAGE:
        return True
    body = page + _OGG_HEADER_BYTES + header[26]
    return body + sum(data[page + _OGG_HEADER_BYTES : body]) > len(data)


def _mp3_cut_short(data: bytes) -> bool:
    start = _id3_bytes(data)
    position, frames = start, 0
    while size := _mp3_frame_bytes(data[position : position + 3]):
        position += size
        frames += 1
    if not frames:
        return 0 < start >= len(data)  # a tag and nothing behind it; or no MP3 at all
    rest = data[position : position + 4]
    # Behind the last frame there may be a tag; something else means damage, which the decoder steps over.
    whole_walk = len(rest) < 4 or rest[:3] == b"TAG" or rest == b"APET"
    cut_in_header = len(rest) < 4 and rest[:1] == b"\xff"
    return position > len(data) or cut_in_header or (whole_walk and _xing_frames(data[start:]) > frames)


def _id3_bytes(data: bytes) -> int:
    """The length of the ID3v2 tag at the front."""
    if data[:3] != b"ID3" or len(data) < 10:
        return 0
    return 10 + sum((byte & 0x7F) << shift for byte, shift in zip(data[6:10], (21, 14, 7, 0), strict=True))


@cache
def _mp3_frame_bytes(head: bytes) -> int:
    """The length of the MPEG layer III frame that begins with these three bytes; 0 if none does."""
    if len(head) < 3 or head[0] != 0xFF or head[1] & 0xE0 != 0xE0:
        return 0
    version, layer = head[1] >> 3 & 0b11, head[1] >> 1 & 0b11
    divisor = _RATE_DIVISORS.get(version)
    if layer != _LAYER_III or divisor is None:
        return 0
    kbits = (_MPEG1_KBITS if divisor == 1 else _MPEG2_KBITS)[head[2] >> 4]
    rate = _MPEG1_RATES[head[2] >> 2 & 0b11] // divisor
    padding = head[2] >> 1 & 1
    samples = 1152 if divisor == 1 else 576
    return samples // 8 * 1000 * kbits // rate + padding if kbits and rate else 0


def _xing_frames(data: bytes) -> int:
    """The number of frames announced in the first one, which it does not count itself; 0 if it announces none."""
    first = data[: _mp3_frame_bytes(data[:3])]
    tag = max(first.find(b"Xing"), first.find(b"Info"))
    if tag < 0 or not first[tag + 7] & 1:
        return 0
    return int.from_bytes(first[tag + 8 : tag + 12], "big")
