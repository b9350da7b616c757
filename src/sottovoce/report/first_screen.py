"""The first screen of a report: what is promised, what it costs, who is understood worst, and a picture of it.

It is about one run. Of several, that is the one with the fewest errors among those with a useful ε; the picture shows
the others beside it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from sottovoce.evaluation.tables import format_points
from sottovoce.privacy.guarantee import format_epsilon
from sottovoce.privacy.membership_odds import GUARANTEE, NO_GUARANTEE, strength_of
from sottovoce.report.comparisons import PrivacyCost, adds_noise, dev_rate, format_gap
from sottovoce.report.drawings import Drawing
from sottovoce.report.parts import screen_text, show_count, show_percent
from sottovoce.report.privacy_picture import privacy_picture
from sottovoce.report.records import Record, RunRecord
from sottovoce.report.verdict import CERTAIN, Verdict, VerdictKind, round_up_percent, summarise_verdicts

BADGES: dict[VerdictKind, str] = {
    "unsound": "Not verified",
    "not private": "Not private",
    "simulation": "Simulation",
    "release": "Release",
    "weak": "Release, weak guarantee",
    "nothing": "Release, no guarantee",
}


class ScreenAnswer(NamedTuple):
    """A question, its answer in a few words and in a sentence."""

    question: str
    short: str
    words: str


@dataclass(frozen=True)
class FirstScreen:
    """A badge with what it means, three answers and a picture; `about` says which run of several they are about."""

    kind: VerdictKind
    badge: str
    meaning: str
    about: str
    answers: tuple[ScreenAnswer, ...]
    drawing: Drawing | None


def first_screen(runs: Sequence[RunRecord], verdicts: Sequence[Verdict]) -> FirstScreen:
    """The first screen of a report on `runs`, from the verdicts on them."""
    place, why = _choose_run(runs, verdicts)
    run, verdict = runs[place], verdicts[place]
    name = f"badge-{verdict.kind}".replace(" ", "-")
    return FirstScreen(
        verdict.kind,
        BADGES[verdict.kind],
        screen_text(name),
        f"{why} {summarise_verdicts(verdicts)}" if why else "",
        (_promise(run, verdict), _cost(run, verdict), _worst(run, verdict)),
        privacy_picture(run, runs, verdicts),
    )


def _choose_run(runs: Sequence[RunRecord], verdicts: Sequence[Verdict]) -> tuple[int, str]:
    """The place of the run that the screen is about, and why it is that one."""
    if len(runs) == 1:
        return 0, ""
    places = range(len(runs))
    epsilons = {n: epsilon for n in places if (epsilon := verdicts[n].epsilon_of_one) is not None}
    useful = [n for n in epsilons if epsilons[n] <= GUARANTEE]
    released = [n for n in useful if runs[n].is_release]  # a promise that holds, before one that would
    useful, what = (released, "release") if released else (useful, "run")
    if useful:
        chosen = _best_recipe(runs, useful)
        name = "about-only" if len(useful) == 1 else "about-best"
        return chosen, screen_text(name, label=runs[chosen].label, what=what, count=show_count(len(useful)))
    if epsilons:
        chosen = _best_recipe(runs, [n for n in epsilons if epsilons[n] == min(epsilons.values())])
        return chosen, screen_text("about-smallest", label=runs[chosen].label)
    noised = [n for n in places if adds_noise(runs[n])]
    chosen = _best_recipe(runs, noised or places)
    return chosen, screen_text("about-noised" if noised else "about-none", label=runs[chosen].label)


def _best_recipe(runs: Sequence[RunRecord], places: Sequence[int]) -> int:
    """The first run of the recipe with the fewest errors on the dev speakers: of several seeds not the luckiest."""
    recipes: dict[str, list[int]] = {}
    for n in places:
        recipes.setdefault(runs[n].settings_but(own=("about", "paper", "seed"), privacy=()), []).append(n)
    return min(recipes.values(), key=lambda found: fmean(dev_rate(runs[n]) for n in found))[0]


def _promise(run: RunRecord, verdict: Verdict) -> ScreenAnswer:
    question, epsilon = screen_text("promise"), verdict.epsilon_of_one
    if epsilon is None or run.guarantee is None:
        name = "unsound" if verdict.kind == "unsound" else "unprotected"
        why = dict(verdict.points).get("Why", "")
        return ScreenAnswer(question, screen_text(f"{name}-short"), screen_text(name, why=why))
    unit, plan = run.guarantee.unit, run.header["plan"]
    stated = f"ε = {format_epsilon(run.guarantee.epsilon.headline)}"
    if verdict.epsilon_inside is not None:
        stated = f"{stated}, and one {unit.inside} inside it ε = {format_epsilon(epsilon)},"
    values = {
        "whom": f"{show_count(plan.get('population_size'))} {unit.several}, {unit.holds},",
        "stated": f"{stated} at δ = {run.guarantee.delta:g}",
        "epsilon": f"ε = {format_epsilon(epsilon)}",
    }
    simulated = "simulated-" if run.guarantee.simulated else ""
    against = f" {screen_text('contradicted')}" if verdict.against else ""
    if epsilon > NO_GUARANTEE:
        words = screen_text(f"{simulated}nothing", **values)
        return ScreenAnswer(question, screen_text("nothing-short"), f"{words}{against}")
    right = verdict.odds.right if verdict.odds is not None else 1.0
    guess = screen_text("certain") if right >= CERTAIN else screen_text("guess", right=round_up_percent(right))
    strength = "weak" if verdict.kind == "weak" else strength_of(epsilon).words
    words = f"{screen_text(f'{simulated}promise-words', **values)} {guess} {screen_text(_trusted(plan))}"
    return ScreenAnswer(question, f"{values['epsilon']}: {strength}", f"{words}{against}")


def _trusted(plan: Record) -> str:
    """Against whom nothing is promised."""
    return "trusted-noise" if plan.get("noise_shares") else "trusted-server" if plan.get("sum_bits") else "trusted"


def _cost(run: RunRecord, verdict: Verdict) -> ScreenAnswer:
    question, cost = screen_text("cost"), verdict.cost
    if cost is None:
        name = "unfinished" if not run.results else "no-text"
        return ScreenAnswer(question, screen_text("unknown-short"), screen_text(name))
    rate = {"wer": show_percent(cost.wer), "test": cost.test}
    start = _from_start(cost)
    if cost.twin is None:
        if not adds_noise(run):
            return ScreenAnswer(
                question, screen_text("no-noise-short", **rate), screen_text("no-noise", **rate) + start
            )
        return ScreenAnswer(question, screen_text("no-twin-short", **rate), screen_text("no-twin", **rate) + start)
    twin = cost.twin
    name = "cost-unclear"
    if twin.is_significant:
        name = "cost-more" if twin.difference > 0 else "cost-less"
    elif twin.interval is None:
        name = "cost-unpaired"
    points = format_points(twin.difference)
    beside = {"base": twin.base, "twin": cost.twin_is, "twin_wer": show_percent(twin.wer), "certainty": twin.certainty}
    words = screen_text(name, points=points.lstrip("+-"), **rate, **beside)
    return ScreenAnswer(question, screen_text("points-short", points=points), words + start)


def _from_start(cost: PrivacyCost) -> str:
    if cost.start is None:
        return ""
    values = {"start_wer": show_percent(cost.start.wer), "points": format_points(cost.start.difference)}
    return " " + screen_text("from-start", **values, certainty=cost.start.certainty)


def _worst(run: RunRecord, verdict: Verdict) -> ScreenAnswer:
    question, gap = screen_text("worst"), verdict.gap
    name = run.headline_test
    test = {} if name is None else run.tests[name]
    speakers = _worst_speakers(test)
    if verdict.cost is None:
        return ScreenAnswer(question, screen_text("unknown-short"), screen_text("not-measured"))
    if gap is None:
        short = screen_text("unknown-short")
        if speakers:
            short = screen_text("speakers-short", rate=speakers[1])
        return ScreenAnswer(question, short, f"{screen_text('no-groups')} {_describe_speakers(speakers)}".strip())
    short = screen_text("group-short", fact=gap.fact, group=gap.group, rate=show_percent(gap.wer))
    return ScreenAnswer(question, short, f"{format_gap(gap)} {_describe_speakers(speakers)}".strip())


def _worst_speakers(test: Record) -> tuple[str, str, str] | None:
    """How many speakers there are, the mean rate of the worst tenth of them, and the median speaker's."""
    spread = test.get("spread")
    if not spread:
        return None
    return show_count(test.get("speakers")), show_percent(spread["worst_tenth"]), show_percent(spread["median"])


def _describe_speakers(found: tuple[str, str, str] | None) -> str:
    if found is None:
        return ""
    speakers, worst, median = found
    return screen_text("speakers", speakers=speakers, worst=worst, median=median)
