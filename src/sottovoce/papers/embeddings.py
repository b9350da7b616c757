"""Who an utterance sounds like, as a point: by a trained speaker encoder, or by statistics of its spectrum.

The encoder has the weights that Resemblyzer's package carries (Apache-2.0) and does what its `embed_utterance` does.
Pauses are not trimmed. The package is found, not imported: it needs modules that setuptools and SciPy left behind.

    B  pieces    N  samples    T  frames    F  mel filters    D  dimensions
"""

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import scipy.fft
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sottovoce.base.errors import InputError
from sottovoce.data.audio.features import INT16_SCALE, log_mel
from sottovoce.data.corpora.corpus import SAMPLE_RATE

Samples = NDArray[np.int16]
Points = NDArray[np.float32]

INSTALL = "pip install --no-deps resemblyzer"

CEPSTRA = slice(1, 21)  # the zeroth is loudness

PIECE_FRAMES = 160  # 1.6 s
PIECE_STEP = 77  # 1.3 pieces start each second
LEAST_COVERED = 0.75  # of the last piece
PIECES_AT_ONCE = 64
WINDOW_SAMPLES, HOP_SAMPLES, MEL_COUNT = 400, 160, 40
LEAST_RMS = 10 ** (-30 / 20)  # quieter recordings are raised to −30 dB below full scale


@dataclass(frozen=True)
class Embedding:
    """A function of an utterance; `standardise`: over a store, each dimension is brought to mean 0 and variance 1."""

    name: str
    definition: str
    standardise: bool
    embed: Callable[[Samples], Points]


def choose_embedding(name: str | None) -> Embedding:
    """The one called `name`; without a name, the trained one where its weights are installed."""
    weights = _resemblyzer_weights()
    if name == "spectrum" or (name is None and weights is None):
        return SPECTRUM
    if name not in (None, "resemblyzer"):
        raise InputError(f"embedding={name}: expected resemblyzer or spectrum")
    if weights is None:
        raise InputError(f"embedding=resemblyzer: its weights are not installed: {INSTALL}")
    return _resemblyzer(weights)


def _spectrum(samples: Samples) -> Points:
    waveform = torch.from_numpy(samples.copy())[None]
    features_TF = log_mel(waveform, torch.tensor([len(samples)]))[0][0].numpy()
    cepstra_TD = scipy.fft.dct(features_TF, norm="ortho")[:, CEPSTRA]
    return np.concatenate([cepstra_TD.mean(axis=0), cepstra_TD.std(axis=0)])


SPECTRUM = Embedding(
    name="spectrum",
    definition="mean and std over frames of 20 mel cepstra (no trained speaker encoder), standardised over the store",
    standardise=True,
    embed=_spectrum,
)


def _resemblyzer_weights() -> Path | None:
    package = importlib.util.find_spec("resemblyzer")
    if package is None or package.origin is None:
        return None
    weights = Path(package.origin).with_name("pretrained.pt")
    return weights if weights.is_file() else None


def _resemblyzer(weights: Path) -> Embedding:
    encoder = SpeakerEncoder()
    state = torch.load(weights, map_location="cpu", weights_only=True)["model_state"]
    encoder.load_state_dict({name: state[name] for name in encoder.state_dict()})
    encoder.eval()
    return Embedding(
        name="resemblyzer",
        definition="Resemblyzer's speaker encoder (an LSTM trained with the GE2E loss), 256 dimensions of length 1",
        standardise=False,
        embed=encoder.embed,
    )


class SpeakerEncoder(nn.Module):
    """Resemblyzer's network, layer by layer as its checkpoint names them."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(MEL_COUNT, 256, 3, batch_first=True)
        self.linear = nn.Linear(256, 256)

    def forward(self, mel_BTF: Tensor) -> Tensor:
        _, (hidden, _) = self.lstm(mel_BTF)
        return nn.functional.normalize(self.linear(hidden[-1]).relu())

    @torch.no_grad()
    def embed(self, samples: Samples) -> Points:
        """The mean over overlapping pieces of 1.6 s, brought to length 1."""
        waveform_N = torch.from_numpy(samples * np.float32(INT16_SCALE))
        rms = float(waveform_N.square().mean().sqrt())
        if 0 < rms < LEAST_RMS:
            waveform_N *= LEAST_RMS / rms
        starts = _piece_starts(len(samples))
        needed = (starts[-1] + PIECE_FRAMES) * HOP_SAMPLES
        mel_TF = mel_spectrogram(nn.functional.pad(waveform_N, (0, max(needed - len(samples), 0))))
        total = torch.zeros(256)
        for first in range(0, len(starts), PIECES_AT_ONCE):
            pieces = [mel_TF[start : start + PIECE_FRAMES] for start in starts[first : first + PIECES_AT_ONCE]]
            total += self(torch.stack(pieces)).sum(dim=0)
        return np.asarray(nn.functional.normalize(total, dim=0).numpy(), dtype=np.float32)


def _piece_starts(samples: int) -> list[int]:
    """The first frame of each piece; the last is left out where it is mostly padding, unless it is the only one."""
    frames = math.ceil((samples + 1) / HOP_SAMPLES)
    starts = list(range(0, max(1, frames - PIECE_FRAMES + PIECE_STEP + 1), PIECE_STEP))
    covered = (samples - starts[-1] * HOP_SAMPLES) / (PIECE_FRAMES * HOP_SAMPLES)
    return starts[:-1] if covered < LEAST_COVERED and len(starts) > 1 else starts


def mel_spectrogram(waveform_N: Tensor) -> Tensor:
    """Powers [T, F] as librosa's `melspectrogram` has them: centred frames, Slaney's mel scale and filters."""
    window = torch.hann_window(WINDOW_SAMPLES)
    spectrum = torch.stft(
        waveform_N, WINDOW_SAMPLES, HOP_SAMPLES, window=window, pad_mode="constant", return_complex=True
    )
    return spectrum.abs().square().T @ torch.from_numpy(_slaney_filters()).float()


def _slaney_filters() -> NDArray[np.float64]:
    """Triangles [bins, F] between 0 and 8,000 Hz."""
    highest_mel = 15 + 27 * math.log(SAMPLE_RATE / 2 / 1000) / math.log(6.4)
    mels = np.linspace(0, highest_mel, MEL_COUNT + 2)
    # Linear up to 1,000 Hz, which is mel 15; from there on 27 mels multiply by 6.4.
    edges = np.where(mels < 15, mels * 200 / 3, 1000 * 6.4 ** ((mels - 15) / 27))
    bins = np.linspace(0, SAMPLE_RATE / 2, WINDOW_SAMPLES // 2 + 1)[:, None]
    rising = (bins - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - bins) / (edges[2:] - edges[1:-1])
    return np.asarray(np.minimum(rising, falling).clip(min=0.0) * 2 / (edges[2:] - edges[:-2]))
