"""Multilingual LibriSpeech: transcripts, order of time, parts with few labels; and what may be wrong there."""

from pathlib import Path

import numpy as np
import pytest
from tests.data.corpora import trees

from sottovoce.base.errors import InputError
from sottovoce.data.corpora import mls
from sottovoce.data.corpora.corpus import ProblemKind
from sottovoce.data.store import Store, pack_corpus


@pytest.fixture(params=["noise", "real speech"])
def voices(request: pytest.FixtureRequest) -> trees.Voices:
    return trees.noise if request.param == "noise" else trees.recorded(request.getfixturevalue("real_speech"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    trees.mls(tmp_path / "mls_french", trees.noise)
    return tmp_path / "mls_french"


@pytest.mark.parametrize(("suffix", "point"), [("flac", False), ("flac", True), ("opus", False)])
def test_lies_in_order_of_time_with_texts_and_genders(
    tmp_path: Path, voices: trees.Voices, suffix: str, point: bool
) -> None:
    sounds = trees.mls(tmp_path / "mls_french", voices, suffix=suffix)
    pack_corpus(mls.read_mls(tmp_path, point=point), tmp_path / "store", workers=1)
    store = Store(tmp_path / "store")
    assert (store.language, list(store.splits)) == ("fr", ["dev", "train"])
    assert not store.header["problems"]
    assert store.users_in_time.all()
    user = store.find("1001")
    assert user.metadata == {"gender": "female"}
    utterances = [store.utterance(row) for row in user.utterances]
    assert [one.id for one in utterances] == trees.IN_TIME
    assert [one.text for one in utterances] == [trees.FRENCH[id][2] for id in trees.IN_TIME]
    assert utterances[0].metadata == {"book": "9876"}
    for one in utterances:
        if suffix == "flac":
            np.testing.assert_array_equal(one.samples, sounds[one.id])
        else:
            assert len(one.samples) == len(sounds[one.id])
    assert store.utterance(store.find("2002").utterances[0]).text == "l'été"


def test_parts_with_few_labels_are_splits_to_be_named(root: Path) -> None:
    corpus = mls.read_mls(root, splits=["train-9hr", "train-1hr", "train-1hr-1"])
    assert {speaker.split: [clip.id for clip in speaker.clips] for speaker in corpus.speakers} == {
        "train-1hr": trees.IN_TIME[2:4],
        "train-1hr-1": trees.IN_TIME[3:4],
        "train-9hr": trees.IN_TIME[:2],
    }
    assert corpus.problems.counts == {ProblemKind.SPLIT_OVERLAP: 1}
    assert all(speaker.in_time for speaker in corpus.speakers)
    (root / "train/limited_supervision/9hr/handles.txt").write_text("1001_9876_000000\n\n1001_9876_000009\n")
    corpus = mls.read_mls(root, splits=["train-9hr"])
    assert corpus.problems.counts == {ProblemKind.MISSING_AUDIO: 1, ProblemKind.EMPTY_ROW: 1}
    with pytest.raises(InputError, match=r"split='train-10hr' is not in .* train, dev, train-1hr, train-1hr-0"):
        mls.read_mls(root, splits=["train-10hr"])


def test_everything_wrong_is_counted_and_the_rest_is_kept(root: Path) -> None:
    train = root / "train"
    with (train / "transcripts.txt").open("ab") as file:
        file.write(b"1001_10003_000009\ttexte sans son\n\n1001_10003_000000\tencore\n../../x\tdehors\n\xff\tx\n")
    lines = (train / "transcripts.txt").read_text(errors="surrogateescape")
    lines = lines.replace("1001_10003_000001\t", "1001_10003_000001 ")
    (train / "transcripts.txt").write_text(lines, errors="surrogateescape")
    (root / "metainfo.txt").write_text("SPEAKER | GENDER | …\n1001 | F | train | 1 | 2 | T | C\n2002 | ? | dev\n")
    corpus = mls.read_mls(root)
    assert corpus.problems.counts == {
        ProblemKind.MALFORMED_ROW: 3,  # a line without TAB, bytes that are not UTF-8, a gender
        ProblemKind.MISSING_AUDIO: 2,
        ProblemKind.EMPTY_ROW: 1,
        ProblemKind.DUPLICATE_ROW: 1,
        ProblemKind.UNLABELLED: 1,
    }
    malformed = [problem.detail for problem in corpus.problems.examples[ProblemKind.MALFORMED_ROW]]
    assert malformed[1:] == ["expected an id, a TAB and the text", "not UTF-8"]
    clips = {clip.id: clip.text for clip in corpus.speakers[1].clips}
    assert list(clips) == trees.IN_TIME, "nothing is lost"
    assert clips["1001_10003_000001"] is None, "what it says is not known"
    assert clips["1001_10003_000000"] == "chapitre cinq"


def test_an_utterance_without_a_time_comes_last_and_its_speaker_is_not_in_time(root: Path) -> None:
    path = root / "train/segments.txt"
    kept = [line for line in path.read_text().splitlines() if not line.startswith("1001_9876_000000")]
    kept[0] = kept[0].replace("12.5", "noon")
    path.write_text("\n".join(kept) + "\n")
    corpus = mls.read_mls(root)
    dev, train = corpus.speakers
    assert corpus.problems.counts == {ProblemKind.NO_TIME: 2, ProblemKind.MALFORMED_ROW: 1}
    assert [clip.id for clip in train.clips] == [
        *(id for id in trees.IN_TIME[1:] if id != "1001_10003_000000"),
        *("1001_10003_000000", "1001_9876_000000"),
    ]
    assert (dev.in_time, train.in_time) == (True, False)


def test_what_strayed_is_not_lost(root: Path) -> None:
    book = root / "train/audio/1001/9876"
    (book / "1001_9876_000000.flac").rename(book.parent / "1001_9876_000000.flac")
    corpus = mls.read_mls(root)
    assert [clip.id for clip in corpus.speakers[1].clips] == trees.IN_TIME
    assert not corpus.problems.counts


def test_opus_cannot_be_pointed_into(tmp_path: Path) -> None:
    trees.mls(tmp_path / "mls_french_opus", trees.noise, suffix="opus")
    corpus = mls.read_mls(tmp_path / "mls_french_opus", point=True)
    with pytest.raises(InputError, match=r"no usable utterance .* 6 × audio that would have to be converted"):
        pack_corpus(corpus, tmp_path / "store", workers=1)


def test_the_folder_tells_the_language(root: Path) -> None:
    assert mls.read_mls(root, language="it").language == "it"
    root.rename(root.with_name("klingon"))
    with pytest.raises(InputError, match="cannot tell its language"):
        mls.read_mls(root.with_name("klingon"))
    with pytest.raises(InputError, match=r"does not hold MLS: expected \{train,dev,test\}/"):
        mls.read_mls(root.with_name("klingon") / "train")


def test_the_real_sample(real_speech: Path, tmp_path: Path) -> None:
    pack_corpus(mls.read_mls(real_speech / "layout-samples/mls_spanish_opus"), tmp_path / "store", workers=1)
    store = Store(tmp_path / "store")
    assert (store.language, store.splits) == ("es", {"train": range(1)})
    user, utterance = store.user(0), store.utterance(0)
    assert (user.name, utterance.id, user.in_time) == ("13697", "13697_11991_000000", False)
    (line,) = (real_speech / "layout-samples/mls_spanish_opus/train/transcripts.txt").read_text().splitlines()
    assert utterance.raw_text == line.split("\t")[1]
    assert list(store.header["problems"]) == [ProblemKind.NO_TIME], "the sample has no segments.txt"
