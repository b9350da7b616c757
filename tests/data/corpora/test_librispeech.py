from collections.abc import Callable
from pathlib import Path

import pytest

from sottovoce.base.errors import InputError
from sottovoce.data.corpora import librispeech
from sottovoce.data.corpora.corpus import Corpus, ProblemKind, Speaker

WriteTone = Callable[[Path], Path]


def chapter(split: Path, speaker: str, number: str, lines: list[str], write_tone: WriteTone) -> Path:
    """A chapter with an audio file for each line of its transcript."""
    folder = split / speaker / number
    for line in lines:
        write_tone(folder / f"{line.split()[0]}.flac")
    (folder / f"{speaker}-{number}.trans.txt").write_text("".join(line + "\n" for line in lines))
    return folder


@pytest.fixture
def root(tmp_path: Path, write_tone: WriteTone) -> Path:
    base = tmp_path / "LibriSpeech"
    chapter(base / "train-clean-5", "19", "198", ["19-198-0001 B C", "19-198-0000 A"], write_tone)
    chapter(base / "train-clean-5", "19", "227", ["19-227-0000 D"], write_tone)
    chapter(base / "dev-clean", "60", "1", ["60-1-0000 E"], write_tone)
    (base / "SPEAKERS.TXT").write_text(
        ";ID  |SEX| SUBSET           |MINUTES| NAME\n"
        "19   | F | train-clean-5    | 25.19 | Some Body\n"
        "60   | M | dev-clean        | 20.18 | |CBW|Simon\n"  # a real name of LibriSpeech's
    )
    return base


def ids(corpus: Corpus[Speaker]) -> dict[tuple[str, str], list[str]]:
    return {(speaker.split, speaker.name): [clip.id for clip in speaker.clips] for speaker in corpus.speakers}


def test_lists_speakers_chapters_and_genders(root: Path) -> None:
    corpus = librispeech.read_librispeech(root)
    assert ids(corpus) == {
        ("dev-clean", "60"): ["60-1-0000"],
        ("train-clean-5", "19"): ["19-198-0000", "19-198-0001", "19-227-0000"],
    }
    simon, somebody = corpus.speakers
    assert simon.metadata == {"gender": "male", "subset": "dev-clean"}  # and no name
    assert somebody.metadata == {"gender": "female", "subset": "train-clean-5"}
    assert [clip.metadata["chapter"] for clip in somebody.clips] == ["198", "198", "227"]
    assert [u.text for u in corpus.render(somebody).utterances] == ["a", "b c", "d"]
    assert not corpus.problems.counts


def test_accepts_the_parent_and_a_tree_without_speakers_file(root: Path) -> None:
    (root / "SPEAKERS.TXT").unlink()
    corpus = librispeech.read_librispeech(root.parent, splits=["dev-clean"])
    assert ids(corpus) == {("dev-clean", "60"): ["60-1-0000"]}
    assert corpus.speakers[0].metadata == {}


def test_everything_wrong_is_counted_once(root: Path, write_tone: WriteTone) -> None:
    folder = root / "train-clean-5" / "19" / "198"
    write_tone(folder / "19-198-0009.flac")  # audio, no text
    write_tone(folder / "19-198-0000.wav")  # a second recording of one utterance
    write_tone(root / "train-clean-5" / "19" / "stray.flac")
    write_tone(folder / "19-198-0005.flac")
    with open(folder / "19-198.trans.txt", "ab") as file:
        file.write(b"19-198-0007 TEXT WITHOUT AUDIO\n\n19-198-0001 AGAIN\n../../../x OUT\n19-198-0005\n\xff BAD\n")
    (root / "dev-clean" / "61").mkdir()  # nobody there: an empty speaker, for the packer to count
    corpus = librispeech.read_librispeech(root)
    assert corpus.problems.counts == {
        ProblemKind.MISSING_TEXT: 3,
        ProblemKind.MISSING_AUDIO: 1,
        ProblemKind.DUPLICATE_ROW: 2,
        ProblemKind.EMPTY_ROW: 1,
        ProblemKind.PATH_ESCAPES: 1,
        ProblemKind.MALFORMED_ROW: 1,
    }
    assert ids(corpus)["train-clean-5", "19"] == ["19-198-0000", "19-198-0001", "19-227-0000"]
    assert ids(corpus)["dev-clean", "61"] == []


def test_a_split_that_lost_all_its_transcripts_is_not_overlooked(root: Path) -> None:
    (root / "dev-clean" / "60" / "1" / "60-1.trans.txt").unlink()
    assert librispeech.read_librispeech(root).problems.counts == {ProblemKind.MISSING_TEXT: 1}


def test_strict_stops_at_the_first_problem(root: Path) -> None:
    (root / "dev-clean" / "60" / "1" / "60-1-0000.flac").unlink()
    with pytest.raises(InputError, match="text with no audio file"):
        librispeech.read_librispeech(root, strict=True)


def test_a_wrong_path_says_what_was_expected_and_found(root: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere" / "clips").mkdir(parents=True)
    with pytest.raises(InputError, match=r"expected <split>/<speaker>/<chapter>.*found clips/"):
        librispeech.read_librispeech(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="nothing there"):
        librispeech.read_librispeech(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"split='test' is not in .* expected one of dev-clean, train-clean-5"):
        librispeech.read_librispeech(root, splits=["test"])


def test_same_speaker_in_two_splits_is_reported_and_kept(root: Path, write_tone: WriteTone) -> None:
    chapter(root / "dev-clean", "19", "300", ["19-300-0000 F"], write_tone)
    corpus = librispeech.read_librispeech(root)
    assert corpus.problems.counts == {ProblemKind.SPLIT_OVERLAP: 1}
    assert len(corpus.speakers) == 3


def test_in_order_of_time_where_it_is_asked_for(root: Path, write_tone: WriteTone) -> None:
    chapter(root / "train-clean-5", "19", "1000", ["19-1000-0000 G"], write_tone)
    by_number = ["19-198-0000", "19-198-0001", "19-227-0000", "19-1000-0000"]
    speaker = librispeech.read_librispeech(root, in_time=True).speakers[1]
    assert ([clip.id for clip in speaker.clips], speaker.in_time) == (by_number, True)
    speaker = librispeech.read_librispeech(root).speakers[1]
    assert ([clip.id for clip in speaker.clips], speaker.in_time) == (sorted(by_number), False)
