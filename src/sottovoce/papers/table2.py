"""The subsets of the flagship paper's Table 2, as a store has them, beside what the paper prints."""

from functools import cache
from importlib import resources
from typing import Any, Protocol

import yaml

from sottovoce.base.errors import InputError
from sottovoce.base.seeds import derive
from sottovoce.data.speakers import SeedPart, Speakers, UserIndex, select_speakers, split_off_seed
from sottovoce.data.statistics import speaker_statistics

MINUTES = ("mean", "std", "min", "max")


class SpokenStore(UserIndex, Protocol):
    """A store that knows its corpus and its language."""

    @property
    def language(self) -> str: ...


@cache
def printed_subsets() -> dict[str, dict[str, dict[str, Any]]]:
    """The table's rows by corpus, and by language where it has several."""
    source = resources.files("sottovoce.papers").joinpath("table2.yaml").read_text(encoding="utf-8")
    found: dict[str, dict[str, dict[str, Any]]] = yaml.safe_load(source)
    return found


def subset_statistics(store: SpokenStore, *, seed: int) -> dict[str, dict[str, Any] | None]:
    """Each of the corpus's subsets: what `speaker_statistics` says, and under `paper` what is printed there.

    None where the store lacks its splits, or has too few speakers to divide. Who is in a seed part is decided as in a
    recipe with this `seed`: as large a share of the people as in the paper, but not the same ones.
    """
    corpus = f"{store.name}-{store.language}" if store.name == "commonvoice" else store.name
    if corpus not in printed_subsets():
        raise InputError(f"store of {corpus}: Table 2 has {', '.join(printed_subsets())}")
    found: dict[str, dict[str, Any] | None] = {}
    for name, row in printed_subsets()[corpus].items():
        chosen = _chosen(store, row, seed=seed)
        found[name] = None
        if chosen is not None:
            found[name] = speaker_statistics(chosen) | {"paper": _printed(row["paper"])}
    return found


def _chosen(store: UserIndex, row: dict[str, Any], *, seed: int) -> Speakers | None:
    if not all(split in store.splits for split in row["splits"]):
        return None
    everybody = select_speakers(store, tuple(row["splits"]))
    if "fraction" not in row:
        return everybody
    if row["fraction"] * len(everybody) < 1:
        return None
    rule = SeedPart(fraction=row["fraction"])
    of_seed, rest = split_off_seed(everybody, rule=rule, seed=derive(seed, "seed part"))
    return of_seed if row["side"] == "seed" else rest


def _printed(numbers: list[float]) -> dict[str, Any]:
    hours, speakers, *minutes = numbers
    return {"hours": hours, "speakers": speakers, "minutes_per_speaker": dict(zip(MINUTES, minutes, strict=True))}
