"""Oracle: transformers' own extractors, which see one utterance at a time, without padding.

Parakeet's asks librosa for its mel filters; where a machine has no librosa, transformers' `mel_filter_bank` stands in
for `librosa.filters.mel`: the same Slaney filters, of which transformers says that they differ by float32's rounding.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sottovoce.base.errors import InputError
from sottovoce.models.huggingface.front_ends import MelSettings, _constants, extract_pretrained, slaney_filters

REASON = "the oracle is transformers, which is not installed"
# Of every value. Ours are computed as theirs, in their precision: what is left is sums in another order, of which a
# logarithm divided by its deviation shows some ten roundings (1.2e-7 each, of values up to 20).
TOLERANCE = 1e-4
LENGTHS = (16_000, 1_600, 24_123, 40_321, 8_079)  # 1,600: 0.1 s; some with odd numbers of frames, no two alike

Samples = NDArray[np.float32]

RAW = {"feature_extractor_type": "Wav2Vec2FeatureExtractor", "sampling_rate": 16_000, "feature_size": 1}
PROCESSORS: dict[str, Mapping[str, Any]] = {
    "raw": {**RAW, "do_normalize": False},  # Moonshine's
    "normalised": {**RAW, "do_normalize": True},  # wav2vec2's
    "seamless": {"feature_extractor_type": "SeamlessM4TFeatureExtractor", "num_mel_bins": 80, "stride": 2},
    "seamless-padded-by-1": {"feature_extractor_type": "SeamlessM4TFeatureExtractor", "padding_value": 1},
    "whisper": {"feature_extractor_type": "WhisperFeatureExtractor", "chunk_length": 30, "n_samples": 480_000},
    "whisper-128": {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 128},
    # Not a multiple of the hop, and shorter than two of the utterances.
    "whisper-2s": {"feature_extractor_type": "WhisperFeatureExtractor", "chunk_length": 2, "hop_length": 150},
    "parakeet": {"feature_extractor_type": "ParakeetFeatureExtractor"},
    "parakeet-128": {"feature_extractor_type": "ParakeetFeatureExtractor", "feature_size": 128, "preemphasis": None},
}
WHISPER_SPECTRUM = MelSettings(fft_samples=400, hop_samples=160, window_samples=400, is_periodic=True, mel_count=80)
PARAKEET_SPECTRUM = MelSettings(fft_samples=512, hop_samples=160, window_samples=400, is_periodic=False, mel_count=80)
every_processor = pytest.mark.parametrize("name", PROCESSORS)

Oracle = Callable[[Samples], tuple[Tensor, int]]


def slaney(*, sr: int, n_fft: int, n_mels: int, fmin: float, fmax: float, norm: str) -> NDArray[np.float32]:
    """Stands in for `librosa.filters.mel`."""
    audio_utils = pytest.importorskip("transformers.audio_utils", reason=REASON)
    return audio_utils.mel_filter_bank(n_fft // 2 + 1, n_mels, fmin, fmax, sr, norm, "slaney").T.astype(np.float32)


def oracle_of(processor: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch) -> Oracle:
    """Their features [T, F] of one utterance, and how many frames their attention mask counts."""
    pytest.importorskip("transformers", reason=REASON)
    kind = processor["feature_extractor_type"]
    folder = {"Wav2Vec2": "wav2vec2", "SeamlessM4T": "seamless_m4t", "Whisper": "whisper", "Parakeet": "parakeet"}
    short = folder[kind.removesuffix("FeatureExtractor")]
    module = pytest.importorskip(f"transformers.models.{short}.feature_extraction_{short}", reason=REASON)
    if short == "parakeet" and "librosa" not in vars(module):
        monkeypatch.setattr(module, "librosa", SimpleNamespace(filters=SimpleNamespace(mel=slaney)), raising=False)
    extractor = vars(module)[kind](**{key: value for key, value in processor.items() if key not in ("n_samples",)})

    def theirs(samples: Samples) -> tuple[Tensor, int]:
        options = {} if short == "whisper" else {"padding": True}
        found = extractor(samples, sampling_rate=16_000, return_attention_mask=True, return_tensors="pt", **options)
        if short == "wav2vec2":
            return found["input_values"][0, :, None], int(found["attention_mask"].sum())
        features = found["input_features"][0]
        return features.mT if short == "whisper" else features, int(found["attention_mask"].sum())

    return theirs


def noisy_tones(samples: int, *, seed: int) -> Samples:
    """Three tones that come and go, an offset, and noise: every filter varies."""
    rng = np.random.default_rng(seed)
    seconds = np.arange(samples) / 16_000
    tones = sum(np.sin(2 * np.pi * hertz * seconds) * np.sin(9 * seconds + hertz) for hertz in (180.0, 730.0, 2_900.0))
    return (0.1 * tones + 0.01 + rng.normal(0, 0.02, samples)).astype(np.float32)


def batch(utterances: list[Samples], *, behind: float, room: int = 333) -> tuple[Tensor, Tensor]:
    """Rows with a constant `behind` each end, and `room` samples of it behind the longest too."""
    lengths_U = torch.tensor([len(samples) for samples in utterances])
    samples_UN = torch.full((len(utterances), int(lengths_U.max()) + room), behind)
    for row_N, samples in zip(samples_UN, utterances, strict=True):
        row_N[: len(samples)] = torch.from_numpy(samples)
    return samples_UN, lengths_U


def check_like_theirs(
    utterances: list[Samples], oracle: Oracle, processor: Mapping[str, Any], *, behind: float, room: int = 333
) -> None:
    samples_UN, lengths_U = batch(utterances, behind=behind, room=room)
    features_UTF, frames_U = extract_pretrained(samples_UN, lengths_U, processor=processor)
    assert features_UTF.dtype == torch.float32
    assert features_UTF.device == samples_UN.device
    assert frames_U.device.type == "cpu"
    differences = []
    for features_TF, frames, samples in zip(features_UTF, frames_U.tolist(), utterances, strict=True):
        expected_TF, expected_frames = oracle(samples)
        assert frames == expected_frames
        assert frames > 0
        shared = len(expected_TF)  # with what theirs holds behind the counted frames
        assert shared >= frames
        differences.append((features_TF[:shared] - expected_TF).abs().flatten())
        assert bool((features_TF[shared:] == processor.get("padding_value", 0.0)).all())
    largest = float(torch.cat(differences).max())
    print(f"largest difference {largest:.1e}")  # pytest -rP shows it
    assert largest <= TOLERANCE


@every_processor
@pytest.mark.parametrize("behind", [0.0, 0.7, float("nan")])
def test_each_utterance_of_a_batch_is_as_theirs_alone(
    name: str, behind: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    utterances = [noisy_tones(length, seed=seed) for seed, length in enumerate(LENGTHS)]
    check_like_theirs(utterances, oracle_of(PROCESSORS[name], monkeypatch), PROCESSORS[name], behind=behind)


@every_processor
@pytest.mark.parametrize("length", [1_600, 16_000])
def test_a_batch_of_one_is_as_theirs(name: str, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    utterances = [noisy_tones(length, seed=7)]
    check_like_theirs(utterances, oracle_of(PROCESSORS[name], monkeypatch), PROCESSORS[name], behind=-0.3)


@every_processor
def test_real_speech_is_as_theirs(name: str, real_speech: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = sorted((real_speech / "librispeech-mini").rglob("*.flac"))[::25]
    assert paths, "no recordings under $SOTTOVOCE_DATA/librispeech-mini"
    utterances = [np.asarray(soundfile.read(path, dtype="float32")[0], dtype=np.float32) for path in paths]
    check_like_theirs(utterances, oracle_of(PROCESSORS[name], monkeypatch), PROCESSORS[name], behind=0.7)


@every_processor
def test_real_speech_of_a_narrow_band_is_as_theirs(
    name: str, real_speech: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Filters above the band vary by a few roundings, which Parakeet's divide by as little: one utterance at a time,
    since sums over more padding are rounded in another order."""
    paths = sorted((real_speech / "iban").rglob("*.mp3"))[::150]
    assert paths, "no recordings under $SOTTOVOCE_DATA/iban"
    oracle = oracle_of(PROCESSORS[name], monkeypatch)
    for path in paths:
        samples = np.asarray(soundfile.read(path, dtype="float32")[0], dtype=np.float32)
        check_like_theirs([samples], oracle, PROCESSORS[name], behind=0.0, room=0)


@every_processor
@pytest.mark.parametrize("length", [0, 1, 159, 319, 399])
def test_hardly_any_sample_gives_finite_features(name: str, length: int) -> None:
    samples_UN, lengths_U = batch([noisy_tones(length, seed=1), noisy_tones(4_000, seed=2)], behind=float("nan"))
    features_UTF, frames_U = extract_pretrained(samples_UN, lengths_U, processor=PROCESSORS[name])
    assert bool(features_UTF.isfinite().all())
    assert frames_U[0] <= features_UTF.shape[1]
    if length == 0:
        assert frames_U[0] == 0


class DoublesSeen(TorchDispatchMode):
    """Counts operations that give a float64 tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        doubles = (torch.float64, torch.complex128)
        if any(isinstance(leaf, Tensor) and leaf.dtype in doubles for leaf in tree_leaves(result)):
            self.names.append(str(func))
        return result


@every_processor
def test_only_what_theirs_compute_in_float64_is_computed_in_it(name: str) -> None:
    samples_UN, lengths_U = batch([noisy_tones(4_000, seed=1), noisy_tones(1_600, seed=2)], behind=0.0)
    extract_pretrained(samples_UN, lengths_U, processor=PROCESSORS[name])  # constants are made once
    with DoublesSeen() as seen:
        extract_pretrained(samples_UN, lengths_U, processor=PROCESSORS[name])
    assert bool(seen.names) == name.startswith("seamless")


@every_processor
def test_autocast_changes_nothing(name: str) -> None:
    samples_UN, lengths_U = batch([noisy_tones(4_000, seed=1)], behind=0.0)
    alone, _ = extract_pretrained(samples_UN, lengths_U, processor=PROCESSORS[name])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast, _ = extract_pretrained(samples_UN, lengths_U, processor=PROCESSORS[name])
    assert torch.equal(alone, cast)


@pytest.mark.parametrize("settings", [WHISPER_SPECTRUM, PARAKEET_SPECTRUM])
def test_windowed_waves_give_the_spectrum_that_a_gpu_multiplies_out(settings: MelSettings) -> None:
    window_K, waves_K2B, _ = _constants(settings, torch.device("cpu"))
    frames_TK = torch.randn(20, settings.fft_samples, generator=torch.Generator().manual_seed(0)).double()
    expected_TB = torch.fft.rfft(frames_TK * window_K)
    found_TB = torch.view_as_complex((frames_TK @ waves_K2B).view(20, -1, 2))
    # Values are near √(K · 3/8) ≈ 14; a sum of K products is off by √K · 2.2e-16 of it.
    torch.testing.assert_close(found_TB, expected_TB, rtol=0, atol=1e-12)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@every_processor
def test_a_gpu_gives_what_the_cpu_gives(name: str) -> None:
    samples_UN, lengths_U = batch([noisy_tones(length, seed=length) for length in LENGTHS], behind=0.7)
    expected_UTF, expected_U = extract_pretrained(samples_UN, lengths_U, processor=PROCESSORS[name])
    features_UTF, frames_U = extract_pretrained(samples_UN.cuda(), lengths_U, processor=PROCESSORS[name])
    assert features_UTF.is_cuda
    assert torch.equal(frames_U, expected_U)
    assert float((features_UTF.cpu() - expected_UTF).abs().max()) <= TOLERANCE


@pytest.mark.parametrize(("mel_count", "fft_samples"), [(80, 400), (128, 400), (80, 512), (128, 512)])
def test_filters_are_slaneys(mel_count: int, fft_samples: int) -> None:
    theirs = slaney(sr=16_000, n_fft=fft_samples, n_mels=mel_count, fmin=0.0, fmax=8_000.0, norm="slaney")
    # Weights are at most 2 / 67 Hz ≈ 0.03 and theirs are rounded to float32: 0.03 · 6e-8 ≈ 2e-9.
    ours = slaney_filters(mel_count, fft_samples=fft_samples).numpy()
    np.testing.assert_allclose(ours, theirs.T, rtol=0, atol=3e-9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"feature_extractor_type": "LasrFeatureExtractor"}, "LasrFeatureExtractor.*Wav2Vec2.*Seamless.*Whisper.*Para"),
        ({"feature_extractor_type": None}, "feature_extractor_type=None, expected one of Wav2Vec2FeatureExtractor"),
        ({"sampling_rate": 8_000}, "sampling_rate=8000, expected 16000"),
        ({"hop_length": 0}, "hop_length=0, expected a positive whole number"),
        ({"dither": 1e-4}, "dither=0.0001, expected 0.0"),
        ({"feature_extractor_type": "SeamlessM4TFeatureExtractor", "stride": 4}, "stride=4, expected 2"),
        ({"feature_extractor_type": "ParakeetFeatureExtractor", "win_length": 600}, "win_length=600.*n_fft=512"),
    ],
)
def test_what_is_not_known_is_refused_in_one_line(changes: Mapping[str, Any], message: str) -> None:
    processor = {**PROCESSORS["whisper"], **changes}
    with pytest.raises(InputError, match=message) as refused:
        extract_pretrained(torch.zeros(1, 1_600), torch.tensor([1_600]), processor=processor)
    assert "\n" not in str(refused.value)
