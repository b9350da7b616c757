"""Inputs and files with faults in them, thousands of them, each read as the command that reads such a file does.

    unharmed      it is read, and where we wrote it ourselves, as it was written
    clean error   it is refused with one line, or counted among what a corpus has of unusable rows and recordings
    traceback     any other exception, a crash of the process, or an error of several lines
    hang          more CPU time than a hundred such cases take
    silent loss   something we wrote (store, checkpoint, model, ledger) reads otherwise without a word, or a recording
                  whose container tells its length reads as a shorter one

Nobody can say of an input from outside what it was before: another letter in a table, another rate in a recipe or
another sample of a WAV file is simply what it says.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from faulty import artefacts, crowds, manifests, recipes, sounds
from faulty.children import Case, try_all
from faulty.outcome import Tally

Cases = Callable[..., Iterator[Case]]

# Of every so many cases, how many of each kind.
SHARES: Mapping[Cases, int] = {
    sounds.cases: 32,
    manifests.cases: 20,
    recipes.cases: 30,
    crowds.cases: 2,
    artefacts.stores: 10,
    artefacts.checkpoints: 6,
    artefacts.models: 6,
    artefacts.ledgers: 10,
}


def campaign(tally: Tally, *, cases: int, seed: int) -> None:
    """Try about `cases` damaged inputs, the same ones for the same `seed`."""
    for make, share in SHARES.items():
        with tempfile.TemporaryDirectory(prefix="sottovoce-faults-") as folder:
            try_all(make(Path(folder), count=-(-cases * share // sum(SHARES.values())), seed=seed), tally)
