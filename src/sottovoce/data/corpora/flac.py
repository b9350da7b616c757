"""Speech that stays where it is: a store may point into the corpus's own FLAC files instead of copying them.

Nothing is decoded to find out that a file is whole: its header announces how many samples it has (and their MD5), and
its last frame says which sample it ends with and carries a checksum of itself: two reads for a chapter of half an hour.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b, md5
from typing import BinaryIO

import numpy as np
import soundfile
from numpy.typing import NDArray

from sottovoce.data.corpora.corpus import SAMPLE_RATE, AudioFile, ProblemKind, Unusable

_END_BYTES = 4096
_HEADER_BYTES = 42  # "fLaC", the head of the first block, which is STREAMINFO, and its 34 bytes
_LARGEST_FRAME = 1 << 17  # where the header does not say; 16 bits, mono, 65,535 samples
_BLOCK_SAMPLES = 1 << 22


class FileChanged(Exception):
    """A file that is not what it was when the store was prepared, and what is different."""


@dataclass(frozen=True, slots=True)
class _StreamInfo:
    """What the first block of a FLAC file says of it."""

    block_samples: int
    largest_frame: int
    samples: int
    md5: bytes


def point_into(path: str, *, name: str) -> AudioFile:
    """The file at `path`, to be known as `name`; `Unusable` where it is not whole, or would have to be converted."""
    with open(path, "rb") as file:
        info = _stream_info(file.read(_HEADER_BYTES))
        size = os.fstat(file.fileno()).st_size
        if not _ends_whole(file, size, info):  # it breaks off; or something else stands behind the sound
            try:
                check_samples(path)
            except FileChanged as reason:
                raise Unusable(ProblemKind.TRUNCATED_AUDIO, str(reason)) from None
        return AudioFile(name, size, info.samples, _ends(file, size))


def check_unchanged(path: str, known: AudioFile) -> None:
    """`FileChanged` where the file at `path` is another than the one that was pointed into."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size != known.bytes:
            raise FileChanged(f"it has {size:,} bytes, expected {known.bytes:,}")
        if _ends(file, size) != known.ends:
            raise FileChanged("its beginning or its end is another")


def read_span(path: str, start: int, length: int) -> NDArray[np.int16]:
    """Samples of the file at `path`; `FileChanged` where they cannot be decoded."""
    try:
        with soundfile.SoundFile(os.fsencode(path)) as file:
            file.seek(start)
            samples: NDArray[np.int16] = file.read(length, dtype="int16")
    except soundfile.LibsndfileError as error:
        raise FileChanged(f"it cannot be decoded at sample {start:,}: {error.error_string}") from None
    if len(samples) != length:
        raise FileChanged(f"decoding stops at sample {start + len(samples):,} of {start + length:,}")
    samples.flags.writeable = False
    return samples


def check_samples(path: str) -> None:
    """Decode the whole file at `path`; `FileChanged` where its samples are not those of the MD5 in its header."""
    with open(path, "rb") as opened:
        info = _stream_info(opened.read(_HEADER_BYTES))
    found, count = md5(usedforsecurity=False), 0
    for samples in _blocks(path):
        found.update(samples.astype("<i2", copy=False).tobytes())
        count += len(samples)
    if count != info.samples:
        raise FileChanged(f"decoding stops at sample {count:,} of {info.samples:,}")
    if any(info.md5) and found.digest() != info.md5:  # some encoders leave it out
        raise FileChanged("its samples are not those of the MD5 in its header")


def _blocks(path: str) -> Iterator[NDArray[np.int16]]:
    try:
        with soundfile.SoundFile(os.fsencode(path)) as file:
            while len(samples := np.asarray(file.read(_BLOCK_SAMPLES, dtype="int16"))):
                yield samples
    except soundfile.LibsndfileError as error:
        raise FileChanged(f"it cannot be decoded: {error.error_string}") from None


def _ends(file: BinaryIO, size: int) -> str:
    found = blake2b(digest_size=16)
    for start in (0, max(0, size - _END_BYTES)):
        file.seek(start)
        found.update(file.read(_END_BYTES))
    return found.hexdigest()


def _stream_info(head: bytes) -> _StreamInfo:
    if head[:4] != b"fLaC":
        raise Unusable(ProblemKind.NOT_AS_STORED, "not FLAC")
    if len(head) < _HEADER_BYTES:
        raise Unusable(ProblemKind.TRUNCATED_AUDIO, "its header breaks off")
    block = head[8:_HEADER_BYTES]
    packed = int.from_bytes(block[10:18], "big")  # rate: 20 bits, channels - 1: 3, bits - 1: 5, samples: 36
    rate, channels, bits = packed >> 44, (packed >> 41 & 7) + 1, (packed >> 36 & 31) + 1
    samples = packed & (1 << 36) - 1
    if (rate, channels, bits) != (SAMPLE_RATE, 1, 16):
        raise Unusable(ProblemKind.NOT_AS_STORED, f"{rate} Hz, {channels} channels, {bits} bits")
    if not samples:
        raise Unusable(ProblemKind.NOT_AS_STORED, "its header gives no length")
    return _StreamInfo(
        block_samples=int.from_bytes(block[:2], "big"),
        largest_frame=int.from_bytes(block[7:10], "big") or _LARGEST_FRAME,
        samples=samples,
        md5=block[18:],
    )


def _ends_whole(file: BinaryIO, size: int, info: _StreamInfo) -> bool:
    """Whether the last frame reaches the last sample and the file's end, and is undamaged."""
    file.seek(max(0, size - info.largest_frame))
    tail = file.read()
    at = len(tail)
    while (at := tail.rfind(b"\xff", 0, at)) >= 0:
        if _last_sample(tail[at : at + 20], info) == info.samples and _crc(tail[at:], bits=16, polynomial=0x8005) == 0:
            return True
    return False


def _last_sample(head: bytes, info: _StreamInfo) -> int | None:
    """How many samples end with the frame that begins with `head`; None if none does (RFC 9639, section 9.1)."""
    if len(head) < 6 or head[1] & 0xFE != 0xF8:
        return None
    block_code, rate_code, leading = head[2] >> 4, head[2] & 15, head[4]
    ones = 8 - (leading ^ 0xFF).bit_length()  # how many bytes the number has, as in UTF-8, but up to seven
    number_bytes = ones or 1
    number = leading & (0xFF >> (ones + 1) if ones else 0x7F)
    for byte in head[5 : 4 + number_bytes]:
        number = number << 6 | byte & 0x3F
    at = 4 + number_bytes
    if block_code in (6, 7):
        more = block_code - 5
        block = int.from_bytes(head[at : at + more], "big") + 1
        at += more
    else:
        block = 192 if block_code == 1 else 144 << block_code if block_code < 6 else 1 << block_code
    at += {12: 1, 13: 2, 14: 2}.get(rate_code, 0)
    if ones == 1 or at >= len(head) or _crc(head[: at + 1], bits=8, polynomial=0x07):
        return None
    return (number if head[1] & 1 else number * info.block_samples) + block


def _crc(data: bytes, *, bits: int, polynomial: int) -> int:
    """The cyclic redundancy check of FLAC: 0 for data that ends with its own."""
    table, shift, mask = _crc_table(bits, polynomial), bits - 8, (1 << bits) - 1
    found = 0
    for byte in data:
        found = (found << 8 & mask) ^ table[found >> shift ^ byte]
    return found


@cache
def _crc_table(bits: int, polynomial: int) -> list[int]:
    table = []
    for value in range(256):
        found = value << (bits - 8)
        for _ in range(8):
            found = (found << 1) ^ polynomial * (found >> (bits - 1))
            found &= (1 << bits) - 1
        table.append(found)
    return table
