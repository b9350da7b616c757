"""What both sides of a secure sum know: its terms, its phases, who is in it, and who shares masks with whom.

A person is a place in the roster. Nothing here is secret, and everything from the other side is checked.
"""

import hashlib
import struct
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from itertools import pairwise
from typing import Literal

import numpy as np
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from sottovoce.base.errors import InputError
from sottovoce.base.signatures import SIGNATURE_BYTES, PublicKey, verified

KEY_BYTES = 32
_ADVERT = struct.Struct(f"<I{KEY_BYTES}s{KEY_BYTES}s{SIGNATURE_BYTES}s")
ADVERT_BYTES = _ADVERT.size - 4
FEWEST = 3  # of two, each knows the other's from the sum


class Phase(IntEnum):
    """In the order in which they come; each is one order to a client, and one answer."""

    KEYS = 1  # nothing → two public keys, signed
    SHARES = 2  # everybody's keys → shares of two secrets, sealed for others
    MASKED = 3  # shares from others → the masked vector
    SURVIVORS = 4  # who has sent shares, and who a vector → a signature under both lists
    UNMASK = 5  # others' signatures under the same lists → shares of what must be taken off


class Reason(IntEnum):
    """Why there is no answer, or no sum."""

    OUT_OF_TURN = 1  # asked for the same again, or for something else first
    UNREADABLE = 2  # not of the layout, or not about people who are in it
    TOO_FEW = 3  # fewer than the threshold, or than was accepted
    FORGED = 4  # not signed or sealed by whom it should be, or for another attempt
    DISAGREEMENT = 5  # lists that do not fit each other, or that others have not signed
    WRONG_SHARES = 6  # they open nothing that was committed to


class SumError(Exception):
    def __init__(self, why: Reason) -> None:
        super().__init__(why.name.lower())
        self.why = why


class Unsafe(SumError):
    """A client goes no further in this attempt, and has forgotten its secrets."""


class NoSum(SumError):
    """A server cannot open this attempt's sum, nor will it ever."""


@dataclass(frozen=True, kw_only=True)
class SumTerms:
    """What a client has accepted; every key, signature and seal is bound to it.

    Sums of fewer than `least` people are not opened. `neighbours` is how many others each one shares masks with (None:
    all; `secure_sum.neighbours` says how few are enough). Vectors have `length` words of `bits` bits.
    """

    roster: tuple[PublicKey, ...]
    least: int
    length: int
    bits: Literal[32, 64] = 32
    neighbours: int | None = None

    def __post_init__(self) -> None:
        if not FEWEST <= self.least <= len(self.roster):
            raise InputError(f"least={self.least}: expected from {FEWEST} people to the roster's {len(self.roster)}")
        if self.length < 1 or self.bits not in (32, 64):
            raise InputError(f"length={self.length}, bits={self.bits}: expected at least 1 word, of 32 or 64 bits")
        if self.neighbours is not None and (self.neighbours < FEWEST or self.neighbours % 2):
            raise InputError(f"neighbours={self.neighbours}: expected an even number, at least {FEWEST + 1}")
        if len(set(self.names)) != len(self.roster):
            raise InputError("a public key is twice in the roster: expected one for each person")

    @cached_property
    def names(self) -> tuple[bytes, ...]:
        """SHA-256 of each public key."""
        encoded = (key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo) for key in self.roster)
        return tuple(hashlib.sha256(key).digest() for key in encoded)

    @cached_property
    def digest(self) -> bytes:
        numbers = struct.pack("<IQII", self.least, self.length, self.bits, self.neighbours or 0)
        return hashlib.sha256(b"sottovoce secure sum 1" + numbers + b"".join(self.names)).digest()

    @property
    def dtype(self) -> np.dtype[np.uint32] | np.dtype[np.uint64]:
        return np.dtype("<u4") if self.bits == 32 else np.dtype("<u8")


def share_threshold(group_size: int) -> int:
    """How many of a group can open a secret shared in it: more than two thirds.

    Everybody reveals a share of one of a person's two secrets. So opening both takes two sets of this size, with more
    than a third of the group in common: people who collude.
    """
    return 2 * group_size // 3 + 1


@dataclass(frozen=True, kw_only=True)
class SumAttempt:
    """One attempt at one step of one run. `context` is in everything that is signed, sealed or derived.

    Where groups take turns it is that of the places `members`, at `row`: nobody else is in it.
    """

    terms: SumTerms
    run: bytes
    step: int
    attempt: int
    row: int | None = None
    members: frozenset[int] | None = None

    @cached_property
    def context(self) -> bytes:
        numbers = struct.pack("<III", len(self.run), self.step, self.attempt)
        turn = b"" if self.row is None else struct.pack("<Q", self.row)
        return hashlib.sha256(self.terms.digest + numbers + self.run + turn).digest()

    @property
    def places(self) -> Collection[int]:
        """Who may be in it."""
        return range(len(self.terms.roster)) if self.members is None else self.members

    def advert(self, place: int, mask_key: bytes, channel_key: bytes) -> bytes:
        return b"keys" + self.context + struct.pack("<I", place) + mask_key + channel_key

    def has_signed_keys(self, place: int, advert: bytes) -> bool:
        """Whether the person at `place` of the roster has signed the keys in `advert`."""
        mask_key, channel_key, signature = advert[:32], advert[32:64], advert[64:]
        return verified(self.terms.roster[place], self.advert(place, mask_key, channel_key), signature)


@dataclass(frozen=True)
class Cohort:
    """Everybody who has sent keys in an attempt, as everybody is shown it. `listing` is how it travels."""

    attempt: SumAttempt
    adverts: dict[int, bytes]  # by place, ascending: mask key, channel key, signature
    _groups: dict[int, tuple[int, ...]] = field(default_factory=dict, repr=False)  # those that were asked for

    @classmethod
    def read(cls, listing: bytes, attempt: SumAttempt) -> "Cohort":
        """Checks the layout and the places, not the signatures (`has_signed_keys`)."""
        if len(listing) % _ADVERT.size or len(listing) > _ADVERT.size * len(attempt.terms.roster):
            raise Unsafe(Reason.UNREADABLE)
        rows = [(row[0], b"".join(row[1:])) for row in _ADVERT.iter_unpack(listing)]
        check_places([place for place, _ in rows], among=attempt.places)
        if len({row[:32] for _, row in rows} | {row[32:64] for _, row in rows}) != 2 * len(rows):
            raise Unsafe(Reason.FORGED)  # whoever takes another's key for their own
        return cls(attempt, dict(rows))

    @cached_property
    def listing(self) -> bytes:
        return b"".join(struct.pack("<I", place) + advert for place, advert in self.adverts.items())

    @cached_property
    def session(self) -> bytes:
        """Binds all that follows to this very list."""
        return hashlib.sha256(self.attempt.context + self.listing).digest()

    @cached_property
    def places(self) -> tuple[int, ...]:
        return tuple(self.adverts)

    def mask_key(self, place: int) -> bytes:
        return self.adverts[place][:32]

    def channel_key(self, place: int) -> bytes:
        return self.adverts[place][32:64]

    @cached_property
    def _ring(self) -> tuple[tuple[int, ...], dict[int, int]]:
        """Everybody in an order that follows from all their keys, and where each one stands in it."""
        ring = tuple(
            sorted(self.places, key=lambda place: hashlib.sha256(self.session + pack_row(place, b"")).digest())
        )
        return ring, {place: position for position, place in enumerate(ring)}

    def group(self, place: int) -> tuple[int, ...]:
        """Who shares masks with `place` and holds its shares, itself included, ascending: its part of the ring."""
        neighbours = self.attempt.terms.neighbours
        if neighbours is None or len(self.places) <= neighbours + 1:
            return self.places
        if place not in self._groups:
            ring, position_of = self._ring
            start = position_of[place] - neighbours // 2
            self._groups[place] = tuple(sorted(ring[i % len(ring)] for i in range(start, start + neighbours + 1)))
        return self._groups[place]

    def bitmap(self, members: Collection[int]) -> bytes:
        return np.packbits([place in members for place in self.places]).tobytes()

    def members(self, bitmap: bytes) -> frozenset[int]:
        """The people of a `bitmap`; Unsafe where it is none of this cohort."""
        flags = np.unpackbits(np.frombuffer(bitmap, dtype=np.uint8))
        if len(flags) != 8 * -(-len(self.places) // 8) or flags[len(self.places) :].any():
            raise Unsafe(Reason.UNREADABLE)
        return frozenset(place for place, flag in zip(self.places, flags.tolist(), strict=False) if flag)

    def survivors_statement(self, shared: Collection[int], survived: Collection[int]) -> bytes:
        """What survivors sign: who has sent shares, and who of them a vector."""
        return b"survivors" + self.session + self.bitmap(shared) + self.bitmap(survived)


def check_places(places: list[int], *, among: Collection[int]) -> None:
    """Unsafe unless they are ascending, so nobody is named twice, and all of them are `among` these."""
    ascending = all(one < following for one, following in pairwise(places))
    if not ascending or not all(place in among for place in places):
        raise Unsafe(Reason.UNREADABLE)


def unpack_rows(data: bytes, size: int) -> dict[int, bytes]:
    """`size` bytes for each place; Unsafe where the layout is another, or somebody is named twice."""
    if len(data) % (4 + size):
        raise Unsafe(Reason.UNREADABLE)
    rows = list(struct.iter_unpack(f"<I{size}s", data))
    if len(found := dict(rows)) != len(rows):
        raise Unsafe(Reason.UNREADABLE)
    return found


def pack_row(place: int, data: bytes) -> bytes:
    return struct.pack("<I", place) + data
