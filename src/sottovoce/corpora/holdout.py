"""Splits for corpora that have none: some speakers, chosen by seed, are set aside whole."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from sottovoce.base.errors import InputError
from sottovoce.base.seeds import keyed_order, name_key
from sottovoce.corpora.corpus import Corpus, Speaker


def hold_out(corpus: Corpus[Speaker], counts: Mapping[str, int], *, seed: int) -> Corpus[Speaker]:
    """Move so many speakers into each split of `counts`; everybody else stays where they are.

    Who is chosen hangs on names and seed alone.
    """
    names = sorted({speaker.name for speaker in corpus.speakers})
    if any(count < 1 for count in counts.values()) or sum(counts.values()) >= len(names):
        wish = ", ".join(f"{split}={count}" for split, count in counts.items())
        raise InputError(f"hold_out {wish}: expected at least 1 each, and fewer in all than the {len(names)} speakers")
    queue = keyed_order(np.array([name_key(name) for name in names], dtype=np.uint64), seed, "hold out").tolist()
    split_of: dict[str, str] = {}
    for split, count in counts.items():
        split_of |= {names[queue.pop(0)]: split for _ in range(count)}
    moved = [replace(speaker, split=split_of.get(speaker.name, speaker.split)) for speaker in corpus.speakers]
    return replace(corpus, speakers=sorted(moved, key=lambda speaker: (speaker.split, speaker.name)))
