"""Streaming a file gives the samples that `prepare` would store, and refuses what it would refuse."""

from pathlib import Path

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st

from sottovoce.data.corpora.corpus import ProblemKind, Unusable
from sottovoce.data.corpora.rendering import decode_audio
from sottovoce.evaluation.sound import blocks, windows


def tone(rate: int, *, seconds: float = 25.0, channels: int = 1) -> np.ndarray:
    time = np.arange(int(rate * seconds)) / rate
    sound = np.stack([0.3 * np.sin(2 * np.pi * (220 + 50 * c) * time * (1 + time / 40)) for c in range(channels)])
    return sound.T if channels > 1 else sound[0]


@pytest.mark.parametrize(
    ("name", "rate", "channels"),
    [("a.wav", 16_000, 1), ("a.flac", 16_000, 2), ("a.wav", 44_100, 1), ("a.ogg", 48_000, 2), ("a.aiff", 8_000, 1)],
)
def test_blocks_are_what_prepare_stores(tmp_path: Path, name: str, rate: int, channels: int) -> None:
    soundfile.write(tmp_path / name, tone(rate, channels=channels), rate)
    streamed = np.concatenate(list(blocks(tmp_path / name)))
    stored, _ = decode_audio(str(tmp_path / name))
    assert len(streamed) == len(stored)
    # The resampler rounds its sums otherwise when it is fed in blocks.
    assert np.abs(streamed.astype(int) - stored).max() <= (0 if rate == 16_000 else 1)


def test_damage_is_found(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "whole.wav", tone(16_000, seconds=2), 16_000)
    soundfile.write(tmp_path / "whole.flac", tone(16_000), 16_000)
    soundfile.write(tmp_path / "nan.wav", np.full(900, np.nan), 16_000, subtype="FLOAT")
    soundfile.write(tmp_path / "none.wav", np.zeros(0), 16_000)
    (tmp_path / "cut.wav").write_bytes((tmp_path / "whole.wav").read_bytes()[:9_000])
    (tmp_path / "cut.flac").write_bytes((tmp_path / "whole.flac").read_bytes()[:60_000])
    (tmp_path / "text.wav").write_text("this is not sound")
    (tmp_path / "empty.wav").touch()
    kinds = {}
    for name in ("cut.wav", "cut.flac", "text.wav", "empty.wav", "none.wav", "nan.wav", "gone.wav"):
        with pytest.raises(Unusable) as caught:
            list(blocks(tmp_path / name))
        kinds[name] = caught.value.kind
    assert kinds == {
        "cut.wav": ProblemKind.TRUNCATED_AUDIO,
        "cut.flac": ProblemKind.TRUNCATED_AUDIO,
        "text.wav": ProblemKind.UNREADABLE_AUDIO,
        "empty.wav": ProblemKind.EMPTY_AUDIO,
        "none.wav": ProblemKind.EMPTY_AUDIO,
        "nan.wav": ProblemKind.NON_FINITE_AUDIO,
        "gone.wav": ProblemKind.UNREADABLE_AUDIO,
    }


@given(st.lists(st.integers(0, 30), max_size=6), st.integers(2, 12), st.integers(1, 11))
def test_windows_cover_everything_and_each_adds_something(sizes: list[int], window: int, step: int) -> None:
    step = min(step, window - 1)
    whole = np.arange(sum(sizes), dtype=np.int16)
    found = list(windows(iter(np.split(whole, np.cumsum(sizes))), window_samples=window, step_samples=step))
    reached = 0
    for number, (start, samples) in enumerate(found):
        assert start == number * step
        assert samples.tolist() == whole[start : start + len(samples)].tolist()
        assert start + len(samples) > reached
        reached = start + len(samples)
        assert len(samples) == window or number == len(found) - 1
    assert reached == len(whole)


def test_a_header_that_announces_too_much_is_refused_before_memory_is_asked_for(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", tone(16_000, seconds=0.1), 16_000, subtype="GSM610")
    data = bytearray((tmp_path / "a.wav").read_bytes())
    data[24:28] = (2_000_000_000).to_bytes(4, "little")  # ten seconds of it would be 80 GB
    (tmp_path / "a.wav").write_bytes(data)
    with pytest.raises(Unusable, match="sample rate 2000000000 Hz"):
        list(blocks(tmp_path / "a.wav"))


@pytest.mark.parametrize(("name", "coding"), [("a.wav", "GSM610"), ("a.aiff", "GSM610"), ("a.au", "G721_32")])
def test_formats_that_cannot_be_sought_are_streamed(tmp_path: Path, name: str, coding: str) -> None:
    soundfile.write(tmp_path / name, tone(16_000), 16_000, subtype=coding)
    assert np.array_equal(np.concatenate(list(blocks(tmp_path / name))), decode_audio(str(tmp_path / name))[0])
