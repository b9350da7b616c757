"""What `privacy.json` says: by the registry's names, from the ledger, the same every time, and as statements do."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.export.conftest import AUDIT, Ended, Exports, write_export
from tests.tampering import read

from sottovoce.base.errors import InputError
from sottovoce.base.signatures import load_signing_key
from sottovoce.export.folder import PRIVACY
from sottovoce.export.guarantee import ExportOptions, read_export_source, write_guarantee
from sottovoce.export.verify import verify_export
from sottovoce.report.records import read_run
from sottovoce.report.statement import statement_text
from sottovoce.report.verdict import judge_run

SCHEMA = json.loads((Path(__file__).parent / "registry_schema.json").read_text())
TYPES: dict[str, tuple[type, ...]] = {"string": (str,), "integer": (int,), "number": (int, float)}
KINDS = ("release", "silo", "banded", "simulation", "no noise", "central", "audited", "signed")


def problems(content: Any, schema: Any, name: str = "") -> Iterator[str]:
    """Where `content` is not what the registry's schema has."""
    if isinstance(schema, dict):
        if not isinstance(content, dict):
            yield f"{name}: no object"
            return
        for key in {*schema, *content}:
            if key not in schema or key not in content:
                yield f"{name}.{key}: missing, or not of the schema"
            else:
                yield from problems(content[key], schema[key], f"{name}.{key}")
    elif isinstance(schema, list):
        if not isinstance(content, list):
            yield f"{name}: no list"
            return
        for one in content:
            yield from problems(one, schema[0], name)
    elif not (content is None and schema.endswith("?")) and not isinstance(content, TYPES[schema.removesuffix("?")]):
        yield f"{name}: {content!r}, expected {schema}"


def nulls(content: Any, name: str = "") -> Iterator[str]:
    if isinstance(content, dict):
        for key, value in content.items():
            yield from nulls(value, f"{name}.{key}" if name else key)
    elif content is None or content == []:
        yield name


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_an_entry_of_the_registry_and_says_why_what_is_null(kind: str, exports: Exports) -> None:
    content = read(exports.place / "exports" / kind / PRIVACY)
    entry = {name: content[name] for name in SCHEMA}
    assert list(problems(entry, SCHEMA)) == []
    assert content.keys() == {"notice", "sottovoce", *SCHEMA}
    reasons = content["sottovoce"]["not_stated"]
    detailed = ("privacy_parameters", "privacy_unit", "access_type")  # whose own `_details` say it
    unsaid = [name for name in nulls(entry) if name not in reasons and not any(one in name for one in detailed)]
    assert unsaid == []
    assert all(reasons.values())


def test_the_schema_refuses_what_is_not_in_it(exports: Exports) -> None:
    content = read(exports.place / "exports" / "release" / PRIVACY)
    entry = {name: content[name] for name in SCHEMA}
    del entry["deployment"]["basic"]["name"]
    entry["tier"], entry["dp_flavor"] = "two", "approximate"
    assert len(list(problems(entry, SCHEMA))) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_every_export_of_a_run_passes_its_own_check(kind: str, exports: Exports) -> None:
    found = verify_export(exports.place / "exports" / kind)
    assert len(found.lines) == 5
    assert found.is_proved == (kind in ("release", "silo", "banded", "audited", "signed"))


def test_what_dp_accounting_cannot_bound_is_not_called_proved(
    exports: Exports, sottovoce: Callable[..., Ended]
) -> None:
    done = sottovoce("verify", exports.place / "exports" / "no bound", "--json")
    assert done.code == 0
    said = json.loads(done.out)
    assert said["proved"] is False
    assert "for one speaker inside a silo is NOT proved: dp-accounting" in said["lines"]["Proved"]
    claims = {one["claim"]: one for one in said["claims"]}
    assert claims["epsilon.headline"]["proved"]
    assert claims["epsilon.inside"]["dp_accounting"] == {"delta": 1e-13, "pld": None, "rdp": None}


@pytest.mark.parametrize(("kind", "begins"), [("simulation", "This is a simulation and promises nothing")])
def test_a_simulation_says_so_in_its_first_field_and_states_no_epsilon(
    kind: str, begins: str, exports: Exports
) -> None:
    content = read(exports.place / "exports" / kind / PRIVACY)
    assert next(iter(content)) == "notice"
    assert content["notice"].startswith(begins)
    loss = content["deployment"]["privacy_loss"]
    assert loss["privacy_parameters"] == {"epsilon": None, "delta": None, "rho": None}
    assert loss["privacy_parameters_details"].startswith(begins)
    assert content["sottovoce"]["epsilon"]["of"] == "a release of the same recipe, which this is not"


@pytest.mark.parametrize("kind", ["no noise", "central"])
def test_runs_without_privacy_say_so(kind: str, exports: Exports) -> None:
    content = read(exports.place / "exports" / kind / PRIVACY)
    assert content["notice"].startswith("Not private: nothing is promised to anybody.")
    assert "epsilon" not in content["sottovoce"]


@pytest.mark.parametrize("kind", ["release", "banded", "simulation"])
def test_it_is_the_same_every_time(kind: str, exports: Exports, tmp_path: Path) -> None:
    again = write_export(exports.run(kind), tmp_path / "again")
    first = exports.place / "exports" / kind
    names = sorted(path.name for path in first.iterdir())
    assert names == sorted(path.name for path in again.iterdir())
    for name in names:
        assert (first / name).read_bytes() == (again / name).read_bytes(), name


@pytest.mark.parametrize("kind", ["release", "silo", "banded", "simulation"])
def test_a_statement_and_the_check_say_the_same_numbers_in_the_same_words(kind: str, exports: Exports) -> None:
    run = read_run(kind, exports.run(kind))
    verdict = judge_run(run)
    text = statement_text(run, verdict)
    found = verify_export(exports.place / "exports" / kind)
    assert dict(found.lines)["Stated"] == verdict.headline
    assert len(found.facts) >= 10
    for name, value in found.facts:
        assert f"| {name} | {value} |" in text
    for name in ("ε that counts", "ε by Rényi accounting", "unit of privacy", "noise", "rounds"):
        assert name in dict(found.facts)


def test_a_run_whose_folder_was_changed_is_not_exported(exports: Exports, tmp_path: Path) -> None:
    run = Path(shutil.copytree(exports.run("release"), tmp_path / "run", symlinks=True))
    (run / "config.yaml").write_text((run / "config.yaml").read_text().replace("lr: 0.01", "lr: 0.02"))
    with pytest.raises(InputError, match=r"config.yaml is not the recipe"):
        write_export(run, tmp_path / "model")
    (run / "ledger.jsonl").unlink()
    with pytest.raises(InputError, match=r"ledger.jsonl"):
        write_export(run, tmp_path / "model")


def test_a_converted_model_is_covered_by_digests_and_said_to_be_in_no_ledger(
    exports: Exports, sottovoce: Callable[..., Ended], tmp_path: Path
) -> None:
    """Whatever a target has written, in folders too, and with a config.json that is not ours."""
    folder = tmp_path / "converted"
    (folder / "onnx").mkdir(parents=True)
    (folder / "onnx" / "model.onnx").write_bytes(b"a graph")
    (folder / "config.json").write_text('{"model_type": "wav2vec2"}')
    source = read_export_source(exports.run("release"))
    assert source is not None
    write_guarantee(source, folder, ExportOptions(key=load_signing_key(exports.place / "key")))
    done = sottovoce("verify", folder, "--key", exports.key, "--json")
    assert done.code == 0
    said = json.loads(done.out)
    assert said["proved"]
    assert not said["model"]["in_ledger"]
    assert "made from the run's after step" in said["lines"]["Only asserted"]
    assert "the model after step" not in said["lines"]["Proved"]
    (folder / "onnx" / "model.onnx").write_bytes(b"another graph")
    done = sottovoce("verify", folder)
    assert done.code == 2
    assert "onnx/model.onnx is not the file" in done.err


# Audits.


def test_an_audit_of_a_releases_own_people_does_not_travel(exports: Exports, tmp_path: Path) -> None:
    from sottovoce.audit.recipe import config_digest

    digest = config_digest((exports.run("release") / "config.yaml").read_text())
    own = tmp_path / "own.json"
    own.write_text(json.dumps({**AUDIT, "config_digest": digest}))
    with pytest.raises(InputError, match="of this release's own people"):
        write_export(exports.run("release"), tmp_path / "model", ExportOptions(audit=own))


def test_an_audit_travels_with_its_bounds_and_without_its_tensors(exports: Exports) -> None:
    folder = exports.place / "exports" / "audited"
    (said,) = read(folder / PRIVACY)["sottovoce"]["audits"]
    assert said["lower_bound"] == {"epsilon": 0.02}
    assert "worst_tensor" not in read(folder / "audit.json")
    assert dict(verify_export(folder).lines)["Audit"].startswith("consistent: ε promised 0.1, at least 0.02")


def test_what_is_no_audit_is_refused(exports: Exports, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no audit"):
        write_export(
            exports.run("release"), tmp_path / "m", ExportOptions(audit=exports.run("release") / "inputs.json")
        )


# The commands.


def test_export_and_verify_by_the_command_line(
    exports: Exports, sottovoce: Callable[..., Ended], tmp_path: Path
) -> None:
    out = tmp_path / "model"
    key = exports.place / "key"
    done = sottovoce(
        "export", exports.run("release"), "--out", out, "--sign", key, "--published", "2026-07-01", "--json"
    )
    assert done.code == 0
    written = json.loads(done.out)
    assert written["kind"] == "release"
    assert written["signed"]
    assert written["folder"] == str(out)
    assert read(out / PRIVACY)["deployment"]["basic"]["publication_date"] == "2026-07-01"
    done = sottovoce("verify", out, "--key", exports.key)
    assert done.code == 0
    assert [line.partition(":")[0] for line in done.out.splitlines()] == [
        "Stated",
        "Proved",
        "Only asserted",
        "Audit",
        "Signature",
    ]
    assert "the key that you named" in done.out
    refused = sottovoce("export", exports.run("release"), "--out", out)
    assert refused.code == 2
    assert "is there already" in refused.err


def test_a_model_of_no_run_is_exported_without_a_statement(
    exports: Exports, sottovoce: Callable[..., Ended], tmp_path: Path
) -> None:
    alone = exports.copy("release", tmp_path)
    for name in ("privacy.json", "ledger.jsonl", "recipe.yaml"):
        (alone / name).unlink()
    assert sottovoce("export", alone, "--out", tmp_path / "out").code == 0
    assert not (tmp_path / "out" / PRIVACY).exists()
    refused = sottovoce("verify", tmp_path / "out")
    assert refused.code == 2
    assert "nothing is stated here" in refused.err
    refused = sottovoce("export", alone, "--out", tmp_path / "signed", "--sign", exports.place / "key")
    assert refused.code == 2
    assert "of no run" in refused.err
    assert not (tmp_path / "signed").exists()


def test_a_failure_leaves_no_folder(exports: Exports, sottovoce: Callable[..., Ended], tmp_path: Path) -> None:
    arguments = ("export", exports.run("release"), "--out", tmp_path / "model", "--audit", exports.run("release"))
    assert sottovoce(*arguments).code == 2
    assert list(tmp_path.iterdir()) == []


def test_a_problem_is_data_too(exports: Exports, sottovoce: Callable[..., Ended], tmp_path: Path) -> None:
    folder = exports.copy("release", tmp_path)
    (folder / "recipe.yaml").write_text("about: something else\n")
    done = sottovoce("verify", folder, "--json")
    assert done.code == 2
    said = json.loads(done.out)
    assert said["valid"] is False
    assert "recipe.yaml" in said["problem"]


def test_what_git_and_the_hub_leave_in_a_copy_is_no_matter(exports: Exports, tmp_path: Path) -> None:
    folder = exports.copy("signed", tmp_path)
    (folder / ".git").mkdir()
    (folder / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    (folder / ".gitattributes").write_text("*.safetensors filter=lfs\n")
    assert verify_export(folder).is_proved


def test_a_check_needs_no_torch(exports: Exports) -> None:
    told = (
        "import json, sys; from sottovoce.cli import main\n"
        f"sys.argv = ['sottovoce', 'verify', {str(exports.place / 'exports' / 'signed')!r}]\n"
        "try:\n    main()\nexcept SystemExit as ended:\n    assert not ended.code\n"
        "print(json.dumps(sorted(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True).stdout
    loaded = set(json.loads(found.splitlines()[-1]))
    assert "dp_accounting" in loaded
    assert not {"torch", "jinja2", "matplotlib", "safetensors", "transformers"} & loaded
