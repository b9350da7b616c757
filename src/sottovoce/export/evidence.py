"""What shows that an exported model is the one of its ledger, and which audit travels with it. Without torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sottovoce.base.errors import InputError
from sottovoce.base.files import read_json
from sottovoce.models.model_files import CONFIG, TOKENS, digest_model_files, read_model_config, weights_file
from sottovoce.privacy.ledger_report import LedgerReport

AUDIT_VERDICTS = ("consistent", "alarm", "broken")
# What travels of an audit: verdicts and bounds, and of which recipe; nothing of its people but how many.
_OF_AUDIT = ("recipe", "sottovoce", "verdict", "why", "observer", "canaries", "people", "rounds", "delta")
_BOUNDS = ("promised", "estimate", "interval_holds_truth", "lower_bound", "noise")


def run_title(ledger: LedgerReport | None, recipe: Mapping[str, Any]) -> str:
    """What a run is called: by its ledger, or by its recipe where there is none."""
    return str(recipe.get("about") or "") if ledger is None else str(ledger.header["run"])


def describe_model(folder: Path, ledger: LedgerReport | None, *, step: int | None) -> dict[str, Any]:
    """The model in `folder`: of which step, what the ledger has committed of it, and whether it is that model.

    A model that was merged or converted is in no ledger; `committed` is then what it is said to be made from.
    """
    committed = committed_model(ledger, step=step)
    own = _digest_own(folder)
    is_same = own is not None and bool(committed) and all(committed.get(name) == one for name, one in own.items())
    return {"step": step, "in_ledger": is_same, "committed": committed}


def committed_model(ledger: LedgerReport | None, *, step: int | None) -> dict[str, str]:
    """The digests that the ledger has committed of the model after `step`; none of an older ledger."""
    commit = {} if ledger is None or step is None else ledger.commits.get(step - 1) or {}
    return dict(commit.get("model") or {})


def find_other_file(folder: Path, committed: Mapping[str, str]) -> str:
    """Which file of our own format is not what was committed, for a message."""
    own = _digest_own(folder) or {}
    names = {"description": CONFIG, "tokens": TOKENS}
    other = next((name for name in ("weights", "tokens", "description") if own.get(name) != committed.get(name)), "")
    if other in names:
        return names[other]
    return weights_file(read_model_config(folder)) if own else CONFIG  # nothing says which file it should be


def _digest_own(folder: Path) -> dict[str, str] | None:
    """Digests of a model in our own format; None for any other. InputError, with its name, for a damaged file."""
    try:
        config = read_model_config(folder)
    except InputError:
        return None
    is_whole = (folder / weights_file(config)).is_file() and (folder / TOKENS).is_file()
    return digest_model_files(folder) if is_whole else None


def read_audit(path: Path) -> dict[str, Any]:
    """What travels of the audit in the file `path`."""
    content = read_json(path, is_unique=True)
    bound, promised = content.get("lower_bound"), content.get("promised")
    numbers = [
        bound.get("epsilon") if isinstance(bound, dict) else None,
        content.get("canaries"),
        content.get("rounds"),
    ]
    known = promised.values() if isinstance(promised, dict) else [""]
    is_audit = content.get("verdict") in AUDIT_VERDICTS and all(map(_is_number, numbers))
    if not is_audit or not all(one is None or _is_number(one) for one in known):
        raise InputError(f"{path}: no audit: expected a file that `sottovoce audit` has written")
    return {name: content.get(name) for name in (*_OF_AUDIT, *_BOUNDS)}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
