"""Commands with inputs that nobody can mean: models, checkpoints, options, files, archives, streams and corpora.

unharmed      the command did something with it, exit code 0
clean error   it was refused with one line (or counted among what is unusable), exit code 2
traceback     any other exception, a crash of the process, or several errors
hang          more than a minute, or more CPU time than a hundred such cases take
silent loss   exit code 0 where a refusal was due
"""

from collections.abc import Mapping

from faulty import invalid_files, invalid_models, invalid_options
from faulty.cases import MakeCases, Tally, try_shares

# Of every so many cases, how many of each kind.
SHARES: Mapping[MakeCases, int] = {
    invalid_models.checkpoints: 24,
    invalid_models.folders: 36,
    invalid_models.outside: 6,
    invalid_options.plans: 30,
    invalid_options.others: 24,
    invalid_options.network: 14,
    invalid_files.special: 40,
    invalid_files.archives: 14,
    invalid_files.streams: 14,
    invalid_files.corpora: 22,
}


def campaign(tally: Tally, *, cases: int, seed: int) -> None:
    """Try about `cases` commands, the same ones for the same `seed`."""
    try_shares(SHARES, tally, count=cases, seed=seed)
