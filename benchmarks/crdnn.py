"""Training steps of Gao et al.'s joint CTC-attention model, ours and SpeechBrain's, and its search, on one device.

    python benchmarks/crdnn.py [--size gao] [--utterances 8] [--steps 10] [--rounds 5] [--device cuda] [--profile]

SpeechBrain's rows are its own modules (1.1.2, `pip install --no-deps speechbrain==1.1.2 hyperpyyaml ruamel.yaml joblib
requests huggingface_hub`) in its own `Brain.fit_batch`, as its Common Voice recipe writes `compute_forward` and
`compute_objectives`, in its default precision and in bfloat16 (`precision: bf16`). Without SpeechBrain these rows are
missing, and a line says so. No row augments.

A step is everything: waveforms from the host to the device, features, forward, joint loss, backward, clipping to 5,
SGD. Utterances are noise of 3 to 8 s with six tokens a second: arithmetic does not depend on what is said. Rows take
turns; medians of rounds. "cuDNN's LSTMs alone" are its bidirectional layers forwards and backwards on the same batches.

`--search` measures the search instead: texts are cut after six tokens a second, so that every run has as many steps.
`--profile` says what the GPU is busy with.
"""

import argparse
import statistics
import sys
import time
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from sottovoce.base.seeds import stream, torch_stream
from sottovoce.data.audio.waveforms import Waveforms, pad_waveforms
from sottovoce.data.corpora.corpus import SAMPLE_RATE
from sottovoce.flat.layout import Layout
from sottovoce.models.attention_search import SearchOptions
from sottovoce.models.crdnn import FAMILY
from sottovoce.models.crdnn.family import Draws
from sottovoce.models.crdnn.graphs import recorded_decoder, recorded_encoder
from sottovoce.models.crdnn.settings import POOLING, Settings, named_settings
from sottovoce.models.family import extract_float32_features
from sottovoce.optimisers import SGD
from sottovoce.optimisers.weights import Weights

SEED = 1
TOKENS = 500
TOKENS_A_SECOND = 6
LEARNING_RATE = 1e-6  # small, so that noise leads nowhere
Work = Callable[[Waveforms], object]


@dataclass(frozen=True)
class Row:
    """One thing to measure."""

    name: str
    work: Work


def batches(count: int, utterances: int) -> list[Waveforms]:
    """Noise of 3 to 8 s, as Common Voice has it, in batches of similar lengths."""
    rng = stream(SEED, "lengths")
    lengths = np.sort(rng.integers(3 * SAMPLE_RATE, 8 * SAMPLE_RATE, size=count * utterances)).reshape(count, -1)
    noise = rng.integers(-3000, 3000, size=8 * SAMPLE_RATE).astype("int16")
    made = []
    for own in lengths[rng.permutation(count)].tolist():
        texts = [rng.integers(1, TOKENS, size=length * TOKENS_A_SECOND // SAMPLE_RATE).tolist() for length in own]
        made.append(pad_waveforms([noise[:length] for length in own], texts))
    return made


# --- ours ------------------------------------------------------------------------------------------------------------


def our_weights(settings: Settings, device: torch.device, dtype: torch.dtype) -> Weights:
    parameters = FAMILY.init(settings, generator=torch_stream(SEED, "init"))
    statistics = FAMILY.training.statistics(settings)
    weights = Weights(Layout.of(parameters), SGD(), device=device, dtype=dtype, statistics=statistics)
    weights.load(parameters)
    return weights


def our_step(weights: Weights, settings: Settings, **options: Any) -> Work:
    device = weights.master.device

    def step(batch: Waveforms) -> None:
        batch = replace(batch, samples_N=batch.samples_N.to(device, non_blocking=True))
        features = extract_float32_features(FAMILY, batch, settings=settings)
        loss = FAMILY.loss(weights.working, features, settings=settings, draws=Draws(SEED), **options)
        weights.set_gradients(torch.autograd.grad(loss, list(weights.working.values()), allow_unused=True))
        weights.step(lr=LEARNING_RATE, max_norm=5.0)

    return step


def our_rows(settings: Settings, device: torch.device) -> list[Row]:
    wide = our_weights(settings, device, torch.float32)
    rows = [Row("ours, float32", our_step(wide, settings))]
    if device.type == "cuda":
        narrow = our_weights(settings, device, torch.bfloat16)
        recorded = {
            "encode": recorded_encoder(narrow.working, settings=settings),
            "log_probs": recorded_decoder(narrow.working, settings=settings),
        }
        rows += [
            Row("ours, bfloat16", our_step(narrow, settings)),
            Row("ours, bfloat16, as in long runs", our_step(narrow, settings, **recorded)),
            Row("cuDNN's LSTMs alone, bfloat16", lstms_alone(settings, device)),
        ]
    return rows


def lstms_alone(settings: Settings, device: torch.device) -> Work:
    layers = torch.nn.LSTM(
        settings.rnn_input, settings.rnn_width, settings.rnn_layers, bidirectional=True, batch_first=True
    ).to(device, torch.bfloat16)
    kept: dict[int, Tensor] = {}

    def step(batch: Waveforms) -> None:
        shape = (len(batch), int(batch.lengths_U.max()) // (SAMPLE_RATE // 100) // POOLING, settings.rnn_input)
        x_UTD = kept.setdefault(id(batch), torch.randn(shape, device=device, dtype=torch.bfloat16))
        out_UTD, _ = layers(x_UTD.requires_grad_())
        torch.autograd.grad(out_UTD, [x_UTD, *layers.parameters()], torch.ones_like(out_UTD))

    return step


# --- theirs ----------------------------------------------------------------------------------------------------------


def their_rows(settings: Settings, device: torch.device) -> list[Row]:
    stub: Any = types.ModuleType("torchaudio")  # imported there, not used here
    sys.modules.setdefault("torchaudio", stub)
    stub.list_audio_backends = lambda: ["none"]
    try:
        import speechbrain  # noqa: F401
    except ImportError as error:
        print(f"no rows of SpeechBrain: {error}")
        return []
    precisions = {"default precision": "fp32", "bfloat16": "bf16"} if device.type == "cuda" else {"float32": "fp32"}
    return [Row(f"SpeechBrain, {name}", their_step(settings, device, given)) for name, given in precisions.items()]


def their_step(settings: Settings, device: torch.device, precision: str) -> Work:
    from speechbrain.core import Brain
    from speechbrain.lobes.features import Fbank
    from speechbrain.lobes.models.CRDNN import CRDNN
    from speechbrain.nnet.embedding import Embedding
    from speechbrain.nnet.linear import Linear
    from speechbrain.nnet.losses import ctc_loss, nll_loss
    from speechbrain.nnet.RNN import LSTM, AttentionalRNNDecoder
    from speechbrain.processing.features import InputNormalization

    s = settings
    modules = {
        "features": Fbank(n_mels=80, n_fft=400, sample_rate=SAMPLE_RATE),
        "normalise": InputNormalization(norm_type="global"),
        "encoder": CRDNN(
            input_shape=[None, None, 80],
            dropout=s.dropout,
            cnn_blocks=len(s.channels),
            cnn_channels=list(s.channels),
            inter_layer_pooling_size=[2] * len(s.channels),
            time_pooling=True,
            time_pooling_size=POOLING,
            rnn_class=LSTM,
            rnn_layers=s.rnn_layers,
            rnn_neurons=s.rnn_width,
            rnn_bidirectional=True,
            dnn_blocks=s.dnn_layers,
            dnn_neurons=s.dnn_width,
        ),
        "embedding": Embedding(s.tokens, s.embedding),
        "decoder": AttentionalRNNDecoder(
            enc_dim=s.dnn_width,
            input_size=s.embedding,
            rnn_type="gru",
            attn_type="location",
            hidden_size=s.decoder_width,
            attn_dim=s.decoder_width,
            num_layers=1,
            scaling=1.0,
            channels=s.location_channels,
            kernel_size=s.location_reach,
            re_init=True,
            dropout=s.dropout,
        ),
        "ctc_head": Linear(input_size=s.dnn_width, n_neurons=s.tokens),
        "token_head": Linear(input_size=s.decoder_width, n_neurons=s.tokens),
    }

    class Theirs(Brain):  # type: ignore[misc]
        def compute_forward(self, batch: Any, stage: Any) -> Any:
            waves, lengths, begun = batch[0].to(self.device), batch[1].to(self.device), batch[2].to(self.device)
            heard = self.modules.normalise(self.modules.features(waves), lengths)
            memory = self.modules.encoder(heard.detach())
            states, _ = self.modules.decoder(self.modules.embedding(begun), memory, lengths)
            ctc_log_probs = self.modules.ctc_head(memory).log_softmax(dim=-1)
            return ctc_log_probs, self.modules.token_head(states).log_softmax(dim=-1), lengths

        def compute_objectives(self, outputs: Any, batch: Any, stage: Any) -> Any:
            ctc_log_probs, log_probs, lengths = outputs
            tokens, ended, token_lengths, ended_lengths = (own.to(self.device) for own in batch[3:])
            nll = nll_loss(log_probs, ended, ended_lengths, label_smoothing=s.label_smoothing)
            ctc = ctc_loss(ctc_log_probs, tokens, lengths, token_lengths, blank_index=0)
            return s.mu * nll + (1 - s.mu) * ctc

    brain = Theirs(
        modules=modules,
        opt_class=lambda parameters: torch.optim.SGD(parameters, lr=LEARNING_RATE),
        run_opts={"device": str(device), "precision": precision},
    )
    brain.on_fit_start()
    brain.modules.train()
    prepared: dict[int, Any] = {}

    def step(batch: Waveforms) -> None:
        brain.step += 1
        brain.fit_batch(prepared.setdefault(id(batch), their_batch(batch)))

    return step


def their_batch(batch: Waveforms) -> tuple[Tensor, ...]:
    longest = int(batch.lengths_U.max())
    waves = torch.zeros(len(batch), longest)
    for own, start, length in zip(waves, batch.starts_U.tolist(), batch.lengths_U.tolist(), strict=True):
        own[:length] = batch.samples_N[start : start + length].float() / 32768
    tokens, counts = batch.tokens_UL, batch.token_lengths_U
    begun, ended = torch.nn.functional.pad(tokens, (1, 0)), torch.nn.functional.pad(tokens, (0, 1))
    relative = counts / counts.max(), (counts + 1) / (counts.max() + 1)
    made = (waves, batch.lengths_U / longest, begun, tokens, ended, *relative)
    return tuple(own.pin_memory() for own in made) if torch.cuda.is_available() else made


# --- search ----------------------------------------------------------------------------------------------------------


def search_rows(settings: Settings, device: torch.device, *, width: int) -> list[Row]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    start = FAMILY.init(settings, generator=torch_stream(SEED, "init"))
    parameters = {name: own.to(device, dtype) for name, own in start.items()}
    assert FAMILY.recognition is not None
    found = FAMILY.recognition.search
    assert found is not None
    per_frame = TOKENS_A_SECOND * POOLING / 100

    def searched(how: SearchOptions) -> Work:
        def work(batch: Waveforms) -> None:
            batch = replace(batch, samples_N=batch.samples_N.to(device, non_blocking=True))
            features = extract_float32_features(FAMILY, batch, settings=settings)
            features = replace(features, features_UTF=features.features_UTF.to(dtype))
            found(parameters, features, settings=settings, how=how)

        return work

    return [
        Row(
            f"search, width {w}, CTC weight {c}",
            searched(SearchOptions(width=w, ctc_weight=c, shortest=per_frame, longest=per_frame)),
        )
        for w, c in ((1, 0.0), (width, 0.0), (width, 0.3))
    ]


# --- measuring -------------------------------------------------------------------------------------------------------


def measured(rows: Sequence[Row], ready: Sequence[Waveforms], *, steps: int, rounds: int) -> list[list[float]]:
    """Seconds of each row and round for `steps` batches."""
    for row in rows:
        for batch in ready:
            row.work(batch)
    times: list[list[float]] = [[] for _ in rows]
    for _ in range(rounds):
        for row, own in zip(rows, times, strict=True):
            _wait()
            begun = time.perf_counter()
            for number in range(steps):
                row.work(ready[number % len(ready)])
            _wait()
            own.append(time.perf_counter() - begun)
    return times


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def print_profile(row: Row, ready: Sequence[Waveforms]) -> None:
    from torch.profiler import ProfilerActivity, profile

    for batch in ready:
        row.work(batch)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        begun = time.perf_counter()
        for batch in ready:
            row.work(batch)
        torch.cuda.synchronize()
        whole = (time.perf_counter() - begun) / len(ready) * 1e3
    found = sorted(profiler.key_averages(), key=lambda e: -e.self_device_time_total)
    busy = sum(e.self_device_time_total for e in found) / len(ready) / 1e3
    kernels = sum(e.count for e in found) / len(ready)
    print(f"\n{row.name}: {whole:.1f} ms a step under the profiler, GPU busy {busy:.1f} ms, {kernels:.0f} kernels")
    for e in found[:14]:
        print(f"  {e.self_device_time_total / len(ready) / 1e3:7.2f} ms {e.count / len(ready):6.0f} × {e.key[:110]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="gao")
    parser.add_argument("--utterances", type=int, default=8)
    parser.add_argument("--batches", type=int, default=6)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--width", type=int, default=80)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--search", action="store_true")
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device, 0) if arguments.device == "cuda" else torch.device("cpu")
    settings = named_settings(arguments.size, tokens=TOKENS, norm="batch")
    ready = batches(arguments.batches, arguments.utterances)
    if arguments.search:
        rows = search_rows(settings, device, width=arguments.width)
    else:
        rows = [*their_rows(settings, device), *our_rows(settings, device)]
    if arguments.profile:
        for row in rows:
            print_profile(row, ready)
        return
    audio = sum(ready[number % len(ready)].audio_seconds for number in range(arguments.steps))
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{arguments.threads} CPU threads"
    title = f"{arguments.size}, {arguments.utterances} utterances a step; {where}, torch {torch.__version__}"
    table = Table("what", "ms a step", "spread", "audio s/s", "times the first row", "spread", title=title)
    times = measured(rows, ready, steps=arguments.steps, rounds=arguments.rounds)
    for row, own in zip(rows, times, strict=True):
        ms = [1e3 * t / arguments.steps for t in own]
        ratios = [first / t for first, t in zip(times[0], own, strict=True)]
        table.add_row(
            row.name,
            f"{statistics.median(ms):.1f}",
            f"{min(ms):.1f}–{max(ms):.1f}",
            f"{audio / statistics.median(own):,.0f}",
            f"{statistics.median(ratios):.2f}",
            f"{min(ratios):.2f}–{max(ratios):.2f}",
        )
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
