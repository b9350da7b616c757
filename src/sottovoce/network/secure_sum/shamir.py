"""Shamir's secret sharing, 30 bits at a time: any `threshold` shares give the secret, fewer give nothing of it.

Each piece of the secret is the constant term of a polynomial of its own over the integers modulo p = 2³¹ − 1; a share
holds the values of all of them at one point. In so small a field products fit into 64 bits, so numpy shares a secret
out among a thousand people in tens of milliseconds. What fewer shares tell does not depend on the field's size: for
every secret there are equally many polynomials through them.

Shapes: N points, T threshold, L pieces of the secret.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from sottovoce.base.errors import check_invariant
from sottovoce.privacy.randomness import SecureRandom

PRIME = 2**31 - 1
_PIECE_BITS = 30
Shares = NDArray[np.uint32]


def field_elements(secret_bytes: int) -> int:
    """How many field elements, of four bytes each, a share of so long a secret has."""
    return -(-8 * secret_bytes // _PIECE_BITS)


def split_secret(secret: bytes, *, threshold: int, points: Sequence[int], random: SecureRandom) -> Shares:
    """One share [L] for each of `points`, which are distinct and from 1 to p − 1: [N, L]."""
    check_invariant(
        len(set(points)) == len(points) >= threshold, "shares at points that are equal, or fewer than needed"
    )
    check_invariant(all(0 < point < PRIME for point in points), "a share at zero is the secret itself")
    secret_L = _to_pieces(secret)
    x_N1 = np.array(points, dtype=np.uint64)[:, None]
    shares_NL = np.zeros((len(points), len(secret_L)), dtype=np.uint64)
    for row_L in _uniform(threshold - 1, len(secret_L), random=random):  # Horner's rule, the highest power first
        shares_NL = _reduced((shares_NL + row_L) * x_N1)
    return _canonical(shares_NL + secret_L).astype(np.uint32)


def combine_shares(shares_TL: Shares, *, points: Sequence[int], secret_bytes: int) -> bytes | None:
    """The secret behind `threshold` shares at `points`; None where they are shares of no such secret."""
    weights_T1 = np.array(_weights_at_zero(tuple(points)), dtype=np.uint64)[:, None]
    terms_TL = _reduced(shares_TL.astype(np.uint64) * weights_T1)
    return _from_pieces(_canonical(terms_TL.sum(axis=0)), secret_bytes)


def _to_pieces(secret: bytes) -> NDArray[np.uint64]:
    number = int.from_bytes(secret)
    mask = (1 << _PIECE_BITS) - 1
    return np.array([number >> _PIECE_BITS * i & mask for i in range(field_elements(len(secret)))], dtype=np.uint64)


def _from_pieces(pieces_L: NDArray[np.uint64], secret_bytes: int) -> bytes | None:
    if (pieces_L >> _PIECE_BITS).any():
        return None
    number = sum(int(piece) << _PIECE_BITS * i for i, piece in enumerate(pieces_L))
    return number.to_bytes(secret_bytes) if number >> 8 * secret_bytes == 0 else None


def _uniform(rows: int, columns: int, *, random: SecureRandom) -> NDArray[np.uint64]:
    """Uniform elements of the field: p itself, which 31 bits can also say, is drawn again."""
    drawn = random.words(rows * columns) >> np.uint64(33)
    while len(again := np.flatnonzero(drawn == PRIME)):
        drawn[again] = random.words(len(again)) >> np.uint64(33)
    return drawn.reshape(rows, columns)


def _reduced(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Values below 2⁶³ modulo p, up to one p too many: 2³¹ is 1 there, so that high bits count as low ones."""
    once = (values & PRIME) + (values >> 31)
    return (once & PRIME) + (once >> 31)


def _canonical(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    return values % PRIME


@lru_cache(maxsize=4096)
def _weights_at_zero(points: tuple[int, ...]) -> tuple[int, ...]:
    """Lagrange's weights: the value at zero is their product with the values at `points`."""
    x_T = np.array(points, dtype=np.uint64)
    above_T, below_T = np.ones_like(x_T), np.ones_like(x_T)
    for i, x in enumerate(points):
        others_T = np.arange(len(points)) != i
        above_T[others_T] = _reduced(above_T[others_T] * np.uint64(x))
        below_T[others_T] = _reduced(below_T[others_T] * ((PRIME + x - x_T[others_T]) % PRIME))
    return tuple(int(a) * pow(int(b), -1, PRIME) % PRIME for a, b in zip(above_T, below_T, strict=True))
