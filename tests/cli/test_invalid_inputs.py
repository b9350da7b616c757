"""What nobody can mean is refused with one line, at once: numbers that are none, and files that are something else."""

import json
import os
import struct
import sys
import zipfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from sottovoce.base.errors import InputError
from sottovoce.base.files import check_file, read_file, read_json, write_json
from sottovoce.data.corpora import librilight, tsv
from sottovoce.data.corpora.corpus import ProblemKind, Unusable
from sottovoce.data.corpora.rendering import decode_audio
from sottovoce.evaluation.recognise import choose_device
from sottovoce.evaluation.streaming import read_chunks
from sottovoce.models.attention_search import SearchOptions
from sottovoce.privacy.mechanism_search import single_release_epsilon
from sottovoce.privacy.noise_planner import NoiseRequest, plan_noise
from sottovoce.privacy.strategies import sum_participations

Command = Callable[..., Any]
PLAN = ("plan", "--population", 10_000, "--steps", 20, "--delta", "1e-6")


def assert_refused(ended: Any, message: str) -> None:
    assert ended.code == 2, ended.out
    assert message in ended.err
    assert len(ended.err.splitlines()) == 1, ended.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((*PLAN, "--cohort", 100, "--noise-multiplier", "nan"), "--noise-multiplier nan: expected a number"),
        ((*PLAN, "--cohort", 100, "--clip-bound", "NaN", "--sigma-dp", 1), "--clip-bound nan: expected a number"),
        (("transcribe", "m", "a.wav", "--window", "nan"), "--window nan: expected a number"),
        (("evaluate", "m", "--on", "s", "--longest", "nan"), "--longest nan: expected a number"),
        (
            (*PLAN, "--mechanism", "auto", "--max-cohort", 100, "--target-epsilon", "5e-324"),
            "target_epsilon=5e-324: expected a number from 1e-30 to 1e+09",
        ),
        (
            (*PLAN, "--mechanism", "auto", "--max-cohort", 100, "--target-epsilon", "1e300"),
            "target_epsilon=1e+300: expected a number from 1e-30 to 1e+09",
        ),
        ((*PLAN, "--cohort", 100, "--noise-multiplier", 1, "--scale", "1e308"), "and at most 1,000,000,000,000 users"),
        (
            (*PLAN, "--steps", 10**7, "--mechanism", "auto", "--max-cohort", 100, "--sigma-dp", 0.01),
            "central_steps=10000000: expected a whole number from 1 to 100000",
        ),
        (("keys", "authority", "new", "--days", 10**9), "days=1000000000: expected 1 to 36,500"),
        (("audit", "demo-clipping/global", "--canaries", 10**7), "canaries=10000000: expected 20 to 100,000"),
        (("audit", "demo-clipping/global", "--canaries", -1), "canaries=-1: expected 20 to 100,000"),
        (("audit", "demo-clipping/global", "--secrets", -2), "secrets=-2: expected 4 to 10,000"),
        (
            ("join", "https://a:99999", *(both := ("--data", "d", "--key", "k", "--ca", "c"))),
            "expected a number from 1",
        ),
        (("join", "https://a:0", *both), "port 0, expected a number from 1 to 65,535"),
        (("join", "https://a:9443", *both, "--megabytes-a-day", "inf"), "--megabytes-a-day inf: expected a positive"),
        (("join", "https://a:9443", *both, "--megabytes-a-day", "nan"), "--megabytes-a-day nan: expected a number"),
        (("join", "https://a:9443", *both, "--seconds-a-day", "inf"), "seconds=inf, expected a positive number"),
        (
            ("join", "https://a:9443", *both, "--seconds-a-day", "1e308"),
            "expected at most the 86,400 of a day",
        ),
        (("join", "https://a:9443", *both, "--seconds-a-day", 86_401), "seconds=86401, expected at most the 86,400"),
        (("join", "https://a:9443", *both, "--megabytes-a-day", "1e308"), "1e+308: expected a positive number"),
    ],
)
def test_numbers_that_nobody_can_mean(
    sottovoce: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[object, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert_refused(sottovoce(*words), message)


@pytest.mark.parametrize("settings", [{"width": 10**9}, {"longest_shift": 10**400}, {"width": 0}, {"longest_shift": 0}])
def test_a_search_is_bounded(settings: dict[str, int]) -> None:
    with pytest.raises(InputError, match="expected 1 to "):
        SearchOptions(**settings)  # type: ignore[arg-type]


def test_a_device_without_a_name_is_none() -> None:
    with pytest.raises(InputError, match="device=: cannot be used here"):
        choose_device("")


def test_noise_that_hides_everybody_has_no_epsilon_to_search_for() -> None:
    assert single_release_epsilon(1e9, delta=1e-6) == 0.0
    assert 1e10 < single_release_epsilon(1e-6, delta=1e-6) < 1e13  # 1/(2z²) and a little more


def test_a_target_that_one_user_meets_needs_a_cohort_of_one() -> None:
    asked = NoiseRequest(
        max_cohort=100,
        central_steps=20,
        delta=1e-6,
        population_size=10_000,
        sigma_dp=0.01,
        target_epsilon=1e7,
    )
    assert plan_noise(asked, kinds=["independent"]).chosen.cohort_size == 1


def test_a_user_without_a_second_round_takes_no_memory_for_it() -> None:
    column = np.array([1.0, 0.5, 0.25])
    assert sum_participations(column, 10**12).tolist() == column.tolist()


@pytest.mark.parametrize("days", [0, -1, 10**9])
def test_a_server_certificate_for_no_time_or_for_ever_is_refused(sottovoce: Command, tmp_path: Path, days: int) -> None:
    authority, server = tmp_path / "authority", tmp_path / "server"
    assert sottovoce("keys", "authority", authority).code == 0
    assert sottovoce("keys", "server", server, "--authority", authority, "--host", "localhost").code == 0
    assert_refused(sottovoce("keys", "renew", server, "--authority", authority, "--days", days), f"days={days}")
    assert_refused(sottovoce("keys", "renew", authority, "--days", days), f"days={days}: expected 1 to 36,500")


# Files.


def _zip(path: Path, method: int) -> None:
    with zipfile.ZipFile(path, "w", method) as packed:
        packed.writestr("run/config.yaml", "about: a run\n" * 50)


@pytest.mark.parametrize("method", [zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2])
@pytest.mark.parametrize("is_damaged", [False, True])
def test_an_archive_is_stored_or_deflated(sottovoce: Command, tmp_path: Path, method: int, is_damaged: bool) -> None:
    archive = tmp_path / "run.zip"
    _zip(archive, method)
    if is_damaged:
        data = bytearray(archive.read_bytes())
        data[50:60] = bytes(10)
        archive.write_bytes(data)
    for words in (("ledger", archive), ("report", archive, "--out", tmp_path / "page.html")):
        assert_refused(sottovoce(*words), "packed otherwise")


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize(("make", "kind"), [(_pipe, "named pipe"), (_device, "device")])
@pytest.mark.parametrize(
    "words",
    [
        ("recipes", "show", "x.yaml"),
        ("run", "x.yaml", "--estimate"),
        ("keys", "revoke", "x", "--authority", "authority"),
    ],
)
def test_a_pipe_or_a_device_is_no_file(
    sottovoce: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[Path], None],
    kind: str,
    words: tuple[str, ...],
) -> None:
    monkeypatch.chdir(tmp_path)
    if words[0] == "keys":
        sottovoce("keys", "authority", "authority")
    make(Path(next(word for word in words if word.startswith("x"))))
    assert_refused(sottovoce(*words), f"is a {kind}, expected a file")


def test_a_table_without_lines_is_not_read_to_its_end(tmp_path: Path) -> None:
    with (tmp_path / "train.tsv").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(InputError, match=r"train\.tsv: a line of more than 16,777,216 characters: it is no table"):
        tsv.read_tsv(tmp_path / "train.tsv")


def test_a_recording_larger_than_the_memory_is_counted(tmp_path: Path) -> None:
    with (tmp_path / "x.wav").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(Unusable):
        decode_audio(str(tmp_path / "x.wav"))


def test_a_file_larger_than_any_of_its_kind_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "x.json").open("wb") as file:
        file.truncate(1 << 40)  # takes no place on the disk
    with pytest.raises(InputError, match="expected at most 536,870,912 bytes"):
        read_json(tmp_path / "x.json")
    with pytest.raises(InputError, match="is larger than any letter: expected at most 10 bytes"):
        read_file(tmp_path / "x.json", most=10, what="any letter")
    check_file(tmp_path / "nothing")  # whoever opens it says so


# Sound.


def _wav(*chunks: bytes, form: bytes = b"WAVE") -> BytesIO:
    return BytesIO(b"RIFF" + struct.pack("<I", 0xFFFFFFFF) + form + b"".join(chunks))


def _chunk(name: bytes, content: bytes, length: int | None = None) -> bytes:
    return name + struct.pack("<I", len(content) if length is None else length) + content


FORMAT = _chunk(b"fmt ", struct.pack("<HHIIHH", 1, 1, 16_000, 32_000, 2, 16))
DATA = _chunk(b"data", bytes(2_000))


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (_wav(DATA), "without a description of its samples"),
        (_wav(DATA, FORMAT), "without a description of its samples"),
        (_wav(_chunk(b"fmt ", b"\1\0"), DATA), "without a description of its samples"),
        (_wav(FORMAT, DATA, form=b"AVI "), "RIFF with b'AVI ' inside"),
        (_wav(_chunk(b"junk", b"", 0xFFFFFFF0), FORMAT, DATA), "more than 16,777,216 bytes before its samples"),
        (_wav(*[_chunk(b"junk", b"", 0)] * 3, FORMAT), "ends before its first sample"),
    ],
)
def test_a_stream_says_what_it_is_before_it_is_heard(stream: BytesIO, message: str) -> None:
    with pytest.raises(InputError, match=message):
        list(read_chunks(stream))


def test_a_stream_with_something_before_its_samples_is_heard() -> None:
    assert sum(map(len, read_chunks(_wav(_chunk(b"LIST", bytes(99) + b"\0"), FORMAT, DATA)))) == 1_000


# Corpora.


@pytest.mark.parametrize(
    ("offset", "duration"), [("1e308", "1e308"), ("0.5", "1e308"), ("1e306", "1"), ("0.5", "1e999")]
)
def test_a_segment_of_thirty_years_is_a_malformed_row(tmp_path: Path, offset: str, duration: str) -> None:
    soundfile.write(tmp_path / "call.wav", np.ones(32_000, dtype=np.int16), 16_000)
    line = '{{"audio_filepath": "call.wav", "offset": {}, "duration": {}, "text": "One", "speaker": "ann"}}\n'
    (tmp_path / "train_manifest.json").write_text(line.format("0.25", "0.5") + line.format(offset, duration))
    corpus = tsv.read_tsv(tmp_path / "train_manifest.json", columns=tsv.NEMO)
    (speaker,) = corpus.speakers
    assert [utterance.text for utterance in corpus.render(speaker).utterances] == ["one"]
    assert corpus.problems.counts == {ProblemKind.MALFORMED_ROW: 1}


@pytest.mark.parametrize("end", ["1e308", "1e300", "1e10"])
def test_voice_that_lasts_thirty_years_is_no_voice_activity(tmp_path: Path, end: str) -> None:
    chapter = tmp_path / "small" / "10" / "book_64kb" / "one"
    chapter.parent.mkdir(parents=True)
    soundfile.write(chapter.with_suffix(".flac"), np.ones(32_000, dtype=np.int16), 16_000)
    chapter.with_suffix(".json").write_text(f'{{"snr": 1.0, "voice_activity": [[0.5, {end}]]}}')
    corpus = librilight.read_librilight(tmp_path)
    (speaker,) = corpus.speakers
    assert [problem.kind for problem in corpus.render(speaker).problems] == [ProblemKind.NO_VOICE_ACTIVITY]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere names of files are UTF-8")
def test_a_name_that_is_no_text_is_a_name(sottovoce: Command, tmp_path: Path) -> None:
    """In what a store keeps, in what is printed, and as JSON."""
    folder = tmp_path / "mine"
    folder.mkdir()
    for name in (b"good", b"caf\xe9", b"alone\xff"):
        soundfile.write(os.fsencode(folder / os.fsdecode(name + b".wav")), np.ones(16_000, dtype=np.int16), 16_000)
    for name in (b"good", b"caf\xe9"):
        (folder / os.fsdecode(name + b".txt")).write_text("Good day")
    ended = sottovoce(
        "prepare", "folder", folder, "--user", "ann", "--workers", 1, "--out", tmp_path / "store", "--json"
    )
    assert ended.code == 0, ended.err
    header = json.loads(ended.out)
    assert "caf\\udce9" in (tmp_path / "store" / "store.json").read_text() or header["problems"]
    assert sottovoce("stats", tmp_path / "store", "--check").code == 0


def test_json_with_half_a_character_reads_back(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", {"path": "caf\udce9", "other": "é"})
    assert read_json(tmp_path / "x.json") == {"path": "caf\udce9", "other": "é"}
