from collections.abc import Callable
from pathlib import Path

import pytest

from sottovoce.base.errors import InputError
from sottovoce.data.corpora import userlibri
from sottovoce.data.corpora.corpus import ProblemKind

WriteTone = Callable[[Path], Path]


@pytest.fixture
def root(tmp_path: Path, write_tone: WriteTone) -> Path:
    base = tmp_path / "UserLibri" / "audio_data"
    for split, user, id in [
        ("test-clean", "speaker-121-book-1041", "121-123852-0000"),
        ("test-clean", "speaker-121-book-1989", "121-121726-0000"),
        ("test-other", "speaker-3005-book-76", "3005-163389-0000"),
    ]:
        write_tone(base / split / user / f"{id}.flac")
        (base / split / user / f"{id.rsplit('-', 1)[0]}.trans.txt").write_text(f"{id} SOME WORDS\n")
    (base / "metadata.tsv").write_text(
        "User ID\tSplit\tNum Audio Examples\tAverage Words Per Example\n"
        "speaker-121-book-1041\tclean\t1\t2\n"
        "speaker-121-book-1989\tclean\t1\t2\n"
        "speaker-3005-book-76\tother\t1\t2"
    )
    return tmp_path


def test_users_are_a_speaker_with_a_book(root: Path) -> None:
    for folder in (root, root / "UserLibri", root / "UserLibri" / "audio_data"):
        corpus = userlibri.read_userlibri(folder)
        assert [(s.split, s.name) for s in corpus.speakers] == [
            ("test-clean", "speaker-121-book-1041"),
            ("test-clean", "speaker-121-book-1989"),
            ("test-other", "speaker-3005-book-76"),
        ]
    assert corpus.speakers[0].metadata == {"speaker": "121", "book": "1041"}
    assert corpus.speakers[0].clips[0].metadata == {"chapter": "123852"}
    assert corpus.render(corpus.speakers[0]).utterances[0].text == "some words"
    assert not corpus.problems.counts


def test_a_listed_user_without_a_folder_is_reported(root: Path) -> None:
    with open(root / "UserLibri" / "audio_data" / "metadata.tsv", "a") as file:
        file.write("\nspeaker-9-book-9\tother\t1\t2\nspeaker-8-book-8\tunknown\t1\t2\n")
    assert userlibri.read_userlibri(root).problems.counts == {ProblemKind.MISSING_AUDIO: 1}
    assert not userlibri.read_userlibri(root, splits=["test-clean"]).problems.counts


def test_a_wrong_path_says_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"expected audio_data/<split>/speaker-<S>-book-<B>/.*an empty folder"):
        userlibri.read_userlibri(tmp_path)
