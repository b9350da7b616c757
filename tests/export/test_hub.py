"""What is exported for the hub: cards and results as the hub's own library reads them, and nothing private."""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

pytest.importorskip("transformers", reason="the extra hf is not installed")
pytest.importorskip("peft", reason="the extra hf is not installed")
hub = pytest.importorskip("huggingface_hub", reason="the extra hf is not installed")

from tests.guides import DOCS  # noqa: E402
from tests.models.huggingface.tiny_models import write_tiny_model  # noqa: E402
from tests.published import CLOCK, HOST, RARE, SHORTEST, _times, every, machine, packed, people_of, person, still_clock  # noqa: E402
from tests.test_guides import commands  # noqa: E402

from sottovoce.base.errors import InputError  # noqa: E402
from sottovoce.cli import main  # noqa: E402
from sottovoce.data.store import Store  # noqa: E402
from sottovoce.data.text.tokens import CharacterTokens  # noqa: E402
from sottovoce.export.hub import HubNames, export_to_hub  # noqa: E402
from sottovoce.models.family import find_family  # noqa: E402
from sottovoce.models.huggingface.folder import MODELS  # noqa: E402
from sottovoce.models.recogniser import create_recogniser  # noqa: E402
from sottovoce.report.records import read_run  # noqa: E402
from sottovoce.report.verdict import judge_run  # noqa: E402

RECIPE = """
about: tones, federated, from a pretrained model
data: {store: tones}
model: {family: huggingface, from: moonshine, train: "lora(r=2)", silence_seconds: 0.5}
federation:
  steps: 2
  cohort_size: 2
  local: {batch_seconds: 4, lr: 0.1, local_steps: 1}
  server: {optimiser: {name: adam}, schedule: {name: constant, lr: 0.01}}
  privacy: {clip_bound: 0.01, noise_multiplier: 8.0, delta: 1e-3, mode: %s}
  evaluate_every: 1
  checkpoint_every: 1
"""
DATASET = "somebody/tones"


def sottovoce(*words: object) -> int:
    with still_clock(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["sottovoce", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
    return int(ended.value.code or 0)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed(tmp_path_factory.mktemp("stores"), map(person, range(20)))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the base model in it, which states its license, and where exports are written."""
    folder = tmp_path_factory.mktemp("hub")
    base = write_tiny_model("moonshine", folder / "models" / "moonshine")
    (base / "README.md").write_text("---\nlicense: mit\n---\n# A model\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MODELS, str(folder / "models"))
        patch.setattr("sottovoce.report.page.inline_svg", lambda _: "<svg />")
        yield folder


def make_run(mode: str, place: Path, stores: Path) -> Path:
    (place / "tones.yaml").write_text(RECIPE % mode)
    assert sottovoce("run", place / "tones.yaml", "--stores", stores, "--runs", place, "--out", place / mode) == 0
    return place / mode


@pytest.fixture(scope="module")
def release(place: Path, stores: Path) -> Path:
    return make_run("secure", place, stores)


@pytest.fixture(scope="module")
def simulation(place: Path, stores: Path) -> Path:
    return make_run("seeded", place, stores)


@pytest.fixture(scope="module")
def exports(release: Path, place: Path) -> dict[str, Path]:
    """The release as an adapter with all that a user can say of it, and merged with nothing."""
    said = ("--base", "org/base", "--dataset", DATASET, "--date", "2026-01-31")
    assert sottovoce("export", release, "--to", "huggingface", *said, "--out", place / "adapter") == 0
    assert sottovoce("export", release, "--to", "huggingface", "--merged", "--out", place / "whole") == 0
    return {"adapter": place / "adapter", "whole": place / "whole"}


def card_of(folder: Path) -> Any:
    return hub.ModelCard.load(folder / "README.md")


def test_files_are_those_that_others_expect(exports: dict[str, Path]) -> None:
    guarantee = {"privacy.json", "ledger.jsonl", "recipe.yaml"}
    shared = {"README.md", "preprocessor_config.json", "tokenizer.json", "tokenizer_config.json"} | guarantee
    adapter = {"adapter_config.json", "adapter_model.safetensors", ".eval_results/somebody--tones.yaml"}
    whole = {"config.json", "model.safetensors", "generation_config.json"}
    assert dict(every(exports["adapter"])).keys() == shared | adapter
    assert dict(every(exports["whole"])).keys() == shared | whole
    assert {(exports["whole"] / name).stat().st_mode & 0o777 for name in (shared | whole) - guarantee} == {0o644}
    config = json.loads((exports["adapter"] / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["r"], config["lora_alpha"]) == ("org/base", 2, 2)


def test_the_hubs_library_reads_the_card(exports: dict[str, Path], release: Path) -> None:
    data = card_of(exports["adapter"]).data
    results = json.loads((release / "results.json").read_text())["test"]["test"]
    assert data.pipeline_tag == "automatic-speech-recognition"
    assert (data.library_name, data.base_model, data.license, data.language) == ("peft", "org/base", "mit", "en")
    assert (data.datasets, data.metrics) == ([DATASET], ["wer"])
    assert data.tags == ["federated-learning", "differential-privacy"]
    (found,) = data.eval_results
    assert (found.task_type, found.dataset_type, found.dataset_split) == (data.pipeline_tag, DATASET, "test")
    assert (found.metric_type, found.metric_value) == ("wer", round(100 * results["wer"], 2))
    without = card_of(exports["whole"]).data
    assert (without.library_name, without.base_model) == ("transformers", "moonshine")
    assert without.eval_results is None
    assert without.get("datasets") is None


def test_the_hubs_library_reads_the_results(exports: dict[str, Path]) -> None:
    content = yaml.safe_load((exports["adapter"] / ".eval_results" / "somebody--tones.yaml").read_text())
    (entry,) = entries = hub.parse_eval_result_entries(content)
    assert (entry.dataset_id, entry.task_id, entry.date) == (DATASET, "test", "2026-01-31")
    assert entry.value == card_of(exports["adapter"]).data.eval_results[0].metric_value
    assert "word error rate in %, " in entry.notes
    assert hub.eval_result_entries_to_yaml(entries) == content


def test_the_card_says_what_the_runs_verdict_says(exports: dict[str, Path], release: Path, simulation: Path) -> None:
    for run, folder in ((release, exports["adapter"]), (simulation, release.parent / "simulated")):
        if run is simulation:
            assert sottovoce("export", run, "--to", "huggingface", "--out", folder) == 0
        verdict = judge_run(read_run("run", run))
        assert f"**{verdict.headline}**" in (folder / "README.md").read_text()
    text = (exports["adapter"] / "README.md").read_text()
    assert "A release with a " in text
    assert "8 utterances of 4 speakers" in text
    assert "texts compared in lower case without punctuation (rules sottovoce 1)" in text
    assert "on data that are not named here, split `test`" in (exports["whole"] / "README.md").read_text()
    assert card_of(release.parent / "simulated").data.tags == ["federated-learning", "differential-privacy-simulation"]


def test_nothing_private_is_in_the_export_of_a_release(
    exports: dict[str, Path], release: Path, simulation: Path, place: Path, stores: Path
) -> None:
    """Every byte: people in any spelling, the clock, host and folders."""
    words = people_of(Store(stores / "tones"), more=[RARE]) | machine(place, stores, release)
    for folder in exports.values():
        assert find_words(folder, words) == set()
        for file, content in every(folder):
            assert list(_times(file.encode() + b"\n" + content, CLOCK, CLOCK)) == [], file
    assert {path.lstat().st_mtime for folder in exports.values() for path in folder.rglob("*")} == {315_532_800}
    # The same search finds people where they are named: a simulation names those it was tested on.
    assert {(HOST.encode() in words), ("results.json", "corpus-voice-0004") in find_words(simulation, words)} == {True}


def find_words(folder: Path, words: Mapping[bytes, str]) -> set[tuple[str, str]]:
    """Files and what stands in their names or bytes; a short word, such as some hosts', would be there by chance."""
    long = {word: means for word, means in words.items() if len(word) >= SHORTEST}
    return {
        (file, means)
        for file, content in every(folder)
        for word, means in long.items()
        if word in file.encode() or word in content
    }


def test_exporting_again_writes_the_same_bytes(exports: dict[str, Path], release: Path, place: Path) -> None:
    again = place / "again" / "whole"
    assert sottovoce("export", release, "--to", "huggingface", "--merged", "--out", again) == 0
    assert dict(every(again)) == dict(every(exports["whole"]))


def test_a_rate_is_that_of_the_best_model_alone(release: Path, place: Path) -> None:
    best = (release / "model").resolve()
    other = next(one for one in sorted((release / "checkpoints").iterdir()) if one.resolve() != best)
    assert sottovoce("export", other, "--to", "huggingface", "--out", place / "other") == 0
    assert "\nNot measured.\n" in (place / "other" / "README.md").read_text()
    assert sottovoce("export", release / "model", "--to", "huggingface", "--out", place / "best") == 0
    assert "8 utterances of 4 speakers" in (place / "best" / "README.md").read_text()


def test_a_model_without_its_run_promises_nothing(release: Path, place: Path) -> None:
    assert sottovoce("export", release, "--merged", "--out", place / "own") == 0
    assert sottovoce("export", place / "own", "--to", "huggingface", "--out", place / "runless") == 0
    assert "**Nothing is promised: the model came without its run" in (place / "runless" / "README.md").read_text()
    assert card_of(place / "runless").data.get("tags") is None


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--base", "/home/somebody/models/base"], "base=/home/somebody/models/base: expected a name on the hub"),
        (["--dataset", "../stores/tones"], "dataset=../stores/tones: expected a name on the hub, or STORE=NAME"),
        (["--dataset", "other=org/name"], "dataset=other=org/name: expected one of the run's stores: tones"),
        (["--dataset", "org/one", "--dataset", "org/two"], "dataset=org/two: org/one is the same store"),
        (["--date", "yesterday"], "date=yesterday: expected a date such as 2026-01-31"),
        (["--to", "sottovoce", "--base", "org/name"], "--base, --dataset and --date are for a card"),
    ],
)
def test_what_cannot_be_said_is_refused(
    words: list[str], why: str, release: Path, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sottovoce("export", release, "--to", "huggingface", *words, "--out", place / "refused") == 2
    assert why in capsys.readouterr().err
    assert not (place / "refused").exists()


def test_other_families_are_refused(tmp_path: Path) -> None:
    family = find_family("ctc_transformer")
    tokens = CharacterTokens("abc")
    settings = family.Options(size="tiny").settings(tokens=tokens.size + 1)
    own = create_recogniser(family, settings, tokens, language="en", generator=torch.Generator())
    with pytest.raises(InputError, match="models of family=ctc_transformer are of no class of transformers"):
        export_to_hub(tmp_path, own, tmp_path / "out", names=HubNames())


def test_the_guides_commands_do_what_it_says(
    release: Path, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    own = [words for words in commands(DOCS / "guides" / "pretrained-models.md") if "huggingface" in words]
    assert len(own) == 2
    for words in own:
        assert sottovoce(*(str(release) if word == "runs/mine" else word for word in words)) == 0
    assert (tmp_path / "mine-adapter" / "adapter_config.json").exists()
    assert card_of(tmp_path / "mine").data.eval_results[0].dataset_type == "google/speech_commands"
