"""Personal parts beside the public model they belong to: over seeds, paired by person.

Repeats have the same people: their words and errors are summed, and people are drawn with all of them.
"""

from collections.abc import Sequence

from findings.kept import Kept
from findings.numbers import per_cent, unless_converged
from findings.tables import Repeats, markdown
from sottovoce.base.errors import InputError
from sottovoce.base.tables import NOTHING
from sottovoce.evaluation.compare import Difference, GroupGap
from sottovoce.evaluation.personal_groups import (
    EVERYBODY,
    PERSONAL,
    PUBLIC,
    UNGUARDED,
    GroupResult,
    at_amount,
    compare_groups,
    find_worst_gaps,
    list_groups,
    measure_recovered,
    pool_seeds,
)
from sottovoce.evaluation.tables import format_interval, format_points
from sottovoce.federated.personal import FEWEST_UTTERANCES
from sottovoce.report.records import Record, RunRecord
from sottovoce.report.run_facts import has_converged

People = Sequence[Record]


def people_of(runs: Repeats, *, amount: int | None = None) -> list[Record]:
    """The people of a setting with what they had under all seeds; with an `amount`, with just so many utterances."""
    found = []
    for run in runs.values():
        people = _people(run)
        found.append([_guarded(person) for person in (people if amount is None else at_amount(people, amount))])
    if amount is not None:  # who has so much need not be the same under a seed that holds out other utterances
        common = set.intersection(*({person["client"] for person in people} for people in found))
        found = [[person for person in people if person["client"] in common] for people in found]
    return [*pool_seeds(found)]


def _guarded(person: Record) -> Record:
    """As the guard decides today by what was kept of its evidence: older runs asked for two utterances, not four."""
    return person if person["utterances"] >= FEWEST_UTTERANCES else _decided(person, is_kept=False)


def _decided(person: Record, *, is_kept: bool) -> Record:
    errors = person["errors"]
    return {**person, "is_kept": is_kept, "errors": {**errors, PERSONAL: errors[UNGUARDED if is_kept else PUBLIC]}}


def _without_more_errors(person: Record) -> Record:
    """With the part wherever it makes no more errors: what a guard that also goes by the loss keeps at the most."""
    found = person["guard"]
    is_no_worse = found["personal_errors"] <= found["public_errors"]
    return _decided(person, is_kept=person["utterances"] >= FEWEST_UTTERANCES and is_no_worse)


def groups_table(kept: Kept, setting: str, *, way: str = PERSONAL) -> str:
    """Each group by the public model and with personal parts, as the guard keeps them or all of them."""
    runs = kept.repeats(setting)
    rows = [_row(group) for group in compare_groups(people_of(runs), first=way)]
    rates = {PERSONAL: "with a personal part", UNGUARDED: "with the part in any case"}
    headings = ["group", "people", f"public model, WER %{_converged(runs)}", f"{rates[way]}, WER %"]
    table = markdown([*headings, "points", "95 % interval", "parts kept"], rows, words=1)
    return f"{table}\n\n{_from(kept, runs)}"


def recovered_table(kept: Kept, private: str, quiet: str) -> str:
    """What noise costs each group, and the share of it that personal parts give back; and how both then compare."""
    with_noise, without = kept.repeats(private), kept.repeats(quiet)
    noisy, clean = people_of(with_noise), people_of(without)
    by_number = {person["client"]: person for person in clean}
    rows = []
    for name, members in list_groups(noisy).items():
        twins = [by_number[person["client"]] for person in members]
        found = measure_recovered(members, twins)
        rates = [_rate(people, way) for people, way in ((twins, PUBLIC), (members, PUBLIC), (members, PERSONAL))]
        share = NOTHING if found.share is None else f"{100 * found.share:.0f} %"
        interval = "no interval" if found.interval is None else _percents(found.interval)
        rows.append([name, str(len(members)), *map(per_cent, rates), per_cent(_rate(twins, PERSONAL)), share, interval])
    headings = ["group", "people", f"no noise, WER %{_converged(without)}", f"ε = 8, WER %{_converged(with_noise)}"]
    headings += ["ε = 8 with a part, WER %", "no noise with a part, WER %", "given back", "95 % interval"]
    return f"{markdown(headings, rows, words=1)}\n\n{_from(kept, with_noise)} {_from(kept, without)}"


def amounts_table(kept: Kept, setting: str) -> str:
    """By how many utterances are trained on: the part in any case, and as the guard keeps it."""
    runs = kept.repeats(setting)
    amounts = sorted({one["utterances"] for run in runs.values() for p in _people(run) for one in p["by_amount"]})
    rows = []
    for amount in (*amounts, None):
        people = people_of(runs, amount=amount)
        unguarded, guarded = (_everybody(people, way) for way in (UNGUARDED, PERSONAL))
        both = [cell for found in (unguarded, guarded) for cell in _points(found.difference)]
        harmed = unguarded.difference.worse / unguarded.difference.speakers
        kept_share = guarded.kept / guarded.tried
        name = "all that they have" if amount is None else str(amount)
        rate = per_cent(unguarded.difference.second)
        rows.append([name, str(len(people)), rate, *both, per_cent(harmed), per_cent(kept_share)])
    headings = ["utterances", "people", f"public model, WER %{_converged(runs)}", "part in any case, points"]
    headings += [
        "95 % interval",
        "with the guard, points",
        "95 % interval",
        "worse in any case, % of people",
        "kept, %",
    ]
    return f"{markdown(headings, rows, words=1)}\n\n{_from(kept, runs)}"


def bounds_table(kept: Kept, settings: Sequence[str]) -> str:
    """What a guard by errors alone keeps, and one that keeps every part without more errors: today's is in between."""
    rows = []
    for setting in settings:
        runs = kept.repeats(setting)
        for name, rule in (("by errors alone", _guarded), ("no more errors", _without_more_errors)):
            groups = compare_groups(pool_seeds([[rule(person) for person in _people(run)] for run in runs.values()]))
            (group,) = (found for found in groups if found.name == EVERYBODY)
            judged = [found for found in groups if found.difference.interval is not None]
            worse = f"{sum(found.is_worse for found in judged)} of {len(judged)}"
            (_, people, *cells), rest = _row(group), f"{group.difference.worse}"
            rows.append([f"`{setting.partition('/')[2]}`", name, people, *cells, worse, rest])
    headings = ["setting", "guard", "people", "public model, WER %", "with a personal part, WER %", "points"]
    headings += ["95 % interval", "parts kept", "groups that are worse", "people who are worse"]
    told = " ".join(_from(kept, kept.repeats(setting)) for setting in settings)
    return f"{markdown(headings, rows, words=2)}\n\n{told}"


def gaps_table(kept: Kept, setting: str) -> str:
    """The group that is furthest above everybody else, by the public model and with personal parts."""
    runs = kept.repeats(setting)
    rows = [
        [way, f"{gap.fact} {gap.group}", per_cent(gap.wer), per_cent(gap.others_wer), *_gap(gap)]
        for way, gap in find_worst_gaps(people_of(runs)).items()
        if gap is not None
    ]
    headings = ["model", "worst group", f"WER %{_converged(runs)}", "everybody else, WER %", "points", "95 % interval"]
    return f"{markdown(headings, rows, words=2)}\n\n{_from(kept, runs)}"


def count_worse(kept: Kept, settings: Sequence[str]) -> str:
    """In how many groups the guarded part is worse than the public model by more than its interval."""
    found = [group for setting in settings for group in compare_groups(people_of(kept.repeats(setting)))]
    judged = [group for group in found if group.difference.interval is not None]
    links = ", ".join(
        kept.link(run, run.label.partition("/")[2]) for name in settings for run in kept.repeats(name).values()
    )
    return f"{sum(group.is_worse for group in judged)} of {len(judged)} groups ({links})"


def _people(run: RunRecord) -> People:
    people: People = run.personal.get("per_client") or ()
    if not people:
        raise InputError(f"{run.label}: it has no personal parts, expected federation.personal")
    return people


def _everybody(people: People, way: str) -> GroupResult:
    (found,) = (group for group in compare_groups(people, first=way) if group.name == EVERYBODY)
    return found


def _row(group: GroupResult) -> list[str]:
    found = group.difference
    rates = [per_cent(found.second), per_cent(found.first)]
    return [group.name, str(found.speakers), *rates, *_points(found), f"{group.kept} of {group.tried}"]


def _points(found: Difference) -> list[str]:
    return [format_points(found.difference), format_interval(found.interval)]


def _gap(gap: GroupGap) -> list[str]:
    return [format_points(gap.gap), NOTHING if gap.interval is None else format_interval(gap.interval)]


def _rate(people: People, way: str) -> float:
    return float(sum(person["errors"][way] for person in people) / sum(person["words"] for person in people))


def _percents(interval: tuple[float, float]) -> str:
    return f"{100 * interval[0]:.0f} to {100 * interval[1]:.0f} %"


def _converged(runs: Repeats) -> str:
    return unless_converged(map(has_converged, runs.values()))


def _from(kept: Kept, runs: Repeats) -> str:
    links = " ".join(kept.link(run, str(seed)) for seed, run in runs.items())
    (first, *_) = runs.values()
    return f"`{first.label.partition('/')[2]}`, seeds {links}."
