"""A campaign of doctored folders: every file of a release and of a simulation replaced, cut, swapped, edited to fit.

Each is refused by name, or it is one of those that no check without a key can see; and those are seen with one.
docs/privacy.md lists what is tried here.
"""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from tests.tampering import edit, older, read, rechain

from sottovoce.base.signatures import fingerprint, load_signing_key
from sottovoce.cli import main
from sottovoce.config import load_recipe
from sottovoce.models.model_files import description_digest, digest_model_files
from sottovoce.network.keys import make_node
from sottovoce.privacy.ledger import verify
from sottovoce.privacy.ledger_report import write_ledger_signature
from sottovoce.training.checkpoint import _digests
from sottovoce.training.ledger_check import check_ledger
from sottovoce.training.run import run_recipe
from sottovoce.training.run_context import RunContext

pytestmark = pytest.mark.usefixtures("undrawn")

RECIPE = """
about: tones, federated
seed: 5
data: {store: tones}
model: {size: tiny, layers: 2, width: 32}
federation:
  steps: 4
  cohort_size: 2
  local: {batch_seconds: 2, lr: 0.1, local_steps: 1}
  server: {optimiser: {name: lamb}, schedule: {name: constant, lr: 0.01}}
  privacy: {clip_bound: 0.01, noise_multiplier: 8.0, delta: 1e-3}
  engine: sequential
  evaluate_every: 2
  checkpoint_every: 2
"""
MODES = {"release": "secure", "simulation": "seeded"}
BEST, LAST = "model", "checkpoints/step-000004"  # where they are one folder, so much the better

Doctor = Callable[[Path, Path], None]  # a run's folder, and another run's


class Made(NamedTuple):
    """Runs that a test may copy: signed and unsigned ones, one without noise (`other`); and the key that has signed."""

    place: Path
    key: Path

    def copy(self, kind: str, to: Path) -> Path:
        return Path(shutil.copytree(self.place / kind, to / "run", symlinks=True))


@pytest.fixture(scope="module")
def made(short_stores: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    place = tmp_path_factory.mktemp("doctored")
    (place / "tones.yaml").write_text(RECIPE)
    make_node(place / "key")
    make_node(place / "other-key")
    wanted: list[tuple[str, Path | None, list[str]]]
    wanted = [(name, place / "key", [f"federation.privacy.mode={mode}"]) for name, mode in MODES.items()]
    wanted += [(f"{name}-unsigned", None, changes) for name, _, changes in wanted]
    wanted += [("other", None, ["federation.privacy.noise_multiplier=0", "seed=6"])]
    for name, sign, changes in wanted:
        around = RunContext(runs=place, stores=short_stores, device=torch.device("cpu"), sign=sign)
        recipe = load_recipe(str(place / "tones.yaml"), changes)
        run_recipe(recipe, out=place / name, resume=False, context=around)
    return Made(place, place / "key" / "node.pub")


class Ended(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def sottovoce(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    def run(*arguments: object) -> Ended:
        monkeypatch.setattr(sys, "argv", ["sottovoce", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        return Ended(ended.value.code or 0, *capsys.readouterr())  # type: ignore[arg-type]

    return run


# Ways to doctor a folder.


def real_model(folder: Path) -> Path:
    """The run's `model` as a folder of its own, no link to a checkpoint any more."""
    place = folder / BEST
    copy = folder / ".model"
    shutil.copytree(place.resolve(), copy)
    place.unlink()
    copy.rename(place)
    return place


def cut(name: str) -> Doctor:
    def doctor(folder: Path, _: Path) -> None:
        path = folder / name
        content = path.read_bytes()
        path.write_bytes(content[: len(content) * 2 // 3])

    return doctor


def emptied(name: str) -> Doctor:
    return lambda folder, _: (folder / name).write_bytes(b"") and None


def swapped(name: str) -> Doctor:
    def doctor(folder: Path, other: Path) -> None:
        shutil.copyfile(other / name, folder / name)

    return doctor


def edited(name: str, change: Callable[[dict[str, Any]], object], *, with_seal: bool = False) -> Doctor:
    return lambda folder, _: edit(folder / name, change, with_seal=with_seal)


def edited_line(name: str, change: Callable[[dict[str, Any]], object], *, line: int = -1) -> Doctor:
    def doctor(folder: Path, _: Path) -> None:
        records = [json.loads(text) for text in (folder / name).read_text().splitlines()]
        change(records[line])
        (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))

    return doctor


def replaced_text(name: str, old: str, new: str) -> Doctor:
    def doctor(folder: Path, _: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new))

    return doctor


def one_bit(name: str) -> Doctor:
    def doctor(folder: Path, _: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[-5] ^= 1
        (folder / name).write_bytes(content)

    return doctor


def fitted_state(folder: Path, checkpoint: str) -> None:
    """The list of files in a checkpoint's state, made anew."""
    place = folder / checkpoint
    found = {name: digest for name, digest in _digests(place).items() if name != "state.json"}
    edit(place / "state.json", lambda state: state.update(files=found), with_seal=True)


def fitted_config(place: Path) -> None:
    """The config's digest of its weights, made anew."""
    digest = _digests(place)["model.safetensors"]
    edit(place / "config.json", lambda config: config.update(parameters=digest), with_seal=True)


def other_model(folder: Path, other: Path) -> None:
    """The finding: the model of a run without noise in the place of the release's."""
    (folder / BEST).unlink()
    shutil.copytree((other / BEST).resolve(), folder / BEST)


def other_weights(folder: Path, other: Path) -> None:
    place = real_model(folder)
    shutil.copyfile(other / BEST / "model.safetensors", place / "model.safetensors")


def other_weights_fitted(folder: Path, other: Path) -> None:
    other_weights(folder, other)
    fitted_config(folder / BEST)


def other_checkpoint(folder: Path, other: Path) -> None:
    shutil.copyfile(other / LAST / "model.safetensors", folder / LAST / "model.safetensors")
    fitted_config(folder / LAST)
    fitted_state(folder, LAST)


def weights_moved(folder: Path, _: Path) -> None:
    """One number of one tensor, written as the library writes it, with the config to fit."""
    place = real_model(folder)
    tensors = load_file(place / "model.safetensors")
    name = sorted(tensors)[0]
    tensors[name].flat[0] += np.float32(1.0)
    save_file(tensors, place / "model.safetensors")
    fitted_config(place)


def tensors_exchanged(folder: Path, _: Path) -> None:
    """Two tensors of one shape under each other's names."""
    place = real_model(folder)
    tensors = load_file(place / "model.safetensors")
    one, two = "blocks.00.mlp.hidden.weight", "blocks.01.mlp.hidden.weight"
    tensors[one], tensors[two] = tensors[two], tensors[one]
    save_file(tensors, place / "model.safetensors")
    fitted_config(place)


def half_precision(folder: Path, _: Path) -> None:
    place = real_model(folder)
    tensors = {name: tensor.astype(np.float16) for name, tensor in load_file(place / "model.safetensors").items()}
    save_file(tensors, place / "model.safetensors")
    fitted_config(place)


def described(change: Callable[[dict[str, Any]], object]) -> Doctor:
    def doctor(folder: Path, _: Path) -> None:
        real_model(folder)
        edit(folder / BEST / "config.json", change, with_seal=True)

    return doctor


def other_tokens(folder: Path, _: Path) -> None:
    place = real_model(folder)
    (place / "tokens.json").write_text((place / "tokens.json").read_text().replace("xyz", "zyx"))


def model_in_the_folder(folder: Path, other: Path) -> None:
    """`load` would take it before the run's own."""
    for path in (other / BEST).resolve().iterdir():
        shutil.copyfile(path, folder / path.name)


def earlier_checkpoint(folder: Path, _: Path) -> None:
    """Another model of the same run as its result."""
    step = read(folder / BEST / "config.json")["about"]["step"]
    (folder / BEST).unlink()
    (folder / BEST).symlink_to(f"checkpoints/step-{6 - step:06d}")


def ledger_cut(count: int) -> Doctor:
    def doctor(folder: Path, _: Path) -> None:
        path = folder / "ledger.jsonl"
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:-count]))

    return doctor


def wer_lowered(results: dict[str, Any]) -> None:
    results["test"]["test"]["wer"] = 0.01


def in_header(change: Callable[[dict[str, Any]], object]) -> Doctor:
    """Change the ledger's header, with chain, results and marks made to fit."""

    def doctor(folder: Path, _: Path) -> None:
        def changed(record: dict[str, Any]) -> dict[str, Any]:
            if record["kind"] == "header":
                change(record)
            return record

        rechain(folder, changed)

    return doctor


def mode_turned(header: dict[str, Any]) -> None:
    header["mode"], header["inputs"] = "unrepeated" if header["mode"] == "secure" else "secure", ""


def released(folder: Path, _: Path) -> None:
    """A simulation that says it is a release."""

    def change(record: dict[str, Any]) -> dict[str, Any]:
        if record["kind"] == "header":
            record["mode"], record["inputs"] = "secure", ""
            record["plan"] |= {"mode": "secure", "root_seed": None}
        return record

    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(text.replace("mode: seeded", "mode: secure"))
    edit(folder / "results.json", lambda results: results["privacy"].update(simulated=False))
    (folder / "diagnostics.jsonl").unlink(missing_ok=True)
    rechain(folder, change)


def simulated(folder: Path, _: Path) -> None:
    def change(record: dict[str, Any]) -> dict[str, Any]:
        if record["kind"] == "header":
            record["mode"] = "unrepeated"
            record["plan"] |= {"mode": "seeded", "root_seed": 7}
        return record

    edit(folder / "results.json", lambda results: results["privacy"].update(simulated=True))
    rechain(folder, change)


def wer_and_chain(folder: Path, _: Path) -> None:
    edit(folder / "results.json", wer_lowered)
    rechain(folder)


def model_and_chain(folder: Path, other: Path) -> None:
    """Another model, and commits that say so."""
    other_checkpoint(folder, other)
    place = folder / LAST
    step = read(place / "config.json")["about"]["step"]
    fitted = digest_model_files(place)

    def change(record: dict[str, Any]) -> dict[str, Any]:
        if record["kind"] == "commit" and record["step"] == step - 1:
            record["model"] |= fitted
        return record

    rechain(folder, change)


def guarantee_and_chain(folder: Path, _: Path) -> None:
    for place in folder.glob("checkpoints/step-*"):
        edit(place / "config.json", lambda config: config["about"].update(guarantee="ε = 0.1"), with_seal=True)
        fitted_state(folder, str(place.relative_to(folder)))
    edit(folder / "results.json", lambda results: results["model"].update(guarantee="ε = 0.1"))

    def change(record: dict[str, Any]) -> dict[str, Any]:
        if record["kind"] == "commit":
            config = read(folder / f"checkpoints/step-{record['step'] + 1:06d}/config.json")
            record["model"]["description"] = description_digest(config)
        return record

    rechain(folder, change)


def recipe_and_chain(folder: Path, _: Path) -> None:
    replaced_text("config.yaml", "about: tones, federated", "about: everybody agreed")(folder, folder)

    def change(record: dict[str, Any]) -> dict[str, Any]:
        return record | ({"run": "everybody agreed"} if record["kind"] == "header" else {})

    for place in folder.glob("checkpoints/step-*"):
        edit(place / "config.json", lambda config: config["about"].update(recipe="everybody agreed"), with_seal=True)
        fitted_state(folder, str(place.relative_to(folder)))
    edit(folder / "results.json", lambda results: results["model"].update(recipe="everybody agreed"))

    def all_of_it(record: dict[str, Any]) -> dict[str, Any]:
        if record["kind"] == "commit":
            config = read(folder / f"checkpoints/step-{record['step'] + 1:06d}/config.json")
            record["model"]["description"] = description_digest(config)
        return change(record)

    rechain(folder, all_of_it)


def optimiser_and_state(folder: Path, _: Path) -> None:
    one_bit(f"{LAST}/optimiser.safetensors")(folder, folder)
    fitted_state(folder, LAST)


def unfinished(folder: Path, _: Path) -> None:
    """A run that looks as if it had never ended, whose metrics nothing knows then."""
    (folder / "results.json").unlink()
    ledger_cut(1)(folder, folder)
    edited_line("metrics.jsonl", lambda record: record.update(lr=0.5))(folder, folder)


def score_in_state(folder: Path, _: Path) -> None:
    edit(folder / LAST / "state.json", lambda state: state.update(best_wer=0.0), with_seal=True)


def times_in_metrics(folder: Path, _: Path) -> None:
    edited_line("metrics.jsonl", lambda record: record.update(seconds=0.001))(folder, folder)


def without_signature(folder: Path, _: Path) -> None:
    (folder / "ledger.signature.json").unlink(missing_ok=True)


def unsigned_and_rechained(folder: Path, _: Path) -> None:
    without_signature(folder, folder)
    edit(folder / "results.json", wer_lowered)
    rechain(folder, lambda record: {name: value for name, value in record.items() if name != "signer"})


def signed_by_another(folder: Path, other: Path) -> None:
    """Everything anew, and signed with a key of one's own."""
    edit(folder / "results.json", wer_lowered)
    key = load_signing_key(other.parent / "other-key")
    rechain(folder, lambda record: {name: value for name, value in record.items() if name != "signer"})
    write_ledger_signature(folder / "ledger.jsonl", verify(folder / "ledger.jsonl").mark, key=key)


JSON_FILES = ("results.json", "population.json", "inputs.json", "environment.json", "engine.json")
CHECKPOINT_FILES = ("model.safetensors", "config.json", "tokens.json", "optimiser.safetensors", "state.json")

# What is done, and what is named: refused without any key.
REFUSED: dict[str, tuple[Doctor, str]] = {
    "model of a run without noise": (other_model, "model/model.safetensors"),
    "population of the plan": (
        in_header(lambda header: header["plan"].update(population_size=10**6)),
        "line 1: a sampling rate of",
    ),
    "noise of the plan": (
        in_header(lambda header: header["plan"].update(noise_multiplier=99.0)),
        "though its plan has",
    ),
    "mode of the ledger alone": (in_header(mode_turned), "though its plan is of mode="),
    "weights of a run without noise": (other_weights, "model/model.safetensors"),
    "weights of a run without noise, its digest in the config made to fit": (
        other_weights_fitted,
        "model/model.safetensors",
    ),
    "one weight moved, its digest made to fit": (weights_moved, "model/model.safetensors"),
    "two tensors exchanged, their digest made to fit": (tensors_exchanged, "model/model.safetensors"),
    "weights at half precision, their digest made to fit": (half_precision, "model/model.safetensors"),
    "checkpoint of another run, its lists made to fit": (other_checkpoint, f"{LAST}/model.safetensors"),
    "another model beside the run's": (model_in_the_folder, "config.json is none of a run's files"),
    "another checkpoint as the result": (earlier_checkpoint, "results.json says was tested"),
    "guarantee of the model": (
        described(lambda config: config["about"].update(guarantee="ε = 0.1")),
        "model/config.json does not describe",
    ),
    "step of the model": (described(lambda config: config["about"].update(step=3)), "model/"),
    "recipe of the model": (described(lambda config: config["about"].update(recipe="another")), "model/config.json"),
    "dev score of the model": (described(lambda config: config["about"].update(dev_wer=0.01)), "model/config.json"),
    "language of the model": (described(lambda config: config.update(language="fr")), "model/config.json"),
    "family of the model": (described(lambda config: config.update(architecture="crdnn")), "model/config.json"),
    "settings of the model": (described(lambda config: config["settings"].update(heads=2)), "model/config.json"),
    "a word more in the model's config": (described(lambda config: config.update(note="audited")), "model/config.json"),
    "config without its seal": (described(lambda config: config["about"].pop("guarantee")), "model/config.json"),
    "tokens in another order": (other_tokens, "model/tokens.json"),
    "WER": (edited("results.json", wer_lowered), "results.json is not what the run has written"),
    "WER of the start": (
        edited("results.json", lambda results: results["start"]["test"]["test"].update(wer=1.5)),
        "results.json",
    ),
    "WER of one speaker": (
        edited("results.json", lambda results: results["test"]["test"]["per_speaker"][0].update(wer=0.0)),
        "results.json",
    ),
    "population in the results": (
        edited("results.json", lambda results: results["privacy"].update(population_size=10**6)),
        "results.json",
    ),
    "results that say they are an excerpt of others": (
        edited("results.json", lambda results: results.update(excerpt="0" * 64)),
        "results.json says that it is an excerpt",
    ),
    "steps of the recipe": (replaced_text("config.yaml", "steps: 4", "steps: 3"), "config.yaml"),
    "a comment in the recipe": (replaced_text("config.yaml", "about:", "# checked\nabout:"), "config.yaml"),
    "dev score in the metrics": (
        edited_line("metrics.jsonl", lambda record: record.update(dev_wer=0.01)),
        "metrics.jsonl",
    ),
    "ε in the metrics": (edited_line("metrics.jsonl", lambda record: record.update(epsilon=1e-3)), "metrics.jsonl"),
    "norms in the metrics": (edited_line("metrics.jsonl", lambda record: record.update(lr=0.5)), "metrics.jsonl"),
    "last line of the ledger cut": (ledger_cut(1), "results.json is there"),
    "last lines of the ledger cut": (ledger_cut(3), "results.json knows"),
    "a line of the ledger edited": (replaced_text("ledger.jsonl", '"step":1', '"step":2'), "does not follow"),
    "privacy unit in population.json": (
        edited("population.json", lambda told: told.update(privacy_unit="utterance")),
        "population.json",
    ),
    "release in environment.json": (
        edited("environment.json", lambda told: told.update(sottovoce="9.9")),
        "environment.json",
    ),
    "stand-in in environment.json": (
        edited("environment.json", lambda told: told.update(stand_in=True)),
        "environment.json",
    ),
    "start model in inputs.json": (
        edited("inputs.json", lambda told: told.update({"start model digest": "0" * 32})),
        "inputs.json",
    ),
    "signature taken away": (without_signature, "signature missing"),
    "signature of another run": (
        lambda folder, other: edit(
            folder / "ledger.signature.json", lambda said: said.update(head="0" * 64, length=said["length"])
        ),
        "signature wrong",
    ),
    "signature cut": (cut("ledger.signature.json"), "ledger.signature.json"),
    **{f"{name} cut": (cut(name), name) for name in (*JSON_FILES, "config.yaml", "metrics.jsonl", "ledger.jsonl")},
    **{f"{name} emptied": (emptied(name), name) for name in (*JSON_FILES, "config.yaml")},
    **{
        f"{name} of another run": (swapped(name), name)
        for name in ("results.json", "config.yaml", "metrics.jsonl", "ledger.jsonl")
    },
    **{f"a checkpoint's {name} cut": (cut(f"{LAST}/{name}"), LAST) for name in CHECKPOINT_FILES},
    **{
        f"a checkpoint's {name} of another run": (swapped(f"{LAST}/{name}"), LAST)
        for name in ("model.safetensors", "optimiser.safetensors", "state.json")
    },
    **{
        f"one bit of a checkpoint's {name}": (one_bit(f"{LAST}/{name}"), LAST)
        for name in ("model.safetensors", "optimiser.safetensors")
    },
}
OF_SIMULATIONS: dict[str, tuple[Doctor, str]] = {
    "diagnostics.jsonl cut": (cut("diagnostics.jsonl"), "diagnostics.jsonl"),
    "diagnostics.jsonl of another run": (swapped("diagnostics.jsonl"), "diagnostics.jsonl"),
    "loss in the diagnostics": (
        edited_line("diagnostics.jsonl", lambda one: one.update(loss=0.0)),
        "diagnostics.jsonl",
    ),
}

# What no check without a key can see, since all that knows of it was made to fit. With the signer's key it is seen.
UNSEEN: dict[str, Doctor] = {
    "a WER, and the ledger's last line": wer_and_chain,
    "another model, and the commit of it": model_and_chain,
    "the guarantee in every model, and all commits": guarantee_and_chain,
    "the recipe's title, and the whole ledger": recipe_and_chain,
    "who is protected, in the whole ledger": in_header(lambda header: header["plan"].update(privacy_unit="household")),
    "what a round took, in the metrics": times_in_metrics,
    "metrics of a run made to look unfinished": unfinished,
    "the optimiser's state of a checkpoint, and its list": optimiser_and_state,
    "the best dev score of a checkpoint's state": score_in_state,
    "no signature, and a ledger that names no signer": unsigned_and_rechained,
    "another signer's signature on all of it": signed_by_another,
}
TURNED: dict[str, tuple[str, Doctor]] = {
    "a simulation that says it is a release": ("simulation", released),
    "a release that says it is a simulation": ("release", simulated),
}

CASES = [(kind, name) for kind in MODES for name in REFUSED] + [("simulation", name) for name in OF_SIMULATIONS]
HIDDEN = [(kind, name) for kind in MODES for name in UNSEEN] + [(kind, name) for name, (kind, _) in TURNED.items()]
LONG = pytest.mark.long


def _cases(found: list[tuple[str, str]], *, always: tuple[str, ...]) -> list[Any]:
    """All of the release's that are named `always` stay in CI; the rest are a campaign."""
    return [
        pytest.param(kind, name, marks=() if kind == "release" and name in always else LONG, id=f"{kind}: {name}")
        for kind, name in found
    ]


FIRST = ("model of a run without noise", "one weight moved, its digest made to fit", "guarantee of the model", "WER")
FIRST_HIDDEN = ("a WER, and the ledger's last line", "no signature, and a ledger that names no signer")


def test_there_are_enough_of_them() -> None:
    assert len(CASES) + len(HIDDEN) >= 60
    assert len({name for _, name in CASES + HIDDEN}) >= 60


def test_what_is_not_doctored_passes(made: Made, sottovoce: Callable[..., Ended], tmp_path: Path) -> None:
    for kind in MODES:
        assert sottovoce("ledger", made.place / kind).code == 0
        done = sottovoce("ledger", made.place / kind, "--key", made.key)
        assert done.code == 0
        assert "the key that was expected" in " ".join(done.out.split()).replace(" │ │ ", " ")
        assert sottovoce("ledger", made.place / f"{kind}-unsigned").code == 0
        assert sottovoce("ledger", made.place / f"{kind}-unsigned", "--key", made.key).code == 2


@pytest.mark.parametrize(("kind", "name"), _cases(CASES, always=FIRST))
def test_a_doctored_folder_is_refused_by_name(
    made: Made, sottovoce: Callable[..., Ended], kind: str, name: str, tmp_path: Path
) -> None:
    doctor, named = (REFUSED | OF_SIMULATIONS)[name]
    folder = made.copy(kind if name.startswith("signature") else f"{kind}-unsigned", tmp_path)
    doctor(folder, made.place / "other")
    done = sottovoce("ledger", folder)
    assert done.code == 2, done.out
    assert named in done.err
    assert done.err.count("\n") == 1


@pytest.mark.parametrize(("kind", "name"), _cases(HIDDEN, always=FIRST_HIDDEN))
def test_what_no_check_without_a_key_can_see_is_seen_with_one(
    made: Made, sottovoce: Callable[..., Ended], kind: str, name: str, tmp_path: Path
) -> None:
    doctor = UNSEEN[name] if name in UNSEEN else TURNED[name][1]
    other = made.place / "other"
    (tmp_path / "plain").mkdir()
    plain = made.copy(f"{kind}-unsigned", tmp_path / "plain")
    doctor(plain, other)
    done = sottovoce("ledger", plain)
    assert done.code == 0, f"it is listed as unseen, and was seen: {done.err}"
    signed = made.copy(kind, tmp_path)
    head = verify(signed / "ledger.jsonl").mark.head
    doctor(signed, other)
    done = sottovoce("ledger", signed, "--key", made.key)
    assert done.code == 2
    if (signed / "ledger.jsonl").read_bytes() != (made.place / kind / "ledger.jsonl").read_bytes():
        assert sottovoce("ledger", signed, "--expect-head", head).code == 2


@pytest.mark.parametrize("command", ["ledger", "report", "statement", "export", "evaluate"])
def test_every_command_refuses_another_model(
    made: Made, sottovoce: Callable[..., Ended], command: str, short_stores: Path, tmp_path: Path
) -> None:
    folder = made.copy("release", tmp_path)
    other_model(folder, made.place / "other")
    out = tmp_path / "page.html"
    done = {
        "ledger": lambda: sottovoce("ledger", folder, "--json"),
        "report": lambda: sottovoce("report", folder, "--out", out, "--json"),
        "statement": lambda: sottovoce("report", folder, "--out", out, "--statement", tmp_path / "s.md"),
        "export": lambda: sottovoce("export", folder, "--out", tmp_path / "exported"),
        "evaluate": lambda: sottovoce("evaluate", folder, "--on", f"{short_stores / 'tones'}:test", "--json"),
    }[command]()
    assert done.code == 2
    assert "model/model.safetensors does not hold the weights of step" in done.err.replace("\n", " ")
    assert not (tmp_path / "s.md").exists()
    assert not (tmp_path / "exported").exists()


def test_a_run_does_not_go_on_from_another_model(made: Made, short_stores: Path, tmp_path: Path) -> None:
    """Its next commit would pass that off as its own."""
    folder = made.copy("release-unsigned", tmp_path)
    other_checkpoint(folder, made.place / "other")
    (folder / "results.json").unlink()
    recipe = load_recipe(str(made.place / "tones.yaml"), ["federation.privacy.mode=secure"])
    around = RunContext(runs=tmp_path, stores=short_stores, device=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"step-000004 is not what the ledger knows of it"):
        run_recipe(recipe, out=folder, resume=True, context=around)


def test_what_is_exported_is_the_committed_model(made: Made, sottovoce: Callable[..., Ended], tmp_path: Path) -> None:
    folder = made.place / "release"
    assert sottovoce("export", folder, "--out", tmp_path / "exported").code == 0
    found = digest_model_files(tmp_path / "exported")
    commits = verify(folder / "ledger.jsonl").commits
    step = read(tmp_path / "exported" / "config.json")["about"]["step"]
    assert found == commits[step - 1]["model"]


def test_an_older_ledger_holds_its_models_by_their_fingerprint(
    made: Made, sottovoce: Callable[..., Ended], tmp_path: Path
) -> None:
    folder = made.copy("release-unsigned", tmp_path)
    rechain(folder, older)
    done = sottovoce("ledger", folder, "--json")
    assert done.code == 0, done.err
    assert any("only a fingerprint that tells accidents" in note for note in json.loads(done.out)["notes"])
    other_model(folder, made.place / "other")
    done = sottovoce("ledger", folder)
    assert done.code == 2
    assert "model/model.safetensors does not hold the weights of step" in done.err


# Signatures.


def test_statements_and_reports_say_who_has_signed(made: Made, sottovoce: Callable[..., Ended], tmp_path: Path) -> None:
    signer = fingerprint(load_signing_key(made.place / "key").public_key()).hex()
    said = {"release": f"Its ledger is **signed** by the key with the fingerprint `{signer}`.", "release-unsigned": ""}
    for name, words in said.items():
        page = tmp_path / "page.html"
        done = sottovoce("report", made.place / name, "--out", page, "--statement", tmp_path / "s.md", "--json")
        assert done.code == 0, done.err
        status = json.loads(done.out)["signatures"][name]
        assert status == ({"status": "unsigned"} if not words else status | {"status": "signed", "signer": signer})
        first_lines = (tmp_path / "s.md").read_text().splitlines()[:6]
        assert any(line.startswith(words or "Its ledger is **unsigned**: ") for line in first_lines)
        assert ("unsigned" if not words else f"signed by {signer[:16]}…") in page.read_text()


def test_the_signer_is_named_and_only_a_key_that_is_known_vouches(made: Made, sottovoce: Callable[..., Ended]) -> None:
    folder, signer = made.place / "release", fingerprint(load_signing_key(made.place / "key").public_key()).hex()
    said = json.loads(sottovoce("ledger", folder, "--json").out)["signature"]
    assert said == {"status": "signed", "signer": signer, "expected": False, "length": 8}
    assert json.loads(sottovoce("ledger", folder, "--json", "--key", signer).out)["signature"]["expected"]
    done = sottovoce("ledger", folder, "--key", made.place / "other-key" / "node.pub")
    assert done.code == 2
    assert f"signed by {signer}, expected " in done.err


def test_a_signature_covers_every_commit_while_a_run_goes_on(
    made: Made, short_stores: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted before its end, a run is signed up to its last commit; it goes on, and all of it is."""
    recipe = load_recipe(str(made.place / "tones.yaml"), ["federation.privacy.mode=secure"])
    around = RunContext(
        runs=tmp_path, stores=short_stores, device=torch.device("cpu"), sign=made.place / "key" / "node.key"
    )
    with monkeypatch.context() as patched:
        patched.setattr("sottovoce.training.federated_run._results", stop)
        with pytest.raises(KeyboardInterrupt):
            run_recipe(recipe, out=tmp_path / "run", resume=False, context=around)
    found = check_ledger(tmp_path / "run")
    assert found.signature.signer is not None
    assert found.signature.length == found.report.settled_length == found.report.mark.length
    run_recipe(recipe, out=tmp_path / "run", resume=True, context=around)
    found = check_ledger(tmp_path / "run", expected_key=found.signature.signer)
    assert found.signature.length == found.report.mark.length
    assert "metrics.jsonl" in found.signature.files


def stop(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_key_that_cannot_sign_is_refused_before_anything_is_made(
    made: Made, sottovoce: Callable[..., Ended], short_stores: Path, tmp_path: Path
) -> None:
    arguments = ("run", made.place / "tones.yaml", "--stores", short_stores, "--out", tmp_path / "run")
    done = sottovoce(*arguments, "--sign", tmp_path)
    assert done.code == 2
    assert "expected a private key, or a folder of keys" in done.err
    assert not (tmp_path / "run").exists()


def test_only_a_head_that_the_ledger_had_is_expected(made: Made, sottovoce: Callable[..., Ended]) -> None:
    folder = made.place / "release-unsigned"
    heads = verify(folder / "ledger.jsonl").hashes
    for head, code in ((heads[-1], 0), (heads[3], 0), ("0" * 64, 2), ("abc", 2)):
        assert sottovoce("ledger", folder, "--expect-head", head).code == code
    assert f"head: {heads[-1]}\n" in sottovoce("ledger", folder).out


# Reports of damaged folders.


@pytest.mark.parametrize(("name", "content"), [("results.json", '{"privacy": {'), ("config.yaml", "about: [tones")])
@pytest.mark.parametrize("of", ["release-unsigned", pytest.param("older", marks=LONG), "central"])
def test_a_report_names_what_cannot_be_read_and_no_statement_is_written(
    made: Made, sottovoce: Callable[..., Ended], name: str, content: str, of: str, tmp_path: Path
) -> None:
    folder = made.copy("release-unsigned", tmp_path)
    if of != "release-unsigned":
        rechain(folder, older)
    if of == "central":  # of which there is no ledger to hold anything against
        for ledger in ("ledger.jsonl", "metrics.jsonl", "results.json", "config.yaml"):
            (folder / ledger).unlink()
        (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    (folder / name).write_text(content)
    page, statement = tmp_path / "page.html", tmp_path / "s.md"
    done = sottovoce("report", folder, "--out", page, "--json")
    assert done.code == 2
    assert any(name in problem for problem in json.loads(done.out)["unreadable"]["run"])
    assert name in done.err
    done = sottovoce("report", folder, "--out", page, "--statement", statement)
    assert done.code == 2
    assert "nobody can sign for this run" in done.err
    assert name in done.err
    assert not statement.exists()


def test_a_statement_never_takes_the_place_of_the_page_or_of_a_run(
    made: Made, sottovoce: Callable[..., Ended], tmp_path: Path
) -> None:
    folder = made.copy("release-unsigned", tmp_path)
    page = tmp_path / "page.html"
    done = sottovoce("report", folder, "--out", page, "--statement", tmp_path / "run" / ".." / "page.html")
    assert done.code == 2
    assert "are one file" in done.err
    assert not page.exists()
    for name in ("ledger.jsonl", "results.json", "model/config.json"):
        before = (folder / name).read_bytes()
        assert sottovoce("report", folder, "--out", page, "--statement", folder / name).code == 2
        assert (folder / name).read_bytes() == before
