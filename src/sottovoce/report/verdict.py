"""The verdict on a run, in plain words: what its ε allows somebody to find out, for whom, against whom, at what cost.

It is read from the ledger, not from what a run says of itself. How guesses and odds follow from the mechanism is in
`privacy.membership_odds`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from sottovoce.base.units import PrivacyUnit
from sottovoce.evaluation.compare import GroupGap
from sottovoce.privacy.events import GaussianRelease, NoGuarantee, accounted
from sottovoce.privacy.guarantee import Guarantee, format_epsilons
from sottovoce.privacy.membership_odds import (
    GUARANTEE,
    NEXT_TO_NOTHING,
    NO_GUARANTEE,
    MembershipOdds,
    bound_membership_odds,
    posterior_belief,
    strength_of,
)
from sottovoce.privacy.stated import CENTRAL, NOT_PRIVATE, describe_adversary, format_odds, state_guarantee
from sottovoce.report.audit import audit_alarm
from sottovoce.report.comparisons import PrivacyCost, format_gap, privacy_cost, worst_group_gap
from sottovoce.report.parts import join_labels, show_count
from sottovoce.report.populations import common_accountant, larger_population
from sottovoce.report.records import RunRecord

CERTAIN = 0.995  # of guesses right, from which they are called right every time
PRIOR = 0.01

VerdictKind = Literal["unsound", "not private", "simulation", "release", "weak", "nothing"]

SEEDED = (
    "Simulated: cohorts and noise came from a seed, and whoever has the seed can take the noise out again. The model "
    "itself protects nobody; the numbers are those that a release of this recipe would have."
)
SECURE = "In secure mode: cohorts and noise came from the operating system, once, and cannot be drawn again."


@dataclass(frozen=True)
class Verdict:
    """What is to be said of one run, the most important first. `points` are questions and their answers.

    `short` is for a terminal. `epsilon` is the smaller bound for a `unit` of privacy, None without a guarantee; so is
    `odds`. `epsilon_inside` is that of one person inside a unit that holds several, of whom `odds` are then.
    `against` is what an audit found against it, empty where there is nothing.
    """

    label: str
    kind: VerdictKind
    headline: str
    short: str
    points: tuple[tuple[str, str], ...]
    epsilon: float | None = None
    delta: float | None = None
    odds: MembershipOdds | None = None
    cost: PrivacyCost | None = None
    gap: GroupGap | None = None
    against: str = ""
    unit: PrivacyUnit | None = None
    epsilon_inside: float | None = None

    @property
    def epsilon_of_one(self) -> float | None:
        """ε of one person, whatever the unit is."""
        return self.epsilon if self.epsilon_inside is None else self.epsilon_inside

    @property
    def brief(self) -> str:
        """For a table. Of a simulation with a large ε, the scale of ε too."""
        if self.against:
            return "contradicted by its audit"
        if self.kind != "simulation" or self.epsilon_of_one is None or self.epsilon_of_one <= GUARANTEE:
            return self.status[0]
        strength = strength_of(self.epsilon_of_one)
        kept = "guarantee next to nothing" if strength is NEXT_TO_NOTHING else f"have a {strength.words} guarantee"
        return f"simulated; a release would {kept}"

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
            "scale": None if one is None else strength_of(one).words,
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
    "unsound": ("not known", "no valid ledger"),
    "not private": ("not private", "nothing is promised"),
    "simulation": ("simulated", "seeded: not a release"),
    "release": ("release", "secure randomness"),
    "weak": ("weak release", "secure randomness, but ε or δ is large"),
    "nothing": ("not private in practice", "secure randomness, but practically no guarantee"),
}

COUNTED: dict[VerdictKind, tuple[str, str]] = {
    "unsound": ("has no valid ledger", "have no valid ledger"),
    "not private": ("is not private", "are not private"),
    "simulation": ("is a simulation", "are simulations"),
    "release": ("is a release with a guarantee", "are releases with a guarantee"),
    "weak": ("is a release with a weak guarantee", "are releases with a weak guarantee"),
    "nothing": ("is not private in practice", "are not private in practice"),
}


def summarise_verdicts(found: Sequence[Verdict]) -> str:
    """The verdict on several runs in one sentence, and on a single one in its own words.

    >>> def one(kind): return Verdict("a", kind, "A headline.", "A headline.", ())
    >>> summarise_verdicts([one("simulation"), one("not private"), one("simulation")])
    'Of 3 runs 2 are simulations and 1 is not private; none is a release with a guarantee.'
    >>> summarise_verdicts([one("simulation"), one("not private")])
    'Of 2 runs 1 is not private and 1 is a simulation. a: A headline.'
    """
    if len(found) == 1:
        return found[0].short
    doubted = [one.label for one in found if one.against]
    against = f" Audits contradict what is promised: {join_labels(doubted)}." if doubted else ""
    counts = {kind: sum(one.kind == kind for one in found) for kind in STATUS}
    largest_first = sorted((kind for kind in counts if counts[kind]), key=lambda kind: -counts[kind])
    named = [f"{counts[kind]:,} {COUNTED[kind][counts[kind] > 1]}" for kind in largest_first]
    none = "" if counts["release"] else "; none is a release with a guarantee"
    if counts["simulation"] == 1 and counts["not private"] == len(found) - 1:  # one run, and what it is compared with
        (alone,) = (one for one in found if one.kind == "simulation")
        none, against = "", f" {alone.label}: {alone.headline}{against}"
    if not named[1:]:
        return f"All {len(found):,} runs {COUNTED[found[0].kind][1]}{none}.{against}"
    return f"Of {len(found):,} runs {', '.join(named[:-1])} and {named[-1]}{none}.{against}"


def judge_runs(runs: Sequence[RunRecord]) -> tuple[Verdict, ...]:
    """One for each run; its cost is that against its twin without noise, where `runs` has it."""
    return tuple(judge_run(run, runs) for run in runs)


def judge_run(run: RunRecord, runs: Sequence[RunRecord] = ()) -> Verdict:
    found = _judge(run)
    cost, gap = privacy_cost(run, runs), worst_group_gap(run)
    measured = () if cost is None else (("Word errors", cost.words), ("The worst group", format_gap(gap)))
    found = replace(found, points=(*found.points, *measured), cost=cost, gap=gap)
    against = "" if found.epsilon is None else audit_alarm(run)
    if not against:
        return found
    headline = f"Its audit contradicts what is promised. By the ledger: {found.headline}"
    answers = (("What an audit found", against), *found.points)
    return replace(found, headline=headline, short=f"{headline} {against}", points=answers, against=against)


def _judge(run: RunRecord) -> Verdict:
    guarantee = run.guarantee
    if run.unsound:
        headline = "No verdict: what is stated about privacy here cannot be verified."
        return Verdict(run.label, "unsound", headline, headline, (("Why", run.unsound),))
    if run.is_federated and guarantee is None:
        headline = "No verdict: there is no ledger."
        why = "Whatever ε is stated, nothing shows what was released."
        return Verdict(run.label, "unsound", headline, headline, (("Why", why),))
    if guarantee is not None and not isinstance(guarantee.release, NoGuarantee):
        return _judge_private(run, guarantee)
    why = CENTRAL
    if guarantee is not None:
        assert isinstance(guarantee.release, NoGuarantee)
        why = (
            f"Federated, but without a guarantee: {guarantee.release.reason}. That speech stays on the device hides "
            "little."
        )
    learn = "Whoever has the model may find out who took part, and what they said."
    points = (("What somebody can find out", learn), ("Why", why))
    return Verdict(run.label, "not private", NOT_PRIVATE, NOT_PRIVATE, points)


def _judge_private(run: RunRecord, guarantee: Guarantee) -> Verdict:
    delta, inside, unit = guarantee.delta, guarantee.epsilon_inside, guarantee.unit
    people = run.header["plan"].get("population_size")
    stated = state_guarantee(guarantee, population_size=people)
    found = bound_membership_odds(guarantee.event_inside or guarantee.event)
    learnt = describe_risk(guarantee, found)
    if guarantee.simulated:
        learnt = f"Of a release of the same recipe: {learnt[0].lower()}{learnt[1:]}"
    answers = [
        ("What somebody can find out", learnt),
        ("For whom", _for_whom(guarantee)),
        ("Against whom", describe_adversary(run.header["plan"])),
        ("Which population", _which_population(run, guarantee)),
        ("Simulated or released", _randomness(guarantee, is_nothing=stated.is_nothing)),
    ]
    if stated.is_delta_large:
        leak = f"δ = {delta:g} is not below one in {show_count(people)}, the population: it allows one person’s leak."
        answers.append(("A large δ", leak))
    if guarantee.outside is not None:
        answers.append(("What it rests on", f"{guarantee.outside}."))
    return Verdict(
        run.label,
        stated.kind,
        stated.headline,
        f"{stated.headline} {learnt}",
        tuple(answers),
        guarantee.epsilon.headline,
        delta,
        odds=found,
        unit=unit,
        epsilon_inside=None if inside is None else inside.headline,
    )


def describe_risk(guarantee: Guarantee, found: MembershipOdds) -> str:
    """What all that is published can reveal of one person, in guesses and in odds."""
    epsilon, delta = (guarantee.epsilon_inside or guarantee.epsilon).headline, guarantee.delta
    guess = "Somebody who guesses whether a person took part may be right every time."
    if found.right < CERTAIN:
        guess = (
            "Somebody who tosses a coin over whether a person took part is right 50 times in 100; with all that is "
            f"published, at most {round_up_percent(found.right)} times."
        )
    if epsilon > NO_GUARANTEE:
        spared = (
            f" It is not 100 only because {100 * _never_sampled(guarantee):.0f} in 100 are drawn in no round. Who is "
            "drawn may be found out for certain."
        )
        odds_now = f"Odds of 1 : 1 may become {format_odds(epsilon)}, which is certainty."
        return f"{odds_now} {guess}{spared if found.right < CERTAIN else ''}"
    alarm = (
        "Who is content to be wrong about 1 in 100 of those who did not take part finds at most "
        f"{round_up_percent(found.found)} in 100 of those who did."
    )
    change = (
        f"Odds of 1 : 1 can become at most {format_odds(epsilon)}, and a suspicion of 1 in 100 at most "
        f"{round_up_percent(posterior_belief(PRIOR, epsilon=epsilon))} in 100, but for a chance of δ = {delta:g}."
    )
    return f"{guess} {alarm} {change}"


def round_up_percent(share: float) -> int:
    """An upper bound, so it is rounded up.

    >>> round_up_percent(0.65001), round_up_percent(0.65)
    (66, 65)
    """
    return min(100, math.ceil(100 * share - 1e-9))


def _never_sampled(guarantee: Guarantee) -> float:
    """How likely one person is in no round at all."""
    share = 1.0
    for part, count in accounted(guarantee.event):
        assert isinstance(part, GaussianRelease)
        rate = part.sampling_rate
        if rate is None:
            assert part.cohort_size is not None
            assert part.population_size is not None
            rate = part.cohort_size / part.population_size
        share *= (1 - rate) ** count
    return share


def _for_whom(guarantee: Guarantee) -> str:
    assert not isinstance(guarantee.release, NoGuarantee)
    unit, inside = guarantee.unit, guarantee.epsilon_inside
    if inside is not None:
        whom = (
            f"Each {unit.short}, {unit.holds}: ε = {format_epsilons(guarantee.epsilon)}. One {unit.inside} inside a "
            f"{unit.short} has less: ε = {format_epsilons(inside)}, since what they said changes the {unit.short}’s "
            "update by up to twice the clip bound and does not take it away. "
            f"That is for who is in one {unit.short} alone."
        )
    elif unit.is_known:
        whom = f"Each {unit.short} of the run, with everything they said in it."
    else:
        whom = f"Each {unit.short}. Whether that is one person, the ledger does not say."
    hidden = f"Hidden is whether it was {unit.one} or another in their place; that so many took part is not"
    if guarantee.release.neighbouring == "add_remove":
        hidden = f"Hidden is whether {unit.one} took part at all, and so what they said"
    return f"{whom} {hidden}. That they are on the list of those who might take part is public."


def _which_population(run: RunRecord, guarantee: Guarantee) -> str:
    people, unit = show_count(run.header["plan"].get("population_size")), guarantee.unit
    rounds = "1 round" if guarantee.steps == 1 else f"{guarantee.steps:,} rounds"
    if guarantee.steps != guarantee.made:
        rounds = f"all {guarantee.steps:,} rounds that were promised ({guarantee.made:,} are made)"
    stated = f"ε = {format_epsilons(guarantee.epsilon)} is for the {people} {unit.several} of this run and {rounds}"
    stated = f"{stated}, by its ledger{', as if it were a release' if guarantee.simulated else ''}."
    if guarantee.epsilon.headline <= GUARANTEE:
        return f"{stated} Nothing is extrapolated."
    accountant = common_accountant([run])
    useful = larger_population(run.privacy, accountant) or {}
    if "population_size" in useful:
        return (
            f"{stated} Extrapolated, not run: with {show_count(useful['population_size'])} {unit.several} "
            f"the same recipe would have ε ≤ {GUARANTEE:g} ({accountant.upper()})."
        )
    return f"{stated} No larger population is known with which the same recipe would have ε ≤ {GUARANTEE:g}."


def _randomness(guarantee: Guarantee, *, is_nothing: bool) -> str:
    if guarantee.simulated:
        return SEEDED
    return f"{SECURE} That makes ε valid, not small: this one is practically no guarantee." if is_nothing else SECURE
