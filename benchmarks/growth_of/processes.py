"""A round over 1, 2 and 4 processes with gloo: processor seconds of all of them, and seconds by the clock.

The teams of `benchmarks/ranks.py` take turns, a round each.
"""

import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ranks import Members, speaker
from sottovoce.data.corpora.corpus import Corpus, ProblemLog, RenderedSpeaker
from sottovoce.data.store import pack_corpus

WORLDS = (1, 2, 4)
COHORT, SECONDS, STEPS, ROUNDS = 32, 12.0, 2, 5
TICKS = os.sysconf("SC_CLK_TCK")


def _as_it_is(rendered: RenderedSpeaker) -> RenderedSpeaker:
    return rendered


def processor_seconds(process: int) -> float:
    """User and system time of a process that runs."""
    fields = Path(f"/proc/{process}/stat").read_text().rsplit(") ", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def measure(worlds: Sequence[int], *, size: str) -> dict[str, Any]:
    options = ["--size", size, "--cohort", str(COHORT), "--seconds", str(SECONDS), "--local-steps", str(STEPS)]
    with tempfile.TemporaryDirectory() as folder:
        users = [speaker(number, SECONDS) for number in range(2 * COHORT)]
        pack_corpus(Corpus("noise", "en", users, _as_it_is, ProblemLog()), Path(folder) / "store", workers=1)
        teams = {world: Members(world, Path(folder), options) for world in worlds}
        clock: dict[int, list[float]] = {world: [] for world in worlds}
        processor: dict[int, list[float]] = {world: [] for world in worlds}
        for repeat in range(ROUNDS + 1):  # the first warms up
            for world, team in teams.items():
                before = sum(map(processor_seconds, team.ids))
                seconds, _ = team.round()
                if repeat:
                    clock[world].append(seconds)
                    processor[world].append(sum(map(processor_seconds, team.ids)) - before)
        for team in teams.values():
            team.end()
    rows = [
        {
            "processes": world,
            "seconds": round(statistics.median(clock[world]), 3),
            "processor_seconds": round(statistics.median(processor[world]), 3),
            "quartiles": [round(each, 3) for each in statistics.quantiles(processor[world], n=4)[::2]],
        }
        for world in worlds
    ]
    return {"machine": f"{os.cpu_count()} cores", "size": size, "clients": COHORT, "processes": rows}
