"""The verdict on a run, in plain words: what its ε allows somebody to find out, for whom, against whom, at what cost.

It is read from the ledger, not from what a run says of itself. How a guess and odds follow from the mechanism stands in
`privacy.odds`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from sottovoce.evaluation.gaps import Gap
from sottovoce.privacy.events import GaussianRelease, NoGuarantee, accounted
from sottovoce.privacy.odds import Odds, believed, odds
from sottovoce.privacy.promise import Promise, both, written_out
from sottovoce.privacy.scale import GUARANTEE, NO_GUARANTEE, step_of
from sottovoce.report.audit import audit_alarm
from sottovoce.report.cells import integer, listed
from sottovoce.report.costs import PrivacyCost, cost_of, gap_of, gap_words
from sottovoce.report.larger_population import accountant_of, larger_population
from sottovoce.report.records import RunRecord
from sottovoce.units import PrivacyUnit

EVERY_TIME = 0.995
PRIOR = 0.01
RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")

VerdictKind = Literal["unsound", "not private", "simulation", "release", "weak", "nothing"]

SEEDED = (
    "Simulated: cohorts and noise came from a seed, and whoever has the seed can take the noise out again. The model "
    "itself protects nobody; the figures say what a release of this recipe would be worth."
)
SECURE = "In secure mode: cohorts and noise came from the operating system, once, and cannot be drawn again."


@dataclass(frozen=True)
class Verdict:
    """What is to be said of one run, the most important first. `points` are questions and their answers.

    `short` is for a terminal. `epsilon` is the smaller bound for a `unit` of privacy, None without a guarantee; so is
    `odds`. `epsilon_inside` is that of one person inside a unit that holds several, of whom `odds` are then.
    `against` is what an audit says against it, empty where there is nothing.
    """

    label: str
    kind: VerdictKind
    headline: str
    short: str
    points: tuple[tuple[str, str], ...]
    epsilon: float | None = None
    delta: float | None = None
    odds: Odds | None = None
    cost: PrivacyCost | None = None
    gap: Gap | None = None
    against: str = ""
    unit: PrivacyUnit | None = None
    epsilon_inside: float | None = None

    @property
    def epsilon_of_one(self) -> float | None:
        """ε of one person, whatever the unit is."""
        return self.epsilon if self.epsilon_inside is None else self.epsilon_inside

    @property
    def brief(self) -> str:
        """For a table. Of a simulation, what its ε would be worth, too."""
        if self.against:
            return "its audit speaks against it"
        if self.kind != "simulation" or self.epsilon_of_one is None or self.epsilon_of_one <= GUARANTEE:
            return self.status[0]
        return f"simulated; released, {step_of(self.epsilon_of_one).words}"

    @property
    def status(self) -> tuple[str, str]:
        """In two words, and a few more."""
        return STATUS[self.kind]

    def as_json(self) -> dict[str, Any]:
        one = self.epsilon_of_one
        inside = {} if self.unit is None or self.epsilon_inside is None else {"epsilon_inside": self.epsilon_inside}
        private = {
            "epsilon": self.epsilon,
            "delta": self.delta,
            "scale": None if one is None else step_of(one).words,
            "unit": None if self.unit is None else self.unit.name,
            **inside,
            "odds": math.exp(one) if one is not None and one < 700 else None,
            "right_guesses": None if self.odds is None else self.odds.right,
            "found_at_one_false_alarm_in_100": None if self.odds is None else self.odds.found,
        }
        return {
            "verdict": self.kind,
            "headline": self.headline,
            "points": dict(self.points),
            **({} if self.epsilon is None else private),
            "cost": None if self.cost is None else self.cost.as_json(),
            "worst_group": None if self.gap is None else self.gap.as_json(),
        }


STATUS: dict[VerdictKind, tuple[str, str]] = {
    "unsound": ("not known", "no ledger that holds"),
    "not private": ("not private", "nothing is promised"),
    "simulation": ("simulated", "seeded: not a release"),
    "release": ("release", "secure randomness"),
    "weak": ("weak release", "secure randomness, but ε or δ is large"),
    "nothing": ("not private in practice", "secure randomness, but ε excludes next to nothing"),
}

COUNTED: dict[VerdictKind, tuple[str, str]] = {
    "unsound": ("is without a ledger that holds", "are without a ledger that holds"),
    "not private": ("is not private", "are not private"),
    "simulation": ("is a simulation", "are simulations"),
    "release": ("is a release with a guarantee", "are releases with a guarantee"),
    "weak": ("is a release with a weak guarantee", "are releases with a weak guarantee"),
    "nothing": ("is not private in practice", "are not private in practice"),
}


def told_together(found: Sequence[Verdict]) -> str:
    """The verdict on several runs in one sentence, and on a single one in its own words.

    >>> def one(kind): return Verdict("a", kind, "A headline.", "A headline.", ())
    >>> told_together([one("simulation"), one("not private"), one("simulation")])
    'Of 3 runs 2 are simulations and 1 is not private; none is a release with a guarantee.'
    """
    if len(found) == 1:
        return found[0].short
    doubted = [one.label for one in found if one.against]
    against = f" Audits speak against what is promised: {listed(doubted)}." if doubted else ""
    counts = {kind: sum(one.kind == kind for one in found) for kind in STATUS}
    named = [f"{count:,} {COUNTED[kind][count > 1]}" for kind, count in sorted(counts.items(), key=_most) if count]
    none = "" if counts["release"] else "; none is a release with a guarantee"
    if not named[1:]:
        return f"All {len(found):,} runs {COUNTED[found[0].kind][1]}{none}.{against}"
    return f"Of {len(found):,} runs {', '.join(named[:-1])} and {named[-1]}{none}.{against}"


def _most(counted: tuple[VerdictKind, int]) -> int:
    return -counted[1]


def verdicts(runs: Sequence[RunRecord]) -> tuple[Verdict, ...]:
    """One for each run; what a run costs is told beside its twin without noise, where `runs` has it."""
    return tuple(verdict_on(run, runs) for run in runs)


def verdict_on(run: RunRecord, runs: Sequence[RunRecord] = ()) -> Verdict:
    cost, gap = cost_of(run, runs), gap_of(run)
    measured = () if cost is None else (("Word errors", cost.words), ("The worst group", gap_words(gap)))
    if run.unsound:
        headline = "No verdict: what is said of privacy here cannot be believed."
        return Verdict(run.label, "unsound", headline, headline, (("Why", run.unsound), *measured), cost=cost, gap=gap)
    if run.is_federated and run.promise is None:
        headline = "No verdict: there is no ledger."
        why = "Whatever ε is stated, nothing shows what was released."
        return Verdict(run.label, "unsound", headline, headline, (("Why", why), *measured), cost=cost, gap=gap)
    if run.promise is None or isinstance(run.promise.release, NoGuarantee):
        return _not_private(run, measured, cost, gap)
    found = _private(run, run.promise, measured, cost, gap)
    against = audit_alarm(run)
    if not against:
        return found
    headline = f"Its audit speaks against what is promised. On paper: {found.headline}"
    points = (("What an audit found", against), *found.points)
    return replace(found, headline=headline, short=f"{headline} {against}", points=points, against=against)


def _not_private(
    run: RunRecord, measured: tuple[tuple[str, str], ...], cost: PrivacyCost | None, gap: Gap | None
) -> Verdict:
    headline = "Not private: nothing is promised to anybody."
    if run.promise is None:
        why = "Training on everybody’s speech in one place, without differential privacy."
    else:
        assert isinstance(run.promise.release, NoGuarantee)
        why = (
            f"Federated, but without a guarantee: {run.promise.release.reason}. That speech stays at home hides little."
        )
    learn = "Whoever has the model may find out who took part, and what they said."
    points = (("What somebody can find out", learn), ("Why", why), *measured)
    return Verdict(run.label, "not private", headline, headline, points, cost=cost, gap=gap)


def _private(
    run: RunRecord, promise: Promise, measured: tuple[tuple[str, str], ...], cost: PrivacyCost | None, gap: Gap | None
) -> Verdict:
    delta, inside = promise.delta, promise.epsilon_inside
    # What is called a guarantee is one for people: of a silo, for each speaker inside.
    epsilon = promise.epsilon.headline if inside is None else inside.headline
    found = odds(promise.event_inside or promise.event)
    people = run.header["plan"].get("population_size")
    delta_too_large = people is not None and delta * people >= 1
    nothing, weak = epsilon > NO_GUARANTEE, epsilon > GUARANTEE or delta_too_large
    kind: VerdictKind = "simulation" if promise.simulated else "nothing" if nothing else "weak" if weak else "release"
    stated = f"ε = {written_out(promise.epsilon.headline)} at δ = {delta:g}"
    if inside is not None:
        unit, whole = promise.unit, written_out(promise.epsilon.headline)
        less = f"ε = {written_out(epsilon)} for one {unit.inside} inside it"
        stated = f"ε = {whole} for {unit.one} and {less}, at δ = {delta:g},"
    holds = f"would hold ({step_of(epsilon).words})"
    would = "would exclude next to nothing" if nothing else "would be a weak guarantee" if weak else holds
    headline = {
        "simulation": f"A simulation, which itself protects nobody. Released, {stated} {would}.",
        "release": f"A release with a guarantee: {stated.rstrip(',')} ({step_of(epsilon).words}).",
        "weak": f"A release with a weak guarantee: {stated.rstrip(',')}.",
        "nothing": f"Practically no guarantee: {stated} excludes next to nothing, however secure its randomness was.",
    }[kind]
    learnt = learn_words(promise, found)
    if promise.simulated:
        learnt = f"Of a release of the same recipe: {learnt[0].lower()}{learnt[1:]}"
    points = [("What somebody can find out", learnt), ("For whom", _for_whom(promise))]
    points += [("Against whom", _against(run)), ("Had or extrapolated", _had(run, promise))]
    points += [("Simulated or released", _drawn(promise, nothing=nothing))]
    if delta_too_large:
        leak = f"δ = {delta:g} is not below one in {integer(people)}, the population: it allows one person’s leak."
        points.append(("A large δ", leak))
    if promise.outside is not None:
        points.append(("What it rests on", f"{promise.outside}."))
    short = f"{headline} {learnt}"
    return Verdict(
        run.label,
        kind,
        headline,
        short,
        (*points, *measured),
        promise.epsilon.headline,
        delta,
        odds=found,
        cost=cost,
        gap=gap,
        unit=promise.unit,
        epsilon_inside=None if inside is None else inside.headline,
    )


def learn_words(promise: Promise, found: Odds) -> str:
    """What all that is published can tell of one person, in guesses and in odds."""
    epsilon, delta = (promise.epsilon_inside or promise.epsilon).headline, promise.delta
    hundred = of_hundred(found.right)
    if found.right >= EVERY_TIME:
        guess = "Somebody who guesses whether a person took part may be right every time."
    else:
        guess = (
            "Somebody who tosses a coin over whether a person took part is right 50 times in 100; with all that is "
            f"published, at most {hundred} times."
        )
    if epsilon > NO_GUARANTEE:
        undrawn = _never_drawn(promise)
        spared = (
            f" That it is not 100 is owed to chance alone, by which {100 * undrawn:.0f} in 100 are drawn in no round. "
            "Who is drawn may be found out for certain."
            if found.right < EVERY_TIME
            else ""
        )
        return f"Odds of 1 : 1 may become {odds_words(epsilon)}, which is to say certainty. {guess}{spared}"
    alarm = (
        "Who is content to be wrong about 1 in 100 of those who did not take part finds at most "
        f"{of_hundred(found.found)} in 100 of those who did."
    )
    change = (
        f"Odds of 1 : 1 can become at most {odds_words(epsilon)}, and a suspicion of 1 in 100 at most "
        f"{of_hundred(believed(PRIOR, epsilon=epsilon))} in 100, but for a chance of δ = {delta:g}."
    )
    return f"{guess} {alarm} {change}"


def of_hundred(share: float) -> int:
    """An upper bound, so it is rounded up.

    >>> of_hundred(0.65001), of_hundred(0.65)
    (66, 65)
    """
    return min(100, math.ceil(100 * share - 1e-9))


def odds_words(epsilon: float) -> str:
    """e^ε : 1, rounded up.

    >>> [odds_words(e) for e in (0.07, 2.0, 8.0, 30.0, 3933.0)]
    ['1.08 : 1', '7.4 : 1', '2,981 : 1', 'more than 10¹³ : 1', 'more than 10¹⁷⁰⁸ : 1']
    """
    if epsilon > math.log(1e6):
        return f"more than 10{str(math.floor(epsilon / math.log(10))).translate(RAISED)} : 1"
    factor = math.exp(epsilon)
    digits = 2 if factor < 2 else 1 if factor < 10 else 0
    return f"{math.ceil(factor * 10**digits - 1e-9) / 10**digits:,.{digits}f} : 1"


def _never_drawn(promise: Promise) -> float:
    """How likely one person is in no round at all, of those that could be theirs."""
    share = 1.0
    for part, count in accounted(promise.event):
        assert isinstance(part, GaussianRelease)
        rate = part.sampling_rate
        if rate is None:
            assert part.cohort_size is not None
            assert part.population_size is not None
            rate = part.cohort_size / part.population_size
        share *= (1 - rate) ** count
    return share


def _for_whom(promise: Promise) -> str:
    assert not isinstance(promise.release, NoGuarantee)
    unit, inside = promise.unit, promise.epsilon_inside
    if inside is not None:
        both_lines = (
            f"Each {unit.short}, {unit.holds}: ε = {both(promise.epsilon)}. One {unit.inside} inside a {unit.short} "
            f"has less: ε = {both(inside)}, since what they said changes the {unit.short}’s update by up to twice the "
            f"clip bound and does not take it away. That is for who is in one {unit.short} alone."
        )
    elif unit.is_known:
        both_lines = f"Each {unit.short} of the run, with everything they said in it."
    else:
        both_lines = f"Each {unit.short}. Whether that is one person, the ledger does not say."
    if promise.release.neighbouring == "add_remove":
        hidden = f"Hidden is whether {unit.one} took part at all, and so what they said"
    else:
        hidden = f"Hidden is whether it was {unit.one} or another in their place; that so many took part is not"
    return f"{both_lines} {hidden}. That they are on the list of those who might take part is public."


def _against(run: RunRecord) -> str:
    plan = run.header["plan"]
    told = (
        "Whoever sees all models that were ever released, the settings, this ledger and the list of people, and "
        "computes for as long as they like."
    )
    if plan.get("noise_shares"):
        server = "The server sees sums with noise by clients: its own ε is larger, since it knows who is drawn."
    elif plan.get("sum_bits"):
        server = "Not against the server: it sees sums before the noise and, with open sums, every single update."
    else:
        server = "Not against the machine that trained: it had the speech, and saw every update before the noise."
    return f"{told} {server} Other channels (time, memory, a stolen disk) are not covered."


def _had(run: RunRecord, promise: Promise) -> str:
    people = integer(run.header["plan"].get("population_size"))
    rounds = "1 round" if promise.steps == 1 else f"{promise.steps:,} rounds"
    if promise.steps != promise.made:
        rounds = f"all {promise.steps:,} rounds that were promised ({promise.made:,} are made)"
    whom = f"the {people} {promise.unit.several} of this run"
    told = f"ε = {both(promise.epsilon)} is for {whom} and {rounds}, by its ledger."
    told = f"On paper, as a simulation has it: {told}" if promise.simulated else f"Had: {told}"
    accountant = accountant_of([run])
    useful = larger_population(run.privacy, accountant) or {}
    if promise.epsilon.headline <= GUARANTEE:
        return f"{told} No larger population is imagined."
    if "population_size" in useful:
        return (
            f"{told} Extrapolated, and had by nobody: with {integer(useful['population_size'])} {promise.unit.several} "
            f"the same recipe would have ε ≤ {GUARANTEE:g} ({accountant.upper()})."
        )
    return f"{told} No larger population is known with which the same recipe would have ε ≤ {GUARANTEE:g}."


def _drawn(promise: Promise, *, nothing: bool) -> str:
    if promise.simulated:
        return SEEDED
    return f"{SECURE} That makes ε true, not small: this one promises practically nothing." if nothing else SECURE
