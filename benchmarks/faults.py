"""Faults, planted by the thousand: does anything end in a traceback, a hang or a silent loss?

    python benchmarks/faults.py [kills] [mutations] [surfaces] [--short] [--seed N] [--json FILE]

`mutations`: damaged audio files, tables, recipes, stores, checkpoints, models and ledgers, each read as the command
that reads such a file does (`faulty/mutations.py`). `kills`: processes killed at every named point of `prepare`, `run`
and a suite, and started again (`faulty/kills.py`). `surfaces`: commands with untrusted models and checkpoints, options
that are no numbers, pipes in place of files (`faulty/surfaces.py`). Without a word all. Exit code 1 if any fault ended
badly.
"""

import argparse
import importlib
import json
import sys
from pathlib import Path

from faulty.cases import Outcome, Tally
from rich.console import Console
from rich.table import Table

KINDS = ("kills", "mutations", "surfaces")
# The short campaign takes about half a minute for each kind; None: a kill at every point there is.
CASES = {"mutations": 5_800, "surfaces": 1_900}
SHORT_CASES = {"mutations": 460, "surfaces": 230}
KILLS, SHORT_KILLS = None, 10
SHOWN = 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"{' or '.join(KINDS)}; all by default")
    parser.add_argument("--short", action="store_true", help="some hundred faults instead of thousands")
    parser.add_argument("--seed", type=int, default=1, help="another seed, other faults")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the counts")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.kinds) - set(KINDS)):
        parser.error(f"{unknown[0]}: expected {' or '.join(KINDS)}")
    tally = Tally()
    for kind in arguments.kinds or KINDS:
        # Late: the one needs torch and all of a run, the other only what reads.
        campaign = importlib.import_module(f"faulty.{kind}").campaign
        if kind == "kills":
            campaign(tally, kills=SHORT_KILLS if arguments.short else KILLS, seed=arguments.seed)
        else:
            campaign(tally, cases=(SHORT_CASES if arguments.short else CASES)[kind], seed=arguments.seed)
    console = Console(width=140)
    console.print(_table(tally))
    for line in tally.bad[:SHOWN]:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if len(tally.bad) > SHOWN:
        console.print(f"and {len(tally.bad) - SHOWN} more")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"counts": tally.as_json(), "bad": tally.bad}, indent=2) + "\n")
    sys.exit(1 if tally.bad else 0)


def _table(tally: Tally) -> Table:
    table = Table("planted in", "tried", *Outcome, title="benchmarks/faults.py")
    for what, found in tally.as_json().items():
        table.add_row(what, *(f"{number:,}" for number in found.values()))
    return table


if __name__ == "__main__":
    main()
