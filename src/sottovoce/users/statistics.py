"""How much speech, from how many people, and how unevenly: the rows of the flagship paper's Table 2."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from sottovoce.corpora.corpus import SAMPLE_RATE
from sottovoce.users.splits import Speakers, UserIndex, select_speakers, user_counts

SAMPLES_PER_MINUTE = 60 * SAMPLE_RATE


def statistics(store: UserIndex) -> dict[str, Any]:
    """Hours, speakers, utterances and minutes per speaker of a store, and of each of its splits.

    The keys are `hours, speakers, utterances, minutes_per_speaker{mean, std, min, max}` and `splits`. A speaker who
    is in two splits is one speaker in the total. `std` is that of the population: divided by the number of speakers,
    not by one less.
    """
    everybody = speaker_statistics(store, select_speakers(store, tuple(store.splits)))
    splits = {split: speaker_statistics(store, select_speakers(store, (split,))) for split in store.splits}
    return everybody | {"splits": splits}


def speaker_statistics(store: UserIndex, speakers: Speakers) -> dict[str, Any]:
    """The same of any choice of speakers: a seed part, say, as in the rows CV-en-train-10 and -90."""
    minutes = minutes_per_speaker(speakers)
    return {
        "hours": int(speakers.samples.sum()) / SAMPLES_PER_MINUTE / 60,
        "speakers": len(speakers),
        "utterances": int(utterances_per_speaker(store, speakers).sum()),
        "minutes_per_speaker": {
            "mean": float(minutes.mean()),
            "std": float(minutes.std()),
            "min": float(minutes.min()),
            "max": float(minutes.max()),
        },
    }


def minutes_per_speaker(speakers: Speakers) -> NDArray[np.float64]:
    return speakers.samples / SAMPLES_PER_MINUTE


def utterances_per_speaker(store: UserIndex, speakers: Speakers) -> NDArray[np.int64]:
    return speakers.rows.totals(user_counts(store, speakers.rows.members))


def table(figures: dict[str, Any], *, title: str) -> Table:
    """What `statistics` returns as a table for the terminal: a row per split, then the total."""
    # Names are wrapped in Text: a bracket in them is no markup.
    printed = Table(
        title=Text(title, style="bold"),
        title_justify="left",
        box=SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
        show_edge=False,
    )
    # Read across, the upper line says "minutes per speaker", as the heading over four columns does in the paper.
    for heading in ("\nsubset", "\nhours", "\nspeakers", "\nutterances"):
        printed.add_column(heading, justify="left" if heading == "\nsubset" else "right", overflow="fold")
    for heading in ("minutes\nmean", "per\nstd", "speaker\nmin", "\nmax"):
        printed.add_column(heading, justify="right")
    *splits, total = table_rows(figures)
    for name, *cells in splits:
        printed.add_row(Text(name), *cells)
    printed.add_section()
    printed.add_row(*total, style="bold")
    return printed


def table_rows(figures: dict[str, Any]) -> list[tuple[str, ...]]:
    """The cells of the table as text."""
    return [_row(name, row) for name, row in [*figures["splits"].items(), ("total", figures)]]


def _row(name: str, row: dict[str, Any]) -> tuple[str, ...]:
    minutes = [_amount(row["minutes_per_speaker"][key]) for key in ("mean", "std", "min", "max")]
    return (name, _amount(row["hours"]), f"{row['speakers']:,}", f"{row['utterances']:,}", *minutes)


def _amount(value: float) -> str:
    # As the paper prints them: 1,593.7 and 24.1, but 0.02 where one digit would say nothing.
    if value >= 1 or value == 0:
        return f"{value:,.1f}"
    return f"{value:.2f}" if value >= 0.01 else f"{value:.1g}"
