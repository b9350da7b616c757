"""Many files on a CPU: × real time of `transcribe`, in batches in the order of the files and sorted by length.

    python benchmarks/transcribe.py runs/demo/seed moonshine-tiny-en [--every 4] [--repeats 5]

Models are folders of runs, or names in $SOTTOVOCE_MODELS. The speech is LibriSpeech's in $SOTTOVOCE_DATA, every so many
of its files. Sides take turns within each repeat, on one thread. Times are the process's own, whatever else runs, and
include reading the files; medians over repeats with quartiles. Texts are compared with those of each file recognised by
itself.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import jiwer
import numpy as np
import soundfile
import torch
from long_files import load_pretrained
from numpy.typing import NDArray

from sottovoce.data.audio.batches import Batch
from sottovoce.data.corpora.corpus import SAMPLE_RATE
from sottovoce.data.text.normalisation import normalise_text
from sottovoce.evaluation import transcribe
from sottovoce.evaluation.decoder import choose_greedy
from sottovoce.evaluation.recognise import choose_batch_seconds, plan_batches
from sottovoce.evaluation.transcripts import Transcript
from sottovoce.models.recogniser import Recogniser, load_recogniser

Plan = Callable[..., tuple[Batch, ...]]
BEFORE_SECONDS, ALONE_SECONDS = 60.0, 0.1  # of a batch


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


def choose_sides(recogniser: Recogniser, others: list[float]) -> dict[str, tuple[Plan, float]]:
    """How batches are made, and their seconds: as before, as now, and sorted with `others`."""
    decode = choose_greedy(recogniser.family, recogniser.settings)
    now = choose_batch_seconds(torch.device("cpu"), decode)
    plans = {"in order": plan_neighbours, "sorted": plan_batches}
    made = [(how, seconds) for seconds in (BEFORE_SECONDS, now) for how in plans]
    made += [("sorted", seconds) for seconds in others]
    return {f"{how}, {seconds:g} s": (plans[how], seconds) for how, seconds in made}


def write_texts(recogniser: Recogniser, files: list[Path], *, plan: Plan, batch_seconds: float) -> dict[Path, str]:
    with patch.object(transcribe, "plan_batches", plan):
        found = list(transcribe.transcribe_files(recogniser, files, batch_seconds=batch_seconds))
    assert all(isinstance(result, Transcript) for result in found), found
    return {result.path: result.text for result in found if isinstance(result, Transcript)}


def measure(recogniser: Recogniser, said: dict[Path, str], *, repeats: int, others: list[float]) -> None:
    files, sides = list(said), choose_sides(recogniser, others)
    audio = sum(soundfile.info(path).duration for path in files)
    alone = write_texts(recogniser, files, plan=plan_batches, batch_seconds=ALONE_SECONDS)
    found: dict[str, list[float]] = {name: [] for name in sides}
    texts: dict[str, dict[Path, str]] = {}
    for _ in range(repeats):
        for name, (plan, seconds) in sides.items():
            begun = time.process_time()
            texts[name] = write_texts(recogniser, files, plan=plan, batch_seconds=seconds)
            found[name].append(time.process_time() - begun)
    before = found[next(iter(sides))]
    references = [normalise_text(text, language="en") for text in said.values()]
    for name, times in found.items():
        low, middle, high = statistics.quantiles([a / b for a, b in zip(before, times, strict=True)], n=4)
        unlike = sum(texts[name][path] != alone[path] for path in files)
        wer = jiwer.wer(references, [normalise_text(texts[name][path], language="en") for path in files])
        speed = audio / statistics.median(times)
        ratio = f"{middle:.2f} ({low:.2f}–{high:.2f})"
        print(f"| {name} | {speed:,.1f} | {ratio} | {unlike} of {len(files)} | {wer:.2%} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batch-seconds", type=float, nargs="+", default=[], help="sorted batches of other sizes too")
    given = parser.parse_args()
    torch.set_num_threads(1)
    said = read_texts(Path(os.environ["SOTTOVOCE_DATA"]) / "librispeech-mini" / "LibriSpeech", every=given.every)
    for model in given.models:
        recogniser = load_recogniser(Path(model)) if Path(model).exists() else load_pretrained(model)
        print(f"\n| {model}, {len(said)} files | × real time | before ÷ this | texts unlike one by one | WER |")
        print("|---|---|---|---|---|")
        measure(recogniser, said, repeats=given.repeats, others=given.batch_seconds)


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
