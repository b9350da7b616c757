"""A training step of contrastive predictive coding, forward and backward, beside what bounds it.

    python benchmarks/cpc.py --size tiny --batch 4 --seconds 4                    # processor, one thread
    python benchmarks/cpc.py --device cuda --size ramesh --batch 8 --seconds 16 --repeats 20

    step       loss and gradients of all weights, as a client or a central step computes them, without the optimiser
    encoder    the same of the encoder alone: dense layers and LSTMs
    LSTMs      `torch.nn.LSTM` alone, its weights in one piece: cuDNN on a GPU
    contrast   predictions, scores and the softmax alone, from z and c

Sides take turns within each repeat; a time is the median over repeats, with its quartiles. On a processor times are the
process's own, whatever else runs. The roofline is what the step's products would take at the card's peak; LSTMs cannot
reach it, since each of their T steps waits for the one before.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from sottovoce.base.seeds import stream, torch_stream
from sottovoce.data.audio.waveforms import pad_waveforms
from sottovoce.data.corpora.corpus import SAMPLE_RATE
from sottovoce.models.cpc.family import FAMILY, Options, draw, loss
from sottovoce.models.cpc.loss import contrastive_losses, rival_steps, score_steps
from sottovoce.models.cpc.settings import Settings, predictors
from sottovoce.models.family import extract_float32_features
from sottovoce.models.speech_lstm import dense_steps, lstm_steps

Side = Callable[[], object]
PEAK = 790e12  # products in bfloat16 a second, an H200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="ramesh")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=16.0)
    parser.add_argument("--ahead", type=int, default=12)
    parser.add_argument("--candidates", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    device = torch.device(given.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    settings = Options(size=given.size, ahead=given.ahead, candidates=given.candidates).settings()
    samples = round(given.seconds * SAMPLE_RATE)
    report(made_sides(settings, given.batch, samples, device, dtype), device=device, repeats=given.repeats)
    steps, encoder = settings.encoder.steps(samples), settings.encoder
    weights = sum(int(np.prod(shape)) for name, shape in FAMILY.shapes(settings).items() if name.endswith("weight"))
    scores = settings.ahead * steps * encoder.dense_width
    operations = 3 * 2 * given.batch * steps * (weights + scores)
    print(f"{given.batch} × {steps} steps: {operations / 1e12:.2f} Tflop forwards and backwards", end="")
    print(f", {1e3 * operations / PEAK:.1f} ms at {PEAK / 1e12:.0f} Tflop/s" if device.type == "cuda" else "")


def made_sides(
    settings: Settings, batch: int, samples: int, device: torch.device, dtype: torch.dtype
) -> dict[str, Side]:
    noise = [stream(1, "noise", n).integers(-3000, 3000, samples).astype(np.int16) for n in range(batch)]
    features = extract_float32_features(FAMILY, pad_waveforms(noise, device=device), settings=settings)
    parameters = {
        name: p.to(device, dtype).requires_grad_()
        for name, p in FAMILY.init(settings, generator=torch_stream(1, "init")).items()
    }
    (draws,) = draw(settings, [batch], samples=[samples], generator=torch_stream(1, "draws"))
    encoder, leaves = settings.encoder, list(parameters.values())
    of_encoder = [p for name, p in parameters.items() if name.startswith("encoder.")]
    with torch.no_grad():
        z = dense_steps(parameters, features.features_UTF, settings=encoder)
        c, _ = lstm_steps(parameters, z, settings=encoder)
    lengths_U = torch.full((batch,), z.shape[1], device=device)
    rivals_USR = rival_steps(draws.to(device), lengths_U, z.shape[1])
    lstm = nn.LSTM(encoder.dense_width, encoder.lstm_width, encoder.lstm_layers, batch_first=True).to(device, dtype)

    def gradients(value: Tensor, of: list[Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(value, of)

    def encoded() -> object:
        found, _ = lstm_steps(
            parameters, dense_steps(parameters, features.features_UTF, settings=encoder), settings=encoder
        )
        return gradients(found.float().mean(), of_encoder)

    def contrasted() -> object:
        own_z, own_c = z.detach().requires_grad_(), c.detach().requires_grad_()
        scores = score_steps(own_z, own_c, predictors(parameters, settings=settings))
        return gradients(contrastive_losses(scores, rivals_USR, lengths_U, scale=settings.scale).mean(), [own_z, own_c])

    return {
        "step": lambda: gradients(loss(parameters, features, settings=settings, draws=draws), leaves),
        "encoder": encoded,
        "LSTMs": lambda: gradients(lstm(z.detach().requires_grad_())[0].float().mean(), list(lstm.parameters())),
        "contrast": contrasted,
        "draws": lambda: draw(settings, [batch], samples=[samples], generator=torch_stream(1, "draws")),
    }


def report(sides: dict[str, Side], *, device: torch.device, repeats: int) -> None:
    times: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(repeats + 2):  # the first two find kernels and fill caches
        for name, side in sides.items():
            elapsed = timed(side, device)
            if repeat >= 2:
                times[name].append(elapsed)
    for name, found in times.items():
        low, middle, high = statistics.quantiles(found, n=4) if len(found) > 1 else found * 3
        print(f"{name:10} {1e3 * middle:9.2f} ms ({1e3 * low:.2f} to {1e3 * high:.2f})")
    if device.type == "cuda":
        share = statistics.median(times["LSTMs"]) / statistics.median(times["step"])
        print(f"cuDNN's LSTMs take {share:.0%} of a step; {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB at most")


def timed(side: Side, device: torch.device) -> float:
    if device.type == "cpu":
        begun = time.process_time()
        side()
        return time.process_time() - begun
    torch.cuda.synchronize()
    begun = time.perf_counter()
    side()
    torch.cuda.synchronize()
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
