"""Many files on a CPU: × real time of `transcribe`, in the order of the files as before and sorted by length as now.

    python benchmarks/transcribe.py runs/demo/seed moonshine-tiny-en [--every 4] [--repeats 5]

Models are folders of runs, or names in $SOTTOVOCE_MODELS. The speech is LibriSpeech's in $SOTTOVOCE_DATA, every so many
of its files. Sides take turns within each repeat, on one thread. Times are the process's own, whatever else runs, and
include reading the files; medians over repeats with quartiles. Texts are compared with those of the first side, where
each file is recognised by itself.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jiwer
import numpy as np
import torch
from long_files import load_pretrained
from numpy.typing import NDArray

from sottovoce.data.audio.batches import Batch
from sottovoce.data.corpora.corpus import SAMPLE_RATE
from sottovoce.data.text.normalisation import normalise_text
from sottovoce.evaluation import transcribe
from sottovoce.evaluation.transcripts import Transcript
from sottovoce.models.recogniser import Recogniser, load_recogniser

Plan = Callable[..., tuple[Batch, ...]]
BEFORE_SECONDS = 60.0  # of a batch


def plan_neighbours(lengths: NDArray[np.int64], *, max_seconds: float, device: torch.device) -> tuple[Batch, ...]:
    """Batches as they were made before: of consecutive windows."""
    batches: list[Batch] = []
    start = 0
    for stop in range(1, len(lengths) + 1):
        longest = int(lengths[start : stop + 1].max())
        if stop == len(lengths) or longest * (stop + 1 - start) > max_seconds * SAMPLE_RATE:
            batches.append(Batch(np.arange(start, stop), int(lengths[start:stop].max())))
            start = stop
    return tuple(batches)


SIDES: dict[str, tuple[Plan, float | None]] = {
    "one by one": (transcribe.plan_batches, 0.1),
    f"in order, {BEFORE_SECONDS:g} s (before)": (plan_neighbours, BEFORE_SECONDS),
    f"sorted, {BEFORE_SECONDS:g} s": (transcribe.plan_batches, BEFORE_SECONDS),
    "sorted (now)": (transcribe.plan_batches, None),
}


def measure(recogniser: Recogniser, said: dict[Path, str], *, repeats: int) -> None:
    found: dict[str, list[float]] = {name: [] for name in SIDES}
    texts: dict[str, list[str]] = {}
    audio = 0.0
    for repeat in range(repeats + 1):
        for name, (plan, seconds) in SIDES.items():
            files = list(said) if repeat else list(said)[:4]  # the first ones make plans and load libraries
            given: dict[str, Any] = {} if seconds is None else {"batch_seconds": seconds}
            begun = time.process_time()
            with patch.object(transcribe, "plan_batches", plan):
                results = list(transcribe.transcribe_files(recogniser, files, **given))
            taken = time.process_time() - begun
            assert all(isinstance(result, Transcript) for result in results)
            texts[name] = [result.text for result in results if isinstance(result, Transcript)]
            audio = sum(result.seconds for result in results if isinstance(result, Transcript))
            if repeat:
                found[name].append(taken)
    before = next(name for name in SIDES if "before" in name)
    alone = texts["one by one"]
    references = [normalise_text(text, language="en") for text in said.values()]
    for name, times in found.items():
        low, middle, high = statistics.quantiles([a / b for a, b in zip(found[before], times, strict=True)], n=4)
        unlike = sum(a != b for a, b in zip(texts[name], alone, strict=True))
        wer = jiwer.wer(references, [normalise_text(text, language="en") for text in texts[name]])
        speed = audio / statistics.median(times)
        ratio = f"{middle:.2f} ({low:.2f}–{high:.2f})"
        print(f"| {name} | {speed:,.1f} | {ratio} | {unlike} of {len(alone)} | {wer:.2%} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    said = read_texts(Path(os.environ["SOTTOVOCE_DATA"]) / "librispeech-mini" / "LibriSpeech", every=given.every)
    for model in given.models:
        recogniser = load_recogniser(Path(model)) if Path(model).exists() else load_pretrained(model)
        print(f"\n| {model}, {len(said)} files | × real time | before ÷ this | texts unlike one by one | WER |")
        print("|---|---|---|---|---|")
        measure(recogniser, said, repeats=given.repeats)


def read_texts(corpus: Path, *, every: int) -> dict[Path, str]:
    """What is said in every so many of the corpus's files, in the order of their names."""
    texts: dict[Path, str] = {}
    for table in corpus.rglob("*.trans.txt"):
        for line in table.read_text().splitlines():
            name, text = line.split(" ", 1)
            texts[table.parent / f"{name}.flac"] = text
    return {path: texts[path] for path in sorted(texts)[::every]}


if __name__ == "__main__":
    main()
