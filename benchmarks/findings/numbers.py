"""Numbers of runs as they stand in a sentence or a cell, each with a way to the run it comes from."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from findings.keeping import PLANNED, PROBE
from findings.kept import Kept, shares_seed_model
from findings.rates import Difference, scored
from sottovoce.audit.canary_audit import HOLDS_TRUTH
from sottovoce.base.errors import InputError
from sottovoce.base.tables import NOTHING
from sottovoce.evaluation.converged import Converged
from sottovoce.evaluation.error_rates import Interval
from sottovoce.report.audit import audit_interval, kept_audit, show_unbounded
from sottovoce.report.layers import norm_profiles
from sottovoce.report.parts import show_count, show_epsilon
from sottovoce.report.records import RunRecord
from sottovoce.report.run_facts import has_converged

Judge = Callable[[RunRecord], Converged]

FILES: Mapping[str, Callable[[RunRecord], Any]] = {
    "results": lambda run: run.results,
    "config": lambda run: run.config,
    "environment": lambda run: run.environment,
    "engine": lambda run: run.engine,
    "population": lambda run: run.population,
    "planned": lambda run: planned(run),
    "probe": lambda run: probed(run),
    "audit": lambda run: kept_audit(run) or {},
}
# What a page says beside a rate, and what an interval over several seeds covers: "How to read this page" explains them.
NOT_CONVERGED, ONE_SEED_MODEL, WHOLE_SEEDS = "not converged", "one seed model", "whole seeds"
VERDICTS = {"consistent": "no alarm", "alarm": "**alarm**", "broken": "**broken**"}


def per_cent(rate: float | None) -> str:
    """Without the sign, for cells.

    >>> per_cent(0.3821)
    '38.2'
    """
    return NOTHING if rate is None else f"{100 * rate:.1f}"


def between(interval: Interval | None) -> str:
    return "no interval" if interval is None else f"{per_cent(interval[0])}–{per_cent(interval[1])}"


def points(rate: float) -> str:
    """A difference, with its sign.

    >>> points(-0.0234), points(0.01)
    ('−2.3', '+1.0')
    """
    return f"{100 * rate:+.1f}".replace("-", "−")


def unless_converged(verdicts: Iterable[Converged]) -> str:
    """The words that stand beside a rate unless all of its runs are shown to have converged."""
    return "" if all(one == "yes" for one in verdicts) else f", {NOT_CONVERGED}"


def told_converged(verdicts: Sequence[Converged]) -> str:
    """
    >>> told_converged(["yes", "yes"]), told_converged(["yes", "no", "not shown"])
    ('yes', '1 of 3')
    """
    return verdicts[0] if len(set(verdicts)) == 1 else f"{verdicts.count('yes')} of {len(verdicts)}"


def single(kept: Kept, run: RunRecord, test: str | None = None) -> str:
    """`38.2 % (35.1–41.0, not converged)`: the rate, and its 95 % interval over speakers."""
    found = scored(run, test)
    interval = found.get("wer_interval")
    beside = between(None if interval is None else tuple(interval)) + unless_converged([has_converged(run)])
    return kept.link(run, f"{per_cent(found['wer'])} % ({beside})")


def over_seeds(
    kept: Kept, runs: Mapping[int, RunRecord], rates: Sequence[float], *, judge: Judge = has_converged
) -> str:
    """The mean, the least and the largest, with a link for each seed. `judge` says whether a rate's model converged."""
    words = unless_converged(map(judge, runs.values()))
    if len(runs) == 1:
        return kept.link(next(iter(runs.values())), f"{per_cent(rates[0])} %") + f" (one seed{words})"
    words = f", {told_seeds([runs])}{words}"
    links = ", ".join(kept.link(run, str(seed)) for seed, run in runs.items())
    return f"{per_cent(fmean(rates))} % ({per_cent(min(rates))}–{per_cent(max(rates))}{words}; seeds {links})"


def told_difference(
    kept: Kept, found: Difference, first: Mapping[int, RunRecord], second: Mapping[int, RunRecord]
) -> str:
    """`−2.3 points (−3.1 to −1.5, one seed model, not converged; seeds …)`, a pair of links for each seed."""
    links = [f"{kept.link(first[s], str(s))}/{kept.link(second[s], str(s))}" for s in found.seeds]
    return _told(found, [{s: runs[s] for s in found.seeds} for runs in (first, second)], links)


def told_change(kept: Kept, found: Difference, runs: Mapping[int, RunRecord]) -> str:
    """The same within runs, a link for each seed."""
    chosen = {seed: runs[seed] for seed in found.seeds}
    return _told(found, [chosen], [kept.link(run, str(seed)) for seed, run in chosen.items()])


def _told(found: Difference, sides: Sequence[Mapping[int, RunRecord]], links: Sequence[str]) -> str:
    """What the interval covers besides test speakers, and whether the models had converged, stands beside it."""
    interval = "no interval" if found.interval is None else " to ".join(points(bound) for bound in found.interval)
    seeds = f", {told_seeds(sides)}" if links[1:] else ""
    words = seeds + unless_converged(has_converged(run) for runs in sides for run in runs.values())
    return f"{points(found.mean)} points ({interval}{words}; {'seeds' if links[1:] else 'seed'} {', '.join(links)})"


def told_seeds(settings: Iterable[Mapping[int, RunRecord]]) -> str:
    """Whether repeats share the model that they start from, on either side of a difference."""
    return ONE_SEED_MODEL if any(map(shares_seed_model, settings)) else WHOLE_SEEDS


def told_epsilon(run: RunRecord) -> str:
    """By both accountants at δ; what a run without noise must be called."""
    found = run.privacy
    if found.get("epsilon_rdp") is None:
        return "not private"
    by_pld = show_epsilon(found.get("epsilon_pld"))
    return f"ε = {show_epsilon(found['epsilon_rdp'])} by RDP, {by_pld} by PLD, at δ = {found['delta']:g}"


def told_population(run: RunRecord) -> str:
    """How many people the same recipe needs for a useful ε."""
    useful = run.privacy.get("useful")
    if useful is None:
        return "no population (not private)"
    if "unreachable" in useful:
        return "no population"
    by_pld = (planned(run).get("pld") or {}).get("population_size")
    return f"{show_count(useful['population_size'])} people by RDP, {show_count(by_pld)} by PLD"


def told_audit(run: RunRecord, found: Mapping[str, Any]) -> str:
    """What an audit says of the rounds that it tried: beside what they promise, and whether its alarm rang.

    An interval has a level only where it holds the truth as often.
    """
    promised = min((one for one in found["promised"].values() if one is not None), default=None)
    estimate, low, high = map(show_unbounded, (found["estimate"]["epsilon"], *found["estimate"]["interval"]))
    holds = audit_interval(run, found) == HOLDS_TRUTH
    level = f"{100 * found['estimate']['level']:.0f} % interval" if holds else "what an attack achieved:"
    stated = NOTHING if promised is None else show_epsilon(promised)
    told = f"ε promised {stated}, estimated {estimate} ({level} {low}–{high})"
    proof = f"at least {show_epsilon(found['lower_bound']['epsilon'])}"
    tried = f"by {show_count(found['canaries'])} canaries in {show_count(found['rounds'])} rounds"
    return f"{told}, {proof}, {tried}: {VERDICTS[found['verdict']]}"


def planned(run: RunRecord) -> Mapping[str, Any]:
    """The populations found when the run was kept; empty where there are none."""
    return _beside(run, PLANNED)


def probed(run: RunRecord) -> Mapping[str, Any]:
    """What a linear layer reads off its encoder; empty where nobody asked."""
    return _beside(run, PROBE)


def _beside(run: RunRecord, name: str) -> Mapping[str, Any]:
    file = run.folder / name
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def value_at(run: RunRecord, path: str) -> Any:
    """What a run's files say at `path`, such as `results.privacy.useful.population_size`."""
    file, *keys = path.split(".")
    if file not in FILES:
        raise InputError(f"value={path}: expected it to begin with one of {', '.join(FILES)}")
    found = FILES[file](run)
    for key in keys:
        inside = isinstance(found, Mapping) and key in found
        position = (
            isinstance(found, Sequence) and not isinstance(found, str) and key.isdigit() and int(key) < len(found)
        )
        if not (inside or position):
            known = f"one of {', '.join(map(str, found))}" if isinstance(found, Mapping) else "nothing inside"
            raise InputError(f"value={path}: no {key!r} in {run.label}, expected {known}")
        found = found[key] if inside else found[int(key)]
    return found


def number_at(run: RunRecord, path: str) -> float:
    found = value_at(run, path)
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise InputError(f"value={path}: expected a number in {run.label}, found {found!r}")
    return float(found)


def formatted(value: Any, how: str) -> str:
    """By Python's format words, such as `.1%` or `,`."""
    try:
        return format(value, how)
    except (TypeError, ValueError):
        raise InputError(f"format={how}: it does not fit the value {value!r}") from None


def norm_ratio(run: RunRecord, first: str, second: str) -> float:
    """The norm of updates to parameters of one kind over another's, before clipping, mean over the layers."""
    blocks = norm_profiles(run.diagnostics, place=run.place)[0].blocks
    for kind in (first, second):
        if kind not in blocks:
            raise InputError(f"kind={kind}: expected one of {', '.join(blocks) or '(no diagnostics)'} in {run.label}")
    return fmean(blocks[first]) / fmean(blocks[second])
