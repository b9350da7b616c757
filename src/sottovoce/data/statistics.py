"""How much speech, from how many people, and how unevenly: the rows of the flagship paper's Table 2."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table
from rich.text import Text

from sottovoce.base.tables import plain_table
from sottovoce.data.corpora.corpus import SAMPLE_RATE
from sottovoce.data.population import Population, PopulationSettings, build_population
from sottovoce.data.speakers import Speakers, UserIndex, select_speakers, user_counts

SAMPLES_PER_MINUTE = 60 * SAMPLE_RATE
SPREAD = ("mean", "std", "min", "max")


def compute_statistics(store: UserIndex) -> dict[str, Any]:
    """Hours, speakers, utterances and minutes per speaker of a store, and of each of its splits.

    The keys are `hours, speakers, utterances, minutes_per_speaker{mean, std, min, max}` and `splits`. A speaker who
    is in two splits is one speaker in the total. `std` is that of the population: divided by the number of speakers,
    not by one less.
    """
    everybody = speaker_statistics(select_speakers(store, tuple(store.splits)))
    splits = {split: speaker_statistics(select_speakers(store, (split,))) for split in store.splits}
    return everybody | {"splits": splits}


def speaker_statistics(speakers: Speakers) -> dict[str, Any]:
    """The same of any choice of speakers: a seed part, say, as in the rows CV-en-train-10 and -90."""
    return {
        "hours": int(speakers.samples.sum()) / SAMPLES_PER_MINUTE / 60,
        "speakers": len(speakers),
        "utterances": int(speakers.utterances.sum()),
        "minutes_per_speaker": _spread(minutes_per_speaker(speakers)),
    }


def _spread(amounts: NDArray[Any]) -> dict[str, float]:
    return {name: float(getattr(amounts, name)()) for name in SPREAD}


def device_statistics(store: UserIndex, *, speakers_per_device: int, seed: int) -> dict[str, Any]:
    """Of each split, how much is on a device that so many of its speakers share (Figure 2 of Gao et al. 2022)."""
    found: dict[str, Any] = {}
    for split in store.splits:
        shared = make_device_population(store, split, speakers_per_device=speakers_per_device, seed=seed)
        found[split] = {"devices": len(shared), "utterances": int(utterances_of_clients(shared).sum())} | {
            f"{what}_per_device": _spread(amounts) | {"median": float(np.median(amounts))}
            for what, amounts in (("minutes", shared.seconds / 60), ("utterances", utterances_of_clients(shared)))
        }
    return {"speakers_per_device": speakers_per_device, "seed": seed, "splits": found}


def make_device_population(store: UserIndex, split: str, *, speakers_per_device: int, seed: int) -> Population:
    """The speakers of a split as clients of the rule `device`."""
    settings = PopulationSettings(split=split, clients="device", speakers_per_device=speakers_per_device)
    return build_population(store, settings, seed=seed)


def utterances_of_clients(population: Population) -> NDArray[np.int64]:
    return population.members.totals(user_counts(population.store, population.members.members))


def format_devices(figures: dict[str, Any]) -> list[str]:
    """What `device_statistics` returns, a line for each split."""
    return [
        f"{split}, {figures['speakers_per_device']} speakers a device: {row['devices']:,} devices, "
        f"{row['utterances_per_device']['median']:,.0f} utterances and {_amount(row['minutes_per_device']['median'])} "
        "minutes in the median"
        for split, row in figures["splits"].items()
    ]


def minutes_per_speaker(speakers: Speakers) -> NDArray[np.float64]:
    return speakers.samples / SAMPLES_PER_MINUTE


def make_statistics_table(figures: dict[str, Any], *, title: str) -> Table:
    """What `compute_statistics` returns as a table for the terminal: a row per split, then the total."""
    printed = _headings(title)
    *splits, total = format_rows(figures)
    for name, *cells in splits:
        printed.add_row(Text(name), *cells)
    printed.add_section()
    printed.add_row(*total, style="bold")
    return printed


def make_comparison_table(subsets: Mapping[str, dict[str, Any] | None], *, title: str) -> Table:
    """Subsets with the paper's numbers below each; those that are not here are named."""
    printed = _headings(title)
    for name, row in subsets.items():
        printed.add_row(*((name, "not here") if row is None else _row(name, row)))
        if row is not None:
            printed.add_row(*_row("  in the paper", row["paper"]), style="dim")
    return printed


def _headings(title: str) -> Table:
    printed = plain_table(title)
    # Read across, the upper line says "minutes per speaker", as the heading over four columns does in the paper.
    for heading in ("\nsubset", "\nhours", "\nspeakers", "\nutterances"):
        printed.add_column(heading, justify="left" if heading == "\nsubset" else "right", overflow="fold")
    for heading in ("minutes\nmean", "per\nstd", "speaker\nmin", "\nmax"):
        printed.add_column(heading, justify="right")
    return printed


def format_rows(figures: dict[str, Any]) -> list[tuple[str, ...]]:
    """The cells of the table as text."""
    return [_row(name, row) for name, row in [*figures["splits"].items(), ("total", figures)]]


def _row(name: str, row: dict[str, Any]) -> tuple[str, ...]:
    minutes = [_amount(row["minutes_per_speaker"][key]) for key in SPREAD]
    utterances = f"{row['utterances']:,}" if "utterances" in row else ""  # Table 2 of the paper does not count them
    return (name, _amount(row["hours"]), f"{row['speakers']:,}", utterances, *minutes)


def _amount(value: float) -> str:
    # As the paper prints them: 1,593.7 and 24.1, but 0.02 where one digit would say nothing.
    if value >= 1 or value == 0:
        return f"{value:,.1f}"
    return f"{value:.2f}" if value >= 0.01 else f"{value:.1g}"
