"""Commands with inputs that nobody can mean: models, checkpoints, options, files, archives, streams and corpora.

unharmed      the command did something with it, exit code 0
clean error   it was refused with one line (or counted among what is unusable), exit code 2
traceback     any other exception, a crash of the process, or several errors
hang          more than a minute, or more CPU time than a hundred such cases take
silent loss   exit code 0 where a refusal was due
"""

import tempfile
from pathlib import Path

from faulty import strange_files, strange_models, strange_options
from faulty.children import try_all
from faulty.mutations import Cases
from faulty.outcome import Tally

# Of every so many cases, how many of each kind.
SHARES: dict[Cases, int] = {
    strange_models.checkpoints: 24,
    strange_models.folders: 36,
    strange_models.outside: 6,
    strange_options.plans: 30,
    strange_options.others: 24,
    strange_options.network: 14,
    strange_files.special: 40,
    strange_files.archives: 14,
    strange_files.streams: 14,
    strange_files.corpora: 22,
}


def campaign(tally: Tally, *, cases: int, seed: int) -> None:
    """Try about `cases` commands, the same ones for the same `seed`."""
    for make, share in SHARES.items():
        with tempfile.TemporaryDirectory(prefix="sottovoce-faults-") as folder:
            try_all(make(Path(folder), count=-(-cases * share // sum(SHARES.values())), seed=seed), tally)
