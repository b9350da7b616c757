"""Digests of a run's files in its ledger, and whether the files still match them; without torch.

    model/, checkpoints/*/    weights, description and tokens: digests in the commit of the model's step
    frozen.safetensors        what is not trained: a digest in every commit
    config.yaml               a digest in the header
    results.json and others   digests in the last record of a run that has ended
    checkpoints/*/state.json  names what lies beside it; the signature of a run that has ended has its digest

In ledgers without such digests (older ones, and those of `Simulation`) a model has a fingerprint only, which shows
accidents and not forgeries, and the rest nothing: the notes say so.
"""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sottovoce.base.digests import content_digest, file_digest, flat_fingerprint, lines_digest, safetensors_digest
from sottovoce.base.errors import InputError
from sottovoce.base.files import check_digest, read_json
from sottovoce.base.parsing import parse_json, parse_yaml
from sottovoce.models.model_files import CONFIG as MODEL_CONFIG
from sottovoce.models.model_files import (
    FROZEN,
    PARAMETERS,
    TOKENS,
    description_digest,
    dev_scores,
    read_model_config,
    weights_file,
)
from sottovoce.privacy.ledger_report import LedgerReport
from sottovoce.training.run_folder import (
    CHECKPOINTS,
    CONFIG,
    DIAGNOSTICS,
    ENGINE,
    ENVIRONMENT,
    INPUTS,
    METRICS,
    MODEL,
    POPULATION,
    RESULTS,
    STATE,
)

IN_LINES: tuple[str, ...] = (METRICS, DIAGNOSTICS)
IN_JSON: tuple[str, ...] = (RESULTS, INPUTS, ENVIRONMENT, ENGINE, POPULATION)
EXCERPT = "excerpt"  # in results.json: the digest of those that they were taken from

ONLY_FINGERPRINT = "{}: this ledger has no SHA-256 of it, only a fingerprint that tells accidents, not forgeries"
NOT_HELD = "{}: nothing in this ledger tells whether it is the run's own"


@dataclass(frozen=True)
class RecordedFiles:
    """The files of a folder that match their digests in its ledger, and notes on those without one."""

    held: tuple[str, ...]
    notes: tuple[str, ...]


def digest_final_files(folder: Path, results: Mapping[str, Any]) -> dict[str, str]:
    """The digests that the ledger of a run that ends with `results` records of its files."""
    found = {RESULTS: content_digest(results)}
    for name in (*IN_LINES, *IN_JSON):
        if name != RESULTS and (folder / name).is_file():
            found[name] = _digest_of(folder / name)
    return found


def digest_signed_files(folder: Path) -> dict[str, str]:
    """SHA-256 of the files in `folder` that the signature at a run's end covers besides its ledger, by name."""
    names = [CONFIG, *IN_LINES, *(name for name in IN_JSON if name != RESULTS)]
    paths = [folder / name for name in names] + sorted((folder / CHECKPOINTS).glob(f"step-*/{STATE}"))
    return {path.relative_to(folder).as_posix(): file_digest(path) for path in paths if path.is_file()}


def check_recorded_files(folder: Path, report: LedgerReport, *, signed: Mapping[str, str]) -> RecordedFiles:
    """Compare the files of `folder` with its ledger, and with what is `signed` with that.

    Raises InputError that begins with the name of the first file that has changed.
    """
    held: list[str] = []
    notes: list[str] = []
    excerpts = _check_results(folder, report, held, notes)
    recipe = report.header.get("recipe")
    if recipe is not None and (folder / CONFIG).exists():
        if _read(folder, CONFIG, file_digest) != recipe:
            raise InputError(f"{CONFIG} is not the recipe that the ledger was begun with")
        held.append(CONFIG)
    _check_models(folder, report, held, notes)
    for name, digest in signed.items():
        path = _inside(folder, name)
        if name not in excerpts and path.exists() and _read(folder, name, file_digest) != digest:
            raise InputError(f"{name} is not what was signed: it was changed since")
    return RecordedFiles(tuple(dict.fromkeys(held)), tuple(notes))


def _inside(folder: Path, name: str) -> Path:
    if os.path.isabs(name) or ".." in Path(name).parts:
        raise InputError(f"{name} is signed, and no name of a file in this folder")
    return folder / name


def _read(folder: Path, name: str, digest: Any) -> str:
    try:
        found: str = digest(folder / name)
    except OSError as error:
        raise InputError(f"{name} cannot be read ({error.strerror})") from None
    except InputError as error:
        words = str(error).removeprefix(str(folder / name)).strip()
        raise InputError(f"{name} {words}") from None
    return found


def _digest_of(path: Path) -> str:
    return lines_digest(path) if path.name in IN_LINES else content_digest(read_json(path))


def _check_results(folder: Path, report: LedgerReport, held: list[str], notes: list[str]) -> frozenset[str]:
    """Compare what a finished run has written with its ledger's last record; returns the files that are excerpts."""
    is_there, ended = (folder / RESULTS).exists(), report.results
    if ended is None:
        if is_there and _has_digests(report):
            raise InputError(f"{RESULTS} is there, and the ledger ends without a record of it")
        if is_there:
            notes.append(NOT_HELD.format(RESULTS))
        return frozenset()
    excerpts = _excerpts(folder, ended["files"]) if is_there else frozenset()
    for name, digest in ended["files"].items():
        if name in excerpts:
            notes.append(f"{name}: an excerpt of what the run has written; its figures are not held against the ledger")
        elif not _inside(folder, name).exists():
            notes.append(f"{name}: the ledger has a digest of it, and it is not in this folder")
        elif _read(folder, name, _digest_of) != digest:
            raise InputError(f"{name} is not what the run has written: it was changed since")
        else:
            held.append(name)
    return excerpts


def _excerpts(folder: Path, recorded: Mapping[str, str]) -> frozenset[str]:
    """The files that say that they are excerpts of those that the ledger knows (`benchmarks/results.py keep`)."""
    try:
        said = parse_json((folder / RESULTS).read_bytes())[EXCERPT]
    except (OSError, ValueError, KeyError, TypeError):
        return frozenset()
    if said != recorded.get(RESULTS):
        raise InputError(f"{RESULTS} says that it is an excerpt of other results than the ledger knows")
    return frozenset((RESULTS, *IN_LINES))


def _has_digests(report: LedgerReport) -> bool:
    return any("model" in commit for commit in report.commits.values())


def _check_models(folder: Path, report: LedgerReport, held: list[str], notes: list[str]) -> None:
    if (folder / MODEL_CONFIG).exists():  # it would be loaded in place of the run's
        raise InputError(f"{MODEL_CONFIG} is none of a run's files: a model that is not the run's lies in its folder")
    places = sorted((folder / CHECKPOINTS).glob("step-*"), reverse=True)
    seen: dict[Path, Mapping[str, Any]] = {}
    for place in (folder / MODEL, *places):
        if not (place / MODEL_CONFIG).exists() and not (place / STATE).exists():
            if place.is_dir() and any(place.iterdir()):
                raise InputError(f"{place.relative_to(folder)} has no {MODEL_CONFIG}: no model that can be held")
            continue
        name = place.relative_to(folder).as_posix()
        if place.resolve() not in seen:
            seen[place.resolve()] = _check_model(folder, name, report, held, notes)
        elif seen[place.resolve()]:
            held.append(f"{name}/{weights_file(seen[place.resolve()])}")
        if place.name == MODEL:
            _check_best(folder, name, seen[place.resolve()])
        elif (place / STATE).exists() and _has_digests(report):
            _check_beside(folder, name)


def _check_model(folder: Path, name: str, report: LedgerReport, held: list[str], notes: list[str]) -> Mapping[str, Any]:
    """Compare one model with the commit of its step; returns its config."""
    config = _config(folder, name)
    step = config["about"].get("step")
    if not isinstance(step, int):
        raise InputError(f"{name}/{MODEL_CONFIG} does not say after which step: no model of this run")
    commit, file = report.commits.get(step - 1), weights_file(config)
    known = None if commit is None else commit.get("model")
    if known is None:
        _check_fingerprint(folder, f"{name}/{file}", report, step=step, held=held, notes=notes)
        return config
    which = f"of step {step}, by the ledger"
    if _read(folder, f"{name}/{file}", safetensors_digest) != known.get("weights"):
        raise InputError(f"{name}/{file} does not hold the weights {which}: another model, or changed since")
    if description_digest(config) != known.get("description"):
        raise InputError(f"{name}/{MODEL_CONFIG} does not describe the model {which}: changed since")
    if _read(folder, f"{name}/{TOKENS}", lambda path: content_digest(read_json(path))) != known.get("tokens"):
        raise InputError(f"{name}/{TOKENS} does not hold the tokens {which}: changed since")
    if "frozen" in known and (folder / FROZEN).exists():
        if _read(folder, FROZEN, safetensors_digest) != known["frozen"]:
            raise InputError(f"{FROZEN} is not what the run has left as it was, by the ledger: changed since")
        held.append(FROZEN)
    _check_scores(folder, name, config, step)
    held.append(f"{name}/{file}")
    return config


def _config(folder: Path, name: str) -> dict[str, Any]:
    path = folder / name
    try:
        return read_model_config(path)
    except InputError as error:
        raise InputError(str(error).replace(f"{folder}{os.sep}", "")) from None


def _check_fingerprint(
    folder: Path, file: str, report: LedgerReport, *, step: int, held: list[str], notes: list[str]
) -> None:
    """What can be said where a ledger has no SHA-256 of the model."""
    commit = report.commits.get(step - 1)
    known = report.parameters.get(step) if commit is None else commit["result"]
    if known is None:
        raise InputError(f"{file} is said to be of step {step}, which the ledger has not committed")
    found = fingerprint_saved_model(folder, (folder / file).parent)
    if found is None:
        notes.append(NOT_HELD.format(file))
    elif found != known:
        raise InputError(f"{file} does not hold the weights of step {step}, by the ledger: another model, or changed")
    else:
        notes.append(ONLY_FINGERPRINT.format(file))
        held.append(file)


def _check_scores(folder: Path, name: str, config: Mapping[str, Any], step: int) -> None:
    """The dev score in a model's config is found out after its commit: it is that of the metrics."""
    if not (folder / METRICS).exists():
        return
    for line in (folder / METRICS).read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = parse_json(line)
            is_it = record["step"] == step
        except (ValueError, KeyError, TypeError):
            return
        for score, said in dev_scores(config).items() if is_it else ():
            if said is not None and score in record and record[score] != said:
                raise InputError(f"{name}/{MODEL_CONFIG} says {score}={said}, {METRICS} {record[score]}")


def _check_best(folder: Path, name: str, config: Mapping[str, Any]) -> None:
    """The model that a finished run has tested is the one that it offers."""
    try:
        said = parse_json((folder / RESULTS).read_bytes())["model"]
    except (OSError, ValueError, KeyError, TypeError):
        return
    if said != config["about"]:
        raise InputError(f"{name}/{MODEL_CONFIG} is of another model than {RESULTS} says was tested")


def _check_beside(folder: Path, name: str) -> None:
    """What a checkpoint keeps besides its model is what its own list says, and that list is whole."""
    try:
        state = check_digest(read_json(folder / name / STATE), where=Path(name) / STATE)
        written = dict(state["files"])
    except InputError as error:
        raise InputError(str(error).replace(f"{folder}{os.sep}", "")) from None
    except (KeyError, TypeError, ValueError):
        raise InputError(f"{name}/{STATE} is damaged: it does not name the files beside it") from None
    for file, digest in written.items():
        path = _inside(folder / name, file)
        if not path.is_file():
            raise InputError(f"{name}/{file} is missing")
        with path.open("rb") as opened:
            found = hashlib.file_digest(opened, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
        if found != digest:
            raise InputError(f"{name}/{file} is not what was written: it was changed since")


def fingerprint_saved_model(run: Path, folder: Path) -> str | None:
    """The fingerprint of the model in `folder`, as the ledger of its `run` would have it.

    None for a part of a model, for an average of models, and for plug-in families, which are not imported.
    """
    from pydantic import TypeAdapter, ValidationError

    from sottovoce.flat.layout import ALIGNMENT  # torch, which knows the order of a family's parameters
    from sottovoce.models.family import REGISTERED, find_family

    config = read_model_config(folder)
    if config.get("part") is not None or config.get("architecture") not in REGISTERED or _is_average(run):
        return None
    family = find_family(config["architecture"])
    try:
        settings = TypeAdapter(family.Settings).validate_python(config["settings"])
        names = [*family.shapes(settings)]
    except (ValidationError, KeyError, TypeError, ValueError):
        raise InputError(f"{folder.name}/config.json does not describe a model of family={family.name}") from None
    return flat_fingerprint(folder / PARAMETERS, names, alignment=ALIGNMENT)


def _is_average(run: Path) -> bool:
    """Whether a run's models are averages, which its ledger's fingerprints are not of; True where that is not known."""
    try:
        recipe = parse_yaml((run / CONFIG).read_text(encoding="utf-8"))
        return recipe["federation"]["server"].get("ema") is not None
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return True
