"""Who is a client: a store's speakers, divided among clients from one seed, the same on every machine.

    split(s) ─► speakers ─► seed | federation ─► speaker, device, silo or shuffled ─► floor ─► cap ─► hold-out
    splits.py                                    clients.py                           └ used_utterances.py ┘

A population is a few small arrays over users; which utterances a client trains on is worked out when it is asked for.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sottovoce.base.errors import InputError
from sottovoce.base.seeds import name_key
from sottovoce.base.units import SILO, SPEAKER
from sottovoce.corpora.corpus import SAMPLE_RATE
from sottovoce.users.clients import dealt, devices, shuffled, silos
from sottovoce.users.groups import Groups, Integers
from sottovoce.users.rules import ClientRule, PopulationSettings, exactly
from sottovoce.users.splits import Speakers, UserIndex, select_speakers, split_off_seed, user_counts, user_samples
from sottovoce.users.used_utterances import (
    HOLDOUT_NEEDS,
    capped,
    hold_out,
    owners,
    utterance_keys,
    utterance_samples,
    utterances_of,
)

# Capping sorts all utterances of the clients above the cap: a portion of this size stays in the processor's cache.
CLIENTS_PER_PORTION = 1 << 12

PRIVACY_UNITS: Mapping[ClientRule, str] = {"speaker": SPEAKER.name, "silo": SILO.name}


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

    A client `still_above_max_seconds` has no utterance short enough and keeps its shortest. One `without_speech` is a
    silo that nobody fell into: it stays a client, and sends a zero update.
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
        kept = _utterances(self.store, self.settings, self.members.take(np.array([index])), seed=self.seed)
        utterances = np.sort(kept.members)
        dealt_out = self.settings.deals_utterances
        speakers = np.unique(owners(self.store, utterances)) if dealt_out else np.sort(self.members[index])
        held_out = np.empty(0, dtype=np.int64)
        if self.settings.holdout is not None:
            share = self.settings.holdout
            utterances, held_out = hold_out(self.store, utterances, holdout=share, seed=self.seed)
        return Client(
            index=index,
            id=self._id(index, speakers),
            speakers=speakers,
            utterances=utterances,
            held_out=held_out,
            seconds=float(self.seconds[index]),
        )

    def _id(self, index: int, speakers: Integers) -> str:
        if self.settings.clients == "silo" or self.settings.deals_utterances:
            return f"{self.settings.clients}-{index}"
        return "+".join(sorted({self.store.user(row).name for row in speakers.tolist()}))

    @property
    def privacy_unit(self) -> str | None:
        """Whom user-level privacy protects here: all that one client holds. None where there is no guarantee at all."""
        return PRIVACY_UNITS.get(self.settings.clients)

    @property
    def no_guarantee(self) -> str | None:
        """Why no guarantee can be given, where there is none."""
        match self.settings.clients:
            case "speaker" | "silo":
                return None
            case "device":
                return (
                    "clients=device makes up devices from a queue of speakers, so that one who leaves moves others to "
                    "other devices, and bounding one device bounds no person; name the real device as the speaker"
                )
            case "iid" | "iid_uniform" as rule:
                return (
                    f"clients={rule} spreads every speaker over many clients, so bounding one client bounds no person"
                )

    def user_rows(self) -> Integers:
        """The store's rows of all people in it."""
        members = self.members.members
        return np.unique(owners(self.store, members)) if self.settings.deals_utterances else members

    def utterance_rows(self) -> Integers:
        """The store's rows of all that its people have said, whatever a cap or a hold-out leaves of it."""
        members = self.members
        return members.members if self.settings.deals_utterances else utterances_of(self.store, members).members

    @cached_property
    def digest(self) -> str:
        """Equal where the same people are in the same clients, with the same utterances for training and testing."""
        digest = hashlib.blake2b(digest_size=16)
        # Cap and hold-out are worked out later from these three; every other setting shows in the members.
        digest.update(f"{self.seed} {self.settings.max_seconds} {self.settings.holdout}".encode())
        # Keys and not rows: the same people elsewhere in a store are still the same population.
        members = self.members.members
        dealt_out = self.settings.deals_utterances
        keys = utterance_keys(self.store, members) if dealt_out else self.store.user_keys[members]
        digest.update(keys.astype("<u8").tobytes())
        digest.update(self.members.offsets.astype("<i8").tobytes())
        return digest.hexdigest()

    def describe(self) -> dict[str, Any]:
        """What a run's record says of its clients, ready for JSON."""
        return {
            "store": self.store.name,
            "store_digest": self.store.digest,
            "settings": asdict(self.settings) | {"split": list(self.settings.splits)},
            "seed": self.seed,
            "digest": self.digest,
            "population_size": len(self),
            "hours": float(self.seconds.sum()) / 3600,
            "seconds_per_client": {
                "min": float(self.seconds.min()),
                "median": float(np.median(self.seconds)),
                "max": float(self.seconds.max()),
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

    The same store, settings and seed give the same clients on every machine. Clients come in an order that hangs on
    their speakers' keys and not on their rows.
    """
    speakers = select_speakers(store, settings.splits)
    if settings.seed_part is not None:
        parts = split_off_seed(speakers, rule=settings.seed_part, seed=seed)
        speakers = parts[0] if settings.part == "seed" else parts[1]
    return populate(store, settings, _members(store, speakers, settings=settings, seed=seed), seed=seed)


def populate(store: UserIndex, settings: PopulationSettings, members: Groups, *, seed: int) -> Population:
    """The population whose clients are these `members` (see `Population`), under its floor, cap and hold-out."""
    samples, counts = _amounts(store, settings, members)
    least = 0 if settings.min_seconds is None else math.ceil(exactly(settings.min_seconds) * SAMPLE_RATE)
    enough = np.flatnonzero(samples >= least)
    if len(enough) == 0:
        longest = samples.max() / SAMPLE_RATE
        raise InputError(f"min_seconds={settings.min_seconds}: no client has as much, the longest has {longest:.1f} s")
    kept, before = members.take(enough), samples[enough]
    most = None if settings.max_seconds is None else _max_samples(settings.max_seconds)
    after, counts = _cap(store, settings, kept, samples=before, counts=counts[enough], seed=seed)
    return Population(
        store=store,
        settings=settings,
        seed=seed,
        members=kept,
        seconds=after / SAMPLE_RATE,
        left_out=LeftOut(
            clients_below_min_seconds=len(members) - len(kept),
            hours_below_min_seconds=_hours(samples) - _hours(before),
            clients_above_max_seconds=0 if most is None else int((before > most).sum()),
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
            return devices(speakers, speakers_per_device=settings.speakers_per_device, seed=seed)
        case "silo":
            assert settings.silos is not None
            return silos(speakers, count=settings.silos, seed=seed)
        case "iid":
            return shuffled(store, speakers, seed=seed)
        case "iid_uniform":
            return dealt(store, speakers, seed=seed)


def _amounts(store: UserIndex, settings: PopulationSettings, members: Groups) -> tuple[Integers, Integers]:
    """Samples of audio and number of utterances of each client, before any cap."""
    if settings.deals_utterances:
        return members.totals(utterance_samples(store, members.members)), members.sizes
    return members.totals(user_samples(store, members.members)), members.totals(user_counts(store, members.members))


def _cap(
    store: UserIndex, settings: PopulationSettings, members: Groups, *, samples: Integers, counts: Integers, seed: int
) -> tuple[Integers, Integers]:
    """Samples and number of utterances of each client after the cap."""
    if settings.max_seconds is None:
        return samples, counts
    samples, counts = samples.copy(), counts.copy()
    above = np.flatnonzero(samples > _max_samples(settings.max_seconds))
    for first in range(0, len(above), CLIENTS_PER_PORTION):
        portion = above[first : first + CLIENTS_PER_PORTION]
        kept = _utterances(store, settings, members.take(portion), seed=seed)
        samples[portion] = kept.totals(utterance_samples(store, kept.members))
        counts[portion] = kept.sizes
    return samples, counts


def _utterances(store: UserIndex, settings: PopulationSettings, members: Groups, *, seed: int) -> Groups:
    """What the clients `members` keep under the cap; the hold-out is still in it."""
    everything = members if settings.deals_utterances else utterances_of(store, members)
    if settings.max_seconds is None:
        return everything
    return capped(store, everything, max_samples=_max_samples(settings.max_seconds), seed=seed)


def _max_samples(max_seconds: float) -> int:
    return math.floor(exactly(max_seconds) * SAMPLE_RATE)


def _hours(samples: Integers) -> float:
    return int(samples.sum()) / SAMPLE_RATE / 3600
