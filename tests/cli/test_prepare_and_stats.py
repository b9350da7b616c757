"""The command line from speech on disk to statistics, as a user types it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from sottovoce.cli import prepare

Command = Callable[..., Any]


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


def test_prepare_then_stats(sottovoce: Command, corpus: Path) -> None:
    done = sottovoce("prepare", "tsv", corpus / "train.tsv", "--out", corpus / "store", "--language", "it")
    assert done.code == 0, done.err
    assert "2 users, 3 utterances" in done.out
    assert "1 × text with no audio file (left out)" in done.err
    assert "1 × several channels, mixed down (kept)" in done.err
    assert "1 × speaker with no usable utterance (left out)" in done.err

    done = sottovoce("stats", corpus / "store", "--json", "--plot", corpus / "figure.html")
    figures = json.loads(done.out)
    assert figures["hours"] == pytest.approx(2.5 / 3600)
    assert (figures["speakers"], figures["utterances"]) == (2, 3)
    assert figures["minutes_per_speaker"] == pytest.approx(
        {"mean": 1.25 / 60, "std": 0.25 / 60, "min": 1 / 60, "max": 1.5 / 60}
    )
    assert figures["splits"]["train"] == {key: value for key, value in figures.items() if key != "splits"}
    assert "<svg" in (corpus / "figure.html").read_text()

    done = sottovoce("stats", corpus / "store", "--speakers-per-device", "2", "--plot", corpus / "devices.html")
    assert "train, 2 speakers a device: 1 devices, 3 utterances and 0.04 minutes in the median" in done.out
    assert "2 a device (1)" in (corpus / "devices.html").read_text()
    devices = sottovoce("stats", corpus / "store", "--speakers-per-device", "2", "--seed", "3", "--json").out
    assert json.loads(devices) == figures | {"devices": json.loads(devices)["devices"]}
    alone = sottovoce("stats", corpus / "store", "--speakers-per-device", "1")
    assert (alone.code, alone.err) == (2, "error: speakers_per_device=1: expected at least 2\n")


def test_common_voice_as_released_beside_the_papers_table_2(sottovoce: Command, corpus: Path) -> None:
    """The user whose only sentence has a number in it is left out, unless the rest of the sentence is kept."""
    rows = ["client_id\tpath\tsentence\tlocale", "u1\ta.wav\tRoute 66\ten", "u2\tb.wav\tHello\ten"]
    (corpus / "train.tsv").write_text("\n".join(rows) + "\n")
    own = sottovoce("prepare", "commonvoice", corpus, "--out", corpus / "own")
    assert "1 users" in own.out
    released = sottovoce("prepare", "commonvoice", corpus, "--out", corpus / "released", "--as-released")
    assert "2 users" in released.out
    assert "1 × text with characters that no token writes, left out of it (kept)" in released.err
    found = json.loads(sottovoce("stats", corpus / "released", "--table2", "--json").out)
    assert found["CV-en-train"]["speakers"] == 2
    assert found["CV-en-train"]["paper"]["speakers"] == 34_753
    assert found["CV-en-train-10"] is None
    refused = sottovoce("stats", corpus / "released", "--table2", "--plot", corpus / "figure.html")
    assert (refused.code, refused.err) == (2, "error: --table2: expected without --plot and --speakers-per-device\n")


def test_a_store_says_by_whose_rules_its_texts_are_spelled(sottovoce: Command, corpus: Path) -> None:
    rows = ["client_id\tpath\tsentence\tlocale", "u1\ta.wav\tRoute 66\ten", "u2\tb.wav\tWell-known\ten"]
    (corpus / "train.tsv").write_text("\n".join(rows) + "\n")
    done = sottovoce("prepare", "commonvoice", corpus, "--out", corpus / "theirs", "--spelling", "gao2022")
    assert "2 users" in done.out
    assert "1 × text that our own rules leave out (kept)" in done.err
    assert "1 × text that our own rules spell otherwise (kept)" in done.err
    assert "texts as gao2022" in sottovoce("stats", corpus / "theirs").out
    header = sottovoce("prepare", "commonvoice", corpus, "--out", corpus / "own", "--json").out
    assert "spelling" not in json.loads(header), "older stores are as they were"
    assert "texts as" not in sottovoce("stats", corpus / "own").out
    both = sottovoce("prepare", "commonvoice", corpus, "--out", "x", "--spelling", "gao2022", "--as-released")
    assert (both.code, both.err.startswith("error: spelling=gao2022 with as_released")) == (2, True)


def test_json_report_has_the_problems(sottovoce: Command, corpus: Path) -> None:
    done = sottovoce("prepare", "tsv", corpus / "train.tsv", "--out", corpus / "store", "--language", "it", "--json")
    report = json.loads(done.out)
    assert report["problems"]["text with no audio file"]["count"] == 1
    assert report["splits"] == {"train": [0, 2]}
    assert report["name"] == "store", "called like the store, not like the folder that the table lies in"


def test_strict_stops_and_leaves_nothing(sottovoce: Command, corpus: Path) -> None:
    done = sottovoce("prepare", "tsv", corpus / "train.tsv", "--out", corpus / "store", "--language", "it", "--strict")
    assert done.code == 2
    assert done.err.startswith("error: text with no audio file: ")
    assert not (corpus / "store").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["stats", "nowhere"], "error: no store at nowhere"),
        (["stats", "nowhere", "--plot", "x.txt"], "error: plot=x.txt: expected a file name that ends in .png"),
        (["prepare", "tsv", ".", "--out", "x"], "error: .: it is a folder; expected a table of clips"),
        (["prepare", "tsv", "x.tsv", "--out", "x"], "error: x.tsv: no such file"),
        (["prepare", "librispeech", "nowhere", "--out", "x"], "error: nowhere"),
        (["prepare", "synthetic", "opera", "--out", "x"], "error: "),
        (
            ["prepare", "synthetic", "crowd", "--out", "x", "--users", "1000000", "--hours", "4000000"],
            "error: 4,000,000 hours of speech take 460,800.0 GB",
        ),
        (
            ["prepare", "synthetic", "crowd", "--out", "x", "--users", "9" * 15],
            "error: users=999999999999999: expected",
        ),
        (
            ["prepare", "synthetic", "crowd", "--out", "x", "--hours", "1e-300"],
            "error: hours=1e-300, users=200: expected at least",
        ),
    ],
)
def test_mistakes_are_one_line(
    sottovoce: Command, arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = sottovoce(*arguments)
    assert done.code == 2
    assert done.err.startswith(message)
    assert done.err.count("\n") == 1, done.err


@pytest.mark.parametrize(
    "pairs", ["dev", "dev=", "=2", "dev=-1", "dev=1,dev=1", "dev=²", "dev=1,", "dev=0", "dev=3", "dev=" + "9" * 5_000]
)
def test_hold_out_that_cannot_be_is_refused(sottovoce: Command, corpus: Path, pairs: str) -> None:
    done = sottovoce(
        "prepare", "tsv", corpus / "train.tsv", "--out", corpus / "store", "--language", "it", "--hold-out", pairs
    )
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert "expected" in done.err
    assert not (corpus / "store").exists()


def test_who_is_held_out_wins_over_the_name_of_the_table(sottovoce: Command, corpus: Path) -> None:
    """Those of test.tsv who are not held out are trained on; several tables say by their names who is where."""
    rows = (corpus / "train.tsv").read_text().splitlines()
    (corpus / "test.tsv").write_text("\n".join([*rows[:4], ""]))
    into = ("--out", corpus / "store", "--language", "it")
    done = sottovoce("prepare", "tsv", corpus / "test.tsv", *into, "--hold-out", "test=1")
    assert "speakers: test 1, train 1; language: it\n" in done.out, done.err
    said = sottovoce("prepare", "tsv", corpus / "test.tsv", *into, "--hold-out", "dev=1", "--split", "others")
    assert "speakers: dev 1, others 1" in said.out
    plain = sottovoce("prepare", "tsv", corpus / "test.tsv", *into)
    assert "speakers: test 2" in plain.out
    (corpus / "train.tsv").write_text("\n".join([rows[0], rows[3], ""]))
    (corpus / "test.tsv").write_text("\n".join([*rows[:3], ""]))
    both = sottovoce("prepare", "tsv", corpus / "train.tsv", corpus / "test.tsv", *into, "--hold-out", "dev=1")
    assert "dev 1" in both.out
    assert ("train 1" in both.out) is not ("test 1" in both.out)


def test_names_that_look_like_markup_are_printed_as_they_are(sottovoce: Command, corpus: Path) -> None:
    store, figure = corpus / "a [bold] :on: store", corpus / "a [bold] :on: figure.svg"
    assert f"{store}: 2 users" in sottovoce("prepare", "tsv", corpus / "train.tsv", "--out", store).out
    assert f"wrote {figure}\n" in sottovoce("stats", store, "--plot", figure).err


def test_what_other_toolkits_wrote_is_the_same_speech(sottovoce: Command, corpus: Path, tmp_path: Path) -> None:
    rows = [("a", "u1", "a.wav", "Ciao!"), ("b", "u1", "b.wav", "Sì"), ("c", "u2", "c.flac", "No")]
    kaldi = tmp_path / "train"
    kaldi.mkdir()
    (kaldi / "wav.scp").write_text("".join(f"{id} {file}\n" for id, _, file, _ in rows))
    (kaldi / "utt2spk").write_text("".join(f"{id} {user}\n" for id, user, _, _ in rows))
    (kaldi / "text").write_text("".join(f"{id} {text}\n" for id, _, _, text in rows))
    nemo = tmp_path / "train_manifest.json"
    lines = [
        {"audio_filepath": str(corpus / "clips" / file), "text": text, "who": user} for _, user, file, text in rows
    ]
    nemo.write_text("".join(json.dumps(line) + "\n" for line in lines))
    table = tmp_path / "train.csv"
    table.write_text("client_id,path,sentence\n" + "".join(f"{user},{file},{text}\n" for _, user, file, text in rows))
    where = ("--audio-root", corpus / "clips", "--language", "it", "--json")
    found = [
        sottovoce("prepare", "kaldi", kaldi, "--out", tmp_path / "kaldi", *where),
        sottovoce("prepare", "nemo", nemo, "--out", tmp_path / "nemo", "--user-column", "who", *where),
        sottovoce("prepare", "tsv", table, "--out", tmp_path / "table", *where),
    ]
    assert [done.code for done in found] == [0, 0, 0], found
    assert len({json.loads(done.out)["digest"] for done in found}) == 1


def test_an_interrupt_says_so_in_one_line(sottovoce: Command, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare, "pack_corpus", interrupted)
    done = sottovoce("prepare", "tsv", corpus / "train.tsv", "--out", corpus / "store")
    assert (done.code, done.out) == (130, "")
    assert done.err == f"interrupted: nothing half-written is left in {corpus / 'store'}\n"


@pytest.mark.parametrize("command", ["prepare tsv", "prepare synthetic", "stats", "tokens"])
def test_help_has_an_example(sottovoce: Command, command: str) -> None:
    done = sottovoce(*command.split(), "--help")
    assert done.code == 0
    assert f"Example: sottovoce {command}" in done.out


def test_tokens_are_trained_by_one_command(sottovoce: Command, corpus: Path) -> None:
    sottovoce("prepare", "tsv", corpus / "train.tsv", "--out", corpus / "store", "--language", "it")
    done = sottovoce("tokens", f"{corpus / 'store'}:train", "--out", corpus / "tokens.json", "--size", 8)
    assert done.code == 0, done.err
    assert json.loads((corpus / "tokens.json").read_text())["size"] == 8
    done = sottovoce("tokens", f"{corpus / 'store'}:tests", "--out", corpus / "tokens.json")
    assert (done.code, "expected one of train" in done.err) == (2, True)


def test_a_changed_letter_in_a_store_is_told(sottovoce: Command, corpus: Path) -> None:
    store = corpus / "store"
    sottovoce("prepare", "tsv", corpus / "train.tsv", "--out", store, "--language", "it")
    (texts,) = store.glob("data-*/utterances.jsonl")
    texts.write_bytes(texts.read_bytes().replace(b"ciao", b"miao"))
    done = sottovoce("stats", store)
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "utterances.jsonl was changed after it was written" in done.err
    texts.write_bytes(texts.read_bytes().replace(b"miao", b"ciao"))
    assert sottovoce("stats", store, "--check").code == 0

    (audio,) = store.glob("data-*/audio.i16")
    audio.write_bytes(audio.read_bytes()[:-1] + b"\x55")
    assert "audio.i16 was changed" in sottovoce("stats", store, "--check").err
