"""What `transcribe --stream` adds to a chunk's own length: a transducer of random weights, chunk by chunk.

    python benchmarks/stream.py [--size small] [--seconds 120] [--threads 1] [--device cpu]

What is said does not change the work; how much is written does: so once with a model that writes nothing, and once with
one that writes the most that greedy search lets it, five letters in each step of 30 ms. Chunks come as they would from
a microphone: one that takes longer than its own sound makes the next wait. A step's text needs 15 ms of sound behind
it, so it is there at most a chunk, these 15 ms and the lag printed here after the step was spoken.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from sottovoce.data.audio.features import HOP_SAMPLES, WINDOW_SAMPLES
from sottovoce.data.corpora.corpus import SAMPLE_RATE
from sottovoce.data.text.normalisation import alphabet
from sottovoce.data.text.tokens import CharacterTokens
from sottovoce.evaluation.streaming import CHUNK_SECONDS, transcribe_stream
from sottovoce.evaluation.windows import Samples
from sottovoce.models.ctc import BLANK
from sottovoce.models.family import find_family
from sottovoce.models.recogniser import Recogniser, create_recogniser
from sottovoce.models.transducer.network import SIZES, named_settings

WARM_UP = 8  # chunks that are not counted
BEHIND_SECONDS = (WINDOW_SAMPLES - HOP_SAMPLES) / SAMPLE_RATE
NEVER = 1e4  # a score that no other comes near


def model(size: str, *, writes: bool) -> Recogniser:
    """With random weights, but for how much it writes: nothing, or a letter whenever it is asked."""
    letters = alphabet("en")
    assert letters is not None
    tokens = CharacterTokens.seen_in(letters)
    settings = named_settings(size, tokens=len(tokens.pieces()))
    found = create_recogniser(
        find_family("transducer"), settings, tokens, language="en", generator=torch.Generator().manual_seed(1)
    )
    bias_V = torch.zeros(settings.tokens)
    bias_V[BLANK] = -NEVER if writes else NEVER
    return replace(found, parameters={**found.parameters, "output.bias": bias_V})


def sound(chunks: int) -> Iterator[Samples]:
    generator = np.random.default_rng(1)
    for _ in range(chunks):
        yield (1_000 * generator.standard_normal(round(CHUNK_SECONDS * SAMPLE_RATE))).astype(np.int16)


def lags(computing: Sequence[float]) -> list[float]:
    """From the end of each chunk's sound to the end of its computing, behind those before it."""
    found, free = [], 0.0
    for place, seconds in enumerate(computing, start=1):
        complete = place * CHUNK_SECONDS
        free = max(free, complete) + seconds
        found.append(free - complete)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="small", choices=list(SIZES))
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    chunks = round(arguments.seconds / CHUNK_SECONDS) + WARM_UP
    print(f"{arguments.size} on {arguments.device}, {arguments.threads} threads, {arguments.seconds:g} s of sound")
    for writes, label in ((False, "writes nothing"), (True, "writes all it may")):
        streamed = transcribe_stream(model(arguments.size, writes=writes), sound(chunks), device=arguments.device)
        computing = [increment.compute_seconds for increment in streamed][WARM_UP:]
        lag = lags(computing)
        middle, most_of_all = (1000 * float(np.quantile(lag, share)) for share in (0.5, 0.99))
        print(
            f"{label:18}: {100 * sum(computing) / arguments.seconds:5.1f} % of real time; lag behind a chunk "
            f"{middle:5.1f} ms, 99 % within {most_of_all:5.1f}, all within {1000 * max(lag):5.1f}; with the window "
            f"{1000 * (max(lag) + BEHIND_SECONDS):5.1f}"
        )


if __name__ == "__main__":
    main()
