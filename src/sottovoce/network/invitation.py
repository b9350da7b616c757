"""An invitation: all that a client is asked to do, as one digest.

    recipe ─► the part that concerns clients    ─┐
    roster, start model, grid, secure sums      ─┴► Invitation ─► canonical bytes ─► digest

The digest covers all that decides what a client computes and sends, and with whom. It does not cover what happens after
the noise (the server's optimiser, evaluations) nor names that only the server uses. A client takes an invitation in its
canonical form alone, with known keys only, and naming nothing that would be imported or opened. ε is computed here, on
the client, from the numbers that it will train with.
"""

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Literal

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from pydantic import ValidationError

import sottovoce
from sottovoce.base.digests import weights_digest
from sottovoce.base.errors import InputError
from sottovoce.base.parsing import ParseError, parse_json
from sottovoce.base.seeds import derive
from sottovoce.base.signatures import PublicKey
from sottovoce.config import Recipe
from sottovoce.config.sections import Section
from sottovoce.data.population import PRIVACY_UNITS
from sottovoce.flat.layout import Layout
from sottovoce.models.trainable import NOTHING_FROZEN, Frozen
from sottovoce.network.client_recipe import check_loads_no_code, check_network_recipe, client_recipe, clients_part
from sottovoce.network.keys import fingerprint
from sottovoce.network.limits import Limits, accepted_limits
from sottovoce.network.secure_sum.terms import SumTerms
from sottovoce.network.turns import Turns, check_noise, search_noise
from sottovoce.privacy.accounting import Epsilon
from sottovoce.privacy.clipping import Normalise, Share
from sottovoce.privacy.events import LARGEST_STEPS, NoGuarantee
from sottovoce.privacy.guarantee import Guarantee
from sottovoce.privacy.mechanism import Correlated, correlated_from_json
from sottovoce.privacy.noise_shares import NoiseShares
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.plan_sampling import draw_rate, drawn_from, groups_of
from sottovoce.privacy.settings import Mode, PrivacySettings

LARGEST = 1 << 26  # bytes of an invitation: half a million nodes


class SecureSums(Section):
    """The server opens sums of at least `least` people. `neighbours`: with how many others each one shares masks."""

    least: int
    neighbours: int | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class Invitation:
    """What a client is asked to do, how often, and with whom.

    `nodes` are the roster's public keys in its order: K is their number. `start` is the SHA-256 of the model that
    training starts from, as it travels; `length` is how many parameters are trained, `layout` a digest of their names,
    shapes and order. `frozen` is the SHA-256 of all that is not trained (`weights_digest`), which clients may have from
    files of their own, or draw. Without `secure` the server sees single updates. With `noise_shares` clients add the
    noise before they mask. A release may make `spare_attempts` more at its rounds, and at its measurements, where some
    are lost. `correlated` is what the recipe's mechanism comes to: the server has searched for its numbers.
    """

    recipe: Recipe
    nodes: tuple[PublicKey, ...]
    start: bytes
    length: int
    layout: bytes
    frozen: bytes
    sum_bits: Literal[32, 64] = 64
    secure: SecureSums | None = None
    noise_shares: NoiseShares | None = None
    spare_attempts: int = 0
    correlated: Correlated | None = None

    def __post_init__(self) -> None:
        check_network_recipe(self.recipe, population_size=len(self.nodes))
        check_noise(self.recipe, self.correlated, people=len(self.nodes))
        if len({fingerprint(key) for key in self.nodes}) != len(self.nodes):
            raise InputError("the invitation names a node twice: expected everybody once")
        if self.length < 1 or any(len(digest) != 32 for digest in (self.start, self.layout, self.frozen)):
            raise InputError("the invitation is of no model: expected a digest and a length")
        if not 0 <= self.spare_attempts <= LARGEST_STEPS:
            raise InputError(f"spare_attempts={self.spare_attempts}: expected a whole number, at least 0")
        if self.spare_attempts and self.private.mode is Mode.SEEDED:
            raise InputError(f"spare_attempts={self.spare_attempts}: a rehearsal counts no attempts; expected none")
        _ = self.outline, self.wer_plan
        if self.secure is not None:
            self._check_least(self.sum_terms.least, self.outline)
            if self.wer_plan is not None:
                self._check_least(self.sum_terms.least, self.wer_plan)
        if self.noise_shares is not None and (self.secure is None or self.secure.least < self.noise_shares.least):
            raise InputError("noise by clients: expected secure sums of as many people at least as the noise is for")

    def _check_least(self, least: int, plan: Plan) -> None:
        """Refuse a release in which the size of a cohort would decide whether its sum under `plan` is opened."""
        people = drawn_from(plan)
        if self.private.mode is Mode.SECURE and plan.fewest_available(least) > people:
            what = "" if plan is self.outline else "client_wer with "
            raise InputError(
                f"{what}least={least}: of {people:,} people, cohorts of about {self.private.cohort_size:,} are "
                "smaller too often, and unopened sums would tell who was drawn; expected fewer, or everybody in every "
                "cohort"
            )

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        nodes: Sequence[PublicKey],
        *,
        start: bytes,
        layout: Layout,
        frozen: Frozen = NOTHING_FROZEN,
        sum_bits: Literal[32, 64] = 64,
        secure: SecureSums | None = None,
        noise_shares: NoiseShares | None = None,
        spare_attempts: int = 0,
    ) -> "Invitation":
        """To train the parameters of `layout` by `recipe`, from the model that travels as `start`, and not `frozen`."""
        if recipe.federation is None:
            raise InputError("recipe: central training has no clients; expected a section federation")
        check_network_recipe(recipe, population_size=len(nodes))
        return cls(
            recipe=client_recipe(clients_part(recipe)),
            nodes=tuple(nodes),
            start=hashlib.sha256(start).digest(),
            length=layout.dimension,
            layout=_layout_digest(layout),
            frozen=_frozen_digest(frozen),
            sum_bits=sum_bits,
            secure=secure,
            noise_shares=noise_shares,
            spare_attempts=spare_attempts,
            correlated=search_noise(recipe, people=len(nodes)),
        )

    @cached_property
    def content(self) -> bytes:
        """All of it in canonical form."""
        form = Encoding.X962, PublicFormat.CompressedPoint
        return _to_json(
            {
                "sottovoce": sottovoce.__version__,
                "recipe": clients_part(self.recipe),
                "nodes": [key.public_bytes(*form).hex() for key in self.nodes],
                "start": self.start.hex(),
                "length": self.length,
                "layout": self.layout.hex(),
                "frozen": self.frozen.hex(),
                "sum_bits": self.sum_bits,
                "secure": None if self.secure is None else self.secure.model_dump(),
                "noise_shares": None if self.noise_shares is None else asdict(self.noise_shares),
                "spare_attempts": self.spare_attempts,
            }
            | ({} if self.correlated is None else {"correlated": self.correlated.as_json()})
        )

    @cached_property
    def digest(self) -> bytes:
        return hashlib.sha256(b"sottovoce invitation 1\n" + self.content).digest()

    @classmethod
    def read(cls, content: bytes) -> "Invitation":
        """An invitation as it came; InputError, in one line, for everything else."""
        if len(content) > LARGEST:
            raise InputError(f"the invitation has {len(content):,} bytes, expected at most {LARGEST:,}")
        try:
            found = _InvitationJson.model_validate(parse_json(content))
        except ParseError:
            raise InputError("the invitation cannot be read: expected JSON") from None
        except ValidationError as error:
            first = error.errors()[0]
            raise InputError(f"the invitation: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
        if found.sottovoce != sottovoce.__version__:
            raise InputError(
                f"the server runs sottovoce {found.sottovoce[:40]!r}, expected {sottovoce.__version__}, as it is here"
            )
        check_loads_no_code(found.recipe)
        invitation = cls(
            recipe=client_recipe(found.recipe),
            nodes=tuple(map(_node, found.nodes)),
            start=_digest(found.start),
            length=found.length,
            layout=_digest(found.layout),
            frozen=_digest(found.frozen),
            sum_bits=found.sum_bits,
            secure=found.secure,
            noise_shares=found.noise_shares,
            spare_attempts=found.spare_attempts,
            correlated=None if found.correlated is None else correlated_from_json(found.correlated),
        )
        if invitation.content != content:
            raise InputError("the invitation is not in its canonical form: another release, or changed on its way")
        return invitation

    @cached_property
    def private(self) -> PrivacySettings:
        """The settings of its plan, as a simulation of the same people has them."""
        recipe, settings = self.recipe, self.recipe.federated
        return settings.privacy.settings(
            population_size=len(self.nodes),
            cohort_size=settings.cohort_size,
            central_steps=settings.steps,
            privacy_unit=PRIVACY_UNITS[settings.clients.rule],
            no_unit_reason=None,
            users_also_in_seed=0,  # the server knows, and refuses
            root_seed=derive(recipe.seed, "privacy"),
            measured=settings.measured,
            expected_answers=settings.expected_answers,
            correlated=self.correlated,
        )

    def plan(self, layout: Layout) -> Plan:
        """What is clipped, rounded and accounted for, on both sides."""
        if layout.dimension != self.length or _layout_digest(layout) != self.layout:
            raise InputError("the start model has other parameters to train than the invitation says")
        return Plan(self.private, layout, sum_bits=self.sum_bits, noise_shares=self.noise_shares)

    def check_frozen(self, frozen: Frozen) -> None:
        """Refuse to train on something else than the others do."""
        if _frozen_digest(frozen) != self.frozen:
            raise InputError(
                "what is not trained of the model is another here than the invitation says: another base model, or "
                "other releases of what loads or draws it"
            )

    @cached_property
    def sum_terms(self) -> SumTerms:
        """What a secure sum is bound to, on both sides; only where there is one."""
        assert self.secure is not None
        return SumTerms(
            roster=self.nodes,
            least=self.secure.least,
            length=self.length,
            bits=self.sum_bits,
            neighbours=self.secure.neighbours,
        )

    @cached_property
    def wer_plan(self) -> Plan | None:
        """What measuring clients' word error rate clips, rounds and accounts for; None where nobody asks for it."""
        asked = self.recipe.federated.client_wer
        return None if asked is None else asked.plan(self.outline)

    @cached_property
    def outline(self) -> Plan:
        """A plan whose bound is not split among layers, which changes nothing of the guarantee."""
        whole = replace(self.private, share=Share.GLOBAL, normalise=Normalise.NEVER, alpha={}, layer_groups={})
        return Plan(whole, Layout(("all",), ((1,),)), sum_bits=self.sum_bits, noise_shares=self.noise_shares)

    @cached_property
    def limits(self) -> Limits | None:
        """The most that one acceptance covers; None for a rehearsal, which repeats lost rounds exactly."""
        if self.private.mode is Mode.SEEDED:
            return None
        settings = self.recipe.federated
        return accepted_limits(
            rounds=settings.steps,
            measurements=0 if settings.measured is None else settings.measured.count,
            spare_attempts=self.spare_attempts,
            sampling_rate=self.outline.sampling_rate,
            cycle=1 if self.correlated is None else self.correlated.cycle,
            draw_rate=draw_rate(self.outline),
        )

    def turns(self, node: bytes) -> Turns | None:
        """The rows that are the turn of this node, by its fingerprint; None where everybody may be in every round."""
        if self.correlated is None:
            return None
        place = [fingerprint(key) for key in self.nodes].index(node)
        (group,) = (number for number, members in enumerate(self._groups) if place in members)
        settings = self.recipe.federated
        rows = None if self.private.mode is Mode.SEEDED else settings.steps + self.spare_attempts
        return Turns(cycle=self.correlated.cycle, group=group, rows=rows)

    def members(self, row: int | None) -> frozenset[int] | None:
        """The places whose turn `row` is; None without a row, or where everybody may be in every round."""
        return None if row is None or self.correlated is None else self._groups[row % self.correlated.cycle]

    @cached_property
    def _groups(self) -> tuple[frozenset[int], ...]:
        return groups_of(self.outline)

    @property
    def epsilon(self) -> Epsilon | None:
        """ε of all rounds and measurements, and of all spare attempts at both; None where nothing is guaranteed."""
        return None if self.guarantee is None else self.guarantee.epsilon

    @property
    def epsilon_inside(self) -> Epsilon | None:
        """ε of one speaker whose silo takes part; None where nothing is guaranteed, or a client is one person."""
        return None if self.guarantee is None else self.guarantee.epsilon_inside

    @cached_property
    def epsilon_without_spare(self) -> Epsilon | None:
        """ε of all, where no attempt has to be repeated."""
        found = self._guarantee(0)
        return None if found is None else found.epsilon

    @cached_property
    def guarantee(self) -> Guarantee | None:
        return self._guarantee(self.spare_attempts)

    def _guarantee(self, spare: int) -> Guarantee | None:
        if isinstance(self.outline.event, NoGuarantee) or self.private.mode is Mode.SEEDED:
            return None
        # Without a budget: a node answers as often as was accepted, and cannot see that a budget is kept.
        whole = replace(self.recipe.federated.whole_run(self.outline), epsilon_budget=None)
        return whole.guarantee_with_spare(spare)


_LENGTH = struct.Struct(">I")


def pack_invitation(invitation: Invitation, certificate: bytes) -> bytes:
    """The payload of an order to read the terms, with the certificate of the key that signs orders."""
    return _LENGTH.pack(len(certificate)) + certificate + invitation.content


def unpack_invitation(payload: bytes) -> tuple[bytes, bytes]:
    """A certificate (PEM) and the content of an invitation, both unread; InputError where there are no two."""
    length = _LENGTH.unpack_from(payload)[0] if len(payload) >= _LENGTH.size else len(payload)
    if _LENGTH.size + length > len(payload):
        raise InputError("the invitation is cut short")
    return payload[_LENGTH.size : _LENGTH.size + length], payload[_LENGTH.size + length :]


class _InvitationJson(Section):
    """What is read leniently here is written again, and must come out the same."""

    sottovoce: str
    recipe: dict[str, Any]
    nodes: list[str]
    start: str
    length: int
    layout: str
    frozen: str
    sum_bits: Literal[32, 64]
    secure: SecureSums | None
    noise_shares: NoiseShares | None
    spare_attempts: int
    correlated: dict[str, Any] | None = None


def _to_json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _layout_digest(layout: Layout) -> bytes:
    held = [layout.held] if layout.held else []  # as before there was any
    return hashlib.sha256(json.dumps([layout.names, layout.shapes, *held]).encode()).digest()


def _frozen_digest(frozen: Frozen) -> bytes:
    return bytes.fromhex(weights_digest({name: p.detach().cpu().numpy() for name, p in frozen.tensors.items()}))


def _node(text: str) -> PublicKey:
    try:
        return ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP384R1(), bytes.fromhex(text))
    except ValueError:
        raise InputError(f"the invitation names a node by {text[:16]!r}…: expected a key of ECDSA P-384") from None


def _digest(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise InputError("the invitation is of no model: expected a digest") from None
