"""A run folder made small enough for the repository: what tables, figures and the report page read, and no more.

The ledger is kept to the byte, so that its chain of hashes can still be verified. What is long is thinned: numbers per
layer stay for a few rounds, from the first to the last. A run's population for ε ≤ 8 by PLD takes seconds to find, so
it is found here and written to `planned.json`. Of voices that somebody owns no names are kept. What `sottovoce audit`
wrote beside a run stays beside it, unless it is a release's, which is nobody's to publish.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from sottovoce.audit.recipe import audit_path
from sottovoce.base.digests import content_digest
from sottovoce.base.errors import InputError
from sottovoce.base.files import write_atomically
from sottovoce.base.parsing import ParseError
from sottovoce.base.seeds import name_key
from sottovoce.evaluation.error_rates import FEWEST_SPEAKERS
from sottovoce.evaluation.score import UNKNOWN, pool_small_groups
from sottovoce.privacy.ledger_report import SIGNATURE
from sottovoce.privacy.planner import plan_run, smallest_population
from sottovoce.privacy.pld import QUICK
from sottovoce.report.audit import kept_audit
from sottovoce.report.records import read_run
from sottovoce.training.recorded_files import EXCERPT
from sottovoce.training.run_folder import (
    CONFIG,
    DIAGNOSTICS,
    ENGINE,
    ENVIRONMENT,
    INPUTS,
    LEDGER,
    METRICS,
    PERSONAL,
    POPULATION,
    RESULTS,
)

PLANNED = "planned.json"
PROBE = "probe.json"  # what `sottovoce probe --json` said of the run's model, where somebody has put it there
WHOLE = (CONFIG, INPUTS, ENVIRONMENT, ENGINE, POPULATION, LEDGER, PROBE)
IN_BRIEF = (CONFIG, INPUTS, ENVIRONMENT, PROBE)
FILES = (*WHOLE, METRICS, DIAGNOSTICS, RESULTS, PLANNED, PERSONAL)

# Rounds with numbers per layer: fewer of a model with many tensors, so that a run takes about 100 kB.
FEWEST_ROUNDS, MOST_ROUNDS, TENSORS = 3, 5, 210
BY_LAYER = ("layers", "signal_to_noise", "server_norms", "trust_ratios")
ACCENT = "accent"
BY_WINDOW = ("gradient_norms", "gradient_deviations")  # of central runs: few, and drawn over the steps
DIGITS, LAYER_DIGITS = 6, 3
SPARSE = 60  # records between evaluations, of a run that is kept in brief
# Of the model a run started from: the same in all runs of a suite, and the report reads its totals alone.
OF_EACH = ("groups", "per_speaker", "samples", "spread")


def keep(run: Path, into: Path, *, rounds: int | None = None, brief: bool = False, speakers: bool = False) -> int:
    """Keep the finished run in the folder `run` as the folder `into`, in place of one that is there. Returns bytes.

    `rounds` says how many keep their numbers per layer; None chooses by the model's size. `brief` keeps recipe,
    surroundings, some metrics and totals: for runs that a rate was chosen by, or that others start from, and that
    nobody asks for their ledger. `speakers` keeps the errors of each of them there too, and those of the model that it
    started from: what is compared, is compared by speaker.
    """
    if not (run / RESULTS).is_file():
        raise InputError(f"run={run}: expected a finished run, with {RESULTS}")
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    for name in IN_BRIEF if brief else (*WHOLE, SIGNATURE):
        if (run / name).is_file():
            shutil.copyfile(run / name, into / name)
    for name in (METRICS,) if brief else (METRICS, DIAGNOSTICS):
        if (run / name).is_file():
            records = [json.loads(line) for line in (run / name).read_text(encoding="utf-8").splitlines()]
            _write(into / name, _lines(thinned(sparse(records) if brief else records, rounds=0 if brief else rounds)))
    results = json.loads((run / RESULTS).read_text(encoding="utf-8"))
    _write(into / RESULTS, readable(_slim(results, brief=brief, speakers=speakers)) + "\n")
    if (run / PERSONAL).is_file():
        quotes = any("samples" in test for test in results["test"].values())
        people = json.loads((run / PERSONAL).read_text(encoding="utf-8"))
        _write(into / PERSONAL, readable(people if quotes else facts_pooled(people)) + "\n")
    if not brief and (planned := _planned(results.get("privacy") or {})) is not None:
        _write(into / PLANNED, readable(planned) + "\n")
    return sum(file.stat().st_size for file in (*into.iterdir(), *_keep_audit(run, into)))


def _keep_audit(run: Path, into: Path) -> list[Path]:
    """Where it is kept now, if there is one of this recipe that may be kept; one of an older run goes."""
    audit_path(into).unlink(missing_ok=True)
    try:
        found = kept_audit(read_run(run.name, run))
    except ParseError as why:
        raise InputError(f"{audit_path(run)}: {why}") from None
    if found is None:
        return []
    shutil.copyfile(audit_path(run), audit_path(into))
    return [audit_path(into)]


def sparse(records: Sequence[Mapping[str, Any]], *, others: int = SPARSE) -> list[Mapping[str, Any]]:
    """Every record of an evaluation, and of the others so many, evenly spaced, first and last too."""
    between = [n for n, record in enumerate(records) if not any(name.startswith("dev_") for name in record)]
    last, steps = len(between) - 1, max(min(others, len(between)) - 1, 1)
    left_out = {*between} - {between[round(k * last / steps)] for k in range(steps + 1) if between}
    return [record for n, record in enumerate(records) if n not in left_out]


def thinned(records: Sequence[Mapping[str, Any]], *, rounds: int | None = None) -> list[dict[str, Any]]:
    """All records, with what they say of single layers only in `rounds` of them, evenly spaced, first and last too."""
    full = [n for n, record in enumerate(records) if any(record.get(name) for name in BY_LAYER)]
    tensors = max((len(records[n].get(name) or ()) for n in full for name in BY_LAYER), default=1)
    wanted = min(max(TENSORS // tensors, FEWEST_ROUNDS), MOST_ROUNDS) if rounds is None else rounds
    last, steps = len(full) - 1, max(min(wanted, len(full)) - 1, 1)
    chosen = {full[round(k * last / steps)] for k in range(steps + 1)} if full and wanted else set()
    return [
        {
            name: _rounded(value, LAYER_DIGITS if name in (*BY_LAYER, *BY_WINDOW) else DIGITS)
            for name, value in record.items()
            if name not in BY_LAYER or n in chosen
        }
        for n, record in enumerate(records)
    ]


def readable(content: Any, *, indent: str = "") -> str:
    """JSON in which what holds single values only stands in one line: a speaker, a group, an interval.

    >>> print(readable({"test": {"wer": 0.5, "words": 2}, "seeds": [1, 2]}))
    {
     "test": {"wer": 0.5, "words": 2},
     "seeds": [1, 2]
    }
    """
    inside: list[Any] = list(content.values()) if isinstance(content, dict) else content
    if not isinstance(content, dict | list) or not any(isinstance(value, dict | list) for value in inside):
        return json.dumps(content, ensure_ascii=False, allow_nan=False)
    names = [json.dumps(name, ensure_ascii=False) + ": " for name in content] if isinstance(content, dict) else []
    parts = [readable(value, indent=indent + " ") for value in inside]
    lines = [f"{indent} {name}{part}" for name, part in zip(names or [""] * len(parts), parts, strict=True)]
    opened, closed = "{}" if isinstance(content, dict) else "[]"
    return f"{opened}\n" + ",\n".join(lines) + f"\n{indent}{closed}"


def _slim(results: Mapping[str, Any], *, brief: bool, speakers: bool) -> dict[str, Any]:
    slim = dict(results)
    if "privacy" in results:  # of a run with a ledger, which knows the digest of what this is taken from
        slim[EXCERPT] = content_digest(results)
    totals = _by_speaker if speakers else _totals
    slim["test"] = totals(results["test"]) if brief else {n: _nameless(test) for n, test in results["test"].items()}
    if (start := results.get("start")) is not None:
        slim["start"] = {**start, "test": totals(start["test"])}
    if (clients := results.get("clients")) is not None:
        slim["clients"] = {k: v for k, v in clients.items() if not (brief and k == "per_client")}
    return slim


def _totals(tests: Mapping[str, Any]) -> dict[str, Any]:
    return {name: {key: value for key, value in test.items() if key not in OF_EACH} for name, test in tests.items()}


def _by_speaker(tests: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: total | {"per_speaker": _nameless(tests[name])["per_speaker"]} for name, total in _totals(tests).items()
    }


def _nameless(test: Mapping[str, Any]) -> dict[str, Any]:
    """Where a run quotes no texts its voices have owners: speakers get keys, the same ones in every run, and what was
    known of each of them (`groups`) goes."""
    people = [_rounded(person, DIGITS) for person in test.get("per_speaker", ())]
    if "samples" not in test:
        people = [
            {k: v for k, v in person.items() if k != "groups"}
            | {"speaker": f"{name_key(str(person['speaker'])):016x}"[:10]}
            for person in people
        ]
    return {**test, "per_speaker": people}


def facts_pooled(personal: Mapping[str, Any]) -> dict[str, Any]:
    """Of voices that somebody owns an accent alone is kept, and only one that enough people share."""
    people = personal["per_client"]
    accents = pool_small_groups([person["groups"].get(ACCENT, UNKNOWN) for person in people], smallest=FEWEST_SPEAKERS)
    known = [{} if accent == UNKNOWN else {ACCENT: accent} for accent in accents]
    return {**personal, "per_client": [p | {"groups": own} for p, own in zip(people, known, strict=True)]}


def _planned(privacy: Mapping[str, Any]) -> dict[str, Any] | None:
    """The population for the target ε by PLD, beside the run's own by RDP; None where there is none."""
    useful = privacy.get("useful")
    if useful is None or "unreachable" in useful:
        return None
    if privacy.get("promised_steps", privacy["steps"]) != privacy["steps"]:
        return None  # it stands in for the ledger's steps where they are in doubt, and is of those that were made
    names = ("population_size", "cohort_size", "steps", "delta", "noise_multiplier")
    by_pld = useful.get("pld") or _smallest(*(privacy[name] for name in names), useful["target_epsilon"])
    by_rdp = {name: useful[name] for name in ("population_size", "cohort_size", "epsilon_rdp", "epsilon_pld")}
    return {"target_epsilon": useful["target_epsilon"], "rdp": by_rdp, "pld": by_pld}


@cache
def _smallest(
    population_size: int, cohort_size: int, steps: int, delta: float, noise_multiplier: float, target: float
) -> dict[str, Any]:
    planned = plan_run(
        population_size,
        cohort_size=cohort_size,
        central_steps=steps,
        delta=delta,
        noise_multiplier=noise_multiplier,
        cap=QUICK,
    )
    found = smallest_population(planned, target_epsilon=target, accountant="pld", cap=QUICK)
    return {
        "population_size": found.population_size,
        "cohort_size": found.cohort_size,
        "epsilon_rdp": found.epsilon.rdp,
        "epsilon_pld": found.epsilon.pld,
    }


def _rounded(value: Any, digits: int) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, dict):
        return {name: _rounded(inside, digits) for name, inside in value.items()}
    return [_rounded(inside, digits) for inside in value] if isinstance(value, list) else value


def _lines(records: Sequence[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records)


def _write(path: Path, content: str) -> None:
    with write_atomically(path) as file:
        file.write(content.encode())
