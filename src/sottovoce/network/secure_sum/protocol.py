"""Secure aggregation: Bonawitz et al. (2017), in its form against a malicious server.

    client u: x_u + m(b_u) + Σ_{v>u} m(s_uv) − Σ_{v<u} m(s_uv)   modulo 2³² or 2⁶⁴

m is a mask (`words.add_mask`); s_uv comes from the mask keys of u and v, b_u is u's own. Masks of pairs cancel in the
sum. What remains is m(b_u) of those who stayed and the pairs of those who went after sharing: both are removed with
shares that everybody's neighbours hold (`shamir`). A neighbour reveals a share of b_u or of u's mask key, never of
both, because both would reveal x_u. Which of the two is decided by lists that more than two thirds of a group signed.

Client and server are state machines: bytes in, bytes out. A client keeps its secrets in memory alone, until it is done
or refuses. decisions/024 has the threats and the parameters.
"""

import hashlib
import os
import struct
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, final

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from sottovoce.base.errors import check_invariant
from sottovoce.base.signatures import SIGNATURE_BYTES, verified
from sottovoce.network.secure_sum import shamir
from sottovoce.network.secure_sum.terms import (
    ADVERT_BYTES,
    KEY_BYTES,
    Cohort,
    NoSum,
    Phase,
    Reason,
    SumAttempt,
    Unsafe,
    check_places,
    pack_row,
    share_threshold,
    unpack_rows,
)
from sottovoce.network.secure_sum.words import Words, add_mask
from sottovoce.privacy.randomness import SecureRandom

_PIECES = shamir.field_elements(KEY_BYTES)
_SHARE_BYTES = 4 * _PIECES  # of one secret
_SEALED_BYTES = 2 * _SHARE_BYTES + 16  # of both, and the seal
_COMMITMENT_BYTES = 32
_NONCE = bytes(12)  # every key seals one message


@final
class SumClient:
    """One client's part in one attempt. Every phase once and in turn; `Unsafe` ends it.

    `sign` is the node's signature (96 bytes). `remember` is called before a masked vector and before shares leave: it
    writes to the disk that they were sent, and raises where they were before, so that no restart answers twice.
    """

    def __init__(
        self, attempt: SumAttempt, *, place: int, sign: Callable[[bytes], bytes], remember: Callable[[Phase], None]
    ) -> None:
        self._attempt, self._place, self._sign, self._remember = attempt, place, sign, remember
        self._secrets: _Secrets | None = _Secrets()
        self._next = Phase.KEYS
        self._held: dict[int, bytes] = {}  # by neighbour: a share of its mask key, and one of its b
        self._survivors: frozenset[int] = frozenset()

    def keys(self) -> bytes:
        """Two new public keys, signed."""
        with self._turn(Phase.KEYS) as secrets:
            keys = (secrets.mask.public_key().public_bytes_raw(), secrets.channel.public_key().public_bytes_raw())
            self._advert = b"".join(keys) + self._sign(self._attempt.advert(self._place, *keys))
            return self._advert

    def shares(self, order: bytes) -> bytes:
        """Everybody's keys → a commitment to b_u, and for each neighbour a share of the mask key and of b_u, sealed."""
        with self._turn(Phase.SHARES) as secrets:
            cohort = Cohort.read(order, self._attempt)
            if cohort.adverts.get(self._place) != self._advert:
                raise Unsafe(Reason.DISAGREEMENT)
            if len(cohort.places) < self._attempt.terms.least:
                raise Unsafe(Reason.TOO_FEW)
            self._cohort, self._group = cohort, cohort.group(self._place)
            others = [place for place in self._group if place != self._place]
            if not all(self._attempt.has_signed_keys(place, cohort.adverts[place]) for place in others):
                raise Unsafe(Reason.FORGED)
            secrets.common = {place: _exchange(secrets.channel, cohort.channel_key(place)) for place in others}
            rows = dict(zip(self._group, _split(secrets, self._group), strict=True))
            self._held = {self._place: rows[self._place]}
            sealed = (
                _seal(cohort, secrets.common[place], self._place, place).encrypt(_NONCE, rows[place], None)
                for place in others
            )
            return _commitment(cohort, self._place, secrets.own) + b"".join(sealed)

    def masked(self, order: bytes, words: Words) -> bytes:
        """Neighbours' sealed shares → `words`, masked."""
        with self._turn(Phase.MASKED) as secrets:
            terms, own = self._attempt.terms, self._place
            check_invariant(
                words.shape == (terms.length,) and words.dtype == terms.dtype, "a vector of another length or kind"
            )
            received = unpack_rows(order, _SEALED_BYTES)
            check_places(list(received), among=secrets.common)
            self._check_enough(len(received) + 1)
            for place, sealed in received.items():
                try:
                    seal = _seal(self._cohort, secrets.common[place], place, own)
                    self._held[place] = seal.decrypt(_NONCE, sealed, None)
                except InvalidTag:
                    raise Unsafe(Reason.FORGED) from None
            self._remember(Phase.MASKED)
            masked = words.copy()
            add_mask(masked, _self_mask(self._cohort, own, secrets.own))
            for place in received:
                add_mask(masked, _pair_mask(self._cohort, secrets.mask, own, place), sign=_direction(own, place))
            return masked.tobytes()

    def survivors(self, order: bytes) -> bytes:
        """Who has sent shares, and who a vector → a signature under both lists."""
        with self._turn(Phase.SURVIVORS):
            half = len(order) // 2
            shared, survived = self._cohort.members(order[:half]), self._cohort.members(order[half:])
            if not survived <= shared or self._place not in survived or shared & {*self._group} != {*self._held}:
                raise Unsafe(Reason.DISAGREEMENT)
            if len(survived) < self._attempt.terms.least:
                raise Unsafe(Reason.TOO_FEW)
            self._check_enough(len(survived & self._held.keys()))
            self._survivors, self._statement = survived, self._cohort.survivors_statement(shared, survived)
            return self._sign(self._statement)

    def unmask(self, order: bytes) -> bytes:
        """Neighbours' signatures under the same lists → a share of each neighbour's b, or mask key where it went."""
        with self._turn(Phase.UNMASK):
            signatures = unpack_rows(order, SIGNATURE_BYTES)
            check_places(list(signatures), among=self._survivors & self._held.keys())
            self._check_enough(len(signatures))
            roster = self._attempt.terms.roster
            if not all(verified(roster[place], self._statement, one) for place, one in signatures.items()):
                raise Unsafe(Reason.DISAGREEMENT)
            self._remember(Phase.UNMASK)
            return b"".join(
                held[_SHARE_BYTES:] if place in self._survivors else held[:_SHARE_BYTES]
                for place, held in sorted(self._held.items())
            )

    @contextmanager
    def _turn(self, phase: Phase) -> Iterator["_Secrets"]:
        """After an error in a phase, and after the last one, the client has no secrets any more."""
        secrets, self._secrets = self._secrets, None
        if secrets is None or self._next is not phase:
            self._held = {}
            raise Unsafe(Reason.OUT_OF_TURN)
        try:
            yield secrets
        except BaseException:
            self._held = {}
            raise
        if phase is Phase.UNMASK:
            self._held = {}
        else:
            self._secrets, self._next = secrets, Phase(phase + 1)

    def _check_enough(self, count: int) -> None:
        if count < share_threshold(len(self._group)):
            raise Unsafe(Reason.TOO_FEW)


@final
class _Secrets:
    """What masks a vector: drawn for one attempt, and never written anywhere."""

    def __init__(self) -> None:
        self.mask, self.channel = X25519PrivateKey.generate(), X25519PrivateKey.generate()
        self.own = os.urandom(KEY_BYTES)  # b_u
        self.common: dict[int, bytes] = {}  # with each neighbour: what its channel key and ours give


@dataclass(frozen=True)
class OpenedSum:
    """A sum, and of whom it is. Private, as all sums before the noise are."""

    total: Words
    survivors: tuple[int, ...]


@final
class SumServer:
    """The server's part in one attempt: `begin`, then `take` answers and `advance`, until there are no more orders.

    A wrong answer counts as none. `NoSum` where too few are left, or shares open nothing.
    """

    def __init__(self, attempt: SumAttempt) -> None:
        self._attempt = attempt
        self._total = np.zeros(attempt.terms.length, dtype=attempt.terms.dtype)
        self._keys: set[bytes] = set()
        self._probe = X25519PrivateKey.generate()
        self._answers: dict[int, bytes] = {}
        self._shared: dict[int, bytes] = {}
        self._survived: frozenset[int] = frozenset()
        self.opened: OpenedSum | None = None

    def begin(self, places: Collection[int]) -> dict[int, bytes]:
        """The orders to those who are asked for keys."""
        return self._ask(Phase.KEYS, dict.fromkeys(sorted(places), b""))

    def _ask(self, phase: Phase, orders: dict[int, bytes]) -> dict[int, bytes]:
        if len(orders) < self._attempt.terms.least:
            raise NoSum(Reason.TOO_FEW)
        self.phase, self._asked, self._answers = phase, orders.keys(), {}
        return orders

    def take(self, place: int, answer: bytes) -> bool:
        """One answer of the phase; whether it was right. Vectors are added up as they come, and not kept."""
        if place not in self._asked or place in self._answers or not self._is_right(place, answer):
            return False
        if self.phase is Phase.MASKED:
            self._total += np.frombuffer(answer, dtype=self._total.dtype)
            answer = b""
        self._answers[place] = answer
        return True

    @property
    def largest_answer(self) -> int:
        """How many bytes an answer of this phase can have, whoever gives it."""
        return max(self._size(place) for place in self._asked)

    def _size(self, place: int) -> int:
        """How many bytes the answer of `place` has."""
        match self.phase:
            case Phase.KEYS:
                return ADVERT_BYTES
            case Phase.SHARES:
                return _COMMITMENT_BYTES + _SEALED_BYTES * (len(self._cohort.group(place)) - 1)
            case Phase.MASKED:
                return self._total.nbytes
            case Phase.SURVIVORS:
                return SIGNATURE_BYTES
            case Phase.UNMASK:
                return _SHARE_BYTES * len(self._held_by(place))

    def _is_right(self, place: int, answer: bytes) -> bool:
        if len(answer) != self._size(place):
            return False
        if self.phase is Phase.KEYS:
            keys = {answer[:KEY_BYTES], answer[KEY_BYTES : 2 * KEY_BYTES]}
            return self._attempt.has_signed_keys(place, answer) and self._new_keys(keys)
        if self.phase is Phase.SURVIVORS:
            return verified(self._attempt.terms.roster[place], self._statement, answer)
        return True

    def _new_keys(self, keys: set[bytes]) -> bool:
        """Whether clients will take these keys: one who sends another's, or none, must not stop all of them."""
        try:
            usable = len(keys) == 2 and not keys & self._keys and all(_exchange(self._probe, key) for key in keys)
        except Unsafe:
            return False
        self._keys |= keys if usable else set()
        return usable

    def _held_by(self, place: int) -> list[int]:
        """Whose shares `place` holds, in the order in which it hands them over."""
        return [one for one in self._cohort.group(place) if one in self._shared]

    def advance(self) -> dict[int, bytes]:
        """Close the phase: who has not answered is out. The orders of the next one; none after the last."""
        answers = dict(sorted(self._answers.items()))
        match self.phase:
            case Phase.KEYS:
                self._cohort = Cohort(self._attempt, answers)
                return self._ask(Phase.SHARES, dict.fromkeys(answers, self._cohort.listing))
            case Phase.SHARES:
                self._shared = answers
                return self._ask(Phase.MASKED, self._deliveries())
            case Phase.MASKED:
                self._survived = frozenset(answers)
                self._statement = self._cohort.survivors_statement(self._shared, self._survived)
                lists = self._cohort.bitmap(self._shared) + self._cohort.bitmap(self._survived)
                return self._ask(Phase.SURVIVORS, dict.fromkeys(answers, lists))
            case Phase.SURVIVORS:
                return self._ask(Phase.UNMASK, {place: self._signatures(place) for place in answers})
            case Phase.UNMASK:
                self._open()
                return {}

    def _deliveries(self) -> dict[int, bytes]:
        """Everybody's sealed shares, by whom they are for."""
        deliveries: dict[int, list[bytes]] = {place: [] for place in self._shared}
        for sender, answer in self._shared.items():
            others = [place for place in self._cohort.group(sender) if place != sender]
            for start, receiver in zip(range(_COMMITMENT_BYTES, len(answer), _SEALED_BYTES), others, strict=True):
                if receiver in deliveries:
                    deliveries[receiver].append(pack_row(sender, answer[start : start + _SEALED_BYTES]))
        return {place: b"".join(rows) for place, rows in deliveries.items()}

    def _signatures(self, place: int) -> bytes:
        """As many of its group's signatures as a client needs to see: each takes it some time."""
        group = self._cohort.group(place)
        signers = [one for one in group if one in self._answers][: share_threshold(len(group))]
        return b"".join(pack_row(one, self._answers[one]) for one in signers)

    def _open(self) -> None:
        """Remove the masks of those who stayed, and of pairs with those who went after sharing."""
        held = {
            place: dict(zip(self._held_by(place), np.frombuffer(answer, "<u4").reshape(-1, _PIECES), strict=True))
            for place, answer in self._answers.items()
        }
        for place, shared in self._shared.items():
            group = self._cohort.group(place)
            holders = [one for one in group if one in held][: share_threshold(len(group))]
            if len(holders) < share_threshold(len(group)):
                raise NoSum(Reason.TOO_FEW)
            shares = np.stack([held[one][place] for one in holders])
            secret = shamir.combine_shares(shares, points=[one + 1 for one in holders], secret_bytes=KEY_BYTES)
            if secret is None:
                raise NoSum(Reason.WRONG_SHARES)
            if place in self._survived:
                if _commitment(self._cohort, place, secret) != shared[:_COMMITMENT_BYTES]:
                    raise NoSum(Reason.WRONG_SHARES)
                add_mask(self._total, _self_mask(self._cohort, place, secret), sign=-1)
            else:
                self._remove_pair_masks(place, X25519PrivateKey.from_private_bytes(secret))
        self.opened = OpenedSum(self._total, tuple(sorted(self._survived)))

    def _remove_pair_masks(self, gone: int, key: X25519PrivateKey) -> None:
        if key.public_key().public_bytes_raw() != self._cohort.mask_key(gone):
            raise NoSum(Reason.WRONG_SHARES)
        for place in self._cohort.group(gone):
            if place in self._survived:  # who added the pair's mask, where the one who went never came to take it off
                add_mask(self._total, _pair_mask(self._cohort, key, gone, place), sign=_direction(gone, place))


def _split(secrets: _Secrets, group: tuple[int, ...]) -> list[bytes]:
    """For each of `group` a share of the mask key, and one of b."""
    points, enough, random = [place + 1 for place in group], share_threshold(len(group)), SecureRandom()
    both = [
        shamir.split_secret(secret, threshold=enough, points=points, random=random)
        for secret in (secrets.mask.private_bytes_raw(), secrets.own)
    ]
    return [one.tobytes() for one in np.concatenate(both, axis=1).astype("<u4")]


def _exchange(own: X25519PrivateKey, other: bytes) -> bytes:
    try:
        return own.exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError:  # a point of small order gives zero, whoever multiplies it
        raise Unsafe(Reason.FORGED) from None


def _derived(cohort: Cohort, secret: bytes, purpose: bytes, *places: int) -> bytes:
    info = purpose + cohort.session + struct.pack(f"<{len(places)}I", *places)
    return HKDF(algorithm=SHA256(), length=32, salt=None, info=info).derive(secret)


def _seal(cohort: Cohort, common: bytes, sender: int, receiver: int) -> AESGCM:
    return AESGCM(_derived(cohort, common, b"seal", sender, receiver))


def _self_mask(cohort: Cohort, place: int, own: bytes) -> bytes:
    return _derived(cohort, own, b"self", place)


def _pair_mask(cohort: Cohort, key: X25519PrivateKey, one: int, other: int) -> bytes:
    """The key of a pair's mask, from the mask key of `one` and what `other` has published."""
    return _derived(cohort, _exchange(key, cohort.mask_key(other)), b"pair", *sorted((one, other)))


def _direction(own: int, other: int) -> Literal[1, -1]:
    return 1 if own < other else -1


def _commitment(cohort: Cohort, place: int, own: bytes) -> bytes:
    """To b, which is 256 random bits and opens nothing but the vector it masks."""
    return hashlib.sha256(b"commitment" + cohort.session + pack_row(place, own)).digest()
