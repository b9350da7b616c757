"""What is stated of a guarantee: the same numbers in the same words in statements, reports, exports and `verify`.

Nothing here needs torch: whoever verifies a model need not have it.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sottovoce.privacy.events import CorrelatedRelease, GaussianRelease, NoGuarantee
from sottovoce.privacy.guarantee import Guarantee, format_epsilon
from sottovoce.privacy.membership_odds import GUARANTEE, NO_GUARANTEE, strength_of

NOT_PRIVATE = "Not private: nothing is promised to anybody."
CENTRAL = "Training on everybody’s speech in one place, without differential privacy."

SECURE_RANDOMNESS = (
    "of the operating system, anew for every draw; sums and noise lie on a public grid, on which float64 is exact. "
    "That the noise is an exact rounded Gaussian is not claimed (docs/privacy.md, Secure mode)"
)
SEEDED_RANDOMNESS = "of a seed: a simulation"

GuaranteeKind = Literal["simulation", "release", "weak", "nothing"]
Fact = tuple[str, str]

_SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
_NAMES_EPSILON = re.compile(r"(?:ε|epsilon) ?(?:=|≤|<=|<|of) ?\d", re.IGNORECASE)
_CONDITIONAL = re.compile(r"\bwould\b", re.IGNORECASE)


@dataclass(frozen=True)
class StatedGuarantee:
    """The grade of a guarantee: `kind` and `headline`.

    `is_nothing`: ε is so large that it must not be called a guarantee; `is_delta_large`: δ allows one person's leak.
    """

    kind: GuaranteeKind
    headline: str
    is_nothing: bool
    is_delta_large: bool


def state_guarantee(guarantee: Guarantee, *, population_size: int | None) -> StatedGuarantee:
    """How a guarantee is called, by ε of one person; for a run that has one."""
    delta, inside, unit = guarantee.delta, guarantee.epsilon_inside, guarantee.unit
    # What is called a guarantee is one for people: of a silo, for each speaker inside.
    epsilon = guarantee.epsilon.headline if inside is None else inside.headline
    is_delta_large = population_size is not None and delta * population_size >= 1
    is_nothing, is_weak = epsilon > NO_GUARANTEE, epsilon > GUARANTEE or is_delta_large
    kind: GuaranteeKind = "nothing" if is_nothing else "weak" if is_weak else "release"
    stated = f"ε = {format_epsilon(guarantee.epsilon.headline)} at δ = {delta:g}"
    if inside is not None:
        less = f"ε = {format_epsilon(epsilon)} for one {unit.inside} inside it"
        stated = f"ε = {format_epsilon(guarantee.epsilon.headline)} for {unit.one} and {less}, at δ = {delta:g}"
    grade = "practically no guarantee"
    if not is_nothing:
        grade = f"a {'weak' if is_weak else strength_of(epsilon).words} guarantee"
    headline = f"A release with {grade}: {stated}."
    if guarantee.simulated:
        kind = "simulation"
        headline = f"A simulation, which protects nobody. A release of this recipe would have {stated}: {grade}."
    elif is_nothing:
        headline = f"A release with {grade}: {stated}, however secure its randomness was."
    return StatedGuarantee(kind, headline, is_nothing, is_delta_large)


def describe_adversary(plan: Mapping[str, Any]) -> str:
    """Against whom a guarantee holds, and against whom it does not."""
    adversary = (
        "Whoever sees all models that were ever released, the settings, this ledger and the list of people, and "
        "computes for as long as they like."
    )
    server = "Not against the machine that trained: it had the speech, and saw every update before the noise."
    if plan.get("noise_shares"):
        server = "The server sees sums with noise by clients: its own ε is larger, since it knows who is drawn."
    elif plan.get("sum_bits"):
        server = "Not against the server: it sees sums before the noise and, with open sums, every single update."
    return f"{adversary} {server} Other channels (time, memory, a stolen disk) are not covered."


def population_fact(guarantee: Guarantee, plan: Mapping[str, Any]) -> Fact:
    several = guarantee.unit.several
    return "population", f"{plan['population_size']:,.0f} {several} on a list that was fixed before the run"


def release_facts(guarantee: Guarantee, plan: Mapping[str, Any], *, repeats: int = 0) -> Iterator[Fact]:
    """Sampling, rounds, clipping, noise, unit, δ and ε; `repeats` are attempts that a crash has lost."""
    yield "sampling", _sampling(guarantee, plan)
    yield "rounds", f"{guarantee.steps:,} promised before the first model was released, {guarantee.made:,} made"
    if repeats:
        yield "repeated after a crash", f"{repeats:,} attempts; each is in ε"
    yield from _mechanism(guarantee, plan)
    yield "randomness", SEEDED_RANDOMNESS if guarantee.simulated else SECURE_RANDOMNESS


def _mechanism(guarantee: Guarantee, plan: Mapping[str, Any]) -> Iterator[Fact]:
    release, stated, people = guarantee.release, guarantee.epsilon, plan["population_size"]
    if isinstance(release, NoGuarantee):
        yield "mechanism", f"none that bounds anything: {release.reason}"
        return
    bound = "a norm that follows theirs, privately" if plan.get("adaptive") else f"an L2 norm of {plan['clip_bound']:g}"
    yield "clipping", f"each client's update to {bound}"
    chained = ", correlated over rounds" if isinstance(release, CorrelatedRelease) else ""
    yield "noise", f"Gaussian{chained}, {release.noise_multiplier:g} times that bound, on the sum of a round, once"
    relation = "added or removed" if release.neighbouring == "add_remove" else "replaced by another"
    unit, inside = guarantee.unit, guarantee.epsilon_inside
    yield "unit of privacy", f"{unit.one}, {relation}, {unit.holds}"
    if guarantee.measured:
        yield "measured besides", f"clients' word error rate, {guarantee.measured:,} times, with noise; in ε"
    below = "below" if guarantee.delta * people < 1 else "NOT BELOW"
    counted = "the population" if unit.inside is None else f"the number of {unit.several}"
    yield "δ", f"{guarantee.delta:g}, {below} one over {counted} ({1 / people:.2g})"
    tight = f"none: {stated.pld_reason}" if stated.pld is None else format_epsilon(stated.pld)
    yield "ε by privacy loss distributions", tight
    yield "ε by Rényi accounting", format_epsilon(stated.rdp)
    yield "ε that counts", f"{format_epsilon(stated.headline)}: both are upper bounds, so the smaller one holds"
    worst = stated.headline
    if inside is not None:
        worst = inside.headline
        by_pld = "" if inside.pld is None else f"{format_epsilon(inside.pld)} by privacy loss distributions, "
        yield (
            f"ε that counts for one {unit.inside} inside a {unit.short}",
            f"{format_epsilon(worst)} ({by_pld}{format_epsilon(inside.rdp)} by Rényi accounting): what they said moves "
            f"the {unit.short}’s update by up to twice the clip bound. For who is in one {unit.short} alone",
        )
    yield "on the scale of ε", f"{strength_of(worst).words} (docs/privacy.md, One scale of ε)"
    yield "odds of 1 : 1 become", f"at most {format_odds(worst)}, but for a chance of δ"


def _sampling(guarantee: Guarantee, plan: Mapping[str, Any]) -> str:
    release, unit, cohort, people = guarantee.release, guarantee.unit, plan["cohort_size"], plan["population_size"]
    one = "person" if unit.inside is None and unit.is_known else unit.short
    if isinstance(release, CorrelatedRelease):
        rate = release.sampling_rate
        whom = f"each {one} of it" if rate == 1 else f"each of it with probability {rate:.4g}"
        return f"one of {release.cycle:,} groups after the other, {whom}"
    if isinstance(release, GaussianRelease) and release.sampling == "fixed_size":
        return f"{cohort:,.0f} different {unit.several} in each round, every set of them equally likely"
    expected = plan.get("expected_answers")
    drawn = (
        f"{cohort:,.0f} expected" if expected is None else f"{cohort:,.0f} drawn for {expected:,.0f} answers in time"
    )
    return f"each {one} alone, with probability {cohort / people:.4g} in each round ({drawn})"


def format_odds(epsilon: float) -> str:
    """e^ε : 1, rounded up.

    >>> [format_odds(e) for e in (0.07, 2.0, 8.0, 30.0, 3933.0)]
    ['1.08 : 1', '7.4 : 1', '2,981 : 1', 'more than 10¹³ : 1', 'more than 10¹⁷⁰⁸ : 1']
    """
    if epsilon > math.log(1e6):
        return f"more than 10{str(math.floor(epsilon / math.log(10))).translate(_SUPERSCRIPTS)} : 1"
    factor = math.exp(epsilon)
    digits = 2 if factor < 2 else 1 if factor < 10 else 0
    return f"{math.ceil(factor * 10**digits - 1e-9) / 10**digits:,.{digits}f} : 1"


def names_epsilon(text: str) -> bool:
    """Whether a text gives an ε as a number.

    >>> [names_epsilon(text) for text in ("ε = 8", "epsilon of 2", "an ε of all rounds")]
    [True, True, False]
    """
    return _NAMES_EPSILON.search(text) is not None


def remove_epsilon(title: str) -> str:
    """A simulation's title without the parts that name an ε, unless they say that a release *would* have it.

    >>> remove_epsilon("1,900 people, each in all of ten rounds, ε = 8 for these very people; denoised by 20 others")
    '1,900 people, each in all of ten rounds; denoised by 20 others (simulated)'
    >>> remove_epsilon("ε ≤ 8 with 288 people"), remove_epsilon("What a release would have: ε ≤ 8")
    ('A simulation', 'What a release would have: ε ≤ 8')
    """
    if not names_epsilon(title) or _CONDITIONAL.search(title):
        return title
    pieces = re.split(r"([,;:]\s+)", title)  # parts, and what stands between them
    kept = ""
    for between, part in zip(["", *pieces[1::2]], pieces[::2], strict=True):
        if not names_epsilon(part):
            kept += f"{between if kept else ''}{part}"
    return f"{kept} (simulated)" if kept else "A simulation"
