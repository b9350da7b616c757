import os
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from sottovoce.base.errors import InputError
from sottovoce.data.corpora.corpus import Clip, ProblemKind, ProblemLog, RenderedSpeaker, Speaker
from sottovoce.data.corpora.rendering import FileRenderer, decode_audio, make_file_corpus, read_blocks

WriteTone = Callable[[Path], Path]


def render(folder: Path, *clips: tuple[Path, str | None], language: str = "en") -> RenderedSpeaker:
    renderer = FileRenderer(language=language, folders=(os.path.realpath(folder),))
    speaker = Speaker("anna", "train", [Clip(path.stem, str(path), text) for path, text in clips], {"age": "forties"})
    return pickle.loads(pickle.dumps(renderer))(speaker)


def only_problem(rendered: RenderedSpeaker) -> ProblemKind:
    assert rendered.utterances == []
    (problem,) = rendered.problems
    return problem.kind


@pytest.mark.parametrize("name", ["a.wav", "a.flac"])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(samples=arrays(np.int16, st.integers(1, 400)))
def test_16_bit_mono_comes_through_bit_by_bit(tmp_path: Path, name: str, samples: NDArray[np.int16]) -> None:
    soundfile.write(tmp_path / name, samples, 16_000, subtype="PCM_16")
    decoded, conversions = decode_audio(str(tmp_path / name))
    assert decoded.dtype == np.int16
    np.testing.assert_array_equal(decoded, samples)
    assert conversions == []


@pytest.mark.parametrize("rate", [8_000, 22_050, 32_000, 44_100, 48_000])
def test_resampling_keeps_a_tone_where_it_was(tmp_path: Path, rate: int) -> None:
    """A 440 Hz tone sampled at any rate is the same tone sampled at 16 kHz, away from the edges."""
    source = 0.5 * np.sin(2 * np.pi * 440 * np.arange(rate) / rate)
    soundfile.write(tmp_path / "a.wav", source, rate, subtype="FLOAT")
    decoded, conversions = decode_audio(str(tmp_path / "a.wav"))
    expected = 0.5 * 32_768 * np.sin(2 * np.pi * 440 * np.arange(16_000) / 16_000)
    assert len(decoded) == 16_000
    assert np.abs(decoded[1_000:-1_000] - expected[1_000:-1_000]).max() < 4
    assert conversions == [(ProblemKind.RESAMPLED, f"{rate} Hz")]


def test_channels_are_averaged(tmp_path: Path, tone: NDArray[np.int16]) -> None:
    soundfile.write(tmp_path / "a.wav", np.stack([tone, np.zeros_like(tone)], axis=1), 16_000)
    decoded, conversions = decode_audio(str(tmp_path / "a.wav"))
    assert np.abs(decoded - tone / 2).max() <= 0.5
    assert conversions == [(ProblemKind.MIXED_DOWN, "2 channels")]


def test_8_bit_audio_is_kept_and_reported(tmp_path: Path, tone: NDArray[np.int16]) -> None:
    soundfile.write(tmp_path / "a.wav", tone, 16_000, subtype="PCM_U8")
    decoded, conversions = decode_audio(str(tmp_path / "a.wav"))
    assert np.abs(decoded.astype(int) - tone).max() <= 256
    assert conversions == [(ProblemKind.LOW_RESOLUTION, "PCM_U8")]


def test_loud_float_audio_is_clipped_and_does_not_wrap(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", np.array([1.5, -1.5, 1.0, -1.0]), 16_000, subtype="FLOAT")
    assert decode_audio(str(tmp_path / "a.wav"))[0].tolist() == [32_767, -32_768, 32_767, -32_768]


@pytest.mark.parametrize(("name", "format"), [("a.mp3", "MP3"), ("a.opus", "OGG"), ("a.ogg", "OGG")])
def test_lossy_formats_sound_alike(tmp_path: Path, tone: NDArray[np.int16], name: str, format: str) -> None:
    subtype = {"a.opus": "OPUS", "a.ogg": "VORBIS", "a.mp3": "MPEG_LAYER_III"}[name]
    soundfile.write(tmp_path / name, tone, 16_000, format=format, subtype=subtype)
    decoded, conversions = decode_audio(str(tmp_path / name))
    assert len(decoded) == len(tone)
    assert np.corrcoef(decoded[500:-500], tone[500:-500])[0, 1] > 0.95
    assert conversions == []


def test_renders_text_and_samples(tmp_path: Path, write_tone: WriteTone, tone: NDArray[np.int16]) -> None:
    rendered = render(tmp_path, (write_tone(tmp_path / "a.wav"), "Hello, World!"), (tmp_path / "a.wav", None))
    assert [u.text for u in rendered.utterances] == ["hello world", None]
    assert [u.raw_text for u in rendered.utterances] == ["Hello, World!", None]
    assert (rendered.name, rendered.split, rendered.metadata) == ("anna", "train", {"age": "forties"})
    np.testing.assert_array_equal(rendered.utterances[0].samples, tone)
    assert rendered.problems == []


@pytest.mark.parametrize(
    ("text", "kind"),
    [("?!", ProblemKind.EMPTY_TEXT), ("Room 101", ProblemKind.FOREIGN_TEXT), ("привет", ProblemKind.FOREIGN_TEXT)],
)
def test_unusable_text(tmp_path: Path, write_tone: WriteTone, text: str, kind: ProblemKind) -> None:
    rendered = render(tmp_path, (write_tone(tmp_path / "a.wav"), text))
    assert only_problem(rendered) == kind
    assert text not in str(rendered.problems[0])  # what somebody said stays out of the log


def damage(path: Path, how: str, tone: NDArray[np.int16]) -> None:
    if how == "zero bytes":
        path.write_bytes(b"")
    elif how == "no audio":
        path.write_bytes(b"<html>404</html>")
    elif how == "no samples":
        soundfile.write(path, tone[:0], 16_000)
    elif how == "one sample at 192 kHz":
        soundfile.write(path, tone[:1], 192_000)
    elif how == "impossible rate":
        soundfile.write(path, tone, 10)
    elif how in ("nan", "inf"):
        soundfile.write(path, np.append(tone / 32_768, float(how)), 16_000, subtype="FLOAT")
    elif how == "folder":
        path.mkdir()
    elif how == "pipe":
        os.mkfifo(path)


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("absent", ProblemKind.MISSING_AUDIO),
        ("zero bytes", ProblemKind.EMPTY_AUDIO),
        ("no samples", ProblemKind.EMPTY_AUDIO),
        ("one sample at 192 kHz", ProblemKind.EMPTY_AUDIO),
        ("no audio", ProblemKind.UNREADABLE_AUDIO),
        ("impossible rate", ProblemKind.UNREADABLE_AUDIO),
        ("folder", ProblemKind.UNREADABLE_AUDIO),
        ("pipe", ProblemKind.UNREADABLE_AUDIO),
        ("nan", ProblemKind.NON_FINITE_AUDIO),
        ("inf", ProblemKind.NON_FINITE_AUDIO),
    ],
)
def test_unusable_audio(tmp_path: Path, tone: NDArray[np.int16], how: str, kind: ProblemKind) -> None:
    damage(tmp_path / "a.wav", how, tone)
    assert only_problem(render(tmp_path, (tmp_path / "a.wav", "hello"))) == kind


@pytest.mark.parametrize("name", ["a.wav", "a.flac", "a.mp3", "a.ogg"])
@pytest.mark.parametrize("share", [0.3, 0.7, 0.99])
def test_truncated_audio(tmp_path: Path, name: str, share: float) -> None:
    noise = np.random.default_rng(0).normal(scale=0.1, size=32_000)
    soundfile.write(tmp_path / name, noise, 16_000)
    data = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(data[: int(share * len(data))])
    assert only_problem(render(tmp_path, (tmp_path / name, "hello"))) == ProblemKind.TRUNCATED_AUDIO


def test_one_bad_clip_does_not_cost_the_others(tmp_path: Path, write_tone: WriteTone) -> None:
    good = write_tone(tmp_path / "good.wav")
    rendered = render(tmp_path, (tmp_path / "gone.wav", "one"), (good, "two"))
    assert [u.id for u in rendered.utterances] == ["good"]
    assert [p.kind for p in rendered.problems] == [ProblemKind.MISSING_AUDIO]


def test_a_link_that_leads_out_is_refused_and_one_that_stays_is_not(tmp_path: Path, write_tone: WriteTone) -> None:
    corpus = tmp_path / "corpus"
    inside = write_tone(corpus / "a.wav")
    (corpus / "link.wav").symlink_to(inside)
    (corpus / "out.wav").symlink_to(write_tone(tmp_path / "corpus-secret" / "b.wav"))
    assert len(render(corpus, (corpus / "link.wav", "hello")).utterances) == 1
    assert only_problem(render(corpus, (corpus / "out.wav", "hello"))) == ProblemKind.PATH_ESCAPES


def test_corpus_is_ordered_and_reports_speakers_in_two_splits(tmp_path: Path) -> None:
    log = ProblemLog()
    clips = [Clip("x", str(tmp_path / "x.wav"), "hello")]
    listed = [Speaker("b", "train", clips), Speaker("a", "train", clips), Speaker("b", "dev", clips)]
    corpus = make_file_corpus("c", language="en", speakers=listed, folders=[tmp_path], log=log)
    assert [(s.split, s.name) for s in corpus.speakers] == [("dev", "b"), ("train", "a"), ("train", "b")]
    (overlap,) = log.examples[ProblemKind.SPLIT_OVERLAP]
    assert (overlap.where, overlap.detail) == ("b", "dev, train")


def test_a_corpus_with_nothing_in_it_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing usable"):
        make_file_corpus("c", language="en", speakers=[Speaker("b", "train", [])], folders=[tmp_path], log=ProblemLog())


@pytest.mark.parametrize(
    ("container", "coding"),
    [("WAV", "GSM610"), ("AIFF", "GSM610"), ("WAV", "G721_32"), ("AU", "G723_24"), ("XI", "DPCM_16"), ("XI", "DPCM_8")],
)
def test_formats_that_cannot_be_sought_are_read_like_others(tmp_path: Path, container: str, coding: str) -> None:
    tone = 0.3 * np.sin(np.arange(16_000) / 20)
    soundfile.write(tmp_path / "a", tone, 16_000, format=container, subtype=coding)
    rendered = render(tmp_path, (tmp_path / "a", "hello"))
    rate = soundfile.info(tmp_path / "a").samplerate  # an instrument has always the same one
    (utterance,) = rendered.utterances
    assert len(utterance.samples) == pytest.approx(16_000 * 16_000 / rate, abs=200)  # codings fill up their last block


def test_a_recording_of_many_blocks_is_one_sound(tmp_path: Path) -> None:
    samples = np.random.default_rng(0).integers(-99, 99, (900, 2)).astype(np.int16)
    soundfile.write(tmp_path / "a.flac", samples, 16_000)
    whole, _ = decode_audio(str(tmp_path / "a.flac"))
    with soundfile.SoundFile(tmp_path / "a.flac") as file:
        blocks = list(read_blocks(file, np.int16, samples=64))
    assert {len(block) for block in blocks} == {32, 900 % 32}
    assert np.array_equal(np.concatenate(blocks), samples)
    assert len(whole) == 900


def test_a_header_that_announces_too_much_is_refused(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", np.zeros(900, np.int16), 16_000)
    data = bytearray((tmp_path / "a.wav").read_bytes())
    data[24:28] = (2_000_000_000).to_bytes(4, "little")  # the sample rate
    (tmp_path / "a.wav").write_bytes(data)
    assert only_problem(render(tmp_path, (tmp_path / "a.wav", "hello"))) is ProblemKind.UNREADABLE_AUDIO
