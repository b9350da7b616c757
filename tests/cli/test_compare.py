"""The command line from two models to the difference between them, as a user types it."""

import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.tones import pack_tones

from sottovoce.base.seeds import torch_stream
from sottovoce.data.text.tokens import CharacterTokens
from sottovoce.models.recogniser import create_recogniser, save_recogniser
from sottovoce.models.transformer import FAMILY
from sottovoce.models.transformer.settings import Settings

Command = Callable[..., Any]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two untrained models, a store with six people to test on, and another with other people."""
    place = tmp_path_factory.mktemp("place")
    tokens = CharacterTokens("abcdefghijklmnopqrstuvwxyz '-")
    for seed, name in enumerate(("a", "b")):
        settings = Settings(layers=1, width=32, tokens=tokens.size + 1)
        (place / name).mkdir()
        save_recogniser(
            create_recogniser(FAMILY, settings, tokens, language="en", generator=torch_stream(seed, "model")),
            place / name,
        )
    pack_tones(place / "store", people=range(30), utterances=2)
    pack_tones(place / "others", people=range(50, 80), utterances=2)
    return place


@pytest.fixture
def runs(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sottovoce: Command) -> Path:
    """Run folders a, b (tested on the store) and c (on the other), and no models in them."""
    monkeypatch.chdir(place)
    for run, model, store in (("a", "a", "store"), ("b", "b", "store"), ("c", "b", "others")):
        found = json.loads(sottovoce("evaluate", model, "--on", f"{store}:test", "--json").out)
        (tmp_path / "suite" / run).mkdir(parents=True)
        (tmp_path / "suite" / run / "results.json").write_text(json.dumps({"test": {"test": found}}))
    monkeypatch.chdir(tmp_path / "suite")
    return tmp_path / "suite"


def test_models_are_recognised_and_the_difference_is_that_of_their_rates(
    sottovoce: Command, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    done = sottovoce("compare", "a", "b", "--on", "store:test", "--json")
    assert done.code == 0, done.err
    said = json.loads(done.out)
    assert (said["first"], said["second"], list(said["tests"])) == ("a", "b", ["store:test"])
    found = said["tests"]["store:test"]
    rates = [json.loads(sottovoce("evaluate", m, "--on", "store:test", "--json").out)["wer"] for m in ("a", "b")]
    assert [found["first_wer"], found["second_wer"]] == pytest.approx(rates)
    assert found["difference"] == pytest.approx(rates[0] - rates[1])
    low, high = found["difference_interval"]
    assert low <= found["difference"] <= high
    assert (found["speakers"], list(found["groups"]["gender"])) == (6, ["female"])
    same = json.loads(sottovoce("compare", "a", "a", "--on", "store:test", "--json").out)["tests"]["store:test"]
    assert (same["difference"], same["difference_interval"], same["better"], same["worse"]) == (0, [0, 0], 0, 0)


def test_other_rules_need_texts_which_runs_do_not_keep(sottovoce: Command, place: Path, runs: Path) -> None:
    done = sottovoce("compare", "a", "b", "--normaliser", "whisper-basic")
    assert (done.code, "expected --on STORE[:SPLIT], since runs keep no texts" in done.err) == (2, True)
    pytest.importorskip("whisper_normalizer", reason="Whisper's rules come from the extra `whisper`")
    on = f"{place / 'store'}:test"
    done = sottovoce("compare", place / "a", place / "b", "--on", on, "--normaliser", "whisper-basic", "--json")
    assert json.loads(done.out)["tests"][on]["normalisation"]["name"] == "whisper-basic"
    done = sottovoce("evaluate", place / "a", "--on", on, "--normaliser", "whisper-english")
    assert "texts normalised by whisper-english" in done.out


def test_what_runs_have_said_is_used_and_comes_to_the_same(sottovoce: Command, place: Path, runs: Path) -> None:
    kept = sottovoce("compare", "a", "b", "--json")
    assert kept.code == 0, kept.err
    anew = sottovoce("compare", place / "a", place / "b", "--on", f"{place / 'store'}:test", "--json")
    assert [*json.loads(kept.out)["tests"].values()] == [*json.loads(anew.out)["tests"].values()]
    assert sottovoce("compare", "a", "b", "--on", "test", "--json").out == kept.out
    done = sottovoce("compare", "a", "b")
    for words in ("WER on test", "A: a", "95 % interval", "female", "Of 6 speakers"):
        assert words in done.out
    with zipfile.ZipFile(runs / "kept.zip", "w") as archive:
        for run in "ab":
            archive.write(runs / run / "results.json", f"{run}/results.json")
    assert json.loads(sottovoce("compare", "kept.zip/a", "b", "--json").out)["tests"] == json.loads(kept.out)["tests"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a", "gone"], "error: gone: expected the folder of a run or a model"),
        (["a", "../suite"], "error: ../suite holds several runs: expected one of a, b, c"),
        (["a", "model"], "error: a and model have no test set in common: expected --on STORE[:SPLIT]"),
        (
            ["a", "c"],
            "error: a and c cannot be compared on test: they were tested on other speakers (6 and 6, 0 in both)",
        ),
        (["a", "b", "--on", "nowhere:test"], "error: no store at nowhere"),
        (["a", "model", "--on", "nowhere"], "error: no store at nowhere"),
    ],
)
def test_mistakes_are_one_line(sottovoce: Command, place: Path, runs: Path, arguments: list[str], message: str) -> None:
    shutil.copytree(place / "a", runs / "model")
    done = sottovoce("compare", *arguments)
    assert done.code == 2
    assert done.err.startswith(message), done.err
    assert done.err.count("\n") == 1


def test_runs_that_count_nobody_are_told_to_be_tested_anew_on_their_own_store(
    sottovoce: Command, place: Path, runs: Path
) -> None:
    """Releases count nobody's words. With `--on` and the store that is named, they are compared."""
    for run in "ab":
        results = json.loads((runs / run / "results.json").read_text())
        for person in results["test"]["test"]["per_speaker"]:
            del person["words"]
        (runs / run / "results.json").write_text(json.dumps(results))
        (runs / run / "config.yaml").write_text("data: {store: mine}\n")
    refused = sottovoce("compare", "a", "b")
    assert refused.code == 2
    assert refused.err.endswith("; sottovoce compare a b --on STORE:test tests both anew\n")
    (runs / "stores").mkdir()
    (runs / "stores" / "mine").symlink_to(place / "store")
    refused = sottovoce("compare", "a", "b")
    assert refused.err.endswith("; sottovoce compare a b --on stores/mine:test tests both anew\n")
