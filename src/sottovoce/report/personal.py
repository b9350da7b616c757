"""Public model and personal parts side by side: who is understood, and how far the worst group is behind."""

from collections.abc import Sequence

from sottovoce.base.tables import NOTHING, Row, Table
from sottovoce.evaluation.compare import GroupGap
from sottovoce.evaluation.personal_groups import GroupResult, compare_groups, find_worst_gaps
from sottovoce.evaluation.tables import format_interval, format_points
from sottovoce.report.parts import PageSection, make_section, make_table, show_count, show_percent
from sottovoce.report.records import Record, RunRecord


def personal_section(runs: Sequence[RunRecord]) -> PageSection | None:
    """None where no run has tried personal parts; nothing of a release, whatever is in its folder."""
    found = {run.label: people for run in runs if (people := _people(run))}
    return make_section("personal", [personal_table(found), gap_table(found)])


def _people(run: RunRecord) -> Sequence[Record]:
    return () if run.is_release else run.personal.get("per_client") or ()


def personal_table(found: dict[str, Sequence[Record]]) -> Table:
    """WER of every group with the public model and with personal parts, paired by person."""
    rows = [(label, *_cells(group)) for label, people in found.items() for group in compare_groups(people)]
    return make_table("personal", rows)


def gap_table(found: dict[str, Sequence[Record]]) -> Table:
    """The worst group's gap with either."""
    rows = [
        (label, way, *_gap(gap))
        for label, people in found.items()
        for way, gap in find_worst_gaps(people).items()
        if gap is not None
    ]
    return make_table("personal-gaps", rows)


def _cells(group: GroupResult) -> Row:
    found = group.difference
    rates = show_percent(found.second), show_percent(found.first)
    points = format_points(found.difference), format_interval(found.interval)
    kept = f"{group.kept:,} of {group.tried:,}"
    return (group.name, show_count(found.speakers), *rates, *points, kept)


def _gap(gap: GroupGap) -> Row:
    rates = show_percent(gap.wer), show_percent(gap.others_wer)
    interval = NOTHING if gap.interval is None else format_interval(gap.interval)
    return (f"{gap.fact} {gap.group}", *rates, format_points(gap.gap), interval)
