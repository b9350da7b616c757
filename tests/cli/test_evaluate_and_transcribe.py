"""The command line from a model to error rates and transcripts, as a user types it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from sottovoce.base.seeds import stream, torch_stream
from sottovoce.data.corpora.corpus import Corpus, ProblemLog, RenderedSpeaker, RenderedUtterance
from sottovoce.data.store import pack_corpus
from sottovoce.data.text.tokens import CharacterTokens
from sottovoce.models.recogniser import create_recogniser, save_recogniser
from sottovoce.models.transformer import FAMILY
from sottovoce.models.transformer.settings import Settings

Command = Callable[..., Any]


def sound(*names: str | int, seconds: float) -> np.ndarray:
    return (stream(1, *names).normal(0, 0.1, int(16_000 * seconds)) * 32_767).astype(np.int16)


def identity(speaker: RenderedSpeaker) -> RenderedSpeaker:
    return speaker


def made_store(folder: Path, *, language: str = "en") -> Path:
    people = []
    for split, name, gender in (("dev", "ada", "female"), ("test", "bob", "male"), ("test", "cyd", "female")):
        spoken = [
            RenderedUtterance(f"{name}-{i}", sound(name, i, seconds=0.5 + i), text=text, raw_text=text)
            for i, text in enumerate(("hello there", None, "good day to you"))
        ]
        people.append(RenderedSpeaker(name, split, spoken, {"gender": gender}))
    corpus = Corpus(name="made", language=language, speakers=people, render=identity, problems=ProblemLog())
    pack_corpus(corpus, folder, workers=1)
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, two stores and some sound files, one of them damaged."""
    place = tmp_path_factory.mktemp("place")
    tokens = CharacterTokens("abcdefghijklmnopqrstuvwxyz '-")
    settings = Settings(layers=1, width=32, tokens=tokens.size + 1)
    (place / "model").mkdir()
    save_recogniser(
        create_recogniser(FAMILY, settings, tokens, language="en", generator=torch_stream(3, "model")), place / "model"
    )
    for run in ("b", "a"):
        shutil.copytree(place / "model", place / "suite" / run / "model")
    made_store(place / "store")
    made_store(place / "french", language="fr")
    (place / "sounds/sub").mkdir(parents=True)
    soundfile.write(place / "sounds/b.wav", sound("b", seconds=1), 16_000)
    soundfile.write(place / "sounds/a.flac", np.stack([sound("a", seconds=2)] * 2, axis=1), 8_000)
    soundfile.write(place / "sounds/sub/a.ogg", sound("c", seconds=1), 16_000)
    (place / "damaged.wav").write_bytes(b"RIFF and nothing else")
    return place


def test_evaluate_json_agrees_with_the_texts_it_writes(sottovoce: Command, place: Path, tmp_path: Path) -> None:
    where = (place / "model", "--on", f"{place / 'store'}:test")
    done = sottovoce("evaluate", *where, "--json", "--out", tmp_path / "texts.jsonl", "--plot", tmp_path / "wer.html")
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert (result["utterances"], result["speakers"], result["splits"]) == (4, 2, ["test"])
    assert result["left_out"] == {"without_text": 2, "too_long": 0}
    assert result["words"] == 12
    assert result["real_time_factor"] == pytest.approx(result["elapsed_seconds"] / result["audio_seconds"])
    assert result["normalisation"] == {"name": "sottovoce", "version": 1}
    texts = [json.loads(line) for line in (tmp_path / "texts.jsonl").read_text().splitlines()]
    assert [row["id"] for row in texts] == ["bob-0", "bob-2", "cyd-0", "cyd-2"]
    assert {row["reference"] for row in texts} == {"hello there", "good day to you"}
    heard = sum(len(row["hypothesis"].split()) for row in texts)
    assert heard == result["words"] - result["deletions"] + result["insertions"]
    assert sum(group["words"] for group in result["groups"]["gender"].values()) == 12
    assert "<svg" in (tmp_path / "wer.html").read_text()
    assert f"wrote {tmp_path / 'wer.html'}" in done.err.replace("\n", "")


def test_speech_of_a_narrow_band_is_told_and_other_speech_is_not(
    sottovoce: Command, place: Path, tmp_path: Path
) -> None:
    """From the recordings to the recogniser: whoever has telephone speech hears of it in one line each time."""
    rows = []
    for name, rate in (("narrow", 8_000), ("wide", 16_000)):
        folder = tmp_path / name
        folder.mkdir()
        soundfile.write(folder / "a.wav", sound("a", seconds=1), rate)
        (folder / "test.tsv").write_text("client_id\tpath\tsentence\nu1\ta.wav\thello there\n")
        told = {
            "prepare": sottovoce("prepare", "tsv", folder / "test.tsv", "--out", folder / "store", "--json"),
            "evaluate": sottovoce("evaluate", place / "model", "--on", folder / "store", "--json"),
            "transcribe": sottovoce("transcribe", place / "model", folder / "a.wav", "--json"),
        }
        for command, done in told.items():
            assert done.code == 0, done.err
            json.loads(done.out)
            rows.append((name, command, "1 of 1 recordings hold nothing above 4 kHz" in done.err))
    assert [row for row in rows if row[2]] == [("narrow", c, True) for c in ("prepare", "evaluate", "transcribe")]


def test_evaluate_prints_a_table(sottovoce: Command, place: Path) -> None:
    done = sottovoce("evaluate", place / "model", "--on", place / "store", "--longest", 2)
    assert done.code == 0, done.err
    for expected in ("all", "female", "CER", "worst tenth", "3 utterances without text", "3 utterances that are too"):
        assert expected in done.out.replace("\n", " ")
    assert "× real time" in done.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model", "--on", "store:eval"], "error: split='eval' is not in store: expected one of dev, test"),
        (["model", "--on", "nowhere:test"], "error: no store at nowhere"),
        (["model", "--on", "french"], "error: the model writes language=en, but store french is in language=fr"),
        (["store", "--on", "store"], "error: no model at store"),
        (["suite", "--on", "store"], "error: no model at suite, which holds runs: expected one of suite/a, suite/b\n"),
        (["model", "--on", "store", "--device", "tpu9"], "error: device=tpu9"),
        (["model", "--on", "store", "--plot", "x.jpg"], "error: plot=x.jpg"),
        (["model", "--on", "store", "--lm-weight", "2"], "error: lm_weight=2.0 needs a language model"),
        (["model", "--on", "store", "--lm", "gone.arpa"], "error: beam search"),
        (["model", "--on", "store", "--longest", "0.1"], "error: nothing to score in store"),
    ],
)
def test_evaluate_mistakes_are_one_line(
    sottovoce: Command, place: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(place)
    done = sottovoce("evaluate", *arguments)
    assert done.code == 2
    assert done.err.startswith(message), done.err
    assert done.err.count("\n") == 1


def test_transcribe_a_folder_to_files(sottovoce: Command, place: Path, tmp_path: Path) -> None:
    out = tmp_path / "new/out"
    done = sottovoce("transcribe", place / "model", place / "sounds", "--format", "srt", "--out", out)
    assert done.code == 0, done.err
    assert sorted(p.relative_to(out).as_posix() for p in out.rglob("*.*")) == ["a.srt", "b.srt", "sub/a.srt"]
    assert (out / "b.srt").read_text().startswith("1\n00:00:0")
    done = sottovoce("transcribe", place / "model", place / "sounds", "--format", "json", "--out", out)
    written = json.loads((out / "a.json").read_text())
    assert (written["path"], written["seconds"]) == (str(place / "sounds/a.flac"), 4.0)
    assert written["text"] == " ".join(word["text"] for word in written["words"])


def test_transcribe_prints(sottovoce: Command, place: Path) -> None:
    sounds = place / "sounds/b.wav", place / "sounds/a.flac"
    found = json.loads(sottovoce("transcribe", place / "model", *sounds, "--json").out)
    texts = [transcript["text"] for transcript in found["transcripts"]]
    assert sottovoce("transcribe", place / "model", sounds[0]).out == f"{texts[0]}\n"
    assert sottovoce("transcribe", place / "model", *sounds).out == "".join(
        f"{path}: {text}\n" for path, text in zip(sounds, texts, strict=True)
    )
    assert json.loads(sottovoce("transcribe", place / "model", *sounds, "--format", "json").out) == found


def test_transcribe_a_damaged_file_among_good_ones(sottovoce: Command, place: Path, tmp_path: Path) -> None:
    done = sottovoce(
        "transcribe", place / "model", place / "damaged.wav", place / "sounds/b.wav", "--out", tmp_path / "out"
    )
    assert done.code == 1
    assert done.err.startswith(f"{place / 'damaged.wav'}: audio ")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["b.txt"]
    done = sottovoce("transcribe", place / "model", place / "damaged.wav", "--json")
    assert done.code == 2
    assert json.loads(done.out)["failed"][0]["path"] == str(place / "damaged.wav")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model", "gone.wav"], "error: gone.wav: there is no such file or folder"),
        (["model", "model"], "error: model: no audio file in this folder"),
        (["model", "sounds", "--format", "srt"], "error: 3 files do not make one .srt"),
        (["model", "sounds/a.flac", "--out", "damaged.wav"], "error: out=damaged.wav: it is a file"),
        (["model", "sounds/a.flac", "--window", "0.1"], "error: window=0.1 s: expected at least"),
    ],
)
def test_transcribe_mistakes_are_one_line(
    sottovoce: Command, place: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(place)
    done = sottovoce("transcribe", *arguments)
    assert done.code == 2
    assert done.err.startswith(message), done.err
    assert done.err.count("\n") == 1


def test_transcripts_never_overwrite_one_another(sottovoce: Command, place: Path, tmp_path: Path) -> None:
    sounds = [place / "sounds/a.flac", place / "sounds/sub/a.ogg"]
    assert sottovoce("transcribe", place / "model", *sounds, "--out", tmp_path / "out").code == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a.flac.txt", "a.ogg.txt"]


@pytest.mark.parametrize("command", ["evaluate", "transcribe"])
def test_help_has_an_example(sottovoce: Command, command: str) -> None:
    done = sottovoce(command, "--help")
    assert done.code == 0
    assert "Example: sottovoce" in done.out
