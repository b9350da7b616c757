"""Random words that nobody can predict or repeat: AES-256 in counter mode under a key from the operating system."""

import os
from typing import final

import numpy as np
from numpy.typing import NDArray

_BLOCK_BYTES = 16
_ZEROS = bytes(1 << 20)


@final
class SecureRandom:
    """A cryptographic generator that cannot be seeded, copied, pickled or shared with a forked process.

    Guarantee: telling its words from uniform ones is as hard as breaking AES-256, as long as the operating system's
    entropy is good. The key is drawn anew for every generator and in every process, and never leaves it.
    """

    def __init__(self) -> None:
        self._rekey()

    def _rekey(self) -> None:
        # Here and not above: simulations, which are nearly all runs, never need it.
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        self._process = os.getpid()
        cipher = Cipher(algorithms.AES(os.urandom(32)), modes.CTR(os.urandom(_BLOCK_BYTES)))
        self._keystream = cipher.encryptor()

    def words(self, count: int) -> NDArray[np.uint64]:
        """`count` independent uniform 64-bit words, none of which was given out before."""
        if os.getpid() != self._process:
            self._rekey()  # a fork would give both processes the same words
        buffer = bytearray(8 * count + _BLOCK_BYTES)
        window = memoryview(buffer)
        for start in range(0, 8 * count, len(_ZEROS)):
            size = min(len(_ZEROS), 8 * count - start)
            self._keystream.update_into(memoryview(_ZEROS)[:size], window[start : start + size + _BLOCK_BYTES])
        return np.frombuffer(buffer, dtype=np.uint64, count=count)

    def __reduce__(self) -> str:
        raise TypeError("a SecureRandom cannot be copied: two copies would give out the same words")
