"""The tables of docs/growth.md, from what is kept in benchmarks/growth.json."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from growth_of.cluster import (
    BATCH_SECONDS,
    EXTRAPOLATED,
    GPUS,
    LOCAL_STEPS,
    PARAMETERS,
    TRAINED,
    cluster_time,
    exchange_seconds,
    in_words,
    measured_round,
)
from growth_of.fits import Line, fit_line
from sottovoce.base.files import read_json

KEPT = Path(__file__).parents[1] / "growth.json"
PAGE = Path(__file__).parents[2] / "docs/growth.md"
NOT_MEASURED = "*Not measured yet.*"
Kept = Mapping[str, Any]


def rows_of(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (header, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(header), *lines[1:]])


_SMALLER = ((1e3, "ms"), (1e6, "µs"), (1e9, "ns"))


def quantity(value: float, unit: str = "s") -> str:
    """Three figures, in the unit that needs no power of ten.

    >>> quantity(0.00123), quantity(12.34), quantity(5e-6), quantity(0.0)
    ('1.23 ms', '12.3 s', '5 µs', '0 s')
    """
    if unit != "s" or value == 0 or abs(value) >= 1:
        return f"{value:.3g} {unit}" if abs(value) < 1000 else f"{value:,.0f} {unit}"
    scale, name = next(each for each in _SMALLER if float(f"{abs(value) * each[0]:.3g}") >= 1 or each is _SMALLER[-1])
    return f"{value * scale:.3g} {name}"


def _line(line: Line, per: str) -> str:
    start = f"{'−' if line.start < 0 else '+'} {quantity(abs(line.start))}"
    return f"{quantity(line.slope)} {per} {start}; off by {100 * line.residual:.0f} % at most"


def _by(kept: Kept, name: str, part: str, x: str, y: str) -> Line:
    rows = kept[name][part]
    return fit_line([row[x] for row in rows], [row[y] for row in rows])


ENGINES = {
    "clients sequential": "one after another",
    "clients stacked": "in stacks of 64",
    "clients stacked without caches": "in stacks, nothing kept of clients' speech",
}


def clients_table(kept: Kept) -> str:
    """Processor seconds of a round by its clients, and a line through them."""
    cohorts = sorted({row["clients"] for name in ENGINES for row in kept[name]["rounds"]})
    header = ["clients in a round, local steps", *(f"{cohort:,}" for cohort in cohorts), "fitted"]
    rows = []
    for name, what in ENGINES.items():
        took = {row["clients"]: quantity(row["seconds"]) for row in kept[name]["rounds"]}
        line = _by(kept, name, "rounds", "clients", "seconds")
        cells = [took.get(cohort, "") for cohort in cohorts]
        rows.append([f"{what}, {kept[name]['local_steps']}", *cells, _line(line, "a client")])
    return rows_of(header, rows)


MEMORY = {
    "clients stacked before without caches": "in stacks, nothing kept, as before: own",
    "clients stacked without caches": "in stacks, nothing kept, now: own",
    "clients sequential": "one after another, with caches: own",
}
MAPPED = "clients sequential"


def memory_table(kept: Kept) -> str:
    """Memory along the largest round, and how it grows in the last third of it."""
    places = (0, 3, 6, 9)
    shown = [name for name in MEMORY if kept.get(name, {}).get("points")]
    header = ["MiB after so many clients"]
    header += [f"{round(kept[MAPPED]['points'][place]['clients'], -2):,}" for place in places]
    rows = []
    for name, of in [*((name, "own_mib") for name in shown), (MAPPED, "mapped_mib")]:
        points = kept[name]["points"]
        what = MEMORY[name] if of == "own_mib" else "the same: mapped"
        rows.append([what, *(f"{points[place][of]:,.0f}" for place in places), _growth(points, of)])
    return rows_of([*header, "between the last two"], rows)


def _growth(points: Sequence[Mapping[str, float]], of: str) -> str:
    before, last = points[-4], points[-1]
    each = (last[of] - before[of]) * 2**20 / (last["clients"] - before["clients"])
    return f"{each / 1000:+.1f} kB a client"


PLANNED = 50_000


def plans_table(kept: Kept) -> str:
    """What a cohort of 50,000 takes before it is read, by what its clients have said."""
    measured = kept["plans"]
    header = ["a client", "its plan", f"{PLANNED:,} of them, as before", "now at most"]
    rows = []
    for row in measured["plans"]:
        before = PLANNED * row["plan_bytes"]
        now = min(before, measured["bound_bytes"]) + PLANNED * row["member_bytes"]
        cells = f"{row['plan_bytes'] / 1e3:.1f} kB", f"{before / 2**20:,.0f} MiB", f"{now / 2**20:,.0f} MiB"
        rows.append([row["client"], *cells])
    return rows_of(header, rows)


def clients_cuda_table(kept: Kept) -> str:
    if (measured := kept.get("clients stacked cuda")) is None:
        return NOT_MEASURED
    line = _by(kept, "clients stacked cuda", "rounds", "clients", "seconds")
    header = ["clients in a round", "seconds", "audio s/s", "device memory", "own memory"]
    rows = [
        [
            f"{row['clients']:,}",
            quantity(row["seconds"]),
            f"{row['clients'] * measured['audio_seconds'] / row['seconds']:,.0f}",
            f"{row['device_mib'] / 1024:.1f} GiB",
            f"{row['own_mib'] / 1024:.1f} GiB",
        ]
        for row in measured["rounds"]
    ]
    return rows_of(header, [*rows, ["fitted", _line(line, "a client"), "", "", ""]])


def population_table(kept: Kept) -> str:
    """What each population takes, and a line through it."""
    measured = kept["population"]["populations"]
    header = ["users", *(f"{row['users']:,}" for row in measured), "fitted"]
    parts = {
        "the store packed": "pack_seconds",
        "opened, clients listed": "prepare_seconds",
        "a cohort of 1,000 (or half) drawn": "sample_seconds",
        "a random client found and read, warm": "read_seconds",
    }
    rows = []
    for what, name in parts.items():
        line = _by(kept, "population", "populations", "users", name)
        # What hardly grows at all has no slope that a fit would find.
        grows = measured[-1][name] > 2 * measured[0][name]
        fitted = _line(line, "a user") if grows else "does not grow"
        rows.append([what, *(quantity(row[name]) for row in measured), fitted])
    rows.append(["memory held for each", *(f"{row['held_bytes']:.0f} bytes" for row in measured), ""])
    rows.append(["own memory grown by", *(f"{row['own_mib']:.1f} MiB" for row in measured), ""])
    return rows_of(header, rows)


def leader_table(kept: Kept) -> str:
    """The work of one process for all, at S = 204,800 and K = 70,000,000."""
    found = kept["population"]["leader"]
    return rows_of(
        ["the first process, for all", "measured"],
        [
            ["a cohort of 204,800 out of 70,000,000, seeded", quantity(found["seeded_seconds"])],
            ["the same, from the system's entropy", quantity(found["secure_seconds"])],
            ["commitment to it for the ledger", quantity(found["commit_seconds"])],
            ["the cohort as bytes, sent to every process", f"{found['cohort_bytes'] / 1e6:.1f} MB"],
            ["charging the first step, accountants made ready (clock)", quantity(found["first_charge_seconds"])],
            ["charging a further step, on the disk (clock)", quantity(found["charge_seconds"])],
            ["dividing them among 512 processes by seconds", quantity(found["divide_seconds"])],
            ["the fullest process ÷ the mean", f"{found['fullest']:.6f}"],
            ["the same with equal numbers of users", f"{found['fullest_by_number']:.2f}"],
        ],
    )


PARTS = {
    "update_seconds": "a client beside its training: reset, difference, clip, add",
    "noise_seconds": "noise on the sum",
    "server_seconds": "the server's step (LAMB)",
    "fingerprint_seconds": "the model's digest for the ledger",
    "client_seconds": "a client, whole, one local step",
    "round_seconds": "a round beside its clients",
}


def parameters_table(kept: Kept, name: str = "parameters") -> str:
    """Seconds and memory by the model's size, and a line through them against its bytes."""
    if (measured := kept.get(name)) is None:
        return NOT_MEASURED
    sizes = measured["sizes"]
    header = ["parameters", *(f"{row['parameters'] / 1e6:.1f}M" for row in sizes), "fitted"]
    rows = []
    for part, what in PARTS.items():
        some = [row for row in sizes if part in row]
        fitted = _line(fit_line([4e-9 * row["parameters"] for row in some], [row[part] for row in some]), "a GB")
        rows.append([what, *(quantity(row[part]) if part in row else "" for row in sizes), fitted])
    whole = [row for row in sizes if "round_seconds" in row]
    peaks = [_gib_beyond(row) if row in whole else "" for row in sizes]
    grown = [row["peak_mib"] - row.get("before_mib", 0.0) for row in whole]
    line = fit_line([4 * row["parameters"] / 2**20 for row in whole], grown)
    rows.append(["most memory", *peaks, f"{line.slope:.1f} × the model's float32 bytes + {line.start:,.0f} MiB"])
    return rows_of(header, rows)


def _gib_beyond(row: Mapping[str, Any]) -> str:
    """The most memory of a whole round, beyond that of a process which has only begun."""
    return f"{(row['peak_mib'] - row.get('before_mib', 0.0)) / 1024:.2f} GiB"


def parameters_cuda_table(kept: Kept) -> str:
    return parameters_table(kept, "parameters cuda")


def processes_table(kept: Kept) -> str:
    """Processor and clock seconds of a round by processes."""
    measured = kept["processes"]["processes"]
    one = measured[0]["processor_seconds"]
    header = ["processes", "processor seconds of all", "quartiles", "÷ one process", "seconds by the clock"]
    rows = [
        [
            str(row["processes"]),
            f"{row['processor_seconds']:.2f}",
            "–".join(f"{each:.2f}" for each in row["quartiles"]),
            f"{row['processor_seconds'] / one:.2f}",
            f"{row['seconds']:.2f}",
        ]
        for row in measured
    ]
    return rows_of(header, rows)


def cluster_table(kept: Kept) -> str:
    """The headline row on so many GPUs, as it was trained and as its ε is extrapolated to."""
    measured = measured_round(kept["private round of base"])
    header = ["S, T", "H200s", "clients on the fullest", "a round", "all rounds", "GPU hours"]
    rows = []
    for row in (TRAINED, EXTRAPOLATED):
        what = f"{row.cohort:,}; {row.rounds:,}"
        for gpus in GPUS:
            found = cluster_time(gpus, row, measured)
            times = in_words(found.round_seconds / 3600), in_words(found.hours), f"{found.gpu_hours:,.0f}"
            rows.append([what, str(gpus), f"{found.clients:,.1f}", *times])
            what = ""
    return rows_of(header, rows)


def assumptions_table(kept: Kept) -> str:
    """What the cluster's table is made of."""
    given = kept["private round of base"]
    measured = measured_round(given)
    low, high = given["spread"]
    rate = f"{measured.audio_seconds_per_second:,.0f} ({low:,}–{high:,})"
    fixed = f"{100 * measured.waited:.1f} % of {quantity(measured.seconds)}"
    exchange = f"{2 * 4 * PARAMETERS / 1e9:.2f} GB at 25 GB/s"
    most = f"{LOCAL_STEPS} × at most {BATCH_SECONDS:.0f} s, of which batches of whole utterances leave"
    return rows_of(
        ["", "", "is"],
        [
            ["audio s/s of a private round on one H200", rate, "measured"],
            ["seconds of a round whatever its cohort", f"{quantity(measured.fixed_seconds)}: {fixed}", "measured"],
            ["seconds of a client", quantity(measured.client_seconds), "measured"],
            ["audio of a client and round", f"{most} {measured.audio_seconds_per_client:,.0f} s", "measured on noise"],
            ["every client has that much", "many of Common Voice have less: an upper bound", "assumed"],
            [f"S = {TRAINED.cohort:,} of {TRAINED.people:,}, Poisson; T = {TRAINED.rounds:,}", "the recipe's", "given"],
            ["whole clients on a GPU: the fullest one ends the round", "E⌈n / GPUs⌉, n ~ Bin(K, S/K)", "computed"],
            ["model out, sum back, from 9 GPUs on", f"{quantity(exchange_seconds(64))}: {exchange}", "assumed"],
            ["several GPUs over NCCL work as processes with gloo do", "", "assumed"],
            ["evaluations, seed model, start-up", "nothing", "left out"],
        ],
    )


TABLES: Mapping[str, Callable[[Kept], str]] = {
    "clients": clients_table,
    "memory": memory_table,
    "plans": plans_table,
    "clients cuda": clients_cuda_table,
    "population": population_table,
    "parameters": parameters_table,
    "parameters cuda": parameters_cuda_table,
    "processes": processes_table,
    "cluster": cluster_table,
    "assumptions": assumptions_table,
    "leader": leader_table,
}


def with_table(page: str, name: str, table: str) -> str:
    """`page` with the table between its marks."""
    begin, end = f"<!-- table: {name} -->\n", f"\n<!-- end: {name} -->"
    before, found, rest = page.partition(begin)
    assert found, f"{PAGE.name} has no table {name}"
    _, found, after = rest.partition(end)
    assert found, f"{PAGE.name}: the table {name} has no end"
    return before + begin + table + end + after


def with_tables(page: str, kept: Kept) -> str:
    for name, table in TABLES.items():
        page = with_table(page, name, table(kept))
    return page


def write() -> None:
    """All tables of the page anew."""
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), read_json(KEPT)), encoding="utf-8")
