"""Tables of a suite in Markdown: one row for each setting, or a grid over two settings."""

import re
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from findings.kept import Kept, find_path, settings_of, short, varying
from findings.numbers import per_cent, planned
from findings.rates import dev_wer, scored, seconds, start_wer
from sottovoce.errors import InputError
from sottovoce.reporting.cells import NOTHING, epsilon, integer
from sottovoce.reporting.records import RunRecord
from sottovoce.reporting.settings import FACTS, short_commit

Repeats = Mapping[int, RunRecord]
MOST_SETTINGS = 6  # columns that a table gives to settings by itself; with more, nobody can read it


def rates_cell(rates: Sequence[float | None]) -> str:
    """The mean, and the least and the largest where there are several."""
    known = [rate for rate in rates if rate is not None]
    if not known:
        return NOTHING
    return per_cent(fmean(known)) + (f" ({per_cent(min(known))}–{per_cent(max(known))})" if known[1:] else "")


def _once(tell: Callable[[RunRecord], str]) -> Callable[[Repeats], str]:
    """What the repeats of a setting all say, or what each of them says."""
    return lambda runs: " / ".join(dict.fromkeys(tell(run) for run in runs.values()))


def _epsilon(run: RunRecord) -> str:
    found = run.privacy
    return "–" if found.get("epsilon_rdp") is None else epsilon(found["epsilon_rdp"])


def _epsilon_pld(run: RunRecord) -> str:
    return epsilon(run.privacy.get("epsilon_pld"))


def _population(run: RunRecord) -> str:
    useful = run.privacy.get("useful") or {}
    return "none" if "unreachable" in useful else integer(useful.get("population_size"))


def _seconds(runs: Repeats) -> str:
    known = [found for run in runs.values() if (found := seconds(run)) is not None]
    return f"{fmean(known):,.0f}" if known else NOTHING


COLUMNS: Mapping[str, tuple[str, Callable[[Repeats], str]]] = {
    "start": ("start, test WER %", lambda runs: rates_cell([start_wer(run) for run in runs.values()])),
    "dev": ("dev WER %", lambda runs: rates_cell([dev_wer(run) for run in runs.values()])),
    "test": ("test WER %", lambda runs: rates_cell([scored(run)["wer"] for run in runs.values()])),
    "epsilon": ("ε (RDP)", _once(_epsilon)),
    "epsilon-pld": ("ε (PLD)", _once(_epsilon_pld)),
    "population": ("people for ε ≤ 8 (RDP)", _once(_population)),
    "population-pld": (
        "people for ε ≤ 8 (PLD)",
        _once(lambda run: integer((planned(run).get("pld") or {}).get("population_size"))),
    ),
    "seconds": ("s of training", _seconds),
    "clipping": ("clipping", _once(FACTS["clipping"])),
    "noise": ("noise", _once(FACTS["noise"])),
    "server": ("server", _once(FACTS["server"])),
    "hardware": ("hardware", _once(FACTS["hardware"])),
}
DEFAULT = ("start", "dev", "test", "epsilon", "population", "seconds")


def suite_table(kept: Kept, suite: str, columns: Sequence[str], *, only: Sequence[str]) -> str:
    """One row for each setting; `columns` are names of COLUMNS, or ends of paths in recipes such as `share`.

    Without columns: whatever is not the same in all of them, and what everybody asks for.
    """
    settings = {name: kept.repeats(name) for name in kept.settings(suite, only=only)}
    recipes = {name: settings_of(next(iter(runs.values()))) for name, runs in settings.items()}
    paths = list(dict.fromkeys(path for recipe in recipes.values() for path in recipe))
    chosen, notes = list(columns), list[str]()
    if not chosen:
        apart, notes = _told_apart(recipes, paths)
        chosen = [*apart, *DEFAULT]
    headings, rows = ["setting"], [[name.partition("/")[2]] for name in settings]
    for column in chosen:
        if column in COLUMNS:
            heading, tell = COLUMNS[column]
            cells = [tell(runs) for runs in settings.values()]
        else:
            path = find_path(column, paths)
            heading, cells = f"`{short(path, paths)}`", [said(recipe.get(path)) for recipe in recipes.values()]
        headings.append(heading)
        for row, cell in zip(rows, cells, strict=True):
            row.append(cell)
    for row, runs in zip(rows, settings.values(), strict=True):
        row.append(" ".join(kept.link(run, str(seed)) for seed, run in runs.items()))
    left = 1 + sum(column not in COLUMNS for column in chosen)
    return "\n\n".join([markdown([*headings, "runs by seed"], rows, words=left), _surroundings(settings, notes)])


def suite_grid(
    kept: Kept,
    suite: str,
    *,
    rows: str | None,
    columns: str | None,
    label: str | None,
    only: Sequence[str],
    rate: Callable[[RunRecord], float],
) -> str:
    """Rates over two settings (`rows`, `columns`: ends of paths; several joined with +), or over the two groups
    of the pattern `label`. The lowest mean of each row is bold."""
    settings = {name: kept.repeats(name) for name in kept.settings(suite, only=only)}
    places = {name: _place(name, runs, rows=rows, columns=columns, label=label) for name, runs in settings.items()}
    cells: dict[tuple[str, str], Repeats] = {}
    for name, place in places.items():
        if place is not None:
            if place in cells:
                raise InputError(f"grid {suite}: {name} and another setting both stand at {' × '.join(place)}")
            cells[place] = settings[name]
    across, down = (_in_order({place[axis] for place in cells}) for axis in (1, 0))
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
            if column in means
            else NOTHING
            for column in across
        ]
        lines.append([row, *told])
    return markdown([f"{rows or ''} \\ {columns or ''}".strip(" \\"), *across], lines, words=1)


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


def _told_apart(recipes: Mapping[str, Mapping[str, Any]], paths: Sequence[str]) -> tuple[list[str], list[str]]:
    """The paths in which recipes differ, those left out that only go along with one before them; and who they are."""
    shown: dict[tuple[int, ...], str] = {}
    along: dict[str, list[str]] = {}
    for path in varying(list(recipes.values())):
        values = [said(recipe.get(path)) for recipe in recipes.values()]
        division = tuple(values.index(value) for value in values)
        if division in shown:
            along.setdefault(shown[division], []).append(path)
        else:
            shown[division] = path
    notes = [f"with {_named([path], paths)} go {_named(others, paths)}" for path, others in along.items()]
    if left_out := list(shown.values())[MOST_SETTINGS:]:
        notes.append(f"they differ in {_named(left_out, paths)}, too")
    return list(shown.values())[:MOST_SETTINGS], notes


def _named(some: Sequence[str], paths: Sequence[str]) -> str:
    return ", ".join(f"`{short(path, paths)}`" for path in some)


def _surroundings(settings: Mapping[str, Repeats], notes: Sequence[str]) -> str:
    runs = [run for repeats in settings.values() for run in repeats.values()]
    where = " and ".join(dict.fromkeys(FACTS["hardware"](run) for run in runs))
    commits = ", ".join(dict.fromkeys(short_commit(run) or "unknown" for run in runs))
    return "; ".join([f"{len(runs)} runs on {where}, commit {commits}", *notes]) + "."


def _place(
    name: str, runs: Repeats, *, rows: str | None, columns: str | None, label: str | None
) -> tuple[str, str] | None:
    """Where a setting stands in a grid; None for one whose label is of another pattern."""
    if label is not None:
        match = re.fullmatch(label, name.partition("/")[2])
        if match is not None and len(match.groups()) != 2:
            raise InputError(f"grid label={label}: expected a pattern with two groups, rows and columns")
        return None if match is None else (match[1], match[2])
    if rows is None or columns is None:
        raise InputError("grid: expected rows=… and columns=…, or label=… with two groups")
    recipe = settings_of(next(iter(runs.values())))
    first, second = (
        ", ".join(said(recipe[find_path(ending, recipe)]) for ending in axis.split("+")) for axis in (rows, columns)
    )
    return first, second


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
