"""What the guides show is what happens: their programs run, their recipes load, their commands exist."""

import math
import os
import re
import runpy
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch
from tests.guides import DOCS, blocks
from tests.models.huggingface.tiny_models import write_tiny_model
from typer.main import get_command
from typer.testing import CliRunner

from sottovoce.base.seeds import stream
from sottovoce.cli import app
from sottovoce.config import load_experiment
from sottovoce.data.corpora.corpus import SAMPLE_RATE
from sottovoce.models.recogniser import load_recogniser
from sottovoce.network.node.ledger import NodeLedger

GUIDES = sorted((DOCS / "guides").glob("*.md"))
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")


def commands(guide: Path) -> list[list[str]]:
    """The arguments of every `sottovoce` in a guide."""
    found = []
    for block in blocks(guide, "bash"):
        for line in block.content.splitlines():
            words = shlex.split(line, comments=True)
            start = words[:3] == ["python", "-m", "sottovoce"]
            assert start or words[:1] == ["sottovoce"], f"{guide.name}: a command of something else: {line}"
            found.append(words[3 if start else 1 :])
    return found


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the guide's files, from which its reader works."""
    own = blocks(request.param, "python", "yaml")
    for block in own:
        (tmp_path / block.file).write_text(block.content, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for block in own:
        sys.modules.pop(block.file.removesuffix(".py"), None)


def guides_with(*languages: str) -> Any:
    chosen = [guide for guide in GUIDES if blocks(guide, *languages)]
    return pytest.mark.parametrize(
        ("guide", "folder"), [(guide, guide) for guide in chosen], indirect=["folder"], ids=[g.stem for g in chosen]
    )


def test_the_guides_are_found() -> None:
    assert len(GUIDES) >= 5
    assert sum(len(blocks(guide, "python")) for guide in GUIDES) >= 4


OF_EXTRAS = {"flwr": "flower or network", "sklearn": "analysis or dev"}


@guides_with("python")
def test_programs_run(guide: Path, folder: Path) -> None:
    for block in blocks(guide, "python"):
        for module in (name for name in OF_EXTRAS if f"from {name}" in block.content):
            pytest.importorskip(module, reason=f"{block.file} needs the extra {OF_EXTRAS[module]}")
        # By its whole path, as Python has it: processes that a program starts look for it again.
        runpy.run_path(str(folder / block.file), run_name="__main__")


@pytest.mark.parametrize("name", ["my_optimiser.py", "my_clipping.py", "my_people.py"])
def test_an_extension_takes_forty_lines_at_most(name: str) -> None:
    (block,) = [b for b in blocks(DOCS / "guides" / "extending.md", "python") if b.file == name]
    assert len(block.content.splitlines()) <= 40


def test_a_family_takes_a_hundred_lines_at_most() -> None:
    (block,) = blocks(DOCS / "guides" / "your-own-model.md", "python")
    assert len(block.content.splitlines()) <= 100


@pytest.mark.parametrize("folder", [DOCS / "guides" / "your-own-model.md"], indirect=True)
def test_the_guides_own_model_is_trained_privately_evaluated_and_used(folder: Path) -> None:
    """The page's recipe as `--smoke` runs it, and what comes out of it by the page's other commands."""
    run = ["run", "gru.yaml", "--smoke", "--out", "runs"]
    for words in (
        run,
        ["evaluate", "runs/gru", "--family", "gru_ctc:FAMILY", "--on", "stores/smoke:test"],
        ["ledger", "runs/gru"],
    ):
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.output
    assert load_recogniser("runs/gru").family.name == "gru_ctc:FAMILY"
    soundfile.write(folder / "digits.wav", stream(1, "noise").normal(0, 0.1, SAMPLE_RATE), SAMPLE_RATE)
    result = CliRunner().invoke(app, ["transcribe", "runs/gru", "digits.wav", "--family", "gru_ctc:FAMILY"])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("folder", [DOCS / "guides" / "your-own-corpus.md"], indirect=True)
def test_a_corpus_of_ones_own_is_prepared_trained_compared_and_used(folder: Path) -> None:
    """The page's tables with recordings of noise, its recipe as `--smoke` runs it, and its other commands on that."""
    people = ["ann", "ben", *(f"speaker-{n}" for n in range(14))]
    rows = [(name, f"{name}-1.flac", "Turn the lights off, please.") for name in people]
    (folder / "recordings").mkdir()
    for name, path, _ in rows:
        soundfile.write(folder / "recordings" / path, stream(1, name).normal(0, 0.1, SAMPLE_RATE), SAMPLE_RATE)
    for table, between, header in (
        ("people.tsv", "\t", ("client_id", "path", "sentence")),
        ("people.csv", ",", ("speaker", "file", "text")),
    ):
        quoted = [tuple(f'"{cell}"' if "," in cell and between == "," else cell for cell in row) for row in rows]
        lines = [between.join(row) for row in (header, *quoted)]
        (folder / "recordings" / table).write_text("\n".join(lines) + "\n", encoding="utf-8")
    own = commands(DOCS / "guides" / "your-own-corpus.md")
    own = [words for words in own if words[:2] not in (["prepare", "librispeech"], ["prepare", "commonvoice"])]
    assert {words[0] for words in own} == {"prepare", "stats", "run", "compare", "evaluate", "report", "transcribe"}
    places = {
        "runs/private": "smoke/private",
        "runs/no-noise": "other/private",
        "stores/mine:test": "stores/smoke:test",
    }
    for words in own:
        used = [places.get(word, word) for word in words]
        if words[0] == "run":
            place = "other" if "--out" in words else "smoke"
            used = ["run", "private.yaml", *(word for word in words if "=" in word), "--smoke", "--out", place]
        result = CliRunner().invoke(app, used)
        assert result.exit_code == 0, result.output


@pytest.mark.parametrize("folder", [DOCS / "guides" / "extending.md"], indirect=True)
def test_ideas_of_ones_own_are_run_side_by_side(folder: Path) -> None:
    (words,) = [words for words in commands(DOCS / "guides" / "extending.md") if "--smoke" in words]
    result = CliRunner().invoke(app, [*words, "--out", "runs"])
    assert result.exit_code == 0, result.output
    recipes = [path.read_text(encoding="utf-8") for path in folder.glob("runs/**/config.yaml")]
    for own in ("my_clipping:Smooth", "my_optimiser:Yogi"):
        assert any(own in recipe for recipe in recipes)


@pytest.mark.parametrize("folder", [DOCS / "guides" / "joint-ctc-attention.md"], indirect=True)
def test_a_model_with_attention_is_trained_evaluated_in_three_ways_and_used(folder: Path) -> None:
    """The page's private run as `--smoke` makes it, and the page's other commands on what comes of it."""
    soundfile.write(folder / "recording.flac", stream(1, "noise").normal(0, 0.1, SAMPLE_RATE), SAMPLE_RATE)
    own = commands(DOCS / "guides" / "joint-ctc-attention.md")
    result = CliRunner().invoke(app, ["run", "demo-crdnn/private", "--smoke", "--out", "runs"])
    assert result.exit_code == 0, result.output
    places = {
        "runs/demo-crdnn-central": "runs/demo-crdnn-private",
        "runs/demo-crdnn/no-noise": "runs/demo-crdnn-private",
        "runs/demo-crdnn/private": "runs/demo-crdnn-private",
        "stores/demo-crowd:test": "stores/smoke:test",
    }
    used = [[places.get(word, word) for word in words] for words in own if words[0] != "run"]
    assert {words[0] for words in used} == {"evaluate", "transcribe", "report", "ledger"}
    for words in used:
        result = CliRunner().invoke(app, list(dict.fromkeys(words)))
        assert result.exit_code == 0, result.output


@pytest.mark.parametrize("folder", [DOCS / "guides" / "speech-without-text.md"], indirect=True)
def test_an_encoder_is_trained_without_texts_probed_and_made_a_recogniser_that_streams(folder: Path) -> None:
    """The page's two recipes as `--smoke` runs them, one stage after the other, and the page's other commands."""
    noise = stream(1, "noise").normal(0, 0.1, SAMPLE_RATE)
    soundfile.write(folder / "recording.flac", noise, SAMPLE_RATE)
    places = {
        "runs/benchmark-ramesh-pretraining-federated": "runs/my-encoder",
        "runs/benchmark-ramesh-start-federated": "runs/my-recogniser",
        "stores/benchmark-ramesh-crowd:test": "stores/smoke:test",
    }
    own = [[places.get(word, word) for word in words] for words in commands(DOCS / "guides" / "speech-without-text.md")]
    used = [words for words in own if words[0] in ("probe", "transcribe")]
    assert len(used) == 3
    for words in (["run", "my-recogniser.yaml", "--smoke", "--out", "runs"], *used):
        result = CliRunner().invoke(app, words, input=(noise * 2**15).astype("<i2").tobytes())
        assert result.exit_code == 0, result.output
    assert load_recogniser("runs/my-encoder").family.name == "cpc"
    assert load_recogniser("runs/my-recogniser").family.name == "transducer"


@pytest.mark.parametrize("folder", [DOCS / "guides" / "for-whoever-signs.md"], indirect=True)
def test_whoever_signs_gets_from_a_release_to_a_statement(folder: Path) -> None:
    """The page's release as `--smoke` makes it, and the page's other commands on what comes of it."""
    own = commands(DOCS / "guides" / "for-whoever-signs.md")
    (release,) = [words for words in own if "federation.privacy.mode=secure" in words]
    result = CliRunner().invoke(app, [*release[:-1], "runs", "--smoke"])
    assert result.exit_code == 0, result.output
    places = {f"runs/{name}": "runs/demo-private" for name in ("rehearsal", "release")}
    used = [[places.get(word, word) for word in words] for words in own if words[0] in ("report", "ledger")]
    assert len(used) == 4
    for words in used:
        result = CliRunner().invoke(app, list(dict.fromkeys(words)))
        assert result.exit_code == 0, result.output
    for page in ("statement.md", "report.html"):  # of a stand-in, for which nobody may sign
        said = (folder / page).read_text()
        assert "Not private: nothing is promised to anybody." in said
        assert "are the stand-in" in said


@pytest.mark.parametrize("folder", [DOCS / "guides" / "verifying-a-model.md"], indirect=True)
def test_a_model_is_handed_over_and_verified(folder: Path) -> None:
    """The page's release as `--smoke` makes it, and the page's other commands on what comes of it."""
    own = commands(DOCS / "guides" / "verifying-a-model.md")
    assert [words[0] for words in own] == ["keys", "run", "export", "verify", "verify", "verify"]
    (release,) = [words for words in own if words[0] == "run"]
    at = release.index("--out")
    smoke = [*release[:at], "--out", "runs", "--smoke", *release[at + 2 :]]
    places = {"runs/release": "runs/demo-private"}
    said = ""
    for words in own:
        words = smoke if words is release else [places.get(word, word) for word in words]
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.output
        said += result.output
    assert "are the stand-in" in said  # for which nobody may vouch
    assert "the key that you named" in said
    (shown,) = [block.content for block in blocks(DOCS / "guides" / "verifying-a-model.md", "")]
    names = [line.partition(":")[0] for line in shown.splitlines()]
    assert all(f"{name}: " in said for name in names)
    assert len(names) == 5


@pytest.mark.parametrize("folder", [DOCS / "guides" / "taking-part.md"], indirect=True)
def test_people_who_take_part_can_do_what_their_page_says(folder: Path) -> None:
    """All of its commands but joining, for which there would have to be a server."""
    said = []
    for words in commands(DOCS / "guides" / "taking-part.md"):
        if words[0] == "join":  # what somebody who joins does, and what becomes of it
            ledger = NodeLedger(folder / "keys" / "mine" / "home")
            ledger.accept(bytes(32))
            ledger.close()
            continue
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.output
        said.append(result.output)
    assert f"accepted {'00' * 32}" in said[1]
    result = CliRunner().invoke(app, ["node", "show", "keys/mine/home"])
    assert result.output.startswith("keys/mine/home: left for good\n")


PRETRAINED = DOCS / "guides" / "pretrained-models.md"


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("folder", [PRETRAINED], indirect=True)
def test_a_pretrained_model_is_tuned_privately_audited_and_exported(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page's commands in order, with few people and rounds: real words and the real model where they are there."""
    pytest.importorskip("peft", reason="the extra hf is not installed")
    import peft
    import transformers

    write_words(folder / "recordings")
    shutil.copy(next((folder / "recordings/clips").iterdir()), folder / "recording.wav")
    base = Path(os.environ.get("SOTTOVOCE_MODELS", "nowhere")) / "moonshine-tiny-en"
    if not base.is_dir():
        base = write_tiny_model("moonshine", folder / "models/moonshine-tiny-en")
        monkeypatch.setenv("SOTTOVOCE_MODELS", str(folder / "models"))
    few = {
        "prepare": {"dev=100,test=200": "dev=3,test=3"},
        "run": {"words.yaml": ["words.yaml", "federation.steps=2", "federation.cohort_size=4"]},
        "audit": {"words.yaml": ["words.yaml", "federation.steps=2", "federation.cohort_size=4", "--canaries=40"]},
    }
    own = [words for words in commands(PRETRAINED) if "huggingface" not in words]  # tests/export/test_hub.py has those
    assert [words[0] for words in own] == ["prepare", "run", "report", "evaluate", "transcribe", "audit", "export"]
    for words in own:
        chosen = [few.get(words[0], {}).get(word, word) for word in words]
        used = [word for one in chosen for word in ([one] if isinstance(one, str) else one)]
        result = CliRunner().invoke(app, used)
        assert result.exit_code == 0, result.output
    assert "The data that the base model (moonshine-tiny-en)" in (folder / "statement.md").read_text()

    (program,) = blocks(PRETRAINED, "py")
    found: dict[str, Any] = {"FOLDER_OF_MOONSHINE": base}
    exec(program.content, found)
    assert isinstance(found["model"], peft.PeftModel)
    # The same outputs as the run's own model, whose corrections are added to its matrices.
    ours = load_recogniser("runs/words").parameters
    merged = transformers.AutoModelForSpeechSeq2Seq.from_pretrained(base)
    theirs = found["model"].merge_and_unload().state_dict()
    moved = [name for name, tensor in merged.state_dict().items() if not torch.equal(tensor, theirs[name])]
    assert len(moved) >= 4
    for name in moved:
        torch.testing.assert_close(theirs[name], ours[name], rtol=1e-5, atol=1e-6)


def write_words(place: Path, *, people: int = 12) -> None:
    """A table of words beside `clips`: real ones of so many people, or noise where there are none."""
    (place / "clips").mkdir(parents=True)
    real = Path(os.environ.get("SOTTOVOCE_DATA", "nowhere")) / "speech-commands-3w"
    rows = [("client_id", "path", "sentence")]
    if real.is_dir():
        lines = [line.split("\t")[:3] for line in (real / "train.tsv").read_text(encoding="utf-8").splitlines()[1:]]
        chosen = list(dict.fromkeys(name for name, _, _ in lines))[:people]
        for name, path, text in ((name, path, text) for name, path, text in lines if name in chosen):
            shutil.copy(real / "clips" / path, place / "clips")
            rows.append((name, path, text))
    else:
        for number in range(people):
            path = f"{number}.wav"
            soundfile.write(place / "clips" / path, stream(1, path).normal(0, 0.1, SAMPLE_RATE), SAMPLE_RATE)
            rows.append((f"speaker-{number}", path, ("bed", "cat", "dog")[number % 3]))
    (place / "words.tsv").write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8")


@guides_with("yaml")
def test_recipes_load(guide: Path, folder: Path) -> None:
    for block in blocks(guide, "yaml"):
        load_experiment(block.file)


@guides_with("bash")
def test_commands_and_their_options_exist(guide: Path, folder: Path) -> None:
    for arguments in commands(guide):
        command: Any = get_command(app)
        words = list(arguments)
        while below := getattr(command, "commands", None):
            assert words[0] in below, f"sottovoce {' '.join(arguments)}: there is no {words[0]!r}"
            command = below[words.pop(0)]
        given, _, _ = command.make_parser(command.context_class(command)).parse_args(words)
        if command.name == "run":
            _check_recipe(given, guide)


def _check_recipe(given: dict[str, Any], guide: Path) -> None:
    """A run's recipe must load with its overrides."""
    name = given["recipe"]
    if name.endswith(".yaml"):
        assert name in [block.file for block in blocks(guide, "yaml")], f"{guide.name} runs {name} and does not show it"
    overrides = given["overrides"]
    load_experiment(name, overrides if isinstance(overrides, list) else ())  # click has a value of its own for none


PLANS = [
    (words, output.content)
    for guide in GUIDES
    for block, output in zip(blocks(guide), blocks(guide)[1:], strict=False)
    if block.language == "bash" and output.language == "" and (words := shlex.split(block.content))[1] == "plan"
]


@pytest.mark.parametrize(("words", "shown"), PLANS)
def test_plans_print_what_the_guide_shows(words: list[str], shown: str) -> None:
    """Numbers to one in 100,000: the accountants stand on libraries whose last digits differ between versions."""
    result = CliRunner().invoke(app, words[1:], env={"COLUMNS": "200"})
    printed = [line.split() for line in result.output.splitlines()]
    for line in shown.splitlines():
        assert any(same_words(line.split(), found) for found in printed), f"{line!r} is not in\n{result.output}"


def same_words(shown: list[str], printed: list[str], *, tolerance: float = 1e-5) -> bool:
    def same(one: str, other: str) -> bool:
        try:
            numbers = [float(word.rstrip(",;").replace(",", "")) for word in (one, other)]
        except ValueError:
            return one == other
        return math.isclose(*numbers, rel_tol=tolerance)

    return len(shown) == len(printed) and all(map(same, shown, printed))


@pytest.mark.parametrize("page", [*GUIDES, *sorted((DOCS / "decisions").glob("*.md"))], ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    broken = [link for link in LINK.findall(page.read_text(encoding="utf-8")) if not (page.parent / link).exists()]
    assert not broken, f"{page.name}: {broken}"
