"""Noise × clipping in the layout of the flagship paper's Table 1.

A noise and a bound to a row, then what they would be worth for larger populations; a way of clipping to a column, with
the paper's WER beside ours where a recipe names it.
"""

from collections.abc import Sequence
from statistics import mean
from typing import Any

from sottovoce.report.cells import epsilon_text, integer, number_text
from sottovoce.report.records import Record, RunRecord
from sottovoce.tables import NOTHING, Row, Table

CLIPPING_SHARES = ("global", "uniform", "dim")
ROW = ("share", "sigma_dp", "noise_multiplier", "clip_bound", "extrapolate")  # of privacy: what rows and columns say
NOISELESS, EVERYTHING = "∞", "0"

Level = tuple[float, float]  # σ_DP, 0 without noise, and C


def noise_tables(runs: Sequence[RunRecord]) -> list[Table]:
    """One table for all runs that differ in noise and clipping alone, where they differ in both."""
    groups: dict[str, list[RunRecord]] = {}
    for run in runs:
        if run.privacy and _test_set(run) is not None:
            # Rates and rounds may be another with every noise, as they are in the paper.
            alike = run.settings_but(own=("about", "paper", "seed"), federation=("steps", "server"), privacy=ROW)
            groups.setdefault(alike, []).append(run)
    tabled = [group for group in groups.values() if _is_table(group)]
    numbered = [("noise" if len(tabled) == 1 else f"noise-{n}", group) for n, group in enumerate(tabled, start=1)]
    return [_table(name, group) for name, group in numbered]


def _is_table(runs: Sequence[RunRecord]) -> bool:
    return len({_level(run) for run in runs}) > 1 and len({_share(run) for run in runs}) > 1


def _table(name: str, runs: Sequence[RunRecord]) -> Table:
    test = _test_set(runs[0])
    printed = any(_paper_wer(run) is not None for run in runs)
    shares = [share for share in CLIPPING_SHARES if any(_share(run) == share for run in runs)]
    told = any(plan.get("paper_epsilon") is not None for run in runs for plan in _extrapolated(run))
    epsilons = (*(["ε paper"] if told else []), "ε RDP", "ε PLD")
    columns = [heading for share in shares for heading in (share, *([f"{share}, paper"] if printed else []))]
    rows: list[Row] = []
    if (start := _start(runs)) is not None:
        first = integer(runs[0].privacy.get("population_size"))
        wers = [cell for _ in shares for cell in (start, *([NOTHING] if printed else []))]
        rows.append((NOTHING, NOTHING, "0", first, *[NOTHING] * 3, *[EVERYTHING] * len(epsilons), *wers))
    # As the paper has it: the most noise first, and what has none last, the larger bound at the end.
    for level in sorted({_level(run) for run in runs}, key=lambda level: (-level[0], level[1])):
        here = [run for run in runs if _level(run) == level]
        rows.append(_own_row(here, shares, printed=printed, told=told))
        rows += [_other_row(level, plan, columns, told=told) for plan in _extrapolated(here[0])[_own_first(here[0]) :]]
    repeats = len({run.config.get("seed") for run in runs})
    seeds = f" Means over {repeats} seeds, with the least and the largest." if repeats > 1 else ""
    papers = " The paper's are of its own speech and model." if printed else ""
    return Table(
        name,
        f"Noise × clipping: WER on {test}, in per cent (δ = {runs[0].privacy.get('delta', 0):g})",
        ("σ_DP", "C", "S", "K", "q", "T", "z", *epsilons, *columns),
        tuple(rows),
        f"The first line is the model before federation. Lines without a WER are the same noise on the mean for "
        f"populations that are not there.{seeds}{papers}",
        words=0,
    )


def _own_row(runs: Sequence[RunRecord], shares: Sequence[str], *, printed: bool, told: bool) -> Row:
    """The runs of one level, with the ε of their own population."""
    privacy, (sigma, bound) = runs[0].privacy, _level(runs[0])
    own = _extrapolated(runs[0])[: _own_first(runs[0])]
    theirs = epsilon_text(own[0].get("paper_epsilon")) if own else NOTHING
    found = (theirs, epsilon_text(privacy.get("epsilon_rdp")), epsilon_text(privacy.get("epsilon_pld")))
    wers = []
    for share in shares:
        cell = [run for run in runs if _share(run) == share]
        wers.append(_spread([run.tests[str(_test_set(run))]["wer"] for run in cell]))
        if printed:
            paper = next((wer for run in cell if (wer := _paper_wer(run)) is not None), None)
            wers.append(NOTHING if paper is None else f"{paper:.1f}")
    steps, z = privacy.get("promised_steps", privacy.get("steps")), privacy.get("noise_multiplier")
    sizes = _sizes(privacy.get("cohort_size"), privacy.get("population_size"), steps, z if sigma else None)
    guarantee = found if sigma else (NOISELESS,) * 3
    return (_sigma(sigma), number_text(bound), *sizes, *guarantee[0 if told else 1 :], *wers)


def _other_row(level: Level, plan: Record, columns: Sequence[str], *, told: bool) -> Row:
    """The same noise on the mean for a population that is not there."""
    cohort, population, steps = (plan.get(name) for name in ("cohort_size", "population_size", "central_steps"))
    sizes = _sizes(cohort, population, steps, plan.get("noise_multiplier"))
    found = [epsilon_text(plan.get(name)) for name in ("paper_epsilon", "epsilon_rdp", "epsilon_pld")]
    return (_sigma(level[0]), number_text(level[1]), *sizes, *found[0 if told else 1 :], *[""] * len(columns))


def _sizes(cohort: int | None, population: int | None, steps: int | None, z: float | None) -> Row:
    rate = None if not cohort or not population else cohort / population
    return (
        integer(cohort),
        integer(population),
        number_text(rate),
        integer(steps),
        NOTHING if z is None else f"{z:.4g}",
    )


def _level(run: RunRecord) -> Level:
    private = run.federation.get("privacy") or {}
    return float(run.privacy.get("sigma_dp") or 0.0), float(private.get("clip_bound") or "inf")


def _share(run: RunRecord) -> str:
    return str((run.federation.get("privacy") or {}).get("share"))


def _extrapolated(run: RunRecord) -> Sequence[Record]:
    return run.privacy.get("extrapolated") or ()


def _own_first(run: RunRecord) -> int:
    """How many of the populations it is reckoned for are its own: the paper's recipes name that first."""
    first = next(iter(_extrapolated(run)), {})
    return int(first.get("cohort_size") == run.privacy.get("cohort_size"))


def _test_set(run: RunRecord) -> str | None:
    """The set that tables are about: `test` where there is one, else the last."""
    sets = [name for name, test in run.tests.items() if "wer" in test]
    return "test" if "test" in sets else (sets[-1] if sets else None)


def _paper_wer(run: RunRecord) -> float | None:
    wers: dict[str, Any] = (run.config.get("paper") or {}).get("wer") or {}
    return wers.get(str(_test_set(run)))


def _start(runs: Sequence[RunRecord]) -> str | None:
    """What all of them started from; None where that differs."""
    starts = {run.start_tests.get(str(_test_set(run)), {}).get("wer") for run in runs}
    return None if len(starts) != 1 or (only := starts.pop()) is None else f"{100 * only:.1f}"


def _spread(rates: Sequence[float]) -> str:
    if not rates:
        return NOTHING
    middle = f"{100 * mean(rates):.1f}"
    return middle if len(rates) == 1 else f"{middle} ({100 * min(rates):.1f}–{100 * max(rates):.1f})"


def _sigma(value: float) -> str:
    return f"{value:.3g}" if value else "0"
