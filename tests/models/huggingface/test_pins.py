"""Base models are found by the digest of their files, and by nothing else."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed (the extra `hf`)")

from tests.models.huggingface.tiny_models import write_tiny_model

from sottovoce.base.errors import InputError
from sottovoce.models.huggingface import folder as folders
from sottovoce.models.huggingface.pins import (
    Pin,
    describe_base_model,
    find_base_model,
    parse_pin,
    pin_options,
)
from sottovoce.models.huggingface.settings import Options


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model("moonshine", tmp_path_factory.mktemp("written") / "tiny-one", seed=71)


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty $SOTTOVOCE_MODELS, and no way to the hub."""

    def asked(name: str, **_: Any) -> None:
        raise AssertionError(f"{name} was imported to fetch something")

    monkeypatch.setattr(folders, "import_extra", asked)
    monkeypatch.setenv(folders.MODELS, str(tmp_path / "models"))
    (tmp_path / "models").mkdir()
    return tmp_path / "models"


def test_a_pin_has_the_last_part_of_a_path_and_is_the_same_wherever_the_files_lie(tiny: Path, tmp_path: Path) -> None:
    pinned = pin_options(Options(source=str(tiny), train="norms"))
    name, digest, trained = describe_base_model(pinned)
    assert (name, trained) == ("tiny-one", "norms")
    assert str(tiny.parent) not in pinned.source
    assert pin_options(pinned) is pinned
    moved = shutil.copytree(tiny, tmp_path / "_with space")
    (moved / "README.md").write_text("what is not read does not count")
    assert parse_pin(pin_options(Options(source=str(moved))).source) == Pin("with-space", digest)


@pytest.mark.parametrize("changed", ["config.json", "model.safetensors", "tokenizer.json", "preprocessor_config.json"])
def test_every_file_that_is_read_counts(tiny: Path, tmp_path: Path, changed: str) -> None:
    other = shutil.copytree(tiny, tmp_path / "tiny-one")
    content = (other / changed).read_bytes()
    (other / changed).write_bytes(
        content[:-1] + bytes([content[-1] ^ 1]) if changed.startswith("model") else content + b" "
    )
    assert pin_options(Options(source=str(other))) != pin_options(Options(source=str(tiny)))


def test_files_are_found_under_any_name_and_a_name_finds_no_other_files(tiny: Path, models: Path) -> None:
    pinned = pin_options(Options(source=str(tiny)))
    other = write_tiny_model("moonshine", models / "tiny-one", seed=72)  # as the invitation calls it
    with pytest.raises(InputError, match=r"no folder with its files .* is in .SOTTOVOCE_MODELS.*--base FOLDER"):
        find_base_model(pinned, None)
    (models / "unusable").mkdir()
    (models / "unusable" / "config.json").write_text(json.dumps({"auto_map": {}}))
    shutil.copytree(tiny, models / "zzz")
    find_base_model(pinned, None)
    assert pinned.folder.path.name == "zzz"
    assert pinned.settings(tokens=2).source == "zzz"
    with pytest.raises(InputError, match="another model, or another version of it"):
        find_base_model(pinned, other)


def test_a_folder_that_was_given_is_opened_and_not_when_it_has_changed(
    tiny: Path, models: Path, tmp_path: Path
) -> None:
    own = shutil.copytree(tiny, tmp_path / "own")
    (own / "generation_config.json").write_text("{}")  # files that no other test has given
    pinned = pin_options(Options(source=str(own)))
    with pytest.raises(InputError, match=re.escape("give `join` its --base FOLDER")):
        find_base_model(pinned, None)
    find_base_model(pinned, own)
    assert pinned.folder.path == own
    (own / "generation_config.json").write_text("{ }")
    with pytest.raises(InputError, match="no folder with its files"):
        _ = pinned.folder


@pytest.mark.parametrize("folder", ["code", "pickled", "adapter", "nothing"])
def test_a_folder_is_given_under_the_rules_of_any_folder(tiny: Path, models: Path, tmp_path: Path, folder: str) -> None:
    own = shutil.copytree(tiny, tmp_path / folder)
    pinned = pin_options(Options(source=str(own)))
    if folder == "code":
        config = json.loads((own / "config.json").read_text())
        (own / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModel": "code.Model"}}))
    elif folder == "pickled":
        (own / "model.safetensors").rename(own / "pytorch_model.bin")
    elif folder == "adapter":
        (own / "adapter_config.json").write_text("{}")
    else:
        shutil.rmtree(own)
    refusals = r"never run|only safetensors are read|expected the base model alone|with a config.json"
    with pytest.raises(InputError, match=refusals):
        find_base_model(pinned, own)


DIGEST = "@sha256:" + 64 * "0"


@pytest.mark.parametrize(
    "source",
    [
        *("/etc", "../x", ".", "", "tiny", "openai/whisper-tiny", "~/models", "file:///etc", "\x00"),
        *(f"/etc{DIGEST}", f"../x{DIGEST}", f"a/b{DIGEST}", f".{DIGEST}", f"..{DIGEST}", DIGEST, f"tiny{DIGEST}/.."),
        *(f"tiny{DIGEST}\n", f"tiny{DIGEST[:-1]}", f"{101 * 'a'}{DIGEST}", f"tiny{DIGEST[:-1]}A"),
    ],
)
def test_what_is_no_pin_is_refused_and_nothing_opened(
    source: str, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(*_: Any, **__: Any) -> None:
        raise AssertionError("a folder was looked for")

    monkeypatch.setattr(folders, "find_folder", opened)
    with pytest.raises(InputError, match="a client opens no folder that a server names, and fetches nothing") as raised:
        describe_base_model(Options(source=source))
    assert "\n" not in str(raised.value)


def test_a_pin_with_a_revision_is_refused() -> None:
    assert describe_base_model(Options(source=f"tiny{DIGEST}")).name == "tiny"
    with pytest.raises(InputError, match="no revision"):
        describe_base_model(Options(source=f"tiny{DIGEST}", revision="main"))
