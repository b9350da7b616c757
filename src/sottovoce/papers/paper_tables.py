"""Tables 1, 17, 18 and 20 of Pelikan et al. 2025: their ε beside ours, with the errata marked."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import yaml
from rich.box import SIMPLE_HEAD
from rich.table import Table

from sottovoce.base.errors import InputError
from sottovoce.privacy.plan_tables import coloured, number
from sottovoce.privacy.planner import PlannedRun, plan_run
from sottovoce.privacy.pld import QUICK, PldCap

Wer = tuple[float, float]  # dev, test, in percent


@dataclass(frozen=True)
class PaperRow:
    """One printed row; `sigma_dp` and `epsilon` as meant, with the erratum that says what is printed instead."""

    population_size: int
    cohort_size: int | None  # None: the seed model, before any federated training
    sigma_dp: float | None  # 0: no noise
    clip_bound: float | None
    printed_rate: float | None
    printed_steps: int | None
    printed_epsilon: float | None
    printed_order: float | None
    epsilon: float | None
    wer_global: Wer | None
    wer_uniform: Wer | None
    wer_dim: Wer | None
    erratum: str | None

    @property
    def central_steps(self) -> int | None:
        """T of a private run: whole passes over the population, nearest to 2,000 steps."""
        if self.cohort_size is None or not self.sigma_dp:
            return None
        return paper_steps(self.cohort_size / self.population_size)


@dataclass(frozen=True)
class AccountedTable:
    """A table's rows, each with the run as we account for it (None without noise)."""

    name: str
    title: str
    delta: float
    notes: tuple[str, ...]
    rows: tuple[tuple[PaperRow, PlannedRun | None], ...]

    def to_json(self) -> dict[str, Any]:
        """Rows with both sides, for machines."""
        return {
            "table": self.name,
            "title": self.title,
            "delta": self.delta,
            "notes": list(self.notes),
            "rows": [{"paper": vars(row), "ours": plan.to_json() if plan else None} for row, plan in self.rows],
        }


def table_names() -> tuple[str, ...]:
    """The tables that can be reproduced."""
    return tuple(_data()["tables"])


def paper_steps(sampling_rate: float) -> int:
    """T = n·round(2000/n) with n = ⌈1/q⌉ and q to three digits, the rule that every legible T of the tables fits.

    >>> [paper_steps(1024 / 34753), paper_steps(204_800 / 69_506_000), paper_steps(256_000 / 46_282_500)]
    [2006, 2034, 1991]
    """
    steps_per_pass = math.ceil(1 / float(f"{sampling_rate:.3g}"))
    return steps_per_pass * max(1, round(2000 / steps_per_pass))


def paper_rows(name: str) -> tuple[PaperRow, ...]:
    """The printed rows of a table, nothing computed.

    >>> row = paper_rows("table1")[3]
    >>> row.cohort_size, row.epsilon, row.printed_order
    (51200, 6.5, 7.0)
    """
    if name not in table_names():
        raise InputError(f"paper table {name!r}: expected one of {', '.join(table_names())}")
    return tuple(_row(row) for row in _data()["tables"][name]["rows"])


def paper_table(name: str, *, cap: PldCap = QUICK) -> AccountedTable:
    """A table with our ε beside the paper's (a few seconds: some twenty accounts)."""
    rows = paper_rows(name)
    table = _data()["tables"][name]
    delta = float(_data()["delta"])
    plans = tuple((row, _plan(row, delta, cap)) for row in rows)
    return AccountedTable(name, table["title"], delta, tuple(table["notes"]), plans)


def _plan(row: PaperRow, delta: float, cap: PldCap) -> PlannedRun | None:
    steps = row.central_steps
    if steps is None:
        return None
    assert row.cohort_size is not None
    assert row.clip_bound is not None
    assert row.sigma_dp is not None
    return plan_run(
        row.population_size,
        cohort_size=row.cohort_size,
        central_steps=steps,
        delta=delta,
        noise_multiplier=float(f"{row.sigma_dp * row.cohort_size:.9g}"),  # equal z, equal float: accounted once
        clip_bound=row.clip_bound,
        cap=cap,
    )


def _row(data: dict[str, Any]) -> PaperRow:
    sigma = data.get("sigma_meant", data.get("sigma"))
    return PaperRow(
        population_size=data["K"],
        cohort_size=data.get("S"),
        sigma_dp=None if sigma is None else sigma * 1e-6,
        clip_bound=data.get("C"),
        printed_rate=data.get("q"),
        printed_steps=data.get("T"),
        printed_epsilon=data.get("epsilon"),
        printed_order=data.get("order"),
        epsilon=data.get("epsilon_meant", data.get("epsilon")),
        wer_global=_wer(data.get("global")),
        wer_uniform=_wer(data.get("uniform")),
        wer_dim=_wer(data.get("dim")),
        erratum=data.get("erratum"),
    )


def _wer(pair: list[float] | None) -> Wer | None:
    return None if pair is None else (pair[0], pair[1])


@cache
def _data() -> dict[str, Any]:
    text = files("sottovoce.papers").joinpath("paper_tables.yaml").read_text(encoding="utf-8")
    data: dict[str, Any] = yaml.safe_load(text)
    return data


# Columns of the printed side by heading.
COLUMNS: dict[str, Callable[[PaperRow, PlannedRun | None], str]] = {
    "σ_DP·10⁶": lambda row, plan: number(None if row.sigma_dp is None else row.sigma_dp * 1e6),
    "C": lambda row, plan: number(row.clip_bound),
    "S": lambda row, plan: f"{row.cohort_size or 0:,}",
    "K": lambda row, plan: f"{row.population_size:,}",
    "q": lambda row, plan: number(row.cohort_size / row.population_size if row.cohort_size else None),
    "T": lambda row, plan: _count(plan.central_steps if plan else row.printed_steps),
    "z": lambda row, plan: f"{plan.noise_multiplier:.6g}" if plan else "–",
}


def paper_table_view(table: AccountedTable) -> Table:
    """The paper's ε beside ours; errata are numbered and spelt out below the table."""
    errata = list(dict.fromkeys(row.erratum for row, _ in table.rows if row.erratum))
    lines = [f"[{index}] {text}" for index, text in enumerate(errata, start=1)] + list(table.notes)
    caption = "\n".join(["global, uniform, dim: the paper's WER on the test set, in percent.", *lines])
    title = f"{table.name.replace('table', 'Table ')}: {table.title} (δ = {table.delta:g})"
    view = Table(
        title=title,
        caption=caption.replace("[", "\\["),
        caption_justify="left",
        box=SIMPLE_HEAD,
        collapse_padding=True,
    )
    for heading in (*COLUMNS, "ε paper", "ε RDP", "ε PLD", "global", "uniform", "dim"):
        view.add_column(heading, justify="right")
    for row, plan in table.rows:
        mark = f" \\[{errata.index(row.erratum) + 1}]" if row.erratum else ""
        epsilons = ["0" if row.cohort_size is None else "∞"] * 3
        if plan is not None:
            epsilons = [number(row.printed_epsilon) + mark, coloured(plan.epsilon.rdp), coloured(plan.epsilon.pld)]
        wers = ("" if wer is None else f"{wer[1]:.1f}" for wer in (row.wer_global, row.wer_uniform, row.wer_dim))
        view.add_row(*(show(row, plan) for show in COLUMNS.values()), *epsilons, *wers)
    return view


def _count(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"
