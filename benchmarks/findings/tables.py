"""Tables of a suite in Markdown: one row for each setting, or a grid over two settings."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any

from findings.kept import Kept, find_path, settings_of, short
from findings.numbers import (
    NOT_CONVERGED,
    ONE_SEED_MODEL,
    per_cent,
    planned,
    probed,
    told_converged,
    told_seeds,
    unless_converged,
)
from findings.rates import dev_wer, scored, start_wer
from sottovoce.base.errors import InputError
from sottovoce.base.tables import NOTHING
from sottovoce.report.parts import show_count, show_epsilon
from sottovoce.report.records import RunRecord
from sottovoce.report.run_facts import RUN_FACTS, has_converged, short_commit, start_converged

Repeats = Mapping[int, RunRecord]
CONVERGED = "converged"


def rates_cell(rates: Sequence[float | None]) -> str:
    """The mean, and the least and the largest where there are several."""
    known = [rate for rate in rates if rate is not None]
    if not known:
        return NOTHING
    return per_cent(fmean(known)) + (f" ({per_cent(min(known))}–{per_cent(max(known))})" if known[1:] else "")


def number_cell(values: Sequence[float]) -> str:
    """The same of what is no share."""
    return f"{fmean(values):.2f}" + (f" ({min(values):.2f}–{max(values):.2f})" if values[1:] else "")


def _read_off(run: RunRecord, what: str, figure: str) -> float | None:
    found: float | None = (probed(run).get(what) or {}).get(figure)
    return found


def _once(tell: Callable[[RunRecord], str]) -> Callable[[Repeats], str]:
    """What the repeats of a setting all say, or what each of them says."""
    return lambda runs: " / ".join(dict.fromkeys(tell(run) for run in runs.values()))


def _epsilon(run: RunRecord, accountant: str) -> str:
    found = run.privacy.get(f"epsilon_{accountant}")
    return "–" if found is None else show_epsilon(found)


def _population(run: RunRecord) -> str:
    useful = run.privacy.get("useful") or {}
    return "none" if "unreachable" in useful else show_count(useful.get("population_size"))


COLUMNS: Mapping[str, tuple[str, Callable[[Repeats], str]]] = {
    "start": ("start, test WER %", lambda runs: rates_cell([start_wer(run) for run in runs.values()])),
    "dev": ("dev WER %", lambda runs: rates_cell([dev_wer(run) for run in runs.values()])),
    "dev-ctc": ("dev WER by CTC %", lambda runs: rates_cell([dev_wer(run, "ctc_wer") for run in runs.values()])),
    "test": ("test WER %", lambda runs: rates_cell([scored(run)["wer"] for run in runs.values()])),
    # Of models that write no text: how well they tell what comes next, and what a linear layer reads off them.
    "loss": ("test loss", lambda runs: number_cell([scored(run)["loss"] for run in runs.values()])),
    "accuracy": ("found, %", lambda runs: rates_cell([scored(run)["accuracy"] for run in runs.values()])),
    "speakers": (
        "speakers told, %",
        lambda runs: rates_cell([_read_off(run, "speaker", "accuracy") for run in runs.values()]),
    ),
    "letters": (
        "letters wrong, %",
        lambda runs: rates_cell([_read_off(run, "letters", "error_rate") for run in runs.values()]),
    ),
    "cer": ("test CER %", lambda runs: rates_cell([scored(run)["cer"] for run in runs.values()])),
    "epsilon": ("ε (RDP)", _once(partial(_epsilon, accountant="rdp"))),
    "epsilon-pld": ("ε (PLD)", _once(partial(_epsilon, accountant="pld"))),
    "population": ("people for ε ≤ 8 (RDP)", _once(_population)),
    "population-pld": (
        "people for ε ≤ 8 (PLD)",
        _once(lambda run: show_count((planned(run).get("pld") or {}).get("population_size"))),
    ),
    "noise": ("noise", _once(RUN_FACTS["noise"])),
    "server": ("server", _once(RUN_FACTS["server"])),
}


def suite_table(kept: Kept, suite: str, columns: Sequence[str], *, only: Sequence[str]) -> str:
    """One row for each setting; `columns` are names of COLUMNS, or ends of paths in recipes such as `share`."""
    settings = {name: kept.repeats(name) for name in kept.settings(suite, only=only)}
    recipes = {name: settings_of(next(iter(runs.values()))) for name, runs in settings.items()}
    paths = list(dict.fromkeys(path for recipe in recipes.values() for path in recipe))
    headings, rows = ["setting"], [[name.partition("/")[2]] for name in settings]
    for column in columns:
        if column in COLUMNS:
            heading, tell = COLUMNS[column]
            if column == "start":  # of other models than the rows'
                heading += unless_converged(start_converged(run) for runs in settings.values() for run in runs.values())
            cells = [tell(runs) for runs in settings.values()]
        else:
            path = find_path(column, paths)
            heading, cells = f"`{short(path, paths)}`", [said(recipe.get(path)) for recipe in recipes.values()]
        headings.append(heading)
        for row, cell in zip(rows, cells, strict=True):
            row.append(cell)
    for row, runs in zip(rows, settings.values(), strict=True):
        row += [converged_cell(runs), " ".join(kept.link(run, str(seed)) for seed, run in runs.items())]
    left = 1 + sum(column not in COLUMNS for column in columns)
    whole = markdown([*headings, CONVERGED, "runs by seed"], rows, words=left)
    return "\n\n".join([whole, f"{_surroundings(settings)}{_covered(settings.values())}"])


def suite_grid(kept: Kept, suite: str, *, label: str, rate: Callable[[RunRecord], float]) -> str:
    """Rates over the two groups of the pattern `label`, rows and columns. The lowest mean of each row is bold.

    Where no cell has converged, or all have, the corner says so; else each that has not.
    """
    settings = {name: kept.repeats(name) for name in kept.settings(suite)}
    places = {name: _place(name, label) for name in settings}
    cells: dict[tuple[str, str], Repeats] = {}
    for name, place in places.items():
        if place is not None:
            if place in cells:
                raise InputError(f"grid {suite}: {name} and another setting both stand at {' × '.join(place)}")
            cells[place] = settings[name]
    across, down = (_in_order({place[axis] for place in cells}) for axis in (1, 0))
    words = {place: unless_converged(map(has_converged, runs.values())) for place, runs in cells.items()}
    corner = NOT_CONVERGED if all(words.values()) else "" if any(words.values()) else CONVERGED
    lines = []
    for row in down:
        means = {
            column: fmean(rate(run) for run in cells[row, column].values())
            for column in across
            if (row, column) in cells
        }
        best = min(means, key=means.__getitem__)
        told = [
            _grid_cell(kept, cells[row, column], rate, bold=column == best and len(means) > 1)
            + ("" if corner else words[row, column])
            if column in means
            else NOTHING
            for column in across
        ]
        lines.append([row, *told])
    covered = _covered(cells.values()).strip()
    return markdown([corner, *across], lines, words=1) + (f"\n\n{covered}" if covered else "")


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]], *, words: int) -> str:
    """A table whose first `words` columns stand to the left, the others to the right."""
    rule = ["---" if n < words else "--:" for n in range(len(headings))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (headings, rule, *rows))


def said(value: Any) -> str:
    if value is None or value == {} or value == []:
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def converged_cell(runs: Repeats) -> str:
    return told_converged([has_converged(run) for run in runs.values()])


def _covered(settings: Iterable[Repeats]) -> str:
    """What rates that are given over several seeds cover."""
    repeated = [runs for runs in settings if len(runs) > 1]
    if not repeated:
        return ""
    one = told_seeds(repeated) == ONE_SEED_MODEL
    return " Seeds share one seed model." if one else " Each seed has its own start."


def _surroundings(settings: Mapping[str, Repeats]) -> str:
    runs = [run for repeats in settings.values() for run in repeats.values()]
    where = " and ".join(dict.fromkeys(RUN_FACTS["hardware"](run) for run in runs))
    commits = ", ".join(dict.fromkeys(short_commit(run) or "unknown" for run in runs))
    return f"{len(runs)} runs on {where}, commit {commits}."


def _place(name: str, label: str) -> tuple[str, str] | None:
    """Where a setting stands in a grid; None for one whose label is of another pattern."""
    match = re.fullmatch(label, name.partition("/")[2])
    if match is not None and len(match.groups()) != 2:
        raise InputError(f"label={label}: expected a pattern with two groups, rows and columns")
    return None if match is None else (match[1], match[2])


def _in_order(words: set[str]) -> list[str]:
    def place(word: str) -> tuple[bool, float, str]:
        try:
            return False, float(word), ""
        except ValueError:
            return True, 0.0, word

    return sorted(words, key=place)


def _grid_cell(kept: Kept, runs: Repeats, rate: Callable[[RunRecord], float], *, bold: bool) -> str:
    rates = [rate(run) for run in runs.values()]
    mean = f"**{per_cent(fmean(rates))}**" if bold else per_cent(fmean(rates))
    if len(runs) == 1:
        return kept.link(next(iter(runs.values())), mean)
    links = " ".join(kept.link(run, per_cent(rate)) for run, rate in zip(runs.values(), rates, strict=True))
    return f"{mean} ({links})"
