"""The guarantee that travels with a model: whatever wrote the model's files, `write_guarantee` adds the rest.

The run's folder is compared with its ledger first (`read_export_source`): nothing is stated of a changed one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sottovoce import __version__
from sottovoce.base.errors import InputError
from sottovoce.base.files import read_file, read_json, write_atomically, write_json
from sottovoce.base.parsing import parse_yaml
from sottovoce.base.signatures import SigningKey
from sottovoce.export.evidence import describe_model, read_audit, run_title
from sottovoce.export.folder import (
    AUDIT,
    EXPORT_SIGNATURE,
    PRIVACY,
    RECIPE,
    copy_file,
    digest_export,
    digest_of,
    sign_export,
)
from sottovoce.export.privacy_file import Asserted, Evidence, Section, describe_privacy
from sottovoce.export.recompute import dp_accounting_version
from sottovoce.models.model_files import locate_model, read_model_config
from sottovoce.privacy.ledger_report import SIGNATURE as LEDGER_SIGNATURE
from sottovoce.privacy.ledger_report import LedgerReport
from sottovoce.training.ledger_check import check_ledger, find_run_of_model
from sottovoce.training.run_folder import CONFIG, ENVIRONMENT, INPUTS, LEDGER, RESULTS, STAND_IN, reset_file_times

RANDOM_START = "random numbers"


@dataclass(frozen=True)
class ExportSource:
    """A run and the model of it that is exported; `ledger` is None for central training."""

    run: Path
    ledger: LedgerReport | None
    recipe: Mapping[str, Any]
    model: Mapping[str, Any]

    @property
    def is_release(self) -> bool:
        return self.ledger is not None and self.ledger.header["mode"] == "secure"


@dataclass(frozen=True)
class ExportOptions:
    """What a user adds: a `key` to sign with, an `audit` of other people, the day on which it is published."""

    key: SigningKey | None = None
    audit: Path | None = None
    published: str | None = None


def read_export_source(model: Path) -> ExportSource | None:
    """The run of the model in `model`, its folder compared with its ledger; None for a model alone, or an export."""
    run = find_run_of_model(model)
    if run is None or (run / PRIVACY).exists():
        return None
    try:
        recipe = parse_yaml(read_file(run / CONFIG).decode("utf-8"))
    except (OSError, ValueError) as problem:
        raise InputError(f"{run / CONFIG} cannot be read ({problem})") from None
    if not isinstance(recipe, dict):
        raise InputError(f"{run / CONFIG} holds no recipe")
    if recipe.get("federation") and not (run / LEDGER).exists():
        raise InputError(f"{run / LEDGER} is missing: what the run has spent is not known, so nothing can be stated")
    ledger = check_ledger(run).report if (run / LEDGER).exists() else None
    return ExportSource(run, ledger, recipe, read_model_config(locate_model(model)))


def write_guarantee(source: ExportSource, folder: Path, options: ExportOptions | None = None) -> Section:
    """Add ledger, recipe, audit, `privacy.json` and a signature to the model in `folder`; what `privacy.json` says.

    It comes last: all files that are there by then are in its list of digests.
    """
    options = options or ExportOptions()
    _copy_ledger(source, folder)
    copy_file(source.run / CONFIG, folder / RECIPE)
    audit = _find_audit(source, options.audit)
    if audit is not None:
        write_json(folder / AUDIT, audit)
    step = source.model["about"].get("step")
    evidence = Evidence(
        title=run_title(source.ledger, source.recipe),
        ledger=source.ledger,
        recipe=digest_of(folder, RECIPE),
        model=describe_model(folder, source.ledger, step=step),
        files=digest_export(folder, but=(PRIVACY, EXPORT_SIGNATURE)),
        asserted=_assert_facts(source, options.published),
        audit=audit,
    )
    stated = describe_privacy(evidence)
    write_json(folder / PRIVACY, stated)
    if options.key is not None:
        files = {**evidence.files, PRIVACY: digest_of(folder, PRIVACY)}
        sign_export(folder, key=options.key, files=files)
    reset_file_times(folder)
    return stated


def _copy_ledger(source: ExportSource, folder: Path) -> None:
    if source.ledger is None:
        return
    content = read_file(source.run / LEDGER)
    with write_atomically(folder / LEDGER) as file:  # without a last line that was never finished
        file.write(content[: len(content) - source.ledger.torn_bytes])
    if (source.run / LEDGER_SIGNATURE).exists():
        copy_file(source.run / LEDGER_SIGNATURE, folder / LEDGER_SIGNATURE)


def _find_audit(source: ExportSource, given: Path | None) -> dict[str, Any] | None:
    """The audit that travels: the one that is given, or of a simulation the one that is kept beside it.

    An audit of a release's own people is made from their speech in rounds that no ledger charges: it is refused.
    """
    from sottovoce.audit.recipe import audit_path, config_digest

    kept = audit_path(source.run)
    path = given or (kept if kept.is_file() and not source.is_release else None)
    if path is None:
        return None
    is_of_run = read_json(path).get("config_digest") == config_digest((source.run / CONFIG).read_text(encoding="utf-8"))
    if source.is_release and is_of_run:
        raise InputError(
            f"--audit {path}: of this release's own people, in rounds that no ledger charges: nothing of it may be "
            "published; expected an audit of the same settings on other people"
        )
    return read_audit(path) if is_of_run or given is not None else None


def _assert_facts(source: ExportSource, published: str | None) -> Asserted:
    found = {name: _read_if_there(source.run / name) for name in (INPUTS, ENVIRONMENT, RESULTS)}
    settings = source.recipe.get("federation") or source.recipe.get("central") or {}
    seed_model = settings.get("seed_model") if isinstance(settings, dict) else None
    pretrained = dict(source.model["settings"].get("digests") or ())
    tokens = found[RESULTS].get("tokens")
    return Asserted(
        software={
            "export": f"sottovoce {__version__}",
            "accountant": f"dp-accounting {dp_accounting_version()}",
            "run": f"sottovoce {found[ENVIRONMENT].get('sottovoce', 'of an unknown release')}",
        },
        start_model={
            "began_with": RANDOM_START if seed_model is None and not pretrained else "a model that was trained before",
            "digest": found[INPUTS].get("start model digest"),
        },
        base_model=pretrained,
        tokens=str(tokens["made_from"]) if isinstance(tokens, dict) and "made_from" in tokens else None,
        publication_date=published,
        stand_in=bool(found[ENVIRONMENT].get(STAND_IN)),
    )


def _read_if_there(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
