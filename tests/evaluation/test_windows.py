"""Blocks are the samples that `prepare` would store, and stitched windows are the whole recording."""

from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from hypothesis import given
from hypothesis import strategies as st

from sottovoce.data.corpora.corpus import ProblemKind, Unusable
from sottovoce.data.corpora.rendering import decode_audio
from sottovoce.evaluation.windows import (
    Emissions,
    cut_windows,
    find_best_path,
    find_token_spans,
    read_audio_blocks,
    stitch_emissions,
)
from sottovoce.models import ctc
from sottovoce.models.ctc import BLANK


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
    streamed = np.concatenate(list(read_audio_blocks(tmp_path / name)))
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
            list(read_audio_blocks(tmp_path / name))
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
    found = list(cut_windows(iter(np.split(whole, np.cumsum(sizes))), window_samples=window, step_samples=step))
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
        list(read_audio_blocks(tmp_path / "a.wav"))


@pytest.mark.parametrize(("name", "coding"), [("a.wav", "GSM610"), ("a.aiff", "GSM610"), ("a.au", "G721_32")])
def test_formats_that_cannot_be_sought_are_streamed(tmp_path: Path, name: str, coding: str) -> None:
    soundfile.write(tmp_path / name, tone(16_000), 16_000, subtype=coding)
    assert np.array_equal(
        np.concatenate(list(read_audio_blocks(tmp_path / name))), decode_audio(str(tmp_path / name))[0]
    )


TOKENS = 3


def certain(path: list[int]) -> torch.Tensor:
    """Log-probabilities of somebody who is nearly sure of `path`."""
    return torch.log_softmax(8.0 * torch.nn.functional.one_hot(torch.tensor(path), TOKENS + 1).float(), dim=-1)


def cut_into_windows(whole: torch.Tensor, *, window: int, step: int, unsure: int) -> list[Emissions]:
    """Windows of `whole` whose outermost `unsure` frames, at cuts only, are nonsense."""
    pieces, start = [], 0
    while True:
        part = whole[start : start + window].clone()
        last = start + window >= len(whole)
        if start:
            part[:unsure] = certain([2] * unsure)
        if not last:
            part[-unsure:] = certain([1] * unsure)
        pieces.append(Emissions(start, part))
        if last:
            return pieces
        start += step


@given(st.lists(st.integers(0, TOKENS), min_size=1, max_size=100))
def test_stitched_windows_are_the_whole(path: list[int]) -> None:
    # The overlap is 8 frames, of which the outer quarter at each end may be wrong.
    whole = certain(path)
    pieces = list(stitch_emissions(cut_into_windows(whole, window=20, step=12, unsure=2), silent=[BLANK]))
    assert torch.equal(torch.cat([piece.log_probs_TV for piece in pieces]), whole)
    assert [piece.start for piece in pieces] == np.cumsum([0, *(len(p.log_probs_TV) for p in pieces[:-1])]).tolist()


def test_cut_falls_into_the_longest_pause() -> None:
    # Both windows hear the same word, but place it one frame apart: a cut inside it would double or lose a token.
    before = certain([BLANK] * 12 + [BLANK, BLANK, 3, 1, 2, BLANK, BLANK, BLANK])
    after = certain([BLANK, BLANK, BLANK, 3, 1, 2, BLANK, BLANK] + [BLANK] * 12)
    joined = torch.cat(
        [p.log_probs_TV for p in stitch_emissions([Emissions(0, before), Emissions(12, after)], silent=[BLANK])]
    )
    assert [span.token for span in find_token_spans(find_best_path(joined))] == [3, 1, 2]


@given(st.integers(0, 2**32), st.integers(1, 12))
def test_greedy_spans_are_the_viterbi_alignment(seed: int, frames: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    log_probs_TV = torch.randn(frames, TOKENS + 1, generator=generator).log_softmax(dim=-1)
    spans = find_token_spans(find_best_path(log_probs_TV))
    assert spans == ctc.align_tokens(log_probs_TV, [span.token for span in spans])
