"""Whether the files of a run's folder agree with its ledger.

A chain of hashes cannot show that its end is missing. But a run writes how far it is in many files, and only once that
is charged; a file that is further than the ledger shows that the ledger was shortened:

    checkpoints/*/state.json    its length and last hash, and the step
    results.json                its length and last hash, its steps, attempts and ε; what was promised; the run's end
    metrics.jsonl               the last step and the ε so far; in simulations diagnostics.jsonl, too
    model/config.json           of which run the model is, and of which step
                                (`recorded_files` checks that it is that model, and other files by their digests)
    planned.json                (of kept runs) the ε of as many steps in a larger population
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sottovoce.base.errors import InputError
from sottovoce.base.files import read_file
from sottovoce.base.parsing import parse_json
from sottovoce.models.model_files import CONFIG as MODEL_CONFIG
from sottovoce.privacy.accounting import rdp_epsilon
from sottovoce.privacy.chain import Mark
from sottovoce.privacy.events import poisson_release, repeated, run_event
from sottovoce.privacy.guarantee import guarantee_of
from sottovoce.privacy.ledger import verify
from sottovoce.privacy.ledger_header import check_header
from sottovoce.privacy.ledger_report import LedgerReport, SignatureCheck, check_ledger_signature
from sottovoce.training.recorded_files import check_recorded_files
from sottovoce.training.run_folder import (
    CHECKPOINTS,
    CONFIG,
    DIAGNOSTICS,
    LEDGER,
    METRICS,
    MODEL,
    RESULTS,
    STATE,
    RunFolder,
)

PLANNED = "planned.json"
TOLERANCE = 1e-5  # kept runs have six digits
UNSIGNED = SignatureCheck()
SHORTENED = "it was shortened or rolled back, and what it forgot has been spent"


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What one file says: the ledger's length and hash then, facts it shares with it, and what it must have reached.

    `is_end`: nothing came after `mark`. `scaled` is (people, cohort, ε by RDP) of the same steps for other people.
    """

    file: str
    mark: Mark | None = None
    is_end: bool = False
    equal: Mapping[str, Any] = field(default_factory=dict)
    at_least: Mapping[str, Any] = field(default_factory=dict)
    scaled: tuple[int, int, float] | None = None


@dataclass(frozen=True)
class CheckedLedger:
    """A verified ledger, the files of its folder that agree with it, and those that cannot be read.

    `held` are files that match their digest in the ledger; `notes` names those without one.
    """

    report: LedgerReport
    consistent_files: tuple[str, ...]
    unread: tuple[str, ...]
    held: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    signature: SignatureCheck = UNSIGNED


def check_ledger(folder: Path, *, expected_key: str | None = None) -> CheckedLedger:
    """Verify the ledger of the run in `folder`, and compare the folder's files with it.

    `expected_key` is the fingerprint of the key that must have signed it. Raises InputError with one line for the first
    contradiction: which file, what it says, what the ledger says.
    """
    found = _check_claims(folder)
    path, report = folder / LEDGER, found.report
    try:
        signature = check_ledger_signature(report, path, expected=expected_key)
        recorded = check_recorded_files(folder, report, signed=signature.files)
    except InputError as why:
        message = str(why)
        raise InputError(message if message.startswith(str(folder)) else f"{path} is not sound: {message}") from None
    return replace(found, held=recorded.held, notes=recorded.notes, signature=signature)


def check_model_of_run(folder: Path) -> None:
    """Compare the model in `folder` (a run, its `model` or a checkpoint) with its run's ledger, if it has one."""
    run = find_run_of_model(folder)
    if run is not None and (run / LEDGER).exists():
        check_ledger(run)


def find_run_of_model(folder: Path) -> Path | None:
    """The run that `folder` is, or whose `model` or checkpoint it is; None for a model alone."""
    place = folder.resolve()
    runs = [folder]
    runs += [folder.absolute().parent] if folder.name == MODEL else []
    runs += [place.parent.parent] if place.parent.name == CHECKPOINTS else []
    return next((run for run in runs if (run / LEDGER).exists() or (run / CONFIG).exists()), None)


def _check_claims(folder: Path) -> CheckedLedger:
    # The claims first: a run that goes on meanwhile adds to its ledger before it writes another.
    claims, unread = _read_claims(folder)
    path = folder / LEDGER
    if claims and not path.exists():
        raise InputError(f"{path}: no ledger there, but {claims[0].file} is: nobody knows what a private run has spent")
    report = verify(path)
    check_header(path, report.header)
    facts = _collect_facts(report)
    for claim in claims:
        if (why := _find_contradiction(claim, report, facts)) is not None:
            raise InputError(f"{path} is not sound: {claim.file} {why}")
    consistent = dict.fromkeys(claim.file for claim in claims if claim.file not in unread)
    return CheckedLedger(report, tuple(consistent), tuple(unread))


def check_resumable(folder: Path) -> None:
    """Refuse to resume where the ledger is missing or shortened; a run that has written nothing may begin.

    A finished run, which is only shown, is checked as a whole. Of others a damaged checkpoint is skipped, and the one
    that is resumed from is compared with the ledger then.
    """
    if (folder / RESULTS).exists():
        check_ledger(folder)
    elif _read_claims(folder)[0]:
        _check_claims(folder)


def _collect_facts(report: LedgerReport) -> dict[str, Any]:
    facts = {
        "run": report.header["run"],
        "delta": report.header["delta"],
        "simulated": report.header["mode"] != "secure",
        "steps": report.steps,
        "attempts": report.attempts,
        "epsilon_rdp": rdp_epsilon(report.spent, report.header["delta"]),
    }
    if "central_steps" in report.header:  # older ledgers do not say what they promised
        promised = guarantee_of(report)
        facts["promised_steps"] = promised.steps
        facts["promised epsilon_rdp"] = rdp_epsilon(promised.event, promised.delta)
    return facts


def _find_contradiction(claim: Claim, report: LedgerReport, facts: Mapping[str, Any]) -> str | None:
    """Where `claim` and the ledger differ, in words; None where they agree."""
    known, length = claim.mark, report.mark.length
    if known is not None and not report.holds(known):
        if length < known.length:
            return f"knows {known.length} lines of it, and it has {length}: {SHORTENED}"
        return f"knows another line {known.length} than it has: it is the ledger of another run, or written anew"
    if known is not None and claim.is_end and report.released is not None and report.released.length > known.length:
        return f"says that it ended after {known.length} lines, and it has {length}"
    for name, said in claim.at_least.items():
        if facts[name] < said * (1 - TOLERANCE):
            return f"says {name}={said:g}, the ledger {facts[name]:g}: {SHORTENED}"
    for name, said in claim.equal.items():
        if name in facts and not _is_close(said, facts[name]):
            return f"says {name}={said}, the ledger {facts[name]}"
    if claim.scaled is not None:
        people, cohort, said = claim.scaled
        found = _compute_scaled_epsilon(report, people=people, cohort=cohort)
        if not _is_close(said, found):
            return f"says epsilon_rdp={said:g} for {people} people, by the ledger it is {found:g}"
    return None


def _is_close(said: Any, found: Any) -> bool:
    if isinstance(said, int | float) and isinstance(found, int | float):
        return math.isclose(said, found, rel_tol=TOLERANCE)
    return bool(said == found)


def _compute_scaled_epsilon(report: LedgerReport, *, people: int, cohort: int) -> float:
    """ε of as many steps and measurements as were promised, with the same noise on the mean, z/S, and other people."""
    promised, larger = guarantee_of(report), cohort / report.header["plan"]["cohort_size"]
    step = poisson_release(report.header["event"]["noise_multiplier"] * larger, sampling_rate=cohort / people)
    besides = None
    if promised.measured:
        z = report.header["client_wer"]["event"]["noise_multiplier"] * larger
        besides = repeated(poisson_release(z, sampling_rate=cohort / people), promised.measured)
    return rdp_epsilon(run_event(step, promised.steps, besides), report.header["delta"])


def _read_claims(folder: Path) -> tuple[list[Claim], list[str]]:
    """What the files of `folder` say of its ledger, and those of them that cannot be read."""
    run = RunFolder(folder)
    states = sorted(run.checkpoints.glob(f"step-*/{STATE}"), reverse=True)
    model = run.best / MODEL_CONFIG
    readers: list[tuple[Path, Callable[[str, Path], list[Claim]]]] = [
        (folder / RESULTS, _read_results),
        *((state, _read_checkpoint) for state in states),
        (folder / METRICS, _read_lines),
        (folder / DIAGNOSTICS, _read_lines),
        (model, _read_model),
        (folder / PLANNED, _read_plan),
    ]
    claims: list[Claim] = []
    unread: list[str] = []
    for path, read in readers:
        file = str(path.relative_to(folder))
        try:
            claims += read(file, path)
        except FileNotFoundError:
            continue
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
            unread.append(file)
            claims.append(Claim(file=file))  # that it exists shows at least that there was a ledger
    if run.best.is_symlink() and not model.exists():
        claims.append(Claim(file=run.best.name))  # a link to a checkpoint that is gone
    return claims, unread


def _read_results(file: str, path: Path) -> list[Claim]:
    results = parse_json(read_file(path))
    privacy = results.get("privacy") or {}
    names = ("delta", "simulated", "steps", "attempts", "promised_steps")
    equal = {name: privacy[name] for name in names if name in privacy}
    # What is spent by now, which older results give as the run's ε, and what was promised before anything was.
    if "epsilon_rdp" in (spent := privacy.get("spent", privacy)):
        equal["epsilon_rdp"] = _parse_epsilon(spent["epsilon_rdp"])
    if "spent" in privacy:
        equal["promised epsilon_rdp"] = _parse_epsilon(privacy["epsilon_rdp"])
    mark = Mark(int(privacy["length"]), str(privacy["head"])) if {"length", "head"} <= privacy.keys() else None
    ended = results.get("ended") or {}
    return [
        Claim(file=file, mark=mark, is_end=True, equal=equal),
        Claim(file=file, at_least={"steps": int(ended.get("step", 0))}),
        _claim_about(file, results.get("model") or {}),
    ]


def _read_checkpoint(file: str, path: Path) -> list[Claim]:
    state = parse_json(read_file(path))
    mark = Mark(int(state["ledger"]["length"]), str(state["ledger"]["head"]))
    return [Claim(file=file, mark=mark, at_least={"steps": int(state["step"])})]


def _read_lines(file: str, path: Path) -> list[Claim]:
    """Of records with a step each; a last line that was never finished says nothing."""
    reached: dict[str, float] = {"steps": 0}
    for line in read_file(path).decode("utf-8").splitlines():
        try:
            record = parse_json(line)
        except ValueError:
            break
        reached["steps"] = max(reached["steps"], int(record["step"]))
        if "epsilon" in record:
            reached["epsilon_rdp"] = _parse_epsilon(record["epsilon"])
    return [Claim(file=file, at_least=reached)]


def _read_model(file: str, path: Path) -> list[Claim]:
    return [_claim_about(file, parse_json(read_file(path))["about"])]


def _claim_about(file: str, about: Mapping[str, Any]) -> Claim:
    same = {"run": about["recipe"]} if "recipe" in about else {}
    return Claim(file=file, equal=same, at_least={"steps": int(about.get("step", 0))})


def _read_plan(file: str, path: Path) -> list[Claim]:
    found = parse_json(read_file(path))["rdp"]
    scaled = (int(found["population_size"]), int(found["cohort_size"]), float(found["epsilon_rdp"]))
    return [Claim(file=file, scaled=scaled)]


def _parse_epsilon(epsilon: float | None) -> float:
    return math.inf if epsilon is None else float(epsilon)
