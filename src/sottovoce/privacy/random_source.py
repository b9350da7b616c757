"""Where a plan's random draws come from: named streams of a root seed, or the operating system's entropy."""

import os
from dataclasses import dataclass

import numpy as np

from sottovoce.base.errors import ensure
from sottovoce.base.seeds import derive, stream
from sottovoce.privacy.sampling import Words
from sottovoce.privacy.secure_random import SecureRandom


@dataclass(frozen=True)
class RandomSource:
    """Draws of each step, and of each attempt at it; without a `root_seed` they never repeat."""

    root_seed: int | None

    @property
    def seeded(self) -> bool:
        return self.root_seed is not None

    @property
    def _root(self) -> int:
        ensure(self.seeded, "a release with random draws that repeat")
        assert self.root_seed is not None
        return self.root_seed

    def cohort_words(self, step: int, attempt: int) -> Words:
        """What a sampler draws a cohort with."""
        if not self.seeded:
            return SecureRandom().words
        raw = stream(self._root, "cohort", step, *_again(attempt)).bit_generator.random_raw
        return lambda count: raw(count)

    def outside_cohort(self, step: int, attempt: int) -> np.random.Generator:
        """What a sampler from outside draws with: in simulations alone."""
        return stream(self._root, "outside cohort", step, *_again(attempt))

    def cohort_nonce(self, step: int) -> bytes:
        """What hides the cohort in the ledger's commitment."""
        return derive(self._root, "cohort nonce", step).to_bytes(8, "little") if self.seeded else os.urandom(32)

    def noise_seed(self, step: int, attempt: int) -> int:
        """Counted up: torch's CPU generator keeps 32 bits of a seed, where hashed ones of two steps may meet."""
        return (derive(self._root, "noise", *_again(attempt)) + step) % 2**63

    def count_noise(self, step: int, attempt: int) -> np.random.Generator:
        """For the count of adaptive clipping, in simulations."""
        return stream(self._root, "clip count noise", step, *_again(attempt))


def _again(attempt: int) -> tuple[str | int, ...]:
    """What a later attempt adds to the name of a random stream: its draws must be new ones."""
    return () if attempt == 1 else ("attempt", attempt)
