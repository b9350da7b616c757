"""Libri-Light's two layouts, cut and ordered as they should be, copied or pointed into; and what may be wrong there."""

import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st
from tests.data.corpora import trees

from sottovoce.base.errors import InputError
from sottovoce.data.corpora import librilight
from sottovoce.data.corpora.corpus import ProblemKind
from sottovoce.data.store import Store, pack_corpus

RATE = 16_000


@pytest.fixture(params=["noise", "real speech"])
def voices(request: pytest.FixtureRequest) -> trees.Voices:
    return trees.noise if request.param == "noise" else trees.recorded(request.getfixturevalue("real_speech"))


def prepared(root: Path, out: Path, **options: object) -> Store:
    pack_corpus(librilight.read_librilight(root, **options), out, workers=1)  # type: ignore[arg-type]
    return Store(out)


@pytest.mark.parametrize("point", [False, True], ids=["copied", "pointed into"])
def test_chapters_are_cut_at_pauses_and_lie_in_order_of_time(tmp_path: Path, voices: trees.Voices, point: bool) -> None:
    written = trees.librilight(tmp_path / "ll", voices)
    store = prepared(tmp_path / "ll", tmp_path / "store", point=point)
    assert {split: len(rows) for split, rows in store.splits.items()} == {"large": 2, "small": 1}
    assert store.users_in_time.all()
    assert not store.header["problems"]
    for place, chapters in written.items():
        split, name = place.split("/")
        utterances = [store.utterance(row) for row in store.find(name, split=split).utterances]
        assert {one.text for one in utterances} == {None}
        expected = [
            (f"{name}/{chapter.path.parent.name}/{chapter.path.stem}-{number:04}", chapter.sound[start:stop])
            for chapter in chapters
            for number, (start, stop) in enumerate(librilight.cut_voice(chapter.voiced, most=20 * RATE))
        ]
        assert [one.id for one in utterances] == [id for id, _ in expected]
        for one, (_, sound) in zip(utterances, expected, strict=True):
            np.testing.assert_array_equal(one.samples, sound)
            assert one.seconds == len(sound) / RATE <= 20
        assert utterances[0].metadata == {
            "book": chapters[0].path.parent.name,
            "chapter": chapters[0].path.stem,
            "snr": "11.2345",
            "start": "0.60",
        }


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 90)), min_size=1, max_size=12),
    st.integers(1, 60),
)
def test_cuts_hold_all_voice_once_and_none_is_too_long(gaps_and_lengths: list[tuple[int, int]], most: int) -> None:
    voiced, at = [], 0
    for gap, length in gaps_and_lengths:
        voiced.append((at + gap, at + gap + length))
        at += gap + length
    found = list(librilight.cut_voice(voiced, most=most))
    assert all(0 < stop - start <= most for start, stop in found)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(found))
    inside = [sample for start, stop in found for sample in range(start, stop)]
    assert {sample for start, stop in voiced for sample in range(start, stop)} <= set(inside)


@pytest.mark.parametrize("point", [False, True], ids=["copied", "pointed into"])
def test_reads_what_cut_by_vad_wrote(tmp_path: Path, voices: trees.Voices, point: bool) -> None:
    sounds = voices(3, 4)
    names = ["02_x_64kb_0000", "10_x_64kb_0000", "10_x_64kb_0001"]
    for book, name, sound in [
        *(("2512", name, sound) for name, sound in zip(reversed(names), sounds, strict=False)),
        ("301", "01_y_64kb_0000", np.concatenate([sounds[3]] * 8)),
    ]:
        (tmp_path / "cut/100" / book).mkdir(parents=True, exist_ok=True)
        soundfile.write(tmp_path / "cut/100" / book / f"{name}.flac", sound, RATE, subtype="PCM_16")
    store = prepared(tmp_path / "cut", tmp_path / "store", cut_seconds=30, point=point)
    assert list(store.splits) == ["train"]
    assert not store.header["problems"], "it has no JSON, and needs none"
    rows = store.user(0).utterances
    ids = [store.utterance(row).id for row in rows]
    pieces = -(-8 * len(sounds[3]) // (30 * RATE))
    assert ids[:pieces] == [f"100/301/01_y_64kb_0000-{number:04}" for number in range(pieces)]
    assert [id.removesuffix("-0000") for id in ids[pieces:]] == [f"100/2512/{name}" for name in names]
    together = np.concatenate([store.samples(row) for row in rows[:pieces]])
    np.testing.assert_array_equal(together, np.concatenate([sounds[3]] * 8), err_msg="what is cut evenly is all there")


@pytest.mark.parametrize("point", [False, True], ids=["copied", "pointed into"])
def test_everything_wrong_is_counted_and_the_rest_is_kept(tmp_path: Path, point: bool) -> None:
    book = tmp_path / "ll/large/100" / trees.FAIRIES
    voice = [np.full(3 * RATE, 100, np.int16)] * 2
    for name, changes in {
        "01_good": {},
        "02_no_key": {"voice_activity": None},
        "03_silent": {"voice_activity": []},
        "04_beyond": {"voice_activity": [[0.6, 3.6], [4.2, 99.5]]},
        "05_nonsense": {"voice_activity": [[3, 1]]},
        "06_no_json": {},
        "07_broken_json": {},
        "08_cut_short": {},
        "09_empty": {},
        "10_gone": {},
        "11_rounded": {"voice_activity": [[0.6, 7.86]]},
    }.items():
        chapter = trees.write_chapter(book, name, voice, **changes)
    length = len(chapter.sound)
    (book / "06_no_json.json").unlink()
    (book / "07_broken_json.json").write_text('{"voice_activity": [[')
    whole = (book / "08_cut_short.flac").read_bytes()
    (book / "08_cut_short.flac").write_bytes(whole[: len(whole) // 2])
    (book / "09_empty.flac").write_bytes(b"")
    (book / "10_gone.flac").unlink()
    trees.write_chapter(book.parent.parent / "101/b", "01", voice)
    (book.parent.parent / "102/b").mkdir(parents=True)

    store = prepared(tmp_path / "ll", tmp_path / "store", point=point)
    problems = store.header["problems"]
    assert {name: (found["count"], found["kept"]) for name, found in problems.items()} == {
        ProblemKind.NO_VOICE_ACTIVITY: (4, True),
        ProblemKind.NO_VOICE: (1, False),
        ProblemKind.BEYOND_THE_END: (1, True),
        ProblemKind.TRUNCATED_AUDIO: (1, False),
        ProblemKind.EMPTY_AUDIO: (1, False),
        ProblemKind.MISSING_AUDIO: (1, False),
        ProblemKind.EMPTY_SPEAKER: (1, False),
    }
    assert "1 of 2 segments, to 99.5 s of 7.8 s" in problems[ProblemKind.BEYOND_THE_END]["examples"][0]
    assert "06_no_json.flac (it has no JSON)" in "".join(problems[ProblemKind.NO_VOICE_ACTIVITY]["examples"])
    found = {one.id.split("/")[-1]: len(one.samples) for one in map(store.utterance, store.find("100").utterances)}
    assert found == {
        "01_good-0000": int(6.6 * RATE),
        "02_no_key-0000": length,
        "04_beyond-0000": length - int(0.6 * RATE),
        "05_nonsense-0000": length,
        "06_no_json-0000": length,
        "07_broken_json-0000": length,
        "11_rounded-0000": length - int(0.6 * RATE),
    }
    assert store.find("101").seconds == 6.6


def test_strict_stops_at_a_chapter_without_json(tmp_path: Path) -> None:
    trees.librilight(tmp_path / "ll", trees.noise)
    next((tmp_path / "ll").glob("large/20/*/*.json")).unlink()
    with pytest.raises(InputError, match=r"chapter with no voice activity .*\(it has no JSON\) \[stopped because"):
        prepared(tmp_path / "ll", tmp_path / "store", strict=True)
    assert not (tmp_path / "store").exists()


def test_a_subset_by_itself_and_by_name(tmp_path: Path) -> None:
    trees.librilight(tmp_path / "ll", trees.noise)
    assert {speaker.split for speaker in librilight.read_librilight(tmp_path / "ll/large").speakers} == {"large"}
    assert [speaker.name for speaker in librilight.read_librilight(tmp_path / "ll", splits=["small"]).speakers] == ["7"]
    with pytest.raises(InputError, match=r"split='medium' is not in .* expected one of small, large"):
        librilight.read_librilight(tmp_path / "ll", splits=["medium"])
    with pytest.raises(InputError, match=r"does not hold Libri-Light: expected <subset>/<speaker>/.*nothing there"):
        librilight.read_librilight(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"cut_seconds=0\.5: expected at least 1"):
        librilight.read_librilight(tmp_path / "ll", cut_seconds=0.5)


def test_what_strayed_is_not_lost(tmp_path: Path) -> None:
    trees.librilight(tmp_path / "ll", trees.noise)
    trees.write_chapter(tmp_path / "ll/small/7", "stray", trees.noise(1, 1))
    shutil.copy(tmp_path / "ll/small/7/stray.flac", tmp_path / "ll/small/7/poems_librivox/poems_1_64kb.wav")
    corpus = librilight.read_librilight(tmp_path / "ll", splits=["small"])
    assert [clip.id for clip in corpus.speakers[0].clips] == ["7/stray", "7/poems_librivox/poems_1_64kb"]
    assert corpus.problems.counts == {ProblemKind.DUPLICATE_ROW: 1}


def test_json_may_hold_anything(tmp_path: Path) -> None:
    for number, activity in enumerate([{}, [[0, "x"]], [[0]], [0, 1], [[True, 2]], [[0, 1e999]], "[]", [[-1, 2]]]):
        chapter = trees.write_chapter(tmp_path / "100/b", f"{number}", trees.noise(1, 1))
        path = chapter.path.with_suffix(".json")
        path.write_text(json.dumps({"voice_activity": activity}))
    corpus = librilight.read_librilight(tmp_path)
    rendered = corpus.render(corpus.speakers[0])
    assert len(rendered.utterances) == 8
    assert {problem.kind for problem in rendered.problems} == {ProblemKind.NO_VOICE_ACTIVITY}
