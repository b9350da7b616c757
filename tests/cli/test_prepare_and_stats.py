"""The command line from speech on disk to statistics, as a user types it."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile


def sottovoce(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sottovoce", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Three clips of two users, one of them stereo, and a row whose audio is missing."""
    rate, tone = 16_000, np.sin(np.arange(16_000) / 20) * 0.3
    (tmp_path / "clips").mkdir()
    soundfile.write(tmp_path / "clips/a.wav", tone, rate)
    soundfile.write(tmp_path / "clips/b.wav", tone[:8000], rate)
    soundfile.write(tmp_path / "clips/c.flac", np.stack([tone, tone], axis=1), rate)
    rows = ["client_id\tpath\tsentence\tgender", "u1\ta.wav\tCiao!\tfemale", "u1\tb.wav\tSì\tfemale"]
    rows += ["u2\tc.flac\tNo\t", "u3\tgone.wav\tMai\t"]
    (tmp_path / "train.tsv").write_text("\n".join(rows) + "\n")
    return tmp_path


def test_prepare_then_stats(corpus: Path) -> None:
    done = sottovoce("prepare", "tsv", corpus / "train.tsv", "--out", corpus / "store", "--language", "it")
    assert done.returncode == 0, done.stderr
    assert "2 users, 3 utterances" in done.stdout
    assert "1 × text with no audio file (left out)" in done.stderr
    assert "1 × several channels, mixed down (kept)" in done.stderr
    assert "1 × speaker with no usable utterance (left out)" in done.stderr

    done = sottovoce("stats", corpus / "store", "--json", "--plot", corpus / "figure.html")
    figures = json.loads(done.stdout)
    assert figures["hours"] == pytest.approx(2.5 / 3600)
    assert (figures["speakers"], figures["utterances"]) == (2, 3)
    assert figures["minutes_per_speaker"] == pytest.approx(
        {"mean": 1.25 / 60, "std": 0.25 / 60, "min": 1 / 60, "max": 1.5 / 60}
    )
    assert figures["splits"]["train"] == {key: value for key, value in figures.items() if key != "splits"}
    assert "<svg" in (corpus / "figure.html").read_text()


def test_json_report_has_the_problems(corpus: Path) -> None:
    done = sottovoce("prepare", "tsv", corpus / "train.tsv", "--out", corpus / "store", "--language", "it", "--json")
    report = json.loads(done.stdout)
    assert report["problems"]["text with no audio file"]["count"] == 1
    assert report["splits"] == {"train": [0, 2]}


def test_strict_stops_and_leaves_nothing(corpus: Path) -> None:
    done = sottovoce("prepare", "tsv", corpus / "train.tsv", "--out", corpus / "store", "--language", "it", "--strict")
    assert done.returncode == 2
    assert done.stderr.startswith("error: text with no audio file: ")
    assert not (corpus / "store").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["stats", "nowhere"], "error: no store at nowhere"),
        (["prepare", "librispeech", "nowhere", "--out", "x"], "error: nowhere"),
        (["prepare", "synthetic", "opera", "--out", "x"], "error: "),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = sottovoce(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") == 1, done.stderr


@pytest.mark.parametrize("command", [[], ["prepare"], ["prepare", "tsv"], ["stats"]])
def test_help_has_an_example(command: list[str]) -> None:
    done = sottovoce(*command, "--help")
    assert done.returncode == 0
    assert len(command) < 2 or "Example: sottovoce" in done.stdout


def test_tokens_are_trained_by_one_command(corpus: Path) -> None:
    sottovoce("prepare", "tsv", corpus / "train.tsv", "--out", corpus / "store", "--language", "it")
    done = sottovoce("tokens", f"{corpus / 'store'}:train", "--out", corpus / "tokens.json", "--size", 8)
    assert done.returncode == 0, done.stderr
    assert json.loads((corpus / "tokens.json").read_text())["size"] == 8
    done = sottovoce("tokens", f"{corpus / 'store'}:tests", "--out", corpus / "tokens.json")
    assert (done.returncode, "expected one of train" in done.stderr) == (2, True)
