"""Published numbers beside ours, and runs in the layout of the flagship paper's Table 1 and Figures 2 to 4."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import fmean, mean
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from sottovoce.base.tables import NOTHING, Row, Table
from sottovoce.data.population import DEALT
from sottovoce.report.curves import LinePoints, Lines, describe_line_ends
from sottovoce.report.drawings import REFERENCE_LINE, draw_lines, finish_axes, percent_labels
from sottovoce.report.parts import (
    PageSection,
    make_drawing,
    make_section,
    make_table,
    show_count,
    show_epsilon,
    show_number,
    show_percent,
    show_text,
)
from sottovoce.report.records import Record, RunRecord
from sottovoce.report.run_facts import RUN_FACTS

PAPER_WER, PAPER_WERR = "paper-wer", "paper-werr"
SIZES = ("population_size", "cohort_size", "central_steps")
EPSILONS = ("paper_epsilon", "epsilon_rdp", "epsilon_pld")


def paper_section(runs: Sequence[RunRecord]) -> PageSection | None:
    sources = dict.fromkeys(str(source) for run in runs if (source := run.paper.get("source")) is not None)
    return make_section("paper", paper_tables(runs), sources=", ".join(sources))


def paper_tables(runs: Sequence[RunRecord]) -> list[Table]:
    """Published numbers beside ours, where a recipe names where they are printed."""
    rates: list[Row] = []
    gains: list[Row] = []
    clients: list[Row] = []
    extrapolated: list[Row] = []
    for run in runs:
        paper = run.paper
        mark = " (unverified)" if paper.get("unverified") is not None else ""
        for name, theirs in (paper.get("wer") or {}).items():
            wers = f"{theirs:.1f} %{mark}", show_percent(run.tests.get(name, {}).get("wer"))
            rates.append((run.label, show_text(paper.get("place")), name, *wers))
        gains += _improvements(run, runs, mark)
        ours, theirs = run.population.get("population_size"), paper.get("population_size")
        if ours is not None and theirs is not None:
            change = f"{100 * (ours - theirs) / theirs:+.2g} %"
            clients.append((run.label, show_count(theirs), show_count(ours), change))
        for plan in _extrapolated(run):
            sizes, epsilons = (show_count(plan.get(n)) for n in SIZES), (show_epsilon(plan.get(n)) for n in EPSILONS)
            extrapolated.append((run.label, *sizes, *epsilons))
    doubted = [run.paper.get("unverified") for run in runs if run.paper.get("wer")]
    doubts = " ".join(f"Unverified: {show_text(why)}." for why in dict.fromkeys(doubted) if why is not None)
    found = [
        make_table(PAPER_WER, rates, doubts=doubts),
        make_table(PAPER_WERR, gains),
        make_table("paper-clients", clients),
        make_table("paper-epsilon", extrapolated),
    ]
    return [table for table in found if table.rows]


def _improvements(run: RunRecord, runs: Sequence[RunRecord], mark: str) -> list[Row]:
    """Relative improvements in WER on each test set for which the paper prints one."""
    paper, seed = run.paper, run.config.get("seed")
    place, against = show_text(paper.get("place")), show_text(paper.get("against"))
    alike = (one for one in runs if one.paper.get("place") == paper.get("against") and one.config.get("seed") == seed)
    baseline = next(alike, None)
    rows: list[Row] = []
    for name, theirs in (paper.get("werr") or {}).items():
        own = run.tests.get(name, {}).get("wer")
        before = None if baseline is None else baseline.tests.get(name, {}).get("wer")
        ours = NOTHING if own is None or not before else f"{100 * (before - own) / before:.2f} %"
        rows.append((run.label, place, name, against, f"{theirs:.2f} %{mark}", ours))
    return rows


def _extrapolated(run: RunRecord) -> Sequence[Record]:
    return run.privacy.get("extrapolated") or ()


# Noise × clipping, as in Table 1: a noise and a bound to a row, followed by the same noise for larger populations; a
# way of clipping to a column, with the paper's WER beside ours where a recipe names it.

CLIPPING_SHARES = ("global", "uniform", "dim")
ROW = ("share", "sigma_dp", "noise_multiplier", "clip_bound", "extrapolate")  # of privacy: what rows and columns show
NOISELESS, EVERYTHING = "∞", "0"

Level = tuple[float, float]  # σ_DP, 0 without noise, and C


def noise_tables(runs: Sequence[RunRecord]) -> list[Table]:
    """One table for all runs that differ in noise and clipping alone, where they differ in both."""
    groups: dict[str, list[RunRecord]] = {}
    for run in runs:
        if run.privacy and _test_set(run) is not None:
            # Learning rates and rounds may differ with the noise, as they do in the paper.
            alike = run.settings_but(own=("about", "paper", "seed"), federation=("steps", "server"), privacy=ROW)
            groups.setdefault(alike, []).append(run)
    tabled = [group for group in groups.values() if len(set(map(_level, group))) > 1 < len(set(map(_share, group)))]
    numbered = [("noise" if len(tabled) == 1 else f"noise-{n}", group) for n, group in enumerate(tabled, start=1)]
    return [_noise_table(name, group) for name, group in numbered]


def _noise_table(name: str, runs: Sequence[RunRecord]) -> Table:
    has_wer = any(_paper_wer(run) is not None for run in runs)
    has_epsilon = any(plan.get("paper_epsilon") is not None for run in runs for plan in _extrapolated(run))
    epsilons = slice(0 if has_epsilon else 1, None)  # the paper's comes first
    shares = [share for share in CLIPPING_SHARES if any(_share(run) == share for run in runs)]
    columns = [heading for share in shares for heading in (share, f"{share}, paper")[: 1 + has_wer]]
    rows: list[Row] = []
    if (start := _start_wer(runs)) is not None:
        population = show_count(runs[0].privacy.get("population_size"))
        wers = [cell for _ in shares for cell in (start, NOTHING)[: 1 + has_wer]]
        rows.append((NOTHING, NOTHING, "0", population, *[NOTHING] * 3, *[EVERYTHING] * len(EPSILONS[epsilons]), *wers))
    # As in the paper: the most noise first, and what has none last, the larger bound at the end.
    for level in sorted(set(map(_level, runs)), key=lambda level: (-level[0], level[1])):
        here = [run for run in runs if _level(run) == level]
        own, others = _split_plans(here[0])
        noise = f"{level[0]:.3g}" if level[0] else "0", show_number(level[1])
        wers = [cell for share in shares for cell in _wers(here, share)[: 1 + has_wer]]
        guarantee = _epsilons({**own, **here[0].privacy}) if level[0] else (NOISELESS,) * 3
        rows.append((*noise, *_sizes(here[0].privacy, has_noise=bool(level[0])), *guarantee[epsilons], *wers))
        rows += [(*noise, *_sizes(plan), *_epsilons(plan)[epsilons], *[""] * len(columns)) for plan in others]
    repeats = len({run.config.get("seed") for run in runs})
    return make_table(
        name,
        rows,
        kind="noise",
        headings=("σ_DP", "C", "S", "K", "q", "T", "z", *("ε paper", "ε RDP", "ε PLD")[epsilons], *columns),
        test=_test_set(runs[0]),
        delta=runs[0].privacy.get("delta", 0),
        seeds=f" Means over {repeats} seeds, with the least and the largest." if repeats > 1 else "",
        papers=" The paper's are of its own speech and model." if has_wer else "",
    )


def _epsilons(plan: Record) -> Row:
    return tuple(show_epsilon(plan.get(name)) for name in EPSILONS)


def _sizes(plan: Record, *, has_noise: bool = True) -> Row:
    """S, K, q, T and z of a run, or of the same noise for another population."""
    cohort, population, z = (plan.get(name) for name in ("cohort_size", "population_size", "noise_multiplier"))
    rate = None if not cohort or not population else cohort / population
    steps = plan.get("central_steps", plan.get("promised_steps", plan.get("steps")))
    noise = f"{z:.4g}" if z is not None and has_noise else NOTHING
    return show_count(cohort), show_count(population), show_number(rate), show_count(steps), noise


def _wers(runs: Sequence[RunRecord], share: str) -> Row:
    """Ours, with its range over seeds, and the paper's."""
    cell = [run for run in runs if _share(run) == share]
    rates = [100 * run.tests[str(_test_set(run))]["wer"] for run in cell]
    ours = f"{mean(rates):.1f}" if rates else NOTHING
    paper = next((wer for run in cell if (wer := _paper_wer(run)) is not None), None)
    spread = f" ({min(rates):.1f}–{max(rates):.1f})" if len(rates) > 1 else ""
    return ours + spread, NOTHING if paper is None else f"{paper:.1f}"


def _level(run: RunRecord) -> Level:
    return float(run.privacy.get("sigma_dp") or 0.0), float(run.privacy_settings.get("clip_bound") or "inf")


def _share(run: RunRecord) -> str:
    return str(run.privacy_settings.get("share"))


def _split_plans(run: RunRecord) -> tuple[Record, Sequence[Record]]:
    """The plan for its own population, which the paper's recipes name first, and those for others."""
    plans = _extrapolated(run)
    is_own = bool(plans) and plans[0].get("cohort_size") == run.privacy.get("cohort_size")
    return ({"paper_epsilon": plans[0].get("paper_epsilon")}, plans[1:]) if is_own else ({}, plans)


def _test_set(run: RunRecord) -> str | None:
    """The set that tables are about: `test` where there is one, else the last."""
    sets = [name for name, test in run.tests.items() if "wer" in test]
    return "test" if "test" in sets else (sets[-1] if sets else None)


def _paper_wer(run: RunRecord) -> float | None:
    wers: dict[str, Any] = run.paper.get("wer") or {}
    return wers.get(str(_test_set(run)))


def _start_wer(runs: Sequence[RunRecord]) -> str | None:
    """Of the model that all of them started from; None where that differs."""
    starts = {run.start_tests.get(str(_test_set(run)), {}).get("wer") for run in runs}
    return None if len(starts) != 1 or (only := starts.pop()) is None else f"{100 * only:.1f}"


# Test error over cohort sizes, by start model and by how data are distributed: the paper's Figures 2 to 4.

# What may distinguish two lines; a line is named by as many of these as it takes, in this order.
LINE_FACTS: Mapping[str, Callable[[RunRecord], str]] = {
    "seed": lambda run: _start(run),
    "clients": lambda run: _client_rule(run),
    **{name: RUN_FACTS[name] for name in ("data", "model", "noise", "clipping", "server", "local training")},
}


def cohort_section(runs: Sequence[RunRecord]) -> PageSection | None:
    """A line for all runs that differ in nothing but their cohorts (and seeds); None where no run has such a peer."""
    lines = cohort_lines(runs)
    if not lines:
        return None
    central = [rate for run in runs if not run.is_federated and (rate := _test_rate(run)) is not None]
    alt = describe_line_ends("Test word error rate over cohort sizes", lines, as_percent=True)
    dashed = " Dashed: central training." if central else ""
    return make_section(
        "cohorts", [make_drawing("cohorts", alt, partial(_cohort_figure, lines, central), central=dashed)]
    )


def cohort_lines(runs: Sequence[RunRecord]) -> dict[str, LinePoints]:
    """Test WER by cohort size, in lines of at least two sizes, each named by what distinguishes it."""
    found: dict[tuple[str, ...], dict[int, list[float]]] = {}
    for run in runs:
        rate, size = _test_rate(run), run.federation.get("cohort_size")
        if rate is not None and size is not None:
            key = tuple(fact(run) for fact in LINE_FACTS.values())
            found.setdefault(key, {}).setdefault(size, []).append(rate)
    several = {key: sizes for key, sizes in found.items() if len(sizes) > 1}
    return {
        label: [(float(size), fmean(rates)) for size, rates in sorted(sizes.items())]
        for label, sizes in zip(_line_labels(list(several)), several.values(), strict=True)
    }


def _line_labels(keys: Sequence[tuple[str, ...]]) -> list[str]:
    """As few facts as distinguish all of them, of those in which they differ."""
    differing = [place for place in range(len(LINE_FACTS)) if len({key[place] for key in keys}) > 1]
    for count in range(1, len(differing) + 1):
        labels = [", ".join(key[place] for place in differing[:count]) for key in keys]
        if len(set(labels)) == len(keys):
            return labels
    return ["all"] if keys else []


def _test_rate(run: RunRecord) -> float | None:
    name = run.headline_test
    return None if name is None else run.tests[name].get("wer")


def _start(run: RunRecord) -> str:
    seed = run.federation.get("seed_model")
    return "no seed" if seed is None else f"from {show_text(seed).rpartition('/')[2]}"


def _client_rule(run: RunRecord) -> str:
    rule = (run.federation.get("clients") or {}).get("rule", "speaker")
    return "IID" if rule in DEALT else "by speaker" if rule == "speaker" else f"by {rule}"


def _cohort_figure(lines: Lines, central: Sequence[float]) -> Figure:
    figure, axes = draw_lines(lines)
    for rate in central:
        axes.axhline(rate, **REFERENCE_LINE)
    axes.set_xscale("log", base=2)
    sizes = sorted({size for points in lines.values() for size, _ in points})
    axes.set_xticks(sizes, [f"{size:,.0f}" for size in sizes])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(0, None)
    axes.yaxis.set_major_formatter(percent_labels())
    finish_axes(axes, x="cohort size", y="word error rate, test")
    return figure
