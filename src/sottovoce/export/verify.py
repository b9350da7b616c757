"""The check of an exported folder by somebody who trusts nobody: offline, without torch.

1. the files that `privacy.json` lists are there, and no others
2. the ledger: its chain, its end, its own signature
3. recipe and model, by the digests that the ledger has of them
4. every ε, by dp-accounting's own accountants from the ledger's events (`recompute`)
5. every other number and word of `privacy.json`, made anew from the ledger
6. SHA-256 of every file, and the signature of all

The first contradiction is refused in one line that names it. What nobody can compute is said to be asserted.
"""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from sottovoce.base.errors import InputError
from sottovoce.base.files import read_file, read_json
from sottovoce.base.parsing import parse_yaml
from sottovoce.base.units import UNITS
from sottovoce.export.evidence import describe_model, find_other_file, read_audit, run_title
from sottovoce.export.findings import CheckedExport, VerifiedExport, judge_export
from sottovoce.export.folder import (
    AUDIT,
    EXPORT_SIGNATURE,
    PRIVACY,
    RECIPE,
    check_export_signature,
    compare_files,
    digest_export,
    digest_of,
    list_export,
)
from sottovoce.export.privacy_file import SCHEMA, Asserted, Evidence, Section, describe_privacy, guarantee_in
from sottovoce.export.recompute import CheckedClaim, RecomputedEpsilon, recompute_epsilons
from sottovoce.models.hub import CARD
from sottovoce.privacy.events import NoGuarantee
from sottovoce.privacy.guarantee import Guarantee
from sottovoce.privacy.ledger import verify
from sottovoce.privacy.ledger_header import check_header
from sottovoce.privacy.ledger_report import LedgerReport, check_ledger_signature
from sottovoce.privacy.stated import names_epsilon
from sottovoce.training.run_folder import LEDGER

SAME = 1e-5  # of numbers that another version of a library may compute
_IN_RECIPE_AND_PLAN = (
    *("mode", "clip_bound", "share", "normalise", "noise_multiplier", "sigma_dp", "sampling", "delta"),
    *("weighting", "weight_cap", "denominator"),
)
_IN_BOTH_OR_NEITHER = ("adaptive", "mechanism", "noise_scope", "clip_rule", "weights", "sampler")
_BUDGET = "epsilon_budget"
_SOFTWARE, _START = {"export", "accountant", "run"}, {"began_with", "digest"}
_PLAIN = re.compile(r"[\w.,+' -]*")  # what a version or a digest is made of: no sign in which a number could be claimed
_LONGEST = 60  # characters of a value in a message


def verify_export(folder: Path, *, expected_key: str | None = None) -> VerifiedExport:
    """Check the folder that `sottovoce export` has written; raises InputError for the first contradiction.

    `expected_key` is the fingerprint of the key that must have signed it.
    """
    if not (folder / PRIVACY).is_file():
        raise InputError(f"{folder / PRIVACY}: nothing is stated here: expected a folder that `export` has written")
    stated = read_json(folder / PRIVACY, is_unique=True)
    own = _own_section(folder, stated)
    _check_names(folder, own["files"])
    ledger, ledger_signer = _check_ledger(folder, own)
    recipe = _check_recipe(folder, ledger)
    _check_model(folder, own, ledger)
    audit = read_audit(folder / AUDIT) if AUDIT in own["files"] else None
    evidence = Evidence(
        title=run_title(ledger, recipe),
        ledger=ledger,
        recipe=digest_of(folder, RECIPE) if (folder / RECIPE).exists() else None,
        model=describe_model(folder, ledger, step=own["model"].get("step")),
        files=own["files"],
        asserted=_read_asserted(folder, stated),
        audit=audit,
    )
    with _readable(folder / LEDGER):
        guarantee = guarantee_in(evidence)
        expected = describe_privacy(evidence)
    claims = tuple(_check_claims(folder, guarantee, own, expected["sottovoce"]))
    if (difference := find_difference(stated, expected)) is not None:
        name, said, found = difference
        expected_words = f"by ledger, recipe and files: {_short(found)}"
        raise InputError(f"{folder / PRIVACY} says {name} = {_short(said)}; {expected_words}")
    files = digest_export(folder, but=(EXPORT_SIGNATURE,))
    compare_files(folder, own["files"], {name: one for name, one in files.items() if name != PRIVACY}, by=PRIVACY)
    signer = check_export_signature(folder, files, expected=expected_key)
    found = judge_export(CheckedExport(evidence, guarantee, expected, claims, replace(signer, of_ledger=ledger_signer)))
    _check_card(folder, own["files"], found.headline)
    return found


def _own_section(folder: Path, stated: Section) -> Section:
    own = stated.get("sottovoce")
    if not isinstance(own, dict) or own.get("schema") != SCHEMA:
        schema = own.get("schema") if isinstance(own, dict) else None
        raise InputError(f"{folder / PRIVACY}: schema={schema!r}: this release of Sottovoce reads {SCHEMA}")
    files, model = own.get("files"), own.get("model")
    if not isinstance(files, dict) or not all(isinstance(one, str) for one in files.values()):
        raise InputError(f"{folder / PRIVACY} is damaged: it lists no files")
    step = model.get("step") if isinstance(model, dict) else ""
    if step is not None and (not isinstance(step, int) or isinstance(step, bool)):
        raise InputError(f"{folder / PRIVACY} is damaged: it does not say which model it is about")
    return own


def _check_names(folder: Path, listed: Mapping[str, str]) -> None:
    found = {name: "" for name in list_export(folder) if name not in (PRIVACY, EXPORT_SIGNATURE)}
    compare_files(folder, dict.fromkeys(listed, ""), found, by=PRIVACY)


def _check_ledger(folder: Path, own: Section) -> tuple[LedgerReport | None, str | None]:
    """The ledger, and the fingerprint of the key that has signed it; None where there is none."""
    known, path = own.get("ledger"), folder / LEDGER
    if known is None and not path.exists():
        return None, None
    if known is None:
        raise InputError(f"{path} is there, and {PRIVACY} says nothing of it")
    report = verify(path)
    if report.torn_bytes:
        raise InputError(f"{path}: its last line is not whole")
    known = known if isinstance(known, dict) else {}
    length, head = known.get("length"), known.get("head")
    if length != report.mark.length:
        raise InputError(
            f"{path} has {report.mark.length} lines, and {PRIVACY} knows {length}: it was cut, or is another run's"
        )
    if head != report.mark.head:
        raise InputError(f"{path} is not the ledger that {PRIVACY} knows: it was written anew, or is another run's")
    check_header(path, report.header)
    return report, check_ledger_signature(report, path).signer


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Refuses a ledger whose chain is whole and whose header no run can have written."""
    try:
        yield
    except InputError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError) as problem:
        raise InputError(f"{path} line 1: no header that a run has written ({problem!r})") from None


def _check_recipe(folder: Path, ledger: LedgerReport | None) -> Mapping[str, Any]:
    path = folder / RECIPE
    if not path.exists():
        return {}
    known = None if ledger is None else ledger.header.get("recipe")
    if known is not None and digest_of(folder, RECIPE) != known:
        raise InputError(
            f"{path} is not the recipe that the ledger was begun with: it was changed, or is another run's"
        )
    try:
        recipe = parse_yaml(read_file(path).decode("utf-8"))
    except (OSError, ValueError) as problem:
        raise InputError(f"{path} cannot be read ({problem})") from None
    recipe = recipe if isinstance(recipe, dict) else {}
    if ledger is not None:
        _compare_recipe(path, recipe, ledger.header)
    return recipe


def _compare_recipe(path: Path, recipe: Mapping[str, Any], header: Mapping[str, Any]) -> None:
    """What a recipe says of privacy, and of who is drawn how often, is what the ledger's header says."""
    plan, settings = _part_of(header, "plan"), _part_of(recipe, "federation")
    wanted, rule = _part_of(settings, "privacy"), _part_of(settings, "clients").get("rule")
    units = {unit.short: unit.name for unit in UNITS}
    facts = [(f"privacy.{name}", wanted.get(name), plan.get(name)) for name in _IN_RECIPE_AND_PLAN]
    facts += [(name, settings.get(name), plan.get(name)) for name in ("cohort_size", "expected_answers")]
    facts += [(f"privacy.{_BUDGET}", wanted.get(_BUDGET), header.get(_BUDGET))]
    asked, measured = _part_of(settings, "client_wer"), _part_of(header, "client_wer")
    facts += [(f"client_wer.{name}", asked.get(name), measured.get(name)) for name in ("words", "every")]
    facts += [("steps", settings.get("steps"), header.get("central_steps"))]
    facts += [("clients.rule", units.get(str(rule), rule), plan.get("privacy_unit"))]
    for name, said, planned in facts:
        if (
            said is not None
            and planned is not None
            and str(said) != str(planned)
            and not _is_same_number(said, planned)
        ):
            raise InputError(f"{path} says federation.{name} = {_short(said)}, the ledger {_short(planned)}")
    for name, planned in [(name, plan.get(name)) for name in _IN_BOTH_OR_NEITHER] + [(_BUDGET, header.get(_BUDGET))]:
        if name in wanted and (wanted[name] is None) != (planned is None):
            said, planned = _short(wanted[name]), _short(planned)
            raise InputError(f"{path} says federation.privacy.{name} = {said}, the ledger {planned}")


def _is_same_number(one: Any, other: Any) -> bool:
    try:
        return math.isclose(float(one), float(other), rel_tol=SAME)
    except (TypeError, ValueError):
        return False


def _check_model(folder: Path, own: Section, ledger: LedgerReport | None) -> None:
    """Refuse a model that is said to be the ledger's and is not."""
    said = own["model"]
    if not said.get("in_ledger"):
        return
    found = describe_model(folder, ledger, step=said.get("step"))
    if not found["in_ledger"]:
        name, step = find_other_file(folder, found["committed"]), said.get("step")
        raise InputError(f"{folder / name} is not of the model after step {step}, by the ledger: another's, or changed")


def _read_asserted(folder: Path, stated: Section) -> Asserted:
    """What only the sender knows, as it is stated."""
    own = stated["sottovoce"]
    try:
        covered = own["not_covered"]
        asserted = Asserted(
            software={str(name): str(one) for name, one in own["software"].items()},
            start_model=dict(covered["seed_model"]),
            base_model={str(name): str(one) for name, one in covered["base_model"].items()},
            tokens=covered["tokens"],
            publication_date=stated["deployment"]["basic"]["publication_date"],
            stand_in=bool(own["stand_in"]),
        )
        _check_asserted(folder / PRIVACY, asserted)
        return asserted
    except (KeyError, TypeError, AttributeError, ValueError) as problem:
        raise InputError(f"{folder / PRIVACY} is damaged: {problem} is missing, or no such thing") from None


def _check_asserted(path: Path, said: Asserted) -> None:
    """Refuse an assertion of anything but what `write_guarantee` asserts: nothing here may name another ε."""
    if said.software.keys() != _SOFTWARE or said.start_model.keys() != _START:
        raise InputError(f"{path}: expected software {sorted(_SOFTWARE)} and a seed model's {sorted(_START)} alone")
    plain = [*said.software.values(), *said.start_model.values(), *said.base_model.values(), said.publication_date]
    texts = [*plain, *said.base_model, said.tokens]
    for text in texts:
        if not isinstance(text, str | None):
            raise InputError(f"{path} asserts {_short(text)}: expected words, or null")
    if wrong := next((text for text in plain if text is not None and not _PLAIN.fullmatch(text)), None):
        raise InputError(f"{path} asserts {_short(wrong)}: expected a version, a digest or a date")
    if wrong := next((text for text in texts if text is not None and names_epsilon(text)), None):
        raise InputError(f"{path} asserts {_short(wrong)}: an ε is in no assertion")


def _check_card(folder: Path, files: Mapping[str, str], headline: str) -> None:
    """A card beside the model names no ε but that of the headline; its other words are its sender's."""
    if CARD not in files:
        return
    try:
        text = read_file(folder / CARD).decode("utf-8")
    except (OSError, ValueError) as problem:
        raise InputError(f"{folder / CARD} cannot be read ({problem})") from None
    if names_epsilon(text.replace(headline, "")):
        raise InputError(f"{folder / CARD} names an ε that is not in what is stated: {headline}")


def _check_claims(folder: Path, guarantee: Guarantee | None, own: Section, expected: Section) -> Iterator[CheckedClaim]:
    """Every ε that is stated, beside dp-accounting's; refuses one that is below both what it and what we compute."""
    if guarantee is None or isinstance(guarantee.release, NoGuarantee):
        return
    points = [(f"profile at δ = {one['delta']:g}", one["delta"], one["epsilon"]) for one in expected["profile"]]
    profile = own.get("profile")
    listed = profile if isinstance(profile, list) else []
    stated = [one.get("epsilon") if isinstance(one, dict) else None for one in listed]
    said = _part_of(own, "epsilon")
    parts = [(f"epsilon.{name}", guarantee.delta, expected["epsilon"][name]) for name in ("headline", "pld", "rdp")]
    deltas = [delta for _, delta, _ in (*parts, *points)]
    found = recompute_epsilons(guarantee.event, deltas)
    claimed = [said.get(name) for name in ("headline", "pld", "rdp")] + stated
    for (name, _, ours), claim, one in zip((*parts, *points), claimed, found, strict=False):
        if ours is not None:
            yield _check_claim(folder, name, claim, ours, one)
    inside = expected["epsilon"]["inside"]
    if inside is not None and guarantee.event_inside is not None:
        (one,) = recompute_epsilons(guarantee.event_inside, [guarantee.delta])
        claim = _part_of(said, "inside").get("headline")
        yield _check_claim(folder, "epsilon.inside", claim, inside["headline"], one)


def _part_of(content: Mapping[str, Any], name: str) -> Section:
    """An object inside another; empty where it is none."""
    part = content.get(name)
    return part if isinstance(part, dict) else {}


def _check_claim(folder: Path, name: str, claim: Any, ours: float, found: RecomputedEpsilon) -> CheckedClaim:
    if not isinstance(claim, int | float) or isinstance(claim, bool):
        raise InputError(f"{folder / PRIVACY} says sottovoce.{name} = {_short(claim)}: expected a number")
    checked = CheckedClaim(name, float(claim), found)
    if not checked.is_proved and claim < ours * (1 - SAME):
        bound = ours if found.bound is None else found.bound
        raise InputError(
            f"{folder / PRIVACY} says sottovoce.{name} = {claim:g} at δ = {found.delta:g}; the ledger's events come to "
            f"{bound:.6g}"
        )
    return checked


def find_difference(said: Any, found: Any, name: str = "") -> tuple[str, Any, Any] | None:
    """The first place in which a statement is not what it has to be: its name, what is said, what was found.

    >>> find_difference({"a": {"b": 1.0}}, {"a": {"b": 1.0000001}}), find_difference({"a": [1]}, {"a": [2]})
    (None, ('a.0', 1, 2))
    """
    if isinstance(said, dict) and isinstance(found, dict):
        keys = [*found, *(key for key in said if key not in found)]
        pairs = [(key, said.get(key, _MISSING), found.get(key, _MISSING)) for key in keys]
    elif isinstance(said, list) and isinstance(found, list) and len(said) == len(found):
        pairs = [(str(at), one, other) for at, (one, other) in enumerate(zip(said, found, strict=True))]
    elif _is_number(said) and _is_number(found):
        return None if math.isclose(said, found, rel_tol=SAME) else (name, said, found)
    else:
        return None if said == found and type(said) is type(found) else (name, said, found)
    inside = (find_difference(one, other, f"{name}.{key}" if name else str(key)) for key, one, other in pairs)
    return next((one for one in inside if one is not None), None)


class _Missing:
    def __repr__(self) -> str:
        return "nothing"


_MISSING = _Missing()


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
