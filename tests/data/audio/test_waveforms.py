"""Utterances heard end to end are what they are when heard alone."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sottovoce.base.seeds import stream
from sottovoce.data.audio.waveforms import concatenate_features, pack_waveforms, pad_waveforms
from sottovoce.models import log_mel
from sottovoce.models.log_mel import extract_log_mel


def noise(*lengths: int) -> list[np.ndarray]:
    rng = stream(1, "noise")
    return [rng.integers(-3000, 3000, size=length).astype(np.int16) for length in lengths]


@given(lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=6))
@settings(max_examples=40, deadline=None)
def test_features_are_those_of_each_utterance_alone(lengths: list[int]) -> None:
    """Shorter than a window, on and off whole hops: no utterance hears its neighbours, and padding is zero."""
    samples = noise(*lengths)
    features_UTF = extract_log_mel(pack_waveforms(samples), dtype=torch.float32).features_UTF
    for own, features_TF in zip(samples, features_UTF, strict=True):
        expected_TF = extract_log_mel(pad_waveforms([own])).features_UTF[0]
        torch.testing.assert_close(features_TF[: len(expected_TF)], expected_TF, rtol=1e-4, atol=1e-4)
        assert not features_TF[len(expected_TF) :].any()


def test_many_utterances_are_heard_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    recordings = pack_waveforms(noise(5000, 900, 3000, 16_000, 400), [[1]] * 5)
    at_once = extract_log_mel(recordings, dtype=torch.float32).features_UTF
    monkeypatch.setattr(log_mel, "PIECE_FRAMES", 200)
    in_pieces = extract_log_mel(recordings, dtype=torch.float32).features_UTF
    torch.testing.assert_close(in_pieces, at_once, rtol=1e-5, atol=1e-5)


def test_a_processor_takes_them_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = noise(5000, 900, 3000, 16_000, 400, 16_000, 7000)
    for recordings in (pack_waveforms(samples), pad_waveforms(samples)):
        at_once = extract_log_mel(recordings, dtype=torch.float32).features_UTF
        with monkeypatch.context() as patched:
            patched.setattr(log_mel, "CACHED_FRAMES", 40)
            in_pieces = extract_log_mel(recordings, dtype=torch.float32).features_UTF
        torch.testing.assert_close(in_pieces, at_once, rtol=1e-5, atol=1e-5)


@given(frames=st.lists(st.integers(0, 3000), min_size=1, max_size=60), most_lines=st.integers(2, 50))
def test_pieces_hold_every_utterance_once_and_are_not_small(frames: list[int], most_lines: int) -> None:
    cuts = log_mel._cached_pieces(frames, most_lines=most_lines)
    assert [first for first, _ in cuts] == [0, *(last for _, last in cuts[:-1])]
    assert cuts[-1][1] == len(frames)
    assert all(0 < last - first <= most_lines for first, last in cuts)
    for first, last in cuts[:-1]:
        assert last - first == most_lines or (last - first >= 2 and sum(frames[first:last]) >= log_mel.CACHED_FRAMES)


def test_a_batch_is_lines_of_the_recordings_as_long_as_the_longest_of_them() -> None:
    recordings = pack_waveforms(noise(5000, 900, 3000), [[1, 2, 3, 4], [5], [6, 7]])
    heard_all = extract_log_mel(recordings, dtype=torch.float32)
    batch = heard_all.take(torch.tensor([2, 1, 2]))
    assert batch.frames_U.tolist() == [17, 4, 17]
    assert batch.tokens_UL.tolist() == [[6, 7], [5, 0], [6, 7]]
    assert batch.token_lengths_U.tolist() == [2, 1, 2]
    assert torch.equal(batch.features_UTF, heard_all.features_UTF[[2, 1, 2], :17])


def test_what_is_joined_is_what_it_was() -> None:
    parts = [
        extract_log_mel(pack_waveforms(noise(*lengths), [[7]] * len(lengths)), dtype=torch.float32)
        for lengths in ((900,), (5000, 1))
    ]
    whole = concatenate_features(parts)
    for line, part, own in ((0, parts[0], 0), (1, parts[1], 0), (2, parts[1], 1)):
        one, same = whole.take(torch.tensor([line])), part.take(torch.tensor([own]))
        assert torch.equal(one.features_UTF, same.features_UTF)
        assert torch.equal(one.tokens_UL, same.tokens_UL)


@given(lengths=st.lists(st.integers(0, 300), min_size=1, max_size=8), extra=st.none() | st.integers(0, 50))
@settings(deadline=None)
def test_padding_gives_back_what_was_put_in(lengths: list[int], extra: int | None) -> None:
    rng = np.random.default_rng(1)
    clips = [rng.integers(-32768, 32768, length, dtype=np.int16) for length in lengths]
    padded = None if extra is None else max(lengths) + extra
    waveforms = pad_waveforms(clips, padded_samples=padded)
    waveforms_BN, lengths_B = waveforms.padded_UN, waveforms.lengths_U
    assert waveforms_BN.dtype == torch.int16
    assert waveforms_BN.shape == (len(clips), max(lengths) + (extra or 0))
    assert lengths_B.tolist() == lengths
    for row, clip in zip(waveforms_BN.numpy(), clips, strict=True):
        assert np.array_equal(row[: len(clip)], clip)
        assert not row[len(clip) :].any()
