"""On a CPU: training steps and recognition in bfloat16 beside float32, by width and seconds of audio.

    python benchmarks/bfloat16_cpu.py                       # CTC transformers, training steps
    python benchmarks/bfloat16_cpu.py --families            # steps of the other families
    python benchmarks/bfloat16_cpu.py --recognise           # waveform to log-probabilities

A step is what a client does: loss, gradients, clipping, SGD, and the model loaded before it. Sides take turns within
each repeat, on one thread. Times are the process's own, whatever else runs; ratios are medians over repeats with
quartiles. `emulated` says whether the processor multiplies bfloat16 at all.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from sottovoce.base.seeds import stream, torch_stream
from sottovoce.data.audio.waveforms import Waveforms, pad_waveforms
from sottovoce.data.corpora.corpus import SAMPLE_RATE
from sottovoce.flat.layout import Layout
from sottovoce.models.family import Family, draw_steps, extract_float32_features, find_family, step_loss
from sottovoce.models.precision import multiplies_bfloat16
from sottovoce.models.transformer import FAMILY as TRANSFORMER
from sottovoce.models.transformer.settings import named_settings
from sottovoce.optimisers import SGD
from sottovoce.optimisers.weights import Weights

CPU = torch.device("cpu")
TOKENS, CHARACTERS_PER_SECOND = 30, 8
DTYPES = (torch.float32, torch.bfloat16)
# Size, width (None: the size's own), seconds a step, seconds an utterance.
STEPS: Sequence[tuple[str, int | None, float, float]] = (
    ("tiny", None, 4, 1.3),
    ("tiny", None, 8, 2.5),
    ("tiny", None, 20, 5),
    ("tiny", 128, 4, 1.3),
    ("tiny", 128, 20, 5),
    ("tiny", 192, 4, 1.3),
    ("tiny", 192, 20, 5),
    ("small", None, 4, 1.3),
    ("small", None, 8, 2.5),
    ("small", None, 20, 5),
    ("small", None, 40, 20),
)
OTHERS = ("crdnn", "transducer", "cpc")
RECOGNISED: Sequence[tuple[str, float, float]] = (("tiny", 60, 5), ("small", 60, 5), ("small", 60, 30))


def noise(seconds: float, utterance_seconds: float) -> Waveforms:
    """Utterances of equal length: arithmetic does not depend on what is said."""
    rng, count = stream(1, "noise"), max(1, int(seconds / utterance_seconds))
    samples, letters = int(utterance_seconds * SAMPLE_RATE), int(CHARACTERS_PER_SECOND * utterance_seconds)
    return pad_waveforms(
        [rng.integers(-3000, 3000, samples).astype(np.int16) for _ in range(count)],
        [rng.integers(1, TOKENS, letters).tolist() for _ in range(count)],
    )


def training_step(
    family: Family[Any, Any], settings: Any, heard: Waveforms, dtype: torch.dtype
) -> Callable[[], object]:
    (draws,) = draw_steps(
        family,
        [len(heard)],
        samples=[int(heard.lengths_U.max())],
        settings=settings,
        spec_augment=None,
        generator=torch_stream(1, "draws"),
    )
    start = family.init(settings, generator=torch_stream(1, "init"))
    layout = Layout.of(start)
    start_P = layout.flatten(start)
    weights = Weights(layout, SGD(), device=CPU, dtype=dtype, statistics=family.training.statistics(settings))
    with torch.no_grad():
        features = family.front_end.extract_features(heard, settings=settings, dtype=dtype)

    def step() -> object:
        weights.reset(start_P)
        loss = step_loss(family, weights.working, features, settings=settings, draws=draws)
        weights.set_gradients(torch.autograd.grad(loss, list(weights.working.values()), allow_unused=True))
        return weights.step(lr=0.1, max_norm=1.0)

    return step


def recognition(settings: Any, heard: Waveforms, dtype: torch.dtype) -> Callable[[], object]:
    parameters = {
        name: p.to(dtype) for name, p in TRANSFORMER.init(settings, generator=torch_stream(1, "init")).items()
    }
    assert TRANSFORMER.recognition is not None
    emit = TRANSFORMER.recognition.emit
    assert emit is not None

    def once() -> object:
        with torch.no_grad():
            features = extract_float32_features(TRANSFORMER, heard, settings=settings)
            return emit(parameters, features, settings=settings)

    return once


def compare(name: str, sides: Mapping[torch.dtype, Callable[[], object]], *, repeats: int, audio: float) -> str:
    """One line of the table: milliseconds of each side, the ratio with its quartiles, and times real time."""
    found: dict[torch.dtype, list[float]] = {dtype: [] for dtype in sides}
    for repeat in range(repeats + 2):
        for dtype, work in sides.items():
            begun = time.process_time()
            work()
            if repeat >= 2:  # the first ones make plans and load libraries
                found[dtype].append(time.process_time() - begun)
    plain, half = (found[dtype] for dtype in DTYPES)
    low, middle, high = statistics.quantiles([a / b for a, b in zip(plain, half, strict=True)], n=4)
    medians = [statistics.median(times) for times in (plain, half)]
    cells = (*(f"{1e3 * seconds:.1f}" for seconds in medians), f"**{middle:.2f}** ({low:.2f}–{high:.2f})")
    return f"| {name} | {' | '.join(cells)} | {' | '.join(f'{audio / seconds:,.0f}' for seconds in medians)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", action="store_true")
    parser.add_argument("--recognise", action="store_true")
    parser.add_argument("--repeats", type=int, default=11)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, emulated: {not multiplies_bfloat16()}")
    print("| | float32, ms | bfloat16, ms | ratio | audio s/s, float32 | bfloat16 |")
    print("|---|---|---|---|---|---|")
    rows: list[tuple[str, Waveforms, Callable[[Waveforms, torch.dtype], Callable[[], object]]]] = []
    if options.families:
        for name in OTHERS:
            for size in ("tiny", "small"):
                family = find_family(name)
                settings = family.Options(size=size).settings(tokens=TOKENS)
                heard = noise(8, 4)
                rows.append(
                    (f"{name}, {size}", heard, lambda w, d, f=family, s=settings: training_step(f, s, w, d))  # type: ignore[misc]
                )
    elif options.recognise:
        for size, seconds, each in RECOGNISED:
            settings = named_settings(size, tokens=TOKENS)
            label = f"{size}, {seconds:g} s in utterances of {each:g} s"
            rows.append((label, noise(seconds, each), lambda w, d, s=settings: recognition(s, w, d)))  # type: ignore[misc]
    else:
        for size, width, seconds, each in STEPS:
            changes = {} if width is None else {"width": width}
            settings = named_settings(size, tokens=TOKENS, dropout=0.0, layer_drop=0.0, **changes)
            label = f"{size}, width {settings.width}, {seconds:g} s a step"
            rows.append(
                (label, noise(seconds, each), lambda w, d, s=settings: training_step(TRANSFORMER, s, w, d))  # type: ignore[misc]
            )
    for label, heard, make in rows:
        sides = {dtype: make(heard, dtype) for dtype in DTYPES}
        print(compare(label, sides, repeats=options.repeats, audio=heard.audio_seconds), flush=True)


if __name__ == "__main__":
    main()
