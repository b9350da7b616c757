"""Updates as words of 32 or 64 bits, which add up modulo 2³² or 2⁶⁴; masks and noise shares are added to them in place.

A word counts cells of the plan's grid, negative ones as two's complement, so that the sum of all words is the sum of
all updates. A word error rate travels in the same way, as a pair of words. Words are little-endian and have no padding.
"""

from dataclasses import replace
from typing import Literal

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray
from torch import Tensor

from sottovoce.base.errors import InvariantError, check_invariant
from sottovoce.flat.layout import Layout
from sottovoce.network.messages import AnswerCode, Refused
from sottovoce.network.secure_sum.terms import SumTerms
from sottovoce.privacy.accounting import Epsilon, epsilon
from sottovoce.privacy.discrete_gaussian import DiscreteGaussian
from sottovoce.privacy.events import repeated
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.randomness import SecureRandom

Words = NDArray[np.uint32] | NDArray[np.uint64]

_MASK_BYTES = 1 << 18  # at a time: keystream and words stay in the cache
_NOISE_WORDS = 1 << 17  # at a time
_ZEROS = bytes(_MASK_BYTES)
_BLOCK = 16


# Between updates and words.


def _word_type(plan: Plan) -> np.dtype[np.signedinteger]:
    check_invariant(plan.sum_bits is not None, "updates over a network without sum_bits")
    return np.dtype("<i4" if plan.sum_bits == 32 else "<i8")


def update_bytes(plan: Plan) -> int:
    return _word_type(plan).itemsize * plan.layout.dimension


def terms_for_plan(terms: SumTerms, plan: Plan) -> SumTerms:
    """`terms` for words under `plan`: a word error rate has another length than an update."""
    return replace(terms, length=plan.layout.dimension, bits=32 if _word_type(plan).itemsize == 4 else 64)


def encode_update(total_P: Tensor, plan: Plan) -> Words:
    """A sum on the plan's grid as words."""
    assert plan.grid is not None
    signed = _word_type(plan)
    words = np.empty(plan.layout.dimension, dtype=signed)
    places = torch.split(torch.from_numpy(words), list(plan.layout.sizes))
    for place, part in zip(places, plan.layout.parts(total_P), strict=True):
        cells = part.cpu() / plan.grid
        place.copy_(cells)
        # Otherwise it would have come out as another number.
        check_invariant(torch.equal(place.to(cells.dtype), cells), "an update off the grid, or too large for a word")
    return words.view(f"<u{signed.itemsize}")


def read_update(payload: bytes, plan: Plan) -> Words:
    """Words as they came; Refused where they are too few or too many."""
    if len(payload) != update_bytes(plan):
        raise Refused(AnswerCode.UNREADABLE)
    return np.frombuffer(payload, dtype=f"<u{_word_type(plan).itemsize}")


def decode_sum(words: Words, plan: Plan) -> Tensor:
    """A sum of words on the plan's grid, [P] in float64; modulo 2⁵³ where float64 holds no more.

    Sums of clipped updates are smaller. No other sum is refused either: that would be an observable difference.
    """
    assert plan.grid is not None
    signed = words.view(_word_type(plan))
    unused = 8 * signed.itemsize - plan.word_bits
    cells = (signed << unused) >> unused  # keeps the sign of what is left
    return fill_flat(torch.from_numpy(cells.astype(np.float64) * plan.grid), plan.layout)


def fill_flat(values: Tensor, layout: Layout) -> Tensor:
    """The parameters of `layout`, given without padding, as a flat vector [P]."""
    flat_P = layout.zeros(dtype=values.dtype)
    for part, own in zip(layout.parts(flat_P), torch.split(values, list(layout.sizes)), strict=True):
        part.copy_(own)
    return flat_P


# What a client adds to its words.


def add_mask(words: Words, key: bytes, *, sign: Literal[1, -1] = 1) -> None:
    """words ± the mask of `key`, in place: AES-256 in counter mode under a key that is used once."""
    keystream = Cipher(algorithms.AES(key), modes.CTR(bytes(_BLOCK))).encryptor()
    buffer = np.empty(_MASK_BYTES + _BLOCK, dtype=np.uint8)
    mask, zeros = buffer[:_MASK_BYTES].view(words.dtype), memoryview(_ZEROS)
    combine = np.add if sign == 1 else np.subtract
    for start in range(0, len(words), len(mask)):
        part = words[start : start + len(mask)]
        keystream.update_into(zeros[: part.nbytes], buffer.data)
        combine(part, mask[: len(part)], out=part)


def add_noise_share(words: Words, *, plan: Plan, terms: SumTerms) -> None:
    """words += this client's share of the noise (`privacy.noise_shares`), in place, modulo 2³² or 2⁶⁴.

    Guarantee: in a sum of `least` survivors or more, `colluding` of whom reveal theirs, the shares of the others are a
    discrete Gaussian of at least honest/needed of the plan's variance, but for e to the `log_gap`.
    """
    agreed = plan.noise_shares
    check_invariant(agreed is not None and terms.least >= agreed.least, "a share of noise for sums of too few")
    check_invariant(plan.sum_bits == terms.bits, f"words of {terms.bits} bits in a plan of {plan.sum_bits}")
    source, random = DiscreteGaussian(variance=plan.noise.share_variance), SecureRandom()
    for start in range(0, len(words), _NOISE_WORDS):
        part = words[start : start + _NOISE_WORDS]
        part += source.draw(len(part), random=random).astype(words.dtype)  # negative numbers wrap around


def epsilon_for_server(plan: Plan, *, rounds: int, delta: float) -> Epsilon:
    """ε of somebody in `rounds` rounds against an honest but curious server, where clients add the noise."""
    event = plan.server_event
    if event is None:
        raise InvariantError("without noise by clients the server sees sums as they are")
    return epsilon(repeated(event, rounds), delta)
