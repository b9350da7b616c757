"""Inputs and files with faults in them, thousands of them, each read as the command that reads such a file does.

    unharmed      it is read, and where we wrote it ourselves, as it was written
    clean error   it is refused with one line, or counted among what a corpus has of unusable rows and recordings
    traceback     any other exception, a crash of the process, or an error of several lines
    hang          more CPU time than a hundred such cases take
    silent loss   something we wrote (store, checkpoint, model, ledger) reads otherwise without a word, or a recording
                  whose container stores its length reads as a shorter one

Nobody can say of an input from outside what it was before: another letter in a table, another rate in a recipe or
another sample of a WAV file is simply what it says.
"""

from collections.abc import Mapping

from faulty import artefacts, inputs, recipes
from faulty.cases import MakeCases, Tally, try_shares

# Of every so many cases, how many of each kind.
SHARES: Mapping[MakeCases, int] = {
    inputs.recordings: 32,
    inputs.tables: 20,
    recipes.cases: 30,
    inputs.corpus_sizes: 2,
    artefacts.stores: 10,
    artefacts.checkpoints: 6,
    artefacts.models: 6,
    artefacts.ledgers: 10,
}


def campaign(tally: Tally, *, cases: int, seed: int) -> None:
    """Try about `cases` damaged inputs, the same ones for the same `seed`."""
    try_shares(SHARES, tally, count=cases, seed=seed)
