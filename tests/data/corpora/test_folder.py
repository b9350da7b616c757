"""One person's folder of recordings, as people have them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from sottovoce.base.errors import InputError
from sottovoce.data.corpora import folder
from sottovoce.data.corpora.corpus import ProblemKind

WriteTone = Callable[[Path], Path]


@pytest.fixture
def recorded(tmp_path: Path, write_tone: WriteTone) -> Path:
    """Two recordings with their texts, one of them in a subfolder."""
    place = tmp_path / "anna"
    for name, text in (("lights", "Turn the lights off,\n please."), ("2024/weather", "What's the weather?")):
        write_tone(place / f"{name}.wav")
        (place / f"{name}.txt").write_text(text)
    return place


def test_texts_lie_beside_their_recordings(recorded: Path) -> None:
    corpus = folder.read_folder(recorded)
    (speaker,) = corpus.speakers
    assert (speaker.name, speaker.split) == ("anna", "train")
    assert [(clip.id, clip.text) for clip in speaker.clips] == [
        ("2024/weather", "What's the weather?"),
        ("lights", "Turn the lights off, please."),
    ]
    rendered = corpus.render(speaker)
    assert [utterance.text for utterance in rendered.utterances] == ["what's the weather", "turn the lights off please"]
    assert rendered.problems == []
    assert not corpus.problems.counts


def test_a_person_and_a_split_can_be_named(recorded: Path) -> None:
    (speaker,) = folder.read_folder(recorded, user="a", split="train-clean").speakers
    assert (speaker.name, speaker.split) == ("a", "train-clean")


def test_what_cannot_be_used_is_counted(recorded: Path, write_tone: WriteTone) -> None:
    write_tone(recorded / "alone.wav")
    write_tone(recorded / "silent.wav")
    write_tone(recorded / "latin.wav")
    write_tone(recorded / "long.wav")
    write_tone(recorded / "lights.flac")
    (recorded / "silent.txt").write_text(" \n")
    (recorded / "latin.txt").write_bytes(b"caf\xe9")
    (recorded / "long.txt").write_text("a" * 70_000)
    (recorded / "lost.txt").write_text("hello")
    (recorded / "notes.md").write_text("no recording")
    (recorded / ".hidden.wav").write_bytes(b"")
    corpus = folder.read_folder(recorded)
    assert dict(corpus.problems.counts) == {
        ProblemKind.MISSING_TEXT: 4,
        ProblemKind.DUPLICATE_ROW: 1,
        ProblemKind.MISSING_AUDIO: 1,
    }
    assert len(corpus.speakers[0].clips) == 2
    with pytest.raises(InputError, match="stopped because of --strict"):
        folder.read_folder(recorded, strict=True)


def test_without_any_text_it_is_speech_without_text(tmp_path: Path, write_tone: WriteTone) -> None:
    write_tone(tmp_path / "mine" / "one.wav")
    corpus = folder.read_folder(tmp_path / "mine")
    assert [clip.text for clip in corpus.speakers[0].clips] == [None]
    assert dict(corpus.problems.counts) == {ProblemKind.UNLABELLED: 1}


def test_a_table_says_itself_what_there_is(recorded: Path) -> None:
    (recorded / "mine.tsv").write_text("client_id\tpath\tsentence\nben\tlights.wav\tLights\n")
    (speaker,) = folder.read_folder(recorded).speakers
    assert (speaker.name, [clip.text for clip in speaker.clips]) == ("ben", ["Lights"])
    (recorded / "other.csv").write_text("client_id,path,sentence\n")
    with pytest.raises(InputError, match=r"does not hold recordings: expected audio files .* or one table"):
        folder.read_folder(recorded)


@pytest.mark.parametrize("made", ["nothing", "a file", "empty", "texts alone"])
def test_what_is_no_folder_of_recordings_is_said_in_one_line(tmp_path: Path, made: str) -> None:
    place = tmp_path / "mine"
    if made == "a file":
        place.write_text("")
    elif made != "nothing":
        place.mkdir()
    if made == "texts alone":
        (place / "lights.txt").write_text("lights")
    with pytest.raises(InputError, match="does not hold recordings: expected audio files") as refused:
        folder.read_folder(place)
    assert "\n" not in str(refused.value)


def test_a_link_that_leads_out_of_it_is_not_followed(recorded: Path, tmp_path: Path, write_tone: WriteTone) -> None:
    (recorded / "stray.wav").symlink_to(write_tone(tmp_path / "elsewhere.wav"))
    (recorded / "stray.txt").write_text("stray")
    corpus = folder.read_folder(recorded)
    problems = corpus.render(corpus.speakers[0]).problems
    assert [problem.kind for problem in problems] == [ProblemKind.PATH_ESCAPES]
