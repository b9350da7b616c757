"""The store gives back what was put in, and an interrupted `prepare` leaves the old store or the new one."""

import json
import pickle
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.commands import command

from sottovoce.base.errors import InputError
from sottovoce.data.corpora.corpus import (
    SAMPLE_RATE,
    Clip,
    Corpus,
    Problem,
    ProblemKind,
    ProblemLog,
    RenderedSpeaker,
    RenderedUtterance,
    Speaker,
)
from sottovoce.data.store import Store, pack_corpus, packing, reading, writing

names = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=8)
samples = st.lists(st.integers(-(2**15), 2**15 - 1), min_size=1, max_size=40).map(lambda x: np.array(x, dtype=np.int16))
texts = st.none() | st.text(max_size=20)
metadata = st.dictionaries(st.sampled_from(["gender", "age", "chapter"]), names, max_size=2)
utterances = st.builds(RenderedUtterance, id=names, samples=samples, text=texts, raw_text=texts, metadata=metadata)
crowds = st.dictionaries(
    st.tuples(st.sampled_from(["dev", "test", "train"]), names),
    st.tuples(st.lists(utterances, max_size=4), metadata),
    min_size=1,
    max_size=6,
)


def identity(speaker: RenderedSpeaker) -> RenderedSpeaker:
    return speaker


def corpus_of(speakers: list[RenderedSpeaker], *, strict: bool = False) -> Corpus[RenderedSpeaker]:
    ordered = sorted(speakers, key=lambda s: (s.split, s.name))
    return Corpus(name="made", language="en", speakers=ordered, render=identity, problems=ProblemLog(strict=strict))


def speaker(name: str, *lengths: int, split: str = "train", value: int = 1) -> RenderedSpeaker:
    spoken = [
        RenderedUtterance(id=f"{name}-{i}", samples=np.full(n, value, np.int16), text="ciao", raw_text="Ciao!")
        for i, n in enumerate(lengths)
    ]
    return RenderedSpeaker(name=name, split=split, utterances=spoken)


@settings(max_examples=60, deadline=None)
@given(crowds)
def test_returns_what_was_put_in(crowd: dict) -> None:
    put = [
        RenderedSpeaker(name=name, split=split, utterances=spoken, metadata=meta)
        for (split, name), (spoken, meta) in sorted(crowd.items())
    ]
    usable = [s for s in put if s.utterances]
    corpus = corpus_of(put)
    with tempfile.TemporaryDirectory() as folder:
        if not usable:
            with pytest.raises(InputError, match="no usable utterance"):
                pack_corpus(corpus, folder, workers=1)
            return
        pack_corpus(corpus, folder, workers=1)
        store = Store(folder)
        assert corpus.problems.counts[ProblemKind.EMPTY_SPEAKER] == len(put) - len(usable)
        assert store.user_count == len(usable)
        assert [row for rows in store.splits.values() for row in rows] == list(range(len(usable)))
        for row, expected in enumerate(usable):
            user = store.user(row)
            assert (user.name, user.split, user.metadata) == (expected.name, expected.split, expected.metadata)
            assert store.find(expected.name, split=expected.split) == user
            assert len(user.utterances) == len(expected.utterances)
            for utterance_row, wanted in zip(user.utterances, expected.utterances, strict=True):
                got = store.utterance(utterance_row)
                np.testing.assert_array_equal(got.samples, wanted.samples)
                assert (got.id, got.text, got.raw_text) == (wanted.id, wanted.text, wanted.raw_text)
                assert got.metadata == wanted.metadata
        total = sum(len(u.samples) for s in usable for u in s.utterances)
        assert sum(store.user(row).seconds for row in range(store.user_count)) == pytest.approx(total / SAMPLE_RATE)
        assert store.seconds == total / SAMPLE_RATE


def test_workers_and_pieces_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clips = [Clip(id=f"{i:03}", path="", text="a") for i in range(7)]
    speakers = [Speaker(name=name, split="train", clips=clips) for name in ("ada", "bea", "cleo")]

    def listing() -> Corpus[Speaker]:
        return Corpus(name="made", language="en", speakers=speakers, render=tone, problems=ProblemLog())

    pack_corpus(listing(), tmp_path / "whole", workers=1)
    monkeypatch.setattr(packing, "CLIPS_PER_TASK", 2)
    pack_corpus(listing(), tmp_path / "pieces", workers=2)
    whole, pieces = Store(tmp_path / "whole"), Store(tmp_path / "pieces")
    assert whole.digest == pieces.digest
    assert pieces.user_count == 3
    assert pieces.find("bea").utterances == range(7, 14)


def tone(speaker: Speaker) -> RenderedSpeaker:
    spoken = [
        RenderedUtterance(id=c.id, samples=np.full(5 + int(c.id), len(speaker.name), np.int16), text="a", raw_text="a")
        for c in speaker.clips
    ]
    return RenderedSpeaker(name=speaker.name, split=speaker.split, utterances=spoken)


def test_digest_follows_content(tmp_path: Path) -> None:
    digests = set()
    for i, content in enumerate(
        ([speaker("a", 3)], [speaker("a", 4)], [speaker("a", 3, value=2)], [speaker("a", 3, split="dev")])
    ):
        pack_corpus(corpus_of(content), tmp_path / str(i), workers=1)
        digests.add(Store(tmp_path / str(i)).digest)
    assert len(digests) == 4


def test_samples_are_read_only_and_store_pickles(tmp_path: Path) -> None:
    pack_corpus(corpus_of([speaker("a", 3)]), tmp_path / "s", workers=1)
    store = pickle.loads(pickle.dumps(Store(tmp_path / "s")))
    with pytest.raises(ValueError, match="read-only"):
        store.samples(0)[0] = 7


def test_replaces_the_old_store_and_sweeps_what_is_left(tmp_path: Path) -> None:
    out = tmp_path / "s"
    pack_corpus(corpus_of([speaker("old", 3)]), out, workers=1)
    reader = Store(out)
    (out / "data-left-by-a-killed-process").mkdir()
    pack_corpus(corpus_of([speaker("new", 4)]), out, workers=1)
    assert Store(out).user(0).name == "new"
    assert reader.samples(0).tolist() == [1, 1, 1], "a reader of the old generation keeps it"
    assert len(list(out.glob("data-*"))) == 1


def test_opening_survives_a_prepare_that_ends_in_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "s"
    pack_corpus(corpus_of([speaker("old", 3)]), out, workers=1)
    read_header, reads = reading._read_header, []

    def read_then_replaced(path: Path) -> dict:
        reads.append(read_header(path))
        if len(reads) == 1:
            pack_corpus(corpus_of([speaker("new", 4)]), out, workers=1)
        return reads[-1]

    monkeypatch.setattr(reading, "_read_header", read_then_replaced)
    store = Store(out)
    assert (store.user(0).name, store.samples(0).tolist(), len(reads)) == ("new", [1] * 4, 2)
    assert store.header["generation"] == reads[1]["generation"]


def test_a_process_that_opens_a_replaced_store_is_told(tmp_path: Path) -> None:
    pack_corpus(corpus_of([speaker("old", 3)]), tmp_path / "s", workers=1)
    sent = pickle.dumps(Store(tmp_path / "s"))
    pack_corpus(corpus_of([speaker("new", 4)]), tmp_path / "s", workers=1)
    with pytest.raises(InputError, match="prepared anew while it was in use"):
        pickle.loads(sent)


@pytest.mark.parametrize("after", ["write_json", "_sweep"])
def test_an_interrupt_right_after_the_commit_keeps_the_new_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    out = tmp_path / "s"
    pack_corpus(corpus_of([speaker("old", 3)]), out, workers=1)
    original = getattr(packing, after)

    def interrupted(*arguments: object, **options: object) -> None:
        original(*arguments, **options)
        if Store(out).user(0).name == "new":
            raise KeyboardInterrupt

    monkeypatch.setattr(packing, after, interrupted)
    with pytest.raises(KeyboardInterrupt):
        pack_corpus(corpus_of([speaker("new", 4)]), out, workers=1)
    assert Store(out).user(0).name == "new"


@pytest.mark.parametrize("old", [True, False])
def test_failure_leaves_the_old_store_or_nothing(tmp_path: Path, old: bool) -> None:
    out = tmp_path / "s"
    if old:
        pack_corpus(corpus_of([speaker("old", 3)]), out, workers=1)
    bad = RenderedSpeaker(
        name="x", split="train", utterances=[], problems=[Problem(ProblemKind.MISSING_AUDIO, "x.flac")]
    )
    with pytest.raises(InputError, match=r"text with no audio file: x\.flac .*--strict"):
        pack_corpus(corpus_of([speaker("a", 3), bad], strict=True), out, workers=1)
    if old:
        assert Store(out).user(0).name == "old"
        assert len(list(out.glob("data-*"))) == 1
    else:
        assert not out.exists()


@contextmanager
def no_file_above(size: int) -> Iterator[None]:
    """Within, writing behind `size` bytes fails as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    old_handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, old_handler)


def test_full_disk_is_one_clear_line(tmp_path: Path) -> None:
    with no_file_above(100_000), pytest.raises(InputError, match=r"no space left .* nothing was changed"):
        pack_corpus(corpus_of([speaker("a", 200_000)]), tmp_path / "s", workers=1)
    assert not (tmp_path / "s").exists()


def test_a_disk_that_fills_up_at_the_tables_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finish = writing.Writer.finish

    def finish_on_a_full_disk(writer: writing.Writer, *names: str) -> dict:
        for file in writer.files.values():
            file.flush()
        with no_file_above(8_000):
            return finish(writer, *names)

    monkeypatch.setattr(writing.Writer, "finish", finish_on_a_full_disk)
    with pytest.raises(InputError, match=r"no space left .* nothing was changed"):
        pack_corpus(corpus_of([speaker(f"{i:04}", 1) for i in range(2_000)]), tmp_path / "s", workers=1)
    assert not (tmp_path / "s").exists()


KILLED = """
import sys
sys.path.insert(0, {root!r})
from tests.data.store.test_store import corpus_of, speaker
from sottovoce.data.store import pack_corpus
held = lambda progress: (print(progress.tasks_done, flush=True), progress.tasks_done == 3 and sys.stdin.readline())
pack_corpus(corpus_of([speaker(f"new{{i:03}}", 2000) for i in range(100)]), sys.argv[1], workers=1, on_progress=held)
"""


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_killed_prepare_leaves_the_old_store(tmp_path: Path, sent: signal.Signals) -> None:
    out = tmp_path / "s"
    pack_corpus(corpus_of([speaker("old", 3)]), out, workers=1)
    code = KILLED.format(root=str(Path(__file__).parents[3]))
    arguments = [sys.executable, "-c", code, out]
    with command(arguments, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        while process.stdout.readline().strip() != "3":  # then it waits for us, with three of a hundred written
            assert process.poll() is None
        process.send_signal(sent)
        assert process.wait() != 0
    assert Store(out).user(0).name == "old"
    pack_corpus(corpus_of([speaker("newer", 3)]), out, workers=1)  # the dead process's lock is gone with it
    assert Store(out).user(0).name == "newer"
    assert len(list(out.glob("data-*"))) == 1


def test_what_a_killed_process_left_is_in_nobodys_way(tmp_path: Path) -> None:
    out = tmp_path / "s"
    (out / "data-left-by-a-killed-process").mkdir(parents=True)
    (out / ".lock").touch()
    with pytest.raises(InputError, match="no usable utterance"):
        pack_corpus(corpus_of([speaker("silent")]), out, workers=1)
    assert not out.exists()


def test_two_prepares_do_not_mix(tmp_path: Path) -> None:
    out = tmp_path / "s"

    def second(_: object) -> None:
        with pytest.raises(InputError, match="another `prepare` is writing"):
            pack_corpus(corpus_of([speaker("b", 3)]), out, workers=1)

    pack_corpus(corpus_of([speaker("a", 3)]), out, workers=1, on_progress=second)
    assert Store(out).user(0).name == "a"


def test_bad_places(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing is there"):
        Store(tmp_path / "none")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/letter.txt").write_text("dear")
    with pytest.raises(InputError, match="holds other things"):
        pack_corpus(corpus_of([speaker("a", 3)]), tmp_path / "other", workers=1)
    with pytest.raises(InputError, match="it is a file"):
        pack_corpus(corpus_of([speaker("a", 3)]), tmp_path / "other/letter.txt", workers=1)


ADDED_LATER = {"seal", "checksums"}


def test_damaged_or_foreign_stores_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "s"
    pack_corpus(corpus_of([speaker("a", 30)]), out, workers=1)
    header = json.loads((out / "store.json").read_text())
    audio = out / header["generation"] / "audio.i16"
    audio.write_bytes(audio.read_bytes()[:-2])
    with pytest.raises(InputError, match=r"damaged: .*audio\.i16 has 58 bytes, expected 60"):
        Store(out)
    (out / "store.json").write_text(json.dumps(header | {"version": 99}))
    with pytest.raises(InputError, match="version=99"):
        Store(out)
    (out / "store.json").write_text(json.dumps(header | {"sample_rate": 8000}))
    with pytest.raises(InputError, match="sample_rate=8000, expected 16000"):
        Store(out)
    (out / "store.json").write_text("{")
    with pytest.raises(InputError, match="not readable"):
        Store(out)
    (out / "store.json").write_text('{"a": 1}')
    with pytest.raises(InputError, match="was not written by"):
        Store(out)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("store.json", b'"users": 2', b'"users": 1'),
        ("store.json", b'"language": "en"', b'"language": "fr"'),
        ("user_keys.npy", b"descr", b"dascr"),
        ("user_keys.npy", b"(2,)", b"(3,)"),
        ("user_keys.npy", b"{", b"("),
    ],
)
def test_a_store_with_one_letter_changed_does_not_open(tmp_path: Path, name: str, old: bytes, new: bytes) -> None:
    pack_corpus(corpus_of([speaker("a", 30), speaker("b", 20)]), tmp_path / "s", workers=1)
    (path,) = (tmp_path / "s").rglob(name)
    assert path.read_bytes().count(old) == 1
    path.write_bytes(path.read_bytes().replace(old, new))
    with pytest.raises(InputError, match="damaged"):
        Store(tmp_path / "s")


@pytest.mark.parametrize("name", ["users.jsonl", "utterances.jsonl", "audio_offsets.npy", "user_keys.npy", "audio.i16"])
@pytest.mark.parametrize("kept_checksums", [True, False])
def test_a_check_finds_a_changed_bit_in_any_file(tmp_path: Path, name: str, kept_checksums: bool) -> None:
    pack_corpus(corpus_of([speaker("a", 30), speaker("b", 20)]), tmp_path / "s", workers=1)
    header = json.loads((tmp_path / "s/store.json").read_text())
    if not kept_checksums:  # as releases before wrote it
        (tmp_path / "s/store.json").write_text(json.dumps({k: v for k, v in header.items() if k not in ADDED_LATER}))
    Store(tmp_path / "s").check(audio=True)
    (path,) = (tmp_path / "s").rglob(name)
    data = bytearray(path.read_bytes())
    data[-2] ^= 0x80
    path.write_bytes(data)
    if kept_checksums or name == "audio_offsets.npy":
        with pytest.raises(InputError, match="damaged"):
            Store(tmp_path / "s").check(audio=True)
    Store(tmp_path / "s")


def test_a_store_tells_whose_speech_lies_in_the_order_it_was_spoken(tmp_path: Path) -> None:
    people = [replace(speaker("ada", 3), in_time=True), speaker("bea", 4), replace(speaker("cleo", 5), in_time=True)]
    pack_corpus(corpus_of(people), tmp_path / "s", workers=1)
    store = Store(tmp_path / "s")
    store.check()
    assert store.users_in_time.tolist() == [True, False, True]
    assert [store.user(row).in_time for row in range(3)] == [True, False, True]
    pack_corpus(corpus_of([replace(one, in_time=False) for one in people]), tmp_path / "no", workers=1)
    assert Store(tmp_path / "no").digest != store.digest, "the order is part of what a run resumes on"
    assert Store(tmp_path / "no").users_in_time.tolist() == [False] * 3


def test_one_piece_out_of_time_is_enough(tmp_path: Path) -> None:
    pieces = [replace(speaker("ada", 3), in_time=True), speaker("ada", 4), replace(speaker("bea", 3), in_time=True)]
    pack_corpus(corpus_of(pieces), tmp_path / "s", workers=1)
    assert Store(tmp_path / "s").users_in_time.tolist() == [False, True]


def test_stores_without_an_order_in_time_are_what_they_always_were(tmp_path: Path) -> None:
    pack_corpus(corpus_of([speaker("ada", 3, 5), speaker("bea", 4, split="dev")]), tmp_path / "s", workers=1)
    store = Store(tmp_path / "s")
    # Written by the release before there was such an order; a run that was begun with it goes on.
    assert (store.header["version"], store.digest) == (1, "715b844086cf69becd140281801c47cc")
    assert not list((tmp_path / "s").rglob("users_in_time.npy"))
