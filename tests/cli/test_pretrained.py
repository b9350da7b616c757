"""Pretrained models, as a user meets them: every command on what a recipe with one has trained."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import soundfile
from tests.pretrained import write_pretrained

pytest.importorskip("transformers", reason="the extra hf is not installed")
pytest.importorskip("peft", reason="the extra hf is not installed")

import huggingface_hub

from sottovoce.base.seeds import stream
from sottovoce.data.corpora.corpus import SAMPLE_RATE
from sottovoce.models.huggingface import folder

Command = Callable[..., Any]

CASES = [
    ("moonshine", "lora(r=2)", None),
    ("wav2vec2", "lora(r=2)", "ctc"),
    *(
        pytest.param(*case, marks=pytest.mark.long)
        for case in (
            ("moonshine", "norms", "ctc"),
            ("whisper", "lora(r=2, factors=b)", None),
            ("parakeet_ctc", "norms", None),
            ("wav2vec2-bert", "all", None),
            ("wavlm", "lora(r=2)", None),
            ("hubert", "head", None),
            ("xls-r", "lora(r=2)", None),
        )
    ),
]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(("kind", "train", "head"), CASES)
def test_every_command_takes_a_pretrained_model(
    kind: str, train: str, head: str | None, here: Path, sottovoce: Command
) -> None:
    write_pretrained(here, kind, train=train, head=head)
    soundfile.write(here / "a.wav", stream(1, "noise").normal(0, 0.1, 3 * SAMPLE_RATE), SAMPLE_RATE)

    def run(*arguments: object) -> str:
        ended = sottovoce(*arguments)
        assert ended.code == 0, ended.err
        return str(ended.out)

    run("run", "federated.yaml", "--out", "run")
    again = json.loads(run("run", "federated.yaml", "--out", "run", "--resume", "--json"))
    assert again == json.loads((here / "run/results.json").read_text())
    run("run", "central.yaml", "--out", "central")
    run("run", "federated.yaml", "--out", "release", "federation.privacy.mode=secure")
    run("evaluate", "run", "--on", "stores/tones:test")
    run("compare", "run", "central", "--on", "stores/tones:test")
    assert "base model" in run("probe", "run", "--on", "stores/tones:train")
    run("audit", "federated.yaml", "--canaries", "60", "--rounds", "2", "--out", "run")
    run("report", "run", "--out", "report.html", "--statement", "statement.md")
    run("ledger", "run")
    run("ledger", "release")
    run("run", "federated.yaml", "--estimate")
    shutil.rmtree(here / "base")  # a saved model is whole without it
    run("transcribe", "run", "a.wav")
    part = sottovoce("export", "run", "--out", "part")
    assert part.code == 0
    assert ("--merged writes a whole one" in part.err) == (here / "part/part.safetensors").exists()
    has_adapter = head is None and train.startswith("lora") and kind != "wavlm"  # where peft's have no effect
    assert (here / "part/adapter_model.safetensors").exists() == has_adapter
    run("export", "run", "--merged", "--out", "whole")
    texts = [json.loads(run("transcribe", model, "a.wav", "--json"))["transcripts"] for model in ("run", "whole")]
    assert texts[0] == texts[1]

    for name in ("run", "central", "release"):
        inputs = json.loads((here / name / "inputs.json").read_text())
        assert inputs["base model name"] == "base"
        assert "base model revision" not in inputs
        assert len(inputs["base model sha256 of model.safetensors"]) == 64
        assert "base model sha256 of config.json" in inputs
    digest = inputs["base model sha256 of model.safetensors"]
    for page in ("report.html", "statement.md"):
        assert digest in (here / page).read_text()
    statement = (here / "statement.md").read_text()
    assert "The data that the base model (base) was trained on before it came here" in statement.split("## 3.")[1]

    refused = sottovoce("transcribe", "run", "a.wav", "--stream")
    assert refused.code == 2
    assert "models of family=huggingface need whole utterances: expected a causal (streaming) one" in refused.err


def test_a_base_model_that_was_changed_is_refused_on_resume(here: Path, sottovoce: Command) -> None:
    write_pretrained(here, "moonshine")
    assert sottovoce("run", "central.yaml", "--out", "run").code == 0
    (here / "run/results.json").unlink()
    shutil.rmtree(here / "base")
    from tests.models.huggingface.tiny_models import write_tiny_model

    write_tiny_model("moonshine", here / "base", seed=1)
    ended = sottovoce("run", "central.yaml", "--out", "run", "--resume")
    assert ended.code == 2
    assert "base model sha256 of model.safetensors was" in " ".join(ended.err.split())


@pytest.mark.parametrize(("kind", "line"), [("moonshine", "model_type=moonshine without alignment_heads do not say")])
def test_subtitles_of_words_without_times_are_refused(kind: str, line: str, here: Path, sottovoce: Command) -> None:
    write_pretrained(here, kind)
    assert sottovoce("run", "central.yaml", "--out", "run").code == 0
    soundfile.write(here / "a.wav", stream(1, "noise").normal(0, 0.1, SAMPLE_RATE), SAMPLE_RATE)
    ended = sottovoce("transcribe", "run", "a.wav", "--format", "srt")
    assert ended.code == 2
    assert line in " ".join(ended.err.split())
    ended = sottovoce("transcribe", "run", "a.wav", "--format", "json")
    assert ended.code == 0
    assert "words have no times" in ended.err
    assert line in json.loads(ended.out)["transcripts"][0]["untimed"]


# Names on the hub.


@pytest.fixture
def hub(here: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A hub whose one model is that of `write_pretrained`; what it is asked for."""
    asked: list[dict[str, Any]] = []
    commit = "c" * 40

    def snapshot_download(name: str, **options: Any) -> str:
        asked.append({"name": name, **options})
        place = here / "hub" / commit
        shutil.copytree(here / "base", place, dirs_exist_ok=True)
        return str(place)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(folder, "_download", folder._download.__wrapped__)  # not what another test was given
    return asked


def test_a_name_on_the_hub_is_one_commit(here: Path, sottovoce: Command, hub: list[dict[str, Any]]) -> None:
    write_pretrained(here, "moonshine")
    arguments = ["run", "central.yaml", "--out", "run", "model.from=somebody/moonshine", "model.revision=v1"]
    ended = sottovoce(*arguments)
    assert ended.code == 0, ended.err
    inputs = json.loads((here / "run/inputs.json").read_text())
    assert inputs["base model name"] == "somebody/moonshine"
    assert inputs["base model revision"] == "c" * 40
    assert {(one["name"], one["revision"]) for one in hub} == {("somebody/moonshine", "v1")}
    wanted = hub[0]["allow_patterns"]
    assert "config.json" in wanted
    assert "model.safetensors" in wanted
    assert not any(name.endswith((".bin", ".py", ".pt")) or name.startswith("*") for name in wanted)
    assert json.loads((here / "run/model/config.json").read_text())["settings"]["source"] == "somebody/moonshine"


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("nobody/nothing", "and the hub did not give it (ConnectError: Name or service not known)"),
        ("nothing", "model: from=nothing: no folder nothing"),
    ],
)
def test_without_network_a_name_on_the_hub_is_refused_in_one_line(
    name: str, line: str, here: Path, sottovoce: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What their client raises where there is no network; it tries to connect once, for ten seconds at most."""
    write_pretrained(here, "moonshine")

    def snapshot_download(*_: Any, **__: Any) -> str:
        why = "Got: ConnectError: Name or service not known\nAn error happened while trying to locate the files"
        raise huggingface_hub.errors.LocalEntryNotFoundError(why)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    ended = sottovoce("run", "central.yaml", "--out", "run", f"model.from={name}")
    assert ended.code == 2
    said = " ".join(ended.err.split())
    assert line in said
    assert "Traceback" not in said
    assert said.count("error:") == 1
