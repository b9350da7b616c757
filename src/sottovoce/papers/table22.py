"""Table 22 of Pelikan et al. 2025: the computing that its runs took, and what that is for each client and GPU."""

from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

import yaml
from rich.box import SIMPLE_HEAD
from rich.table import Table

from sottovoce.papers.table2 import printed_subsets

CAPTION = """s/client: GPU seconds for one client's part in one round, all else included.
audio s/s: seconds of audio trained on per second and GPU. For epochs it is ten passes over the mean client of Table 2,
for steps it is at most this: ten full batches."""


@dataclass(frozen=True)
class ComputeRow:
    """One printed row; `recipe` is None where no other table has its run."""

    seed: str
    data: str
    model: Literal["FL", "FL + DP"]
    batch_seconds: float
    cohort_size: int
    local: int
    unit: Literal["epochs", "steps"]
    central_steps: int
    gpus: int
    hours: float
    gpu_hours: float
    recipe: str | None

    @property
    def gpu_seconds_per_client(self) -> float:
        """Of one client in one round."""
        return 3600 * self.gpu_hours / (self.cohort_size * self.central_steps)

    @property
    def audio_seconds_per_client(self) -> float:
        """What one client trains on in a round: passes over the mean client's speech, or at most so many batches."""
        if self.unit == "steps":
            return self.local * self.batch_seconds
        hours, speakers, *_ = next(rows[self.data]["paper"] for rows in printed_subsets().values() if self.data in rows)
        return float(self.local * 3600 * hours / speakers)

    @property
    def audio_seconds_per_second(self) -> float:
        """Per GPU."""
        return self.audio_seconds_per_client / self.gpu_seconds_per_client

    def to_json(self) -> dict[str, Any]:
        """As printed, and what follows from it."""
        derived = ("gpu_seconds_per_client", "audio_seconds_per_client", "audio_seconds_per_second")
        return asdict(self) | {name: round(getattr(self, name), 3) for name in derived}


@cache
def compute_rows() -> tuple[ComputeRow, ...]:
    """The table's rows.

    >>> row = compute_rows()[10]
    >>> row.gpu_hours, round(row.gpu_seconds_per_client, 2), round(row.audio_seconds_per_second)
    (1120, 1.97, 610)
    """
    source = resources.files("sottovoce.papers").joinpath("table22.yaml").read_text(encoding="utf-8")
    return tuple(_row(row) for row in yaml.safe_load(source))


def _row(found: dict[str, Any]) -> ComputeRow:
    minutes, cohort, local, steps, gpus, hours, gpu_hours = found["paper"]
    count, unit = local.split()
    words = {name: found[name] for name in ("seed", "data", "model", "recipe")}
    return ComputeRow(
        batch_seconds=60 * minutes,
        cohort_size=cohort,
        local=int(count),
        unit=unit,
        central_steps=steps,
        gpus=gpus,
        hours=hours,
        gpu_hours=gpu_hours,
        **words,
    )


def compute_table_view(rows: tuple[ComputeRow, ...]) -> Table:
    """For people."""
    title = "Table 22: computing for the main runs of Pelikan et al. 2025, on A100s with 80 GB"
    view = Table(title=title, caption=CAPTION, caption_justify="left", box=SIMPLE_HEAD, collapse_padding=True)
    for heading in ("seed", "data", "model"):
        view.add_column(heading)
    for heading in ("batch", "S", "local", "T", "GPUs", "hours", "GPU hours", "s/client", "audio s/s"):
        view.add_column(heading, justify="right")
    view.add_column("recipe")
    for row in rows:
        view.add_row(
            *(row.seed, row.data, row.model, f"{row.batch_seconds:g} s", f"{row.cohort_size:,}"),
            *(f"{row.local} {row.unit}", f"{row.central_steps:,}", f"{row.gpus}", f"{row.hours:g}"),
            *(f"{row.gpu_hours:,}", f"{row.gpu_seconds_per_client:.3g}", f"{row.audio_seconds_per_second:.3g}"),
            row.recipe or "–",
        )
    return view
