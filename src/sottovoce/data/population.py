"""Who is a client: a store's speakers, divided among clients from one seed, the same on every machine.

    split(s) ─► speakers ─► seed | federation ─► speaker, device, silo or shuffled ─► floor ─► cap ─► hold-out
                └───── speakers.py ─────┘        └────────────────── client_utterances.py ──────────────────┘

A population is a few small arrays over users; which utterances a client trains on is computed when it is asked for.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from sottovoce.base.errors import InputError
from sottovoce.base.seeds import name_key
from sottovoce.base.units import SILO, SPEAKER
from sottovoce.data.client_utterances import (
    HOLDOUT_NEEDS,
    balance_silos,
    cap_utterances,
    deal_utterances,
    find_owners,
    group_into_devices,
    group_into_silos,
    hold_out_utterances,
    shuffle_utterances,
    utterance_keys,
    utterance_samples,
    utterances_of,
)
from sottovoce.data.corpora.corpus import SAMPLE_RATE
from sottovoce.data.speakers import (
    Groups,
    Integers,
    SeedPart,
    Speakers,
    UserIndex,
    exact_fraction,
    select_speakers,
    split_off_seed,
    user_counts,
    user_samples,
)

ClientRule = Literal["speaker", "device", "silo", "iid", "iid_uniform"]
DEALT: frozenset[ClientRule] = frozenset({"iid", "iid_uniform"})  # rules that deal out utterances, and no speakers
Part = Literal["federation", "seed"]
PRIVACY_UNITS: Mapping[ClientRule, str] = {"speaker": SPEAKER.name, "silo": SILO.name}
# Capping sorts all utterances of the clients above the cap: a portion of this size stays in the processor's cache.
CLIENTS_PER_PORTION = 1 << 12


@dataclass(frozen=True, kw_only=True)
class PopulationSettings:
    """Who is a client.

    `split` is one split of the store or several, taken together. With a `seed_part`, `part` says which side this
    population is: the speakers of the seed model, or the rest. `speakers_per_device` and `silos` belong to the client
    rules of those names; with `balance` silos have about equal seconds of speech. `iid` deals all utterances out at
    random, to each client as many as a speaker had; `iid_uniform` draws a client for every utterance, as the paper's
    Tables 5 and 6 do. A client below `min_seconds` is left out (never a silo: how many there are is public); one above
    `max_seconds` keeps a random choice of its utterances. `holdout` is the share of each client's utterances kept to
    test on that client (Gao et al.: 0.1).
    """

    split: str | Sequence[str]
    clients: ClientRule = "speaker"
    speakers_per_device: int | None = None
    silos: int | None = None
    balance: Literal["seconds"] | None = None
    min_seconds: float | None = None
    max_seconds: float | None = None
    holdout: float | None = None
    seed_part: SeedPart | None = None
    part: Part = "federation"

    def __post_init__(self) -> None:
        if not self.splits:
            raise InputError("split: expected at least one name")
        for name, choices in (("clients", get_args(ClientRule)), ("part", get_args(Part))):
            if getattr(self, name) not in choices:
                raise InputError(f"{name}={getattr(self, name)}: expected one of {', '.join(choices)}")
        if self.part == "seed" and self.seed_part is None:
            raise InputError("part=seed: expected a seed_part that says who is in it")
        for rule, name, least in (("device", "speakers_per_device", 2), ("silo", "silos", 1)):
            value = getattr(self, name)
            if (self.clients == rule) != (value is not None):
                raise InputError(f"{name}={value}: given exactly when clients={rule}, but clients={self.clients}")
            if value is not None and value < least:
                raise InputError(f"{name}={value}: expected at least {least}")
        if self.balance is not None and self.clients != "silo":
            raise InputError(f"balance={self.balance}: only silos are balanced, but clients={self.clients}")
        self._check_amounts()

    def _check_amounts(self) -> None:
        for name in ("min_seconds", "max_seconds"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise InputError(f"{name}={value}: expected a positive number of seconds")
        if self.clients == "silo" and self.min_seconds is not None:
            raise InputError(
                f"min_seconds={self.min_seconds} with clients=silo: every silo stays a client, whatever it holds; "
                "expected no floor"
            )
        if self.min_seconds is not None and self.max_seconds is not None and self.min_seconds > self.max_seconds:
            raise InputError(f"min_seconds={self.min_seconds}: expected no more than max_seconds={self.max_seconds}")
        if self.holdout is not None and not 0 < self.holdout <= 0.5:
            raise InputError(f"holdout={self.holdout}: expected a share above 0 and at most 0.5")

    @property
    def deals_utterances(self) -> bool:
        """Whether clients hold utterances of anybody, in place of people."""
        return self.clients in DEALT

    @property
    def splits(self) -> tuple[str, ...]:
        return (self.split,) if isinstance(self.split, str) else tuple(dict.fromkeys(self.split))

    @property
    def min_samples(self) -> int:
        return 0 if self.min_seconds is None else math.ceil(exact_fraction(self.min_seconds) * SAMPLE_RATE)

    @property
    def max_samples(self) -> int | None:
        return None if self.max_seconds is None else math.floor(exact_fraction(self.max_seconds) * SAMPLE_RATE)


@dataclass(frozen=True, eq=False, slots=True)
class Client:
    """One client: rows of the store, in ascending order. `held_out` is never trained on; `seconds` covers both."""

    index: int
    id: str
    speakers: Integers
    utterances: Integers
    held_out: Integers
    seconds: float

    @property
    def key(self) -> int:
        """A 64-bit number that names the client's random streams, whatever its index."""
        return name_key(self.id)


@dataclass(frozen=True)
class LeftOut:
    """What the floor and the cap on seconds took away, and whom the cap and the hold-out could not serve.

    A client `still_above_max_seconds` has no utterance short enough and keeps its shortest. One `without_speech` is an
    empty silo: it stays a client, and sends a zero update.
    """

    clients_below_min_seconds: int = 0
    hours_below_min_seconds: float = 0.0
    clients_above_max_seconds: int = 0
    hours_above_max_seconds: float = 0.0
    clients_still_above_max_seconds: int = 0
    clients_without_holdout: int = 0
    clients_without_speech: int = 0


@dataclass(frozen=True, eq=False)
class Population:
    """The clients of one run. Made by `build_population`.

    `members` are groups of user rows, or of utterance rows where those are dealt out. `seconds` is what each client
    holds, after the cap and with its hold-out.
    """

    store: UserIndex
    settings: PopulationSettings
    seed: int
    members: Groups
    seconds: NDArray[np.float64]
    left_out: LeftOut

    def __len__(self) -> int:
        return len(self.members)

    def __iter__(self) -> Iterator[Client]:
        return map(self.client, range(len(self)))

    def client(self, index: int) -> Client:
        """Client `index` of `len(self)`; its id is made of its speakers' names and outlives the index."""
        if not 0 <= index < len(self):
            raise IndexError(f"index={index}: expected 0 to {len(self) - 1}")
        settings = self.settings
        kept = _kept_utterances(self.store, settings, self.members.take(np.array([index])), seed=self.seed)
        utterances, dealt = np.sort(kept.members), settings.deals_utterances
        speakers = np.unique(find_owners(self.store, utterances)) if dealt else np.sort(self.members[index])
        if settings.clients == "silo" or dealt:
            id = f"{settings.clients}-{index}"
        else:
            id = "+".join(sorted({self.store.user(row).name for row in speakers.tolist()}))
        held_out = np.empty(0, dtype=np.int64)
        if settings.holdout is not None:
            utterances, held_out = hold_out_utterances(self.store, utterances, holdout=settings.holdout, seed=self.seed)
        return Client(index, id, speakers, utterances, held_out, float(self.seconds[index]))

    @property
    def privacy_unit(self) -> str | None:
        """Whom user-level privacy protects here: all that one client holds. None where there is no guarantee at all."""
        return None if self.no_guarantee is not None else PRIVACY_UNITS[self.settings.clients]

    @property
    def no_guarantee(self) -> str | None:
        """Why no guarantee can be given, where there is none."""
        match self.settings.clients:
            case "silo" if self.settings.balance is not None:
                return (
                    "clients.balance divides speakers by how much each has said, so that one who leaves moves others "
                    "to other silos, and bounding one silo bounds nobody"
                )
            case "speaker" | "silo":
                return None
            case "device":
                return (
                    "clients=device makes up devices from a queue of speakers, so that one who leaves moves others to "
                    "other devices, and bounding one device bounds no person; name the real device as the speaker"
                )
            case rule:
                return (
                    f"clients={rule} spreads every speaker over many clients, so bounding one client bounds no person"
                )

    def user_rows(self) -> Integers:
        """The store's rows of all people in it."""
        members = self.members.members
        return np.unique(find_owners(self.store, members)) if self.settings.deals_utterances else members

    def utterance_rows(self) -> Integers:
        """The store's rows of all that its people have said, whatever a cap or a hold-out leaves of it."""
        members = self.members
        return members.members if self.settings.deals_utterances else utterances_of(self.store, members).members

    @cached_property
    def digest(self) -> str:
        """Equal where the same people are in the same clients, with the same utterances for training and testing."""
        digest = hashlib.blake2b(digest_size=16)
        # Cap and hold-out follow from these three; every other setting shows in the members.
        digest.update(f"{self.seed} {self.settings.max_seconds} {self.settings.holdout}".encode())
        # Keys and not rows: the same people elsewhere in a store are still the same population.
        members, dealt = self.members.members, self.settings.deals_utterances
        keys = utterance_keys(self.store, members) if dealt else self.store.user_keys[members]
        digest.update(keys.astype("<u8").tobytes())
        digest.update(self.members.offsets.astype("<i8").tobytes())
        return digest.hexdigest()

    def describe(self) -> dict[str, Any]:
        """What a run's record says of its clients, ready for JSON."""
        return {
            "store": self.store.name,
            "store_digest": self.store.digest,
            "settings": _written(self.settings),
            "seed": self.seed,
            "digest": self.digest,
            "population_size": len(self),
            "hours": float(self.seconds.sum()) / 3600,
            "seconds_per_client": {
                name: float(of(self.seconds)) for name, of in (("min", np.min), ("median", np.median), ("max", np.max))
            },
            "privacy_unit": self.privacy_unit,
            "no_guarantee": self.no_guarantee,
            "left_out": asdict(self.left_out),
        }


def build_population(store: UserIndex, settings: PopulationSettings, *, seed: int) -> Population:
    """Divide the speakers of `store` among clients.

    >>> settings = PopulationSettings(split="train", seed_part=SeedPart(fraction=0.1))      # doctest: +SKIP
    >>> population = build_population(Store("stores/crowd"), settings, seed=7)              # doctest: +SKIP
    >>> len(population), population.client(0).utterances                                    # doctest: +SKIP

    The same store, settings and seed give the same clients on every machine. Their order follows from their speakers'
    keys and not from their rows.
    """
    speakers = select_speakers(store, settings.splits)
    if settings.seed_part is not None:
        of_seed, others = split_off_seed(speakers, rule=settings.seed_part, seed=seed)
        speakers = of_seed if settings.part == "seed" else others
    return make_population(store, settings, _members(store, speakers, settings=settings, seed=seed), seed=seed)


def make_population(store: UserIndex, settings: PopulationSettings, members: Groups, *, seed: int) -> Population:
    """The population whose clients are these `members` (see `Population`), under its floor, cap and hold-out."""
    if settings.deals_utterances:
        samples, counts = members.totals(utterance_samples(store, members.members)), members.sizes
    else:
        samples = members.totals(user_samples(store, members.members))
        counts = members.totals(user_counts(store, members.members))
    enough = np.flatnonzero(samples >= settings.min_samples)
    if len(enough) == 0:
        longest = samples.max() / SAMPLE_RATE
        raise InputError(f"min_seconds={settings.min_seconds}: no client has as much, the longest has {longest:.1f} s")
    kept, before, most = members.take(enough), samples[enough], settings.max_samples
    after, counts = before.copy(), counts[enough]
    above = np.empty(0, dtype=np.int64) if most is None else np.flatnonzero(before > most)
    for first in range(0, len(above), CLIENTS_PER_PORTION):
        portion = above[first : first + CLIENTS_PER_PORTION]
        used = _kept_utterances(store, settings, kept.take(portion), seed=seed)
        after[portion] = used.totals(utterance_samples(store, used.members))
        counts[portion] = used.sizes
    return Population(
        store=store,
        settings=settings,
        seed=seed,
        members=kept,
        seconds=after / SAMPLE_RATE,
        left_out=LeftOut(
            clients_below_min_seconds=len(members) - len(kept),
            hours_below_min_seconds=_hours(samples) - _hours(before),
            clients_above_max_seconds=len(above),
            hours_above_max_seconds=_hours(before - after),
            clients_still_above_max_seconds=0 if most is None else int((after > most).sum()),
            clients_without_holdout=0 if settings.holdout is None else int((counts < HOLDOUT_NEEDS).sum()),
            clients_without_speech=int((counts == 0).sum()),
        ),
    )


def shared_speakers(one: Population, other: Population) -> NDArray[np.uint64]:
    """The keys of the people in both: by key, so this holds across splits and across stores."""
    return np.intersect1d(one.store.user_keys[one.user_rows()], other.store.user_keys[other.user_rows()])


def check_disjoint(seed_part: Population, federation: Population) -> None:
    """Refuse a seed model trained on anybody who is also a client: their privacy would be spent uncounted."""
    shared = shared_speakers(seed_part, federation)
    if len(shared):
        rows = federation.user_rows()
        name = federation.store.user(int(rows[federation.store.user_keys[rows] == shared[0]][0])).name
        raise InputError(
            f"{len(shared)} speakers are in both the seed and the federation part (speaker={name} for one): "
            "expected nobody in both"
        )


def _members(store: UserIndex, speakers: Speakers, *, settings: PopulationSettings, seed: int) -> Groups:
    match settings.clients:
        case "speaker":
            return speakers.rows
        case "device":
            assert settings.speakers_per_device is not None
            return group_into_devices(speakers, speakers_per_device=settings.speakers_per_device, seed=seed)
        case "silo":
            assert settings.silos is not None
            divide = group_into_silos if settings.balance is None else balance_silos
            return divide(speakers, count=settings.silos, seed=seed)
        case "iid":
            return shuffle_utterances(store, speakers, seed=seed)
        case "iid_uniform":
            return deal_utterances(store, speakers, seed=seed)


def _kept_utterances(store: UserIndex, settings: PopulationSettings, members: Groups, *, seed: int) -> Groups:
    """What the clients `members` keep under the cap; the hold-out is still in it."""
    utterances = members if settings.deals_utterances else utterances_of(store, members)
    if settings.max_samples is None:
        return utterances
    return cap_utterances(store, utterances, max_samples=settings.max_samples, seed=seed)


def _written(settings: PopulationSettings) -> dict[str, Any]:
    """Settings as a record has them; what came later is not written where it is None."""
    found = asdict(settings) | {"split": list(settings.splits)}
    return {name: value for name, value in found.items() if value is not None or name != "balance"}


def _hours(samples: Integers) -> float:
    return int(samples.sum()) / SAMPLE_RATE / 3600
