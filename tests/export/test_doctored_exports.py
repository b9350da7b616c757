"""Exports that somebody has doctored: each refused by name, and the one forgery that no recomputation sees."""

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.export.conftest import Ended, Exports
from tests.tampering import GENESIS, edit, read

from sottovoce.base.digests import file_digest
from sottovoce.base.errors import InputError
from sottovoce.base.signatures import load_signing_key
from sottovoce.export.folder import EXPORT_SIGNATURE, PRIVACY, digest_export, sign_export
from sottovoce.export.privacy_file import Asserted, Evidence, describe_privacy
from sottovoce.export.verify import find_difference, verify_export
from sottovoce.models.hub import CARD
from sottovoce.privacy.chain import read_chain, seal
from sottovoce.privacy.events import event_from_json
from sottovoce.privacy.ledger import verify
from sottovoce.privacy.rdp import RunningEpsilon

Doctor = Callable[[Path, Path], object]  # an export's folder, and another's
Record = dict[str, Any]


def stated(change: Callable[[Record], object]) -> Doctor:
    """Change `privacy.json`."""
    return lambda folder, _: edit(folder / PRIVACY, change)


def of_own(*keys: str | int, to: Any) -> Doctor:
    """Set one value in the section `sottovoce`."""

    def change(content: Record) -> None:
        at: Any = content["sottovoce"]
        for key in keys[:-1]:
            at = at[key]
        assert at[keys[-1]] != to
        at[keys[-1]] = to

    return stated(change)


def both(*doctors: Doctor) -> Doctor:
    return lambda folder, other: [doctor(folder, other) for doctor in doctors]


def lines_of_ledger(change: Callable[[list[bytes]], list[bytes]]) -> Doctor:
    def doctor(folder: Path, _: Path) -> None:
        path = folder / "ledger.jsonl"
        path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))

    return doctor


def swapped(*names: str) -> Doctor:
    return lambda folder, other: [shutil.copyfile(other / name, folder / name) for name in names]


def one_bit(folder: Path, _: Path) -> None:
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-5] ^= 1
    (folder / "model.safetensors").write_bytes(content)


def half_precision(folder: Path, _: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({name: one.astype(np.float16) for name, one in tensors.items()}, folder / "model.safetensors")


def in_recipe(old: str, new: str) -> Doctor:
    def doctor(folder: Path, _: Path) -> None:
        text = (folder / "recipe.yaml").read_text()
        assert old in text
        (folder / "recipe.yaml").write_text(text.replace(old, new))

    return doctor


def removed(name: str) -> Doctor:
    return lambda folder, _: (folder / name).unlink()


def without_audit(content: Record) -> None:
    content["sottovoce"]["audits"] = []
    del content["sottovoce"]["files"]["audit.json"]


def lowered_epsilon(content: Record) -> None:
    content["sottovoce"]["epsilon"] |= {"pld": 0.01, "headline": 0.01}
    content["deployment"]["privacy_loss"]["privacy_parameters"]["epsilon"] = 0.01


def fitted(folder: Path) -> None:
    """The list of digests in `privacy.json` made anew, as far as it had the files."""

    def change(content: Record) -> None:
        own = content["sottovoce"]
        found = digest_export(folder, but=(PRIVACY, EXPORT_SIGNATURE))
        own["files"] = {name: found.get(name, digest) for name, digest in own["files"].items()}
        if own["recipe"] is not None:
            own["recipe"]["sha256"] = found["recipe.yaml"]

    edit(folder / PRIVACY, change)


# What is done, to an export of what, and what the one line has to name.
DOCTORED: dict[str, tuple[Doctor, str, str]] = {
    # The twelve that were asked for, but for the signature of another key (below).
    "ε lowered in the statement": (stated(lowered_epsilon), "release", "privacy.json says sottovoce.epsilon.headline"),
    "ledger cut": (lines_of_ledger(lambda lines: lines[:-1]), "release", "ledger.jsonl has 7 lines"),
    "ledger reordered": (
        lines_of_ledger(lambda lines: [lines[0], lines[2], lines[1], *lines[3:]]),
        "release",
        "ledger.jsonl line 2",
    ),
    "ledger of another run": (swapped("ledger.jsonl"), "release", "ledger.jsonl is not the ledger"),
    "model of another run": (
        swapped("model.safetensors", "config.json", "tokens.json"),
        "release",
        "model.safetensors is not of the model after step",
    ),
    "one bit flipped": (one_bit, "release", "model.safetensors is not"),
    "recipe changed": (in_recipe("lr: 0.01", "lr: 0.02"), "release", "recipe.yaml is not the recipe"),
    "noise multiplier lowered in recipe and statement": (
        both(
            in_recipe("noise_multiplier: 8.0", "noise_multiplier: 4.0"), of_own("mechanism", "noise_multiplier", to=4.0)
        ),
        "release",
        "recipe.yaml is not the recipe",
    ),
    "unit changed from silo to person": (of_own("unit", "name", to="speaker"), "silo", "sottovoce.unit.name"),
    "adjacency changed": (of_own("adjacency", to="replace_one"), "release", "sottovoce.adjacency"),
    "audit removed from the statement": (stated(without_audit), "audited", "audit.json is none of the files"),
    "audit removed from the folder": (removed("audit.json"), "audited", "audit.json is missing"),
    # And others.
    "audit's bound lowered": (
        lambda folder, _: edit(folder / "audit.json", lambda audit: audit["lower_bound"].update(epsilon=0.0)),
        "audited",
        "sottovoce.audits.0",
    ),
    "profile lowered at one δ": (of_own("profile", 5, "epsilon", to=0.001), "release", "profile at δ = 1e-06"),
    "profile cut": (stated(lambda content: content["sottovoce"]["profile"].pop()), "release", "sottovoce.profile"),
    "μ lowered": (of_own("gaussian_dp", "mu", to=0.001), "release", "sottovoce.gaussian_dp.mu"),
    "ε lowered for people inside silos": (
        of_own("epsilon", "inside", "headline", to=0.01),
        "silo",
        "sottovoce.epsilon.inside",
    ),
    "ε that is no number": (of_own("epsilon", "headline", to="small"), "release", "sottovoce.epsilon.headline"),
    "δ lowered": (of_own("epsilon", "delta", to=1e-9), "release", "sottovoce.epsilon.delta"),
    "rounds lowered": (of_own("rounds", "promised", to=2), "release", "sottovoce.rounds.promised"),
    "clip bound": (of_own("clipping", "bound", to=0.001), "release", "sottovoce.clipping.bound"),
    "a simulation called a release": (of_own("kind", to="release"), "simulation", "sottovoce.kind"),
    "another notice": (
        stated(lambda content: content.update(notice="ε = 0.1")),
        "release",
        "privacy.json says notice",
    ),
    "a key more": (stated(lambda content: content.update(approved=True)), "release", "privacy.json says approved"),
    "a schema of tomorrow": (of_own("schema", to=2), "release", "privacy.json: schema=2"),
    "a file more, which a loader might prefer": (
        lambda folder, _: (folder / "pytorch_model.bin").write_bytes(b"other weights"),
        "release",
        "pytorch_model.bin is none of the files",
    ),
    "weights at half precision": (half_precision, "release", "model.safetensors is not"),
    "ledger taken away": (removed("ledger.jsonl"), "release", "ledger.jsonl is missing"),
    "statement cut": (
        lambda folder, _: (folder / PRIVACY).write_bytes((folder / PRIVACY).read_bytes()[:900]),
        "release",
        "privacy.json is damaged",
    ),
}


@pytest.mark.parametrize("fits", [False, True], ids=["as it is", "digests made to fit"])
@pytest.mark.parametrize("what", DOCTORED)
def test_a_doctored_export_is_refused_by_name(
    what: str, fits: bool, exports: Exports, sottovoce: Callable[..., Ended], tmp_path: Path
) -> None:
    doctor, kind, named = DOCTORED[what]
    folder = exports.copy(kind, tmp_path)
    doctor(folder, exports.copy("another", tmp_path / "other"))
    if fits and what != "statement cut":
        fitted(folder)
    done = sottovoce("verify", folder)
    assert done.code == 2
    assert done.out == ""
    assert named in done.err.replace("\n", " ")
    assert done.err.count("\n") == 1


@pytest.mark.parametrize("name", ["config.json", "ledger.jsonl", "model.safetensors", "privacy.json", "recipe.yaml"])
def test_no_file_of_a_signed_export_can_be_changed(
    name: str, exports: Exports, sottovoce: Callable[..., Ended], tmp_path: Path
) -> None:
    folder = exports.copy("signed", tmp_path)
    assert sottovoce("verify", folder, "--key", exports.key).code == 0
    content = bytearray((folder / name).read_bytes())
    content[-2:-2] = b" "
    (folder / name).write_bytes(content)
    done = sottovoce("verify", folder)
    assert done.code == 2
    assert name in done.err


# The signature.


def test_a_signature_of_another_key_is_refused_where_the_key_is_named(
    exports: Exports, sottovoce: Callable[..., Ended], tmp_path: Path
) -> None:
    folder = exports.copy("signed", tmp_path)
    files = digest_export(folder, but=(EXPORT_SIGNATURE,))
    sign_export(folder, key=load_signing_key(exports.place / "other-key"), files=files)
    done = sottovoce("verify", folder)
    assert done.code == 0
    assert ", whom you must know." in done.out
    done = sottovoce("verify", folder, "--key", exports.key)
    assert done.code == 2
    assert "privacy.signature.json: signed by" in done.err


def test_a_signature_that_names_a_key_that_has_not_made_it_is_refused(
    exports: Exports, sottovoce: Callable[..., Ended], tmp_path: Path
) -> None:
    folder = exports.copy("signed", tmp_path)
    other = (exports.place / "other-key" / "node.pub").read_text().strip()
    edit(folder / EXPORT_SIGNATURE, lambda said: said.update(key=other))
    done = sottovoce("verify", folder)
    assert done.code == 2
    assert "signature wrong: it is not by the key that it names" in done.err


def test_a_signature_that_was_taken_away_is_missed_by_who_names_the_key(
    exports: Exports, sottovoce: Callable[..., Ended], tmp_path: Path
) -> None:
    folder = exports.copy("signed", tmp_path)
    (folder / EXPORT_SIGNATURE).unlink()
    assert sottovoce("verify", folder).code == 0
    done = sottovoce("verify", folder, "--key", exports.key)
    assert done.code == 2
    assert "unsigned, expected a signature by" in done.err


# What nobody can see.


def forge(folder: Path, *, z: float) -> None:
    """As if there had been other noise: in recipe, ledger and statement, all of it made anew to fit."""
    recipe = folder / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("noise_multiplier: 8.0", f"noise_multiplier: {z}"))
    path = folder / "ledger.jsonl"
    lines, head, spent = list[bytes](), GENESIS, RunningEpsilon(delta=1e-3)
    for record in read_chain(path).records:
        made = json.loads(json.dumps(record))
        if "event" in made:
            made["event"]["noise_multiplier"] = z
        if made["kind"] == "header":
            made["plan"]["noise_multiplier"], made["recipe"] = z, file_digest(recipe)
        if made["kind"] == "intent":
            spent.add(event_from_json(made["event"]))
        if "epsilon" in made:
            made["epsilon"] = spent.epsilon
        line, head = seal(made, after=head)
        lines.append(line)
    path.write_bytes(b"".join(lines))
    old = read(folder / PRIVACY)["sottovoce"]
    covered = old["not_covered"]
    asserted = Asserted(
        software=old["software"],
        start_model=covered["seed_model"],
        base_model=covered["base_model"],
        tokens=covered["tokens"],
    )
    evidence = Evidence(
        title=old["title"],
        ledger=verify(path),
        recipe=file_digest(recipe),
        model=old["model"],
        files=digest_export(folder, but=(PRIVACY, EXPORT_SIGNATURE)),
        asserted=asserted,
    )
    (folder / PRIVACY).write_text(json.dumps(describe_privacy(evidence)))


def test_a_consistent_forgery_without_a_signature_cannot_be_seen_and_that_is_said(
    exports: Exports, sottovoce: Callable[..., Ended], tmp_path: Path
) -> None:
    folder = exports.copy("release", tmp_path)
    before = json.loads(sottovoce("verify", folder, "--json").out)
    forge(folder, z=32.0)
    done = sottovoce("verify", folder, "--json")
    assert done.code == 0
    after = json.loads(done.out)
    assert after["epsilon"] < before["epsilon"] / 2
    assert "all of it anew, consistently, and no recomputation sees that" in after["lines"]["Signature"]
    assert "that the noise was really added" in after["lines"]["Only asserted"]


def test_the_same_forgery_is_refused_where_the_key_is_named(
    exports: Exports, sottovoce: Callable[..., Ended], tmp_path: Path
) -> None:
    folder = exports.copy("signed", tmp_path)
    forge(folder, z=32.0)
    done = sottovoce("verify", folder, "--key", exports.key)
    assert done.code == 2
    assert "is not the file that privacy.signature.json lists" in done.err
    sign_export(
        folder,
        key=load_signing_key(exports.place / "other-key"),
        files=digest_export(folder, but=(EXPORT_SIGNATURE,)),
    )
    done = sottovoce("verify", folder, "--key", exports.key)
    assert done.code == 2
    assert "expected" in done.err


def rechained(folder: Path, change: Callable[[Record], object]) -> None:
    """Change the header of the ledger, and fit its chain and the statement's mark to it."""
    path, head, lines = folder / "ledger.jsonl", GENESIS, list[bytes]()
    for record in read_chain(path).records:
        if record["kind"] == "header":
            change(record)
        line, head = seal(record, after=head)
        lines.append(line)
    path.write_bytes(b"".join(lines))
    edit(folder / PRIVACY, lambda content: content["sottovoce"]["ledger"].update(head=head))


HEADERS: dict[str, tuple[Callable[[Record], object], str]] = {
    "more people in the plan alone": (lambda h: h["plan"].update(population_size=10**6), "a sampling rate of"),
    "nobody in the plan": (lambda h: h["plan"].update(population_size=0), "line 1"),
    "people without a number": (lambda h: h["plan"].update(population_size="all"), "line 1"),
    "no plan": (lambda h: h.pop("plan"), "line 1"),
    "a plan that is none": (lambda h: h.update(plan="secret"), "line 1"),
    "no shares": (lambda h: h["plan"].pop("share"), "line 1"),
    "an event of another kind": (lambda h: h.update(event={"kind": "laplace"}), "line 1"),
    "a unit that is none": (lambda h: h["plan"].update(privacy_unit=["speaker"]), "line 1"),
    "noise that its rounds do not have": (lambda h: h["plan"].update(noise_multiplier=80.0), "noise_multiplier=8"),
    "a seed": (lambda h: h["plan"].update(root_seed=7), "the seed or the inputs of a simulation"),
    "inputs": (lambda h: h.update(inputs="00"), "the seed or the inputs of a simulation"),
    "another plan's δ": (lambda h: h["plan"].update(delta=0.5), "delta=0.001, though its plan has delta=0.5"),
    "weights by error rates": (lambda h: h["plan"].update(weighting="wer"), "weighting=wer"),
    "a sampler of somebody's own": (lambda h: h["plan"].update(sampler={"factory": "x:y"}), "has sampler="),
    "noise on a part": (lambda h: h["plan"].update(noise_scope={"only": "x"}), "has noise_scope="),
    "nobody who is protected": (lambda h: h["plan"].update(privacy_unit=None), "protects nobody"),
    "people who are in the seed part": (lambda h: h["plan"].update(users_also_in_seed=3), "protects nobody"),
    "cohorts of a fixed size": (lambda h: h["plan"].update(sampling="fixed_size"), "its event is not that of its plan"),
}


@pytest.mark.parametrize("what", HEADERS)
def test_a_header_that_no_run_has_written_is_refused(
    what: str, exports: Exports, sottovoce: Callable[..., Ended], tmp_path: Path
) -> None:
    change, named = HEADERS[what]
    folder = exports.copy("release", tmp_path)
    rechained(folder, change)
    done = sottovoce("verify", folder)
    assert done.code == 2
    assert "ledger.jsonl" in done.err
    assert named in done.err


def stated_anew(folder: Path) -> None:
    """All that follows from the ledger made to fit it: each line's ε, and the statement."""
    path, lines, head = folder / "ledger.jsonl", list[bytes](), GENESIS
    records = read_chain(path).records
    spent = RunningEpsilon(delta=records[0]["delta"])
    for old in records:
        record = json.loads(json.dumps(old))
        if record["kind"] == "intent":
            spent.add(event_from_json(record["event"]))
        if "epsilon" in record:
            record["epsilon"] = spent.epsilon
        line, head = seal(record, after=head)
        lines.append(line)
    path.write_bytes(b"".join(lines))
    old = read(folder / PRIVACY)["sottovoce"]
    covered = old["not_covered"]
    evidence = Evidence(
        title=records[0]["run"],
        ledger=verify(path),
        recipe=file_digest(folder / "recipe.yaml"),
        model=old["model"],
        files=digest_export(folder, but=(PRIVACY, EXPORT_SIGNATURE)),
        asserted=Asserted(
            software=old["software"],
            start_model=covered["seed_model"],
            base_model=covered["base_model"],
            tokens=covered["tokens"],
        ),
    )
    (folder / PRIVACY).write_text(json.dumps(describe_privacy(evidence)))


# One value of the header, with everything made anew that follows from the ledger: recipe and plan still tell.
LIES: dict[str, tuple[str, Callable[[Record], object], str]] = {
    "a simulation called a release": ("simulation", lambda h: h.update(mode="secure"), "its plan is of mode=seeded"),
    "a larger δ": ("release", lambda h: h.update(delta=0.5), "delta=0.5, though its plan has delta=0.001"),
    "more people, in groups": ("banded", lambda h: h["plan"].update(population_size=900), "in its groups"),
    "other groups": ("banded", lambda h: h["plan"]["mechanism"].update(cycle=4), "in its groups, though 2 of"),
    "fewer rounds": ("release", lambda h: h.update(central_steps=3), "says federation.steps = 4"),
    "a budget that nobody has set": (
        "release",
        lambda h: h.update(epsilon_budget=0.05),
        "says federation.privacy.epsilon_budget = None, the ledger 0.05",
    ),
    "a silo called a person": (
        "silo",
        lambda h: h["plan"].update(privacy_unit="speaker"),
        "says federation.clients.rule = 'silo with all its speakers', the ledger 'speaker'",
    ),
    "adaptive clipping": (
        "release",
        lambda h: h["plan"].update(adaptive={"target_quantile": 0.5}),
        "says federation.privacy.adaptive = None",
    ),
    "noise over rounds": (
        "release",
        lambda h: h["plan"].update(mechanism={"cycle": 1, "strategy": {"kind": "banded", "column": [1.0]}}),
        "its event is not that of its plan",
    ),
}


@pytest.mark.parametrize("what", LIES)
def test_a_header_that_contradicts_itself_or_the_recipe_is_refused(
    what: str, exports: Exports, sottovoce: Callable[..., Ended], tmp_path: Path
) -> None:
    kind, change, named = LIES[what]
    folder = exports.copy(kind, tmp_path)
    rechained(folder, change)
    stated_anew(folder)
    done = sottovoce("verify", folder)
    assert done.code == 2
    assert named in done.err


ASSERTIONS: dict[str, Callable[[Record], object]] = {
    "an ε of the seed model": lambda own: own["not_covered"]["seed_model"].update(epsilon=0.01),
    "an ε beside versions": lambda own: own["software"].update(proof="epsilon = 0.01"),
    "an ε in a version": lambda own: own["software"].update(run="sottovoce, with ε = 0.01"),
    "an ε as the tokens' origin": lambda own: own["not_covered"].update(tokens={"epsilon": 0.01}),
    "an ε in the tokens' origin": lambda own: own["not_covered"].update(tokens="nobody's texts: ε = 0.01"),
    "an ε as a file": lambda own: own["not_covered"]["base_model"].update({"proved: ε = 0.01": "00"}),
}


@pytest.mark.parametrize("what", ASSERTIONS)
def test_no_epsilon_hides_in_what_is_asserted(what: str, exports: Exports, tmp_path: Path) -> None:
    folder = exports.copy("release", tmp_path)
    edit(folder / PRIVACY, lambda content: ASSERTIONS[what](content["sottovoce"]))
    with pytest.raises(InputError, match=r"privacy.json(: expected software|: asserts| asserts)"):
        verify_export(folder)


def test_a_key_that_stands_twice_is_refused(exports: Exports, tmp_path: Path) -> None:
    """Readers differ in which of the two they take."""
    folder = exports.copy("release", tmp_path)
    text = (folder / PRIVACY).read_text().lstrip().removeprefix("{")
    (folder / PRIVACY).write_text('{"notice": "A release with a strong guarantee: ε = 0.01.",' + text)
    with pytest.raises(InputError, match=r"privacy.json is damaged \('notice' twice\)"):
        verify_export(folder)


def test_a_key_of_an_audit_that_stands_twice_is_refused(exports: Exports, tmp_path: Path) -> None:
    folder = exports.copy("audited", tmp_path)
    text = (folder / "audit.json").read_text().lstrip().removeprefix("{")
    (folder / "audit.json").write_text('{"verdict": "consistent",' + text)
    fitted(folder)
    with pytest.raises(InputError, match=r"audit.json is damaged \('verdict' twice\)"):
        verify_export(folder)


def test_a_link_to_a_folder_is_a_file_more(exports: Exports, tmp_path: Path) -> None:
    folder = exports.copy("release", tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (folder / "onnx").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="onnx is none of the files"):
        verify_export(folder)


@pytest.mark.parametrize("kind", ["release", "simulation", "no noise", "central"])
def test_a_card_that_names_another_epsilon_is_refused(kind: str, exports: Exports, tmp_path: Path) -> None:
    folder = exports.copy(kind, tmp_path)
    (folder / CARD).write_text("")

    def write(text: str) -> None:
        (folder / CARD).write_text(text)
        edit(folder / PRIVACY, lambda content: content["sottovoce"]["files"].update({CARD: file_digest(folder / CARD)}))

    write("# A model\n")
    checked = verify_export(folder)
    assert "the words of README.md" in dict(checked.lines)["Only asserted"]
    write(f"# A model\n\n**{checked.headline}** It is about the fine-tuning alone.\n")
    verify_export(folder)
    write("# A model\n\n**A release with a strong guarantee: ε = 0.01 at δ = 1e-06.**\n")
    with pytest.raises(InputError, match=r"README.md names an ε that is not in what is stated"):
        verify_export(folder)


@pytest.mark.parametrize("name", ["lower_bound", "promised", "canaries", "rounds", "verdict"])
def test_an_audit_that_is_none_is_refused(name: str, exports: Exports, tmp_path: Path) -> None:
    folder = exports.copy("audited", tmp_path)
    edit(folder / "audit.json", lambda audit: audit.update({name: "good"}))
    fitted(folder)
    with pytest.raises(InputError, match=r"audit.json: no audit"):
        verify_export(folder)


# Anything at all in place of what is stated.


def paths(content: Any, at: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Every place in a statement, objects and lists included."""
    inside = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    return [at, *(place for key, value in inside for place in paths(value, (*at, key)))]


# What only the sender knows: another value is another assertion. (Of central training, the model's step is such.)
ASSERTED = ("software", "not_covered", "publication_date", "stand_in")
ANYTHING: list[Any] = [None, "x", 7, -1.5, [], {}, True, [[]], {"a": 1}]


def replaced_in(text: str, place: tuple[str | int, ...], value: Any) -> str | None:
    """A statement with another value in one place; None where it has that already."""
    content = at = json.loads(text)
    for key in place[:-1]:
        at = at[key]
    if find_difference(at[place[-1]], value) is None:
        return None
    at[place[-1]] = value
    return json.dumps(content)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["release", "silo", "central", "audited"])
def test_whatever_stands_in_a_statement_is_refused_in_one_line(kind: str, exports: Exports, tmp_path: Path) -> None:
    """Each place has one of `ANYTHING` in turn: what is asserted may pass, and nothing ends in a traceback."""
    folder = exports.copy(kind, tmp_path)
    whole = (folder / PRIVACY).read_text()
    for number, place in enumerate(paths(json.loads(whole))[1:]):
        if (text := replaced_in(whole, place, ANYTHING[number % len(ANYTHING)])) is None:
            continue
        (folder / PRIVACY).write_text(text)
        may_pass = any(one in ASSERTED for one in place) or (kind == "central" and place[-1] == "step")
        with suppress(InputError) if may_pass else pytest.raises(InputError):
            verify_export(folder)
