"""Embeddings: which is chosen, what they are blind to, and that the encoder is Resemblyzer's own."""

import numpy as np
import pytest
import torch
from tests.papers.sounds import as_samples, noise, voice

from sottovoce.base.errors import InputError
from sottovoce.papers import embeddings
from sottovoce.papers.embeddings import SPECTRUM, choose_embedding


def test_the_spectrum_is_blind_to_loudness():
    quiet = voice(120, rms=0.05) + noise(rms=0.01)
    # Doubling adds log 4 to every filter, which is the zeroth cepstrum alone; 16 bits round each differently, about
    # 60 dB below the noise.
    loud, soft = (SPECTRUM.embed(as_samples(gain * quiet)) for gain in (2, 1))
    assert loud == pytest.approx(soft, abs=1e-2)
    assert loud.shape == (40,)


def test_voices_differ_more_than_what_they_say():
    first, second, other = (
        SPECTRUM.embed(as_samples(voice(hertz) + noise(rms=rms, name=name))[:80_000])
        for hertz, rms, name in ((110, 0.01, "a"), (110, 0.01, "b"), (180, 0.03, "c"))
    )
    assert np.linalg.norm(first - second) < np.linalg.norm(first - other)


@pytest.mark.parametrize("samples", [1, 399, 30_000])
def test_short_clips_and_silence_have_a_finite_place(samples):
    encoder = embeddings.SpeakerEncoder()
    for embed in (SPECTRUM.embed, encoder.embed):
        assert np.isfinite(embed(np.zeros(samples, np.int16))).all()


def test_what_is_not_there_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert choose_embedding(None) is SPECTRUM
    with pytest.raises(InputError, match="not installed: pip install --no-deps resemblyzer"):
        choose_embedding("resemblyzer")
    with pytest.raises(InputError, match="embedding=x: expected resemblyzer or spectrum"):
        choose_embedding("x")
    assert choose_embedding("spectrum") is SPECTRUM


def test_pieces_in_several_batches_are_one_mean(monkeypatch):
    torch.manual_seed(1)
    encoder, samples = embeddings.SpeakerEncoder(), as_samples(voice(120) + noise(rms=0.01))
    whole = encoder.embed(samples)
    monkeypatch.setattr(embeddings, "PIECES_AT_ONCE", 3)
    # Numbers below one, added up in float32 in another order.
    assert encoder.embed(samples) == pytest.approx(whole, abs=1e-6)
    assert np.linalg.norm(whole) == pytest.approx(1, abs=1e-6)


def test_a_last_piece_of_padding_is_left_out():
    # 1.6 s are one piece; the second starts at frame 77 and needs three quarters of its 160 frames.
    assert embeddings._piece_starts(16_000) == [0]
    assert embeddings._piece_starts(160 * (77 + 119)) == [0]
    assert embeddings._piece_starts(160 * (77 + 120)) == [0, 77]


# The eight largest of 256, by Resemblyzer 0.1.4 itself with librosa 0.11 and torch 2.13, of the sound of the test:
# VoiceEncoder.embed_utterance(normalize_volume(samples / 32768, -30, increase_only=True)).
GOLDEN = {
    74: 0.2133085,
    1: 0.2122211,
    132: 0.1883200,
    139: 0.1824226,
    162: 0.1760012,
    198: 0.1689477,
    125: 0.1670568,
    203: 0.1614453,
}


def test_the_encoder_is_resemblyzers_own():
    if embeddings._resemblyzer_weights() is None:
        pytest.skip(f"Resemblyzer's weights are not installed: {embeddings.INSTALL}")
    sound = as_samples(voice(120) * np.linspace(0.2, 1, 160_000))[:40_000]
    point = choose_embedding("resemblyzer").embed(sound)
    # Float32 through three recurrent layers of 160 steps.
    assert point[list(GOLDEN)] == pytest.approx(list(GOLDEN.values()), abs=1e-5)
