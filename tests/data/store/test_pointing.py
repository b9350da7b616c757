"""A store that points into FLAC files gives the same samples as one that has copied them, and tells if they changed."""

import os
import pickle
import tempfile
from pathlib import Path

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st
from tests.data.corpora import trees

from sottovoce.base.errors import InputError
from sottovoce.data.corpora import flac, librilight
from sottovoce.data.corpora.corpus import ProblemKind, Unusable
from sottovoce.data.corpora.flac import point_into
from sottovoce.data.statistics import compute_statistics
from sottovoce.data.store import Store, pack_corpus

RATE = 16_000


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    trees.librilight(tmp_path / "ll", trees.noise)
    return tmp_path / "ll"


@pytest.fixture
def store(corpus: Path, tmp_path: Path) -> Store:
    pack_corpus(librilight.read_librilight(corpus, point=True), tmp_path / "store", workers=1)
    return Store(tmp_path / "store")


def everything(store: Store) -> list[object]:
    return [
        (one.id, one.text, one.metadata, one.seconds, one.samples.tobytes())
        for one in map(store.utterance, range(store.utterance_count))
    ]


def test_the_same_as_a_copy_without_one(corpus: Path, store: Store, tmp_path: Path) -> None:
    pack_corpus(librilight.read_librilight(corpus), tmp_path / "copy", workers=2)
    copy = Store(tmp_path / "copy")
    assert everything(store) == everything(copy)
    assert compute_statistics(store) == compute_statistics(copy)
    assert (store.points, copy.points) == (True, False)
    assert (store.header["version"], copy.header["version"]) == (2, 1)
    assert not list((tmp_path / "store").rglob("audio.i16"))
    size = sum(path.stat().st_size for path in (tmp_path / "store").rglob("*.*") if path.is_file())
    assert size < os.path.getsize(next((tmp_path / "copy").rglob("audio.i16"))) / 20
    store.check(audio=True)
    for one in (store, copy):
        whole = one.samples(3)
        assert one.samples(3, start=50, count=20).tolist() == whole[50:70].tolist()
        assert one.samples(3, start=50).tolist() == whole[50:].tolist()
        assert one.samples(3, start=len(whole) - 5, count=20).tolist() == whole[-5:].tolist()  # not of the next one
    assert pickle.loads(pickle.dumps(store)).samples(3).tolist() == store.samples(3).tolist()
    with pytest.raises(ValueError, match="read-only"):
        store.samples(0)[0] = 7


def test_the_digest_is_that_of_the_corpus_wherever_it_lies(corpus: Path, store: Store, tmp_path: Path) -> None:
    corpus.rename(tmp_path / "elsewhere")
    pack_corpus(librilight.read_librilight(tmp_path / "elsewhere", point=True), tmp_path / "again", workers=2)
    assert Store(tmp_path / "again").digest == store.digest
    pack_corpus(
        librilight.read_librilight(tmp_path / "elsewhere", point=True, cut_seconds=10), tmp_path / "other", workers=1
    )
    assert Store(tmp_path / "other").digest != store.digest


def test_statistics_and_texts_need_no_audio(corpus: Path, store: Store) -> None:
    before = compute_statistics(store), [store.utterance(row).id for row in range(store.utterance_count)]
    for path in corpus.rglob("*.flac"):
        path.unlink()
    again = Store(store.path)
    again.check()
    assert (compute_statistics(again), [again.utterance(row).id for row in range(again.utterance_count)]) == before


def test_a_corpus_that_was_moved_is_found_by_its_link(corpus: Path, store: Store, tmp_path: Path) -> None:
    before = everything(store)
    corpus.rename(tmp_path / "moved")
    with pytest.raises(
        InputError, match=r"points into .*/ll, and nothing is there: where it was moved, `ln -sfn NEW "
    ) as told:
        store.samples(0)
    link = Path(str(told.value).rpartition("NEW ")[2].rstrip("`"))
    link.unlink()
    link.symlink_to(tmp_path / "moved")
    assert everything(Store(store.path)) == before
    Store(store.path).check(audio=True)


def first_file(store: Store, corpus: Path) -> Path:
    speaker, book, chapter = store.utterance(0).id.removesuffix("-0000").split("/")
    return corpus / "large" / speaker / book / f"{chapter}.flac"


def test_a_changed_file_is_told(corpus: Path, store: Store) -> None:
    path, whole = first_file(store, corpus), store.samples(0)
    data = path.read_bytes()
    os.utime(path, ns=(1, 1))
    assert np.array_equal(store.samples(0), whole), "a copy of the same file is the same file"

    path.write_bytes(data[:-100])
    with pytest.raises(
        InputError, match=r"64kb\.flac, which is not as it was \(.* bytes, expected [0-9,]+\); prepare it"
    ):
        store.samples(0)
    soundfile.write(path, np.roll(soundfile.read(path.with_name(path.name), dtype="int16", frames=100)[0], 1), RATE)
    path.write_bytes(path.read_bytes() + bytes(len(data) - path.stat().st_size))
    with pytest.raises(InputError, match="its beginning or its end is another"):
        store.samples(0)
    path.unlink()
    with pytest.raises(InputError, match="No such file"):
        store.samples(0)
    assert len(store.samples(store.utterance_count - 1)), "the others are as they were"


def test_a_check_of_the_audio_finds_damage_inside_a_file(corpus: Path, store: Store) -> None:
    path = first_file(store, corpus)
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 200] = bytes(200)
    path.write_bytes(data)
    store.check()
    with pytest.raises(InputError, match=r"64kb\.flac, which is not as it was"):
        store.check(audio=True)


@given(st.data())
def test_a_file_that_breaks_off_anywhere_is_left_out(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.flac"
        soundfile.write(path, trees.noise(data.draw(st.integers(0, 5)), 1)[0], RATE, subtype="PCM_16")
        whole = path.read_bytes()
        path.write_bytes(whole[: data.draw(st.integers(4, len(whole) - 1))])
        with pytest.raises(Unusable) as left_out:
            point_into(str(path), name="x")
        assert left_out.value.kind is ProblemKind.TRUNCATED_AUDIO


@pytest.mark.parametrize("level", [0, 0.5, 1])
@pytest.mark.parametrize("samples", [1, 17, 40_000, 250_001])
def test_whole_files_are_known_without_decoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, samples: int, level: float
) -> None:
    sound = np.random.default_rng(samples).integers(-30_000, 30_000, samples).astype(np.int16)
    soundfile.write(tmp_path / "x.flac", sound, RATE, subtype="PCM_16", compression_level=level)
    monkeypatch.setattr(flac, "check_samples", not_to_be_called)
    assert point_into(str(tmp_path / "x.flac"), name="x").samples == samples


def not_to_be_called(_: object) -> None:
    raise AssertionError


def test_something_behind_the_sound_is_no_reason_to_leave_it_out(tmp_path: Path) -> None:
    path = tmp_path / "x.flac"
    soundfile.write(path, trees.noise(1, 1)[0], RATE, subtype="PCM_16")
    path.write_bytes(path.read_bytes() + b"TAG" + bytes(125))  # an ID3 tag
    assert point_into(str(path), name="x").samples == len(trees.noise(1, 1)[0])


def test_real_files_are_known_without_decoding(real_speech: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flac, "check_samples", not_to_be_called)
    for path in sorted(real_speech.glob("librispeech-mini/**/*.flac")):
        assert point_into(str(path), name="x").samples == soundfile.info(path).frames


@pytest.mark.parametrize(
    ("rate", "channels", "subtype"), [(8_000, 1, "PCM_16"), (16_000, 2, "PCM_16"), (16_000, 1, "PCM_24")]
)
def test_what_would_have_to_be_converted_is_left_out(tmp_path: Path, rate: int, channels: int, subtype: str) -> None:
    soundfile.write(tmp_path / "x.flac", np.zeros((900, channels)), rate, subtype=subtype)
    with pytest.raises(Unusable) as left_out:
        point_into(str(tmp_path / "x.flac"), name="x")
    assert left_out.value.kind is ProblemKind.NOT_AS_STORED
