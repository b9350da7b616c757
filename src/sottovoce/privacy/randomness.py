"""Where random draws come from: named streams of a root seed (simulations), or the operating system (releases)."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from sottovoce.base.errors import check_invariant
from sottovoce.base.seeds import derive, stream

Words = Callable[[int], NDArray[np.uint64]]  # as many uniform 64-bit words as asked for

_BLOCK_BYTES = 16
_ZEROS = bytes(1 << 20)


@final
class SecureRandom:
    """AES-256 in counter mode under a key from the operating system: cannot be seeded, copied, pickled or forked.

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


@dataclass(frozen=True)
class RandomSource:
    """The draws of each step of a plan, and of each attempt at it; without a `root_seed` they never repeat."""

    root_seed: int | None

    @property
    def is_seeded(self) -> bool:
        return self.root_seed is not None

    @property
    def _root(self) -> int:
        check_invariant(self.is_seeded, "a release with random draws that repeat")
        assert self.root_seed is not None
        return self.root_seed

    def cohort_words(self, step: int, attempt: int) -> Words:
        """What a sampler draws a cohort with."""
        if not self.is_seeded:
            return SecureRandom().words
        raw = stream(self._root, "cohort", step, *_again(attempt)).bit_generator.random_raw
        return lambda count: raw(count)

    def plugin_cohort(self, step: int, attempt: int) -> np.random.Generator:
        """What a plug-in sampler draws with: in simulations alone."""
        return stream(self._root, "outside cohort", step, *_again(attempt))

    def cohort_nonce(self, step: int) -> bytes:
        """What hides the cohort in the ledger's commitment."""
        return derive(self._root, "cohort nonce", step).to_bytes(8, "little") if self.is_seeded else os.urandom(32)

    def noise_seed(self, step: int, attempt: int) -> int:
        """Counted up: torch's CPU generator keeps 32 bits of a seed, where hashed ones of two steps may meet."""
        return (derive(self._root, "noise", *_again(attempt)) + step) % 2**63

    def count_noise(self, step: int, attempt: int) -> np.random.Generator:
        """For the count of adaptive clipping, in simulations."""
        return stream(self._root, "clip count noise", step, *_again(attempt))


def _again(attempt: int) -> tuple[str | int, ...]:
    """What a later attempt adds to the name of a random stream: its draws must be new ones."""
    return () if attempt == 1 else ("attempt", attempt)
