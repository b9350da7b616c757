"""Masks: AES-256 in counter mode under a key that is used once, added word by word modulo 2³² or 2⁶⁴."""

from typing import Literal

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

Words = NDArray[np.uint32] | NDArray[np.uint64]

_CHUNK = 1 << 18  # bytes: keystream and words stay in the cache between being made and being added
_ZEROS = bytes(_CHUNK)
_BLOCK = 16


def add_mask(words: Words, key: bytes, *, sign: Literal[1, -1] = 1) -> None:
    """words ± the mask of `key`, in place."""
    keystream = Cipher(algorithms.AES(key), modes.CTR(bytes(_BLOCK))).encryptor()
    buffer = np.empty(_CHUNK + _BLOCK, dtype=np.uint8)
    mask, zeros = buffer[:_CHUNK].view(words.dtype), memoryview(_ZEROS)
    combine = np.add if sign == 1 else np.subtract
    for start in range(0, len(words), len(mask)):
        part = words[start : start + len(mask)]
        keystream.update_into(zeros[: part.nbytes], buffer.data)
        combine(part, mask[: len(part)], out=part)
