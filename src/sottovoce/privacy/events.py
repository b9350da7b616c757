"""What one release (or a run of them) spends, as data.

An event says what was done, never what it costs: `accounting` computes ε from it, the ledger stores it, and the
plan builds it. Multipliers are those of the glossary (noise std on the *sum*, divided by the clip bound C); the
neighbouring relation says how far one user can move that sum: by C when added or removed, by 2C when replaced.
"""

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from sottovoce.base.errors import InputError
from sottovoce.privacy.strategies import Banded, Strategy, sensitivity, strategy_from_json, strategy_to_json

if TYPE_CHECKING:
    import dp_accounting

Sampling = Literal["poisson", "fixed_size"]
Neighbouring = Literal["add_remove", "replace_one"]

# What the accountants can compute without overflow or underflow; far beyond anything that makes sense.
SMALLEST_MULTIPLIER, LARGEST_MULTIPLIER = 1e-9, 1e9
LARGEST_POPULATION, LARGEST_STEPS = 10**12, 10**7

# How far one user moves the sum of clipped updates, in units of C.
SENSITIVITY: dict[Neighbouring, float] = {"add_remove": 1.0, "replace_one": 2.0}


def check_whole(name: str, value: float, *, most: int) -> None:
    """A count of users or steps: a whole number, and no larger than an accountant can take."""
    if not (1 <= value <= most and value == int(value)):
        raise InputError(f"{name}={value}: expected a whole number from 1 to {most}")


def check_sizes(population_size: int, *, cohort_size: int) -> None:
    """Whole numbers of users, and a cohort no larger than its population (q ≤ 1)."""
    check_whole("population_size", population_size, most=LARGEST_POPULATION)
    check_whole("cohort_size", cohort_size, most=LARGEST_POPULATION)
    if cohort_size > population_size:
        raise InputError(
            f"cohort_size={cohort_size} exceeds population_size={population_size}: "
            f"expected a sampling_rate of at most 1, got {cohort_size / population_size:g}"
        )


@dataclass(frozen=True)
class GaussianRelease:
    """One noised sum over one cohort.

    `poisson` needs `sampling_rate`, `fixed_size` needs `cohort_size` and `population_size`; with a rate of 1 every user
    is in every round. Build it with `poisson_release` or `fixed_size_release`.
    """

    noise_multiplier: float
    sampling: Sampling
    neighbouring: Neighbouring
    sampling_rate: float | None = None
    cohort_size: int | None = None
    population_size: int | None = None

    def __post_init__(self) -> None:
        z = float(self.noise_multiplier)
        if not z > 0:
            raise InputError(f"noise_multiplier={self.noise_multiplier}: expected a positive number (no noise, no ε)")
        if not SMALLEST_MULTIPLIER <= z <= LARGEST_MULTIPLIER:
            raise InputError(
                f"noise_multiplier={z}: expected a number from {SMALLEST_MULTIPLIER:g} to {LARGEST_MULTIPLIER:g}"
            )
        object.__setattr__(self, "noise_multiplier", z)  # 1 and 1.0 must be the same event, byte for byte
        if self.sampling not in get_args(Sampling):
            raise InputError(f"sampling={self.sampling!r}: expected one of {', '.join(get_args(Sampling))}")
        if self.neighbouring not in SENSITIVITY:
            raise InputError(f"neighbouring={self.neighbouring!r}: expected one of {', '.join(SENSITIVITY)}")
        given = {
            name for name in ("sampling_rate", "cohort_size", "population_size") if getattr(self, name) is not None
        }
        needed = {"poisson": {"sampling_rate"}, "fixed_size": {"cohort_size", "population_size"}}
        if given != needed[self.sampling]:
            wanted = " and ".join(sorted(needed[self.sampling]))
            raise InputError(f"sampling={self.sampling}: expected {wanted}, got {', '.join(sorted(given)) or 'none'}")
        self._check_sampling()

    def _check_sampling(self) -> None:
        if self.sampling_rate is not None:
            if not 1 / LARGEST_POPULATION <= self.sampling_rate <= 1:
                raise InputError(
                    f"sampling_rate={self.sampling_rate}: expected a probability in [{1 / LARGEST_POPULATION:g}, 1]"
                )
            object.__setattr__(self, "sampling_rate", float(self.sampling_rate))
        if self.cohort_size is not None and self.population_size is not None:
            check_sizes(self.population_size, cohort_size=self.cohort_size)

    @property
    def sensitivity(self) -> float:
        """How far one user moves the sum, in units of C."""
        return SENSITIVITY[self.neighbouring]

    @property
    def effective_multiplier(self) -> float:
        """Noise std over sensitivity: z for add/remove, z/2 for replace-one."""
        return self.noise_multiplier / self.sensitivity

    @property
    def unsampled(self) -> "GaussianRelease":
        """The same with everybody in the cohort: what it spends of one who is known to be in it.

        >>> fixed_size_release(2.0, cohort_size=3, population_size=9).unsampled.cohort_size
        9
        """
        if self.sampling == "fixed_size":
            return replace(self, cohort_size=self.population_size)
        return replace(self, sampling_rate=1.0)


@dataclass(frozen=True)
class CorrelatedRelease:
    """One row of a chain of noised sums, whose noise is correlated over rows by a strategy (`strategies`).

    Row t is of the group t mod `cycle` of the users alone, each of whom joins with probability `sampling_rate`. So many
    of it in a composition are so many rows of *one* chain: `expanded` says what they spend together. Guarantee: against
    adding or removing one user. `noise_multiplier` is that of the fresh noise which the strategy correlates.
    """

    noise_multiplier: float
    sampling_rate: float
    cycle: int
    strategy: Strategy

    def __post_init__(self) -> None:
        fresh = poisson_release(self.noise_multiplier, sampling_rate=self.sampling_rate)  # refuses what makes no sense
        object.__setattr__(self, "noise_multiplier", fresh.noise_multiplier)
        object.__setattr__(self, "sampling_rate", fresh.sampling_rate)
        check_whole("cycle", self.cycle, most=LARGEST_STEPS)
        object.__setattr__(self, "cycle", int(self.cycle))
        sensitivity(self.strategy, rows=1, cycle=self.cycle)
        if self.sampling_rate < 1 and not (isinstance(self.strategy, Banded) and self.strategy.bands <= self.cycle):
            raise InputError(
                f"sampling_rate={self.sampling_rate:g} within groups, cycle={self.cycle}: expected 1 (everybody of the "
                "group), or a banded strategy with no more bands than the cycle"
            )

    @property
    def neighbouring(self) -> Neighbouring:
        return "add_remove"


@dataclass(frozen=True)
class NoGuarantee:
    """A release that nothing bounds, and why. Its ε is infinite wherever it appears."""

    reason: str


Release = GaussianRelease | CorrelatedRelease


@dataclass(frozen=True)
class Composition:
    """Releases one after another, each with how often it happened; fresh sample and fresh noise every time.

    Of a `CorrelatedRelease` each part is one chain, and the count its rows.
    """

    parts: tuple[tuple[Release | NoGuarantee, int], ...]

    def __post_init__(self) -> None:
        for event, count in self.parts:
            if count != int(count) or count < 0:
                raise InputError(f"count={count} of {event}: expected a whole number, at least 0")
        object.__setattr__(self, "parts", tuple((event, int(count)) for event, count in self.parts))


Event = Release | Composition | NoGuarantee


def poisson_release(noise_multiplier: float, *, sampling_rate: float) -> GaussianRelease:
    """Each user joins with probability `sampling_rate`. Guarantee: against adding or removing one user."""
    return GaussianRelease(noise_multiplier, "poisson", "add_remove", sampling_rate=sampling_rate)


def fixed_size_release(noise_multiplier: float, *, cohort_size: int, population_size: int) -> GaussianRelease:
    """`cohort_size` users without replacement. Guarantee: against replacing one user (sensitivity 2C)."""
    return GaussianRelease(
        noise_multiplier, "fixed_size", "replace_one", cohort_size=cohort_size, population_size=population_size
    )


def sampled_release(
    noise_multiplier: float, *, population_size: int, cohort_size: int, sampling: Sampling = "poisson"
) -> GaussianRelease:
    """One release over a cohort of a population, whichever way it is drawn."""
    if sampling == "fixed_size":
        return fixed_size_release(noise_multiplier, cohort_size=cohort_size, population_size=population_size)
    return poisson_release(noise_multiplier, sampling_rate=cohort_size / population_size)


def repeated(event: Event, count: int) -> Composition:
    """`event` happening `count` times.

    >>> repeated(poisson_release(1.0, sampling_rate=0.01), 3).parts[0][1]
    3
    """
    return Composition(tuple((part, n * count) for part, n in parts_of(event)))


def composed(*events: Event) -> Composition:
    """Everything in `events`, equal parts merged, in order of first appearance.

    Rows of equal correlated releases are merged to one chain, as a run goes on; runs are composed by `accounted`.
    """
    counts: dict[Release | NoGuarantee, int] = {}
    for event in events:
        for part, count in parts_of(event):
            counts[part] = counts.get(part, 0) + count
    return Composition(tuple(counts.items()))


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a run measures besides its rounds: `count` sums over cohorts of the same size, with noise of their own."""

    count: int
    noise_multiplier: float

    def event(self, *, population_size: int, cohort_size: int, sampling: Sampling = "poisson") -> Composition:
        """All of them. Cohorts are drawn from the whole population, also where rounds draw from groups in turn.

        >>> Measured(count=2, noise_multiplier=8.0).event(population_size=9, cohort_size=2).parts[0][0].sampling_rate
        0.2222222222222222
        """
        release = sampled_release(
            self.noise_multiplier, population_size=population_size, cohort_size=cohort_size, sampling=sampling
        )
        return repeated(release, self.count)


def run_event(step: Release | NoGuarantee, steps: int, besides: Event | None = None) -> Composition:
    """`steps` rounds, and what is released `besides`.

    >>> measured = repeated(poisson_release(8.0, sampling_rate=0.01), 2)
    >>> whole = run_event(poisson_release(1.0, sampling_rate=0.01), 20, measured)
    >>> [(part.noise_multiplier, count) for part, count in whole.parts]
    [(1.0, 20), (8.0, 2)]
    """
    rounds = repeated(step, steps)
    return rounds if besides is None else composed(rounds, besides)


def parts_of(event: Event) -> tuple[tuple[Release | NoGuarantee, int], ...]:
    """The event as (release, count) pairs."""
    return event.parts if isinstance(event, Composition) else ((event, 1),)


def expand_rows(event: CorrelatedRelease, rows: int) -> tuple[tuple[GaussianRelease, int], ...]:
    """What the first `rows` rows of a chain spend, as releases with noise of their own.

    Guarantee: the chain is as private as those releases, also where updates depend on what was released before. With
    everybody of the group in each of its rounds the whole chain is one Gaussian release that a user moves by
    `sensitivity`. Under sampling a user's rounds touch rows of their own alone, so each is one sampled release that a
    user moves by the column's norm (Choquette-Choo et al. 2023): ⌈rows/cycle⌉ of them.

    >>> chain = CorrelatedRelease(2.0, 0.5, 3, Banded(column=(1.0, 0.75)))
    >>> [(part.noise_multiplier, count) for part, count in expand_rows(chain, 7)]
    [(1.6, 3)]
    """
    if rows == 0:
        return ()
    if event.sampling_rate == 1.0:
        moved, count = sensitivity(event.strategy, rows=rows, cycle=event.cycle), 1
    else:
        moved = sensitivity(event.strategy, rows=min(rows, event.cycle), cycle=event.cycle)
        count = -(-rows // event.cycle)
    return ((poisson_release(event.noise_multiplier / moved, sampling_rate=event.sampling_rate), count),)


def accounted(event: Event) -> tuple[tuple[GaussianRelease | NoGuarantee, int], ...]:
    """The event as (release, count) pairs that accountants take: each chain of correlated releases is expanded."""
    parts: list[tuple[GaussianRelease | NoGuarantee, int]] = []
    for part, count in parts_of(event):
        parts.extend(expand_rows(part, count) if isinstance(part, CorrelatedRelease) else ((part, count),))
    return tuple(parts)


def replaced(event: Event) -> Composition:
    """The same releases against *replacing* what one client sends, which stays a client: moved by 2C and not by C.

    That protects one speaker inside a silo, whose speech changes the silo's update. It bounds adding and removing too.

    >>> [(part.neighbouring, part.effective_multiplier) for part, _ in
    ...     replaced(poisson_release(3.0, sampling_rate=0.1)).parts]
    [('replace_one', 1.5)]
    """
    parts = accounted(event)
    return Composition(
        tuple(
            (part if isinstance(part, NoGuarantee) else replace(part, neighbouring="replace_one"), count)
            for part, count in parts
        )
    )


def event_to_json(event: Event) -> dict[str, Any]:
    """A plain dict that `event_from_json` turns back into an equal event."""
    match event:
        case Composition(parts):
            return {"kind": "composition", "parts": [[event_to_json(part), count] for part, count in parts]}
        case NoGuarantee(reason):
            return {"kind": "no_guarantee", "reason": reason}
        case GaussianRelease():
            fields = {name: value for name, value in vars(event).items() if value is not None}
            return {"kind": "gaussian", **fields}
        case CorrelatedRelease():
            return {
                "kind": "correlated",
                "noise_multiplier": event.noise_multiplier,
                "sampling_rate": event.sampling_rate,
                "cycle": event.cycle,
                "strategy": strategy_to_json(event.strategy),
                "neighbouring": event.neighbouring,
            }


def event_from_json(data: dict[str, Any]) -> Event:
    """The event that `event_to_json` wrote; anything else is refused."""
    fields = dict(data)
    kind = fields.pop("kind", None)
    try:
        if kind == "composition":
            return Composition(tuple((_leaf_from_json(part), count) for part, count in fields.pop("parts")))
        if kind == "no_guarantee":
            return NoGuarantee(**fields)
        if kind == "gaussian":
            return GaussianRelease(**fields)
        if kind == "correlated" and fields.pop("neighbouring") == "add_remove":
            return CorrelatedRelease(**{**fields, "strategy": strategy_from_json(fields["strategy"])})
    except (TypeError, KeyError, ValueError) as error:
        raise InputError(f"privacy event {json.dumps(data, default=repr)}: {error}") from error
    raise InputError(f"privacy event kind={kind!r}: expected gaussian, correlated, composition or no_guarantee")


def _leaf_from_json(data: dict[str, Any]) -> Release | NoGuarantee:
    event = event_from_json(data)
    if isinstance(event, Composition):
        raise InputError("a composition inside a composition: expected a flat list of releases")
    return event


def to_dp_event(event: Event) -> "dp_accounting.DpEvent":
    """The same in dp-accounting's words; multipliers there are relative to the sensitivity."""
    import dp_accounting  # here and below in `rdp` and `pld`: a second to load, and only those who account need it

    match event:
        case Composition():
            return dp_accounting.ComposedDpEvent(
                [dp_accounting.SelfComposedDpEvent(to_dp_event(part), count) for part, count in accounted(event)]
            )
        case NoGuarantee():
            return dp_accounting.NonPrivateDpEvent()
        case CorrelatedRelease():
            return to_dp_event(Composition(expand_rows(event, 1)))
        case GaussianRelease():
            gaussian = dp_accounting.GaussianDpEvent(event.effective_multiplier)
            if event.sampling == "poisson":
                return dp_accounting.PoissonSampledDpEvent(event.sampling_rate, gaussian)
            return dp_accounting.SampledWithoutReplacementDpEvent(event.population_size, event.cohort_size, gaussian)
