import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import soundfile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sottovoce.base.errors import InputError
from sottovoce.data.corpora import tsv
from sottovoce.data.corpora.corpus import ProblemKind

WriteTone = Callable[[Path], Path]
HEADER = ("client_id", "path", "sentence")


def write(path: Path, rows: Sequence[Sequence[str]], header: Sequence[str] = HEADER) -> Path:
    with open(path, "w", encoding="utf-8", newline="") as file:
        if path.suffix == ".jsonl":
            file.writelines(json.dumps(dict(zip(header, row, strict=True))) + "\n" for row in rows)
        elif path.suffix == ".csv":
            csv.writer(file).writerows([header, *rows])
        else:
            file.writelines("\t".join(row) + "\n" for row in [header, *rows])
    return path


words = st.text(
    alphabet=st.characters(exclude_categories=["C", "Zl", "Zp"], exclude_characters="\ufffd"), min_size=1
).filter(str.strip)


@pytest.mark.parametrize("suffix", [".tsv", ".csv", ".jsonl"])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(table=st.lists(st.tuples(st.sampled_from("uvw"), words), min_size=1, max_size=8))
def test_every_format_gives_back_what_was_written(tmp_path: Path, suffix: str, table: list[tuple[str, str]]) -> None:
    """Quotes, commas and scripts of all kinds; only tabs and line ends cannot be written in a TSV."""
    rows = [(user, f"{number:02}.wav", text) for number, (user, text) in enumerate(table)]
    corpus = tsv.read_tsv(write(tmp_path / f"train{suffix}", rows))
    listed = sorted((s.name, f"{clip.id}.wav", clip.text) for s in corpus.speakers for clip in s.clips)
    assert listed == sorted(rows)


@pytest.mark.parametrize("place", ["", "clips/", "wavs/"])
def test_clips_lie_beside_the_manifest_or_under_clips(tmp_path: Path, write_tone: WriteTone, place: str) -> None:
    write_tone(tmp_path / place / "a.wav")
    written = "wavs/a.wav" if place == "wavs/" else "a.wav"
    corpus = tsv.read_tsv(write(tmp_path / "all.tsv", [("u", written, "Hello")]))
    assert [u.text for u in corpus.render(corpus.speakers[0]).utterances] == ["hello"]


def test_columns_can_be_named(tmp_path: Path) -> None:
    header = ("speaker", "audio", "text", "part", "chapter", "age")
    rows = [("u", "a.wav", "Hello", "dev", "7", "30"), ("u", "b.wav", "Bye", "", "7", "30")]
    columns = tsv.Columns(user="speaker", path="audio", text="text", split="part")
    corpus = tsv.read_tsv(write(tmp_path / "train.csv", rows, header), columns=columns)
    (speaker,) = corpus.speakers
    assert (speaker.name, speaker.split, speaker.metadata) == ("u", "dev", {"age": "30"})
    assert speaker.clips[0].metadata == {"chapter": "7"}
    assert corpus.problems.counts == {ProblemKind.EMPTY_ROW: 1}  # the row that names no split


@pytest.mark.parametrize(
    ("name", "split", "expected"),
    [
        ("dev.tsv", None, "dev"),
        ("train-clean_2.tsv", None, "train-clean_2"),
        ("mine.tsv", None, "train"),
        ("dev.tsv", "test", "test"),
    ],
)
def test_split(tmp_path: Path, name: str, split: str | None, expected: str) -> None:
    corpus = tsv.read_tsv(write(tmp_path / name, [("u", "a.wav", "Hello")]), split=split)
    assert corpus.speakers[0].split == expected


def test_without_a_text_column_speech_is_unlabelled(tmp_path: Path, write_tone: WriteTone) -> None:
    write_tone(tmp_path / "a.wav")
    corpus = tsv.read_tsv(write(tmp_path / "train.tsv", [("u", "a.wav")], ("client_id", "path")))
    assert corpus.speakers[0].clips[0].text is None
    assert corpus.render(corpus.speakers[0]).utterances[0].text is None


def test_a_text_column_of_another_name_is_not_passed_over(tmp_path: Path) -> None:
    manifest = write(tmp_path / "train.tsv", [("u", "a.wav", "Hello")], ("client_id", "path", "text"))
    with pytest.raises(InputError, match="no column 'sentence' for the text, but one called 'text'"):
        tsv.read_tsv(manifest)
    assert tsv.read_tsv(manifest, columns=tsv.Columns(text=None)).speakers[0].clips[0].text is None


@pytest.mark.parametrize("name", ["train.tsv", "train.csv", "train.jsonl"])
def test_a_missing_column_names_the_nearest(tmp_path: Path, name: str) -> None:
    manifest = write(tmp_path / name, [("u", "a.wav", "Hello")], ("clientid", "path", "sentence"))
    with pytest.raises(
        InputError,
        match=r"no column 'client_id' for the user; the nearest is 'clientid' of .*: say which with --user-column",
    ):
        tsv.read_tsv(manifest)


def test_several_manifests_are_one_corpus(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    paths = [write(tmp_path / folder / "train.tsv", [("u", "a.wav", folder)]) for folder in ("one", "two")]
    (speaker,) = tsv.read_tsv(paths).speakers
    assert [(clip.id, clip.text) for clip in speaker.clips] == [("one/a", "one"), ("two/a", "two")]


@pytest.mark.parametrize(
    "path", ["../a.wav", "x/../../a.wav", "/etc/a.wav", "..", "clips/../../corpus-secret/a.wav", "./../a.wav"]
)
def test_a_path_that_leaves_the_folder_is_refused(tmp_path: Path, path: str) -> None:
    corpus = tsv.read_tsv(write(tmp_path / "train.tsv", [("u", path, "Hello"), ("u", "b.wav", "Hello")]))
    assert [clip.id for clip in corpus.speakers[0].clips] == ["b"]
    assert corpus.problems.counts == {ProblemKind.PATH_ESCAPES: 1}


def test_a_path_that_stays_inside_may_take_any_form(tmp_path: Path, write_tone: WriteTone) -> None:
    write_tone(tmp_path / "clips" / "a.wav")
    forms = ["a.wav", "clips/a.wav", "./a.wav", "x/../a.wav", str(tmp_path / "clips" / "a.wav")]
    for form in forms:
        corpus = tsv.read_tsv(write(tmp_path / "train.tsv", [("u", form, "Hello")]))
        assert len(corpus.render(corpus.speakers[0]).utterances) == 1, form
    corpus = tsv.read_tsv(write(tmp_path / "train.tsv", [("u", form, "Hello") for form in forms]))
    assert corpus.problems.counts == {ProblemKind.DUPLICATE_ROW: len(forms) - 1}


def test_rows_that_cannot_be_parsed_are_counted(tmp_path: Path) -> None:
    manifest = write(tmp_path / "train.tsv", [("u", "a.wav", "Hello")])
    with open(manifest, "ab") as file:
        file.write(
            b"u\tb.wav\tstray\ttab\nu\tc.wav\t\xff\xfe\n\nu\td.wav\n\t\t\nu\te.wav\tz\x00ero\nu\tf.wav\tBye\t\t\n"
        )
    corpus = tsv.read_tsv(manifest)
    assert [clip.id for clip in corpus.speakers[0].clips] == ["a", "f"]
    assert corpus.problems.counts == {
        ProblemKind.MALFORMED_ROW: 3,
        ProblemKind.EMPTY_ROW: 2,
        ProblemKind.MISSING_TEXT: 1,
    }

    lines = [
        '{"client_id": 7, "path": "a.wav", "sentence": "Hello", "words": [1]}',
        "not json",
        "[]",
        "",
        '{"path": "b.wav"}',
        '{"client_id": ' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"client_id": ' + "7" * 5_000 + "}",
    ]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    corpus = tsv.read_tsv(tmp_path / "train.jsonl")
    assert [(s.name, len(s.clips)) for s in corpus.speakers] == [("7", 1)]
    assert corpus.problems.counts == {ProblemKind.MALFORMED_ROW: 4, ProblemKind.EMPTY_ROW: 2}


def test_a_user_whose_rows_all_fail_is_still_listed(tmp_path: Path) -> None:
    corpus = tsv.read_tsv(write(tmp_path / "train.tsv", [("u", "a.wav", "Hello"), ("w", "../b.wav", "Hello")]))
    assert [(s.name, len(s.clips)) for s in corpus.speakers] == [("u", 1), ("w", 0)]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train.tsv", "", "it is empty"),
        ("train.tsv", "client_id\tpath\tsentence\n", "nothing usable"),
        ("train.csv", 'client_id,path,sentence\nu,a.wav,"never closed\n', "RFC 4180"),
        ("train.jsonl", "", "no JSON object"),
        ("train.xlsx", "", "expected a name ending in .tsv, .csv, .jsonl"),
    ],
)
def test_unusable_manifests(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=message):
        tsv.read_tsv(tmp_path / name)


def test_no_such_manifest(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        tsv.read_tsv(tmp_path / "gone.tsv")
    with pytest.raises(InputError, match="names no file"):
        tsv.read_tsv([])


def test_absolute_paths_lie_in_the_audio_root(tmp_path: Path, write_tone: WriteTone) -> None:
    """Several manifests share it, and one recording is one recording."""
    audio = write_tone(tmp_path / "audio" / "x" / "a.wav")
    write_tone(tmp_path / "audio" / "b.wav")
    tables = tmp_path / "tables"
    for split, path in (("train", str(audio)), ("dev", "b.wav"), ("test", "x/a.wav")):
        (tables / split).mkdir(parents=True)
        write(tables / split / f"{split}.tsv", [(split, path, "Hello")])
    manifests = [tables / split / f"{split}.tsv" for split in ("train", "dev", "test")]
    corpus = tsv.read_tsv(manifests, audio_root=tmp_path / "audio")
    assert [(s.split, [clip.id for clip in s.clips]) for s in corpus.speakers] == [
        ("dev", ["b"]),
        ("test", []),
        ("train", ["x/a"]),
    ]
    assert all(len(corpus.render(s).utterances) == len(s.clips) for s in corpus.speakers)
    assert corpus.problems.counts == {ProblemKind.DUPLICATE_ROW: 1}
    with pytest.raises(InputError, match=r"lead out of .*: --audio-root names the folder where the audio lies"):
        tsv.read_tsv(manifests[0])
    with pytest.raises(InputError, match=r"audio_root=.*: expected the folder where the audio lies"):
        tsv.read_tsv(manifests, audio_root=audio)


def test_nemos_lines_may_be_parts_of_a_file(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "call.wav", np.arange(32_000, dtype=np.int16), 16_000)
    lines = [
        {"audio_filepath": "call.wav", "offset": 1.5, "duration": 0.25, "text": "One", "speaker": "ann"},
        {"audio_filepath": "call.wav", "offset": 0.25, "duration": 0.5, "text": "Two", "speaker": "ann"},
        {"audio_filepath": "call.wav", "duration": 2.0, "text": "Whole", "speaker": "ann"},
        {"audio_filepath": "call.wav", "offset": 0.25, "duration": -1, "text": "None", "speaker": "ann"},
    ]
    (tmp_path / "train_manifest.json").write_text("\n".join(map(json.dumps, lines)))
    corpus = tsv.read_tsv(tmp_path / "train_manifest.json", columns=tsv.NEMO)
    (speaker,) = corpus.speakers
    assert speaker.split == "train"
    found = [(u.id, int(np.asarray(u.samples)[0]), len(u.samples)) for u in corpus.render(speaker).utterances]
    assert found == [("call", 0, 32_000), ("call-00000250", 4_000, 8_000), ("call-00001500", 24_000, 4_000)]
    assert corpus.problems.counts == {ProblemKind.MALFORMED_ROW: 1}
    # Who is who is never guessed.
    (tmp_path / "train_manifest.json").write_text(json.dumps({"audio_filepath": "call.wav", "text": "One"}))
    with pytest.raises(InputError, match="no column 'speaker' for the user"):
        tsv.read_tsv(tmp_path / "train_manifest.json", columns=tsv.NEMO)
