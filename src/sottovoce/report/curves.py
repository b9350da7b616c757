"""What changes over a run, one line for each: error, loss, ε, speed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from matplotlib.figure import Figure

from sottovoce.drawing import FAINT
from sottovoce.evaluation.measures import MEASURES, WER, Measure
from sottovoce.report.cells import slugs
from sottovoce.report.drawings import Drawing, dress, label_decades, new_axes, number_labels, pens, percents, plot
from sottovoce.report.records import Record, RunRecord

LinePoints = list[tuple[float, float]]

PRIVATE_LOSS = (
    " In a federated run it is the clients' own, a by-product of their data that no ε covers: only simulations keep it."
)


def learning_drawings(runs: Sequence[RunRecord]) -> list[Drawing]:
    """The dev score, by whichever measure, and training loss over rounds or steps."""
    steps, top, found = _steps(runs), rate_top(runs), list[Drawing]()
    for measure in MEASURES.values():
        is_rate = measure.is_rate
        found += _line_drawing(
            f"dev-{measure.name}",
            f"{'Error' if is_rate else 'Loss'} on speakers who are not trained on",
            f"{measure.in_full.capitalize()} of the dev speakers, by whom the model was chosen, over {steps}. "
            "Lower is better; the first point is the start.",
            {run.label: series(run.metrics, measure.key("dev")) for run in runs},
            _Axes(f"Dev {measure.in_full}", steps, f"{measure.in_full}, dev", is_rate, top if measure is WER else None),
        )
    found += _line_drawing(
        "dev-accuracy",
        "Right guesses on speakers who are not trained on",
        f"How often a model tells what comes next from what is said elsewhere in an utterance of the dev "
        f"speakers, over {steps}. Higher is better; the first point is the start.",
        {run.label: series(run.metrics, "dev_accuracy") for run in runs},
        _Axes("Dev accuracy", steps, "contrastive accuracy, dev", is_rate=True),
    )
    found += _tested_along(runs, top=top)
    private = any(run.is_federated for run in runs)
    found += _line_drawing(
        "loss",
        "Training loss",
        f"Mean loss in training, over {steps}; models of different families have different losses."
        + (PRIVATE_LOSS if private else ""),
        {run.label: series(run.diagnostics or run.metrics, "loss") for run in runs},
        _Axes("Training loss", steps, "loss", marks=False),
    )
    return found


def rate_top(runs: Sequence[RunRecord]) -> float | None:
    """Where axes of word error rates over rounds and over ε end: all at one place, to be looked at side by side."""
    dev = [rate for run in runs for _, rate in series(run.metrics, WER.key("dev"))]
    along = [rate for run in runs for record in run.metrics for rate in (record.get("test_wer") or {}).values()]
    rates = [rate for rate in (*dev, *along) if _is_number(rate)]
    return 1.05 * max(rates) if rates and max(rates) > 0 else None


def _tested_along(runs: Sequence[RunRecord], *, top: float | None) -> list[Drawing]:
    """The test sets over the rounds, of runs that were asked for it; not the set that models are chosen on."""
    along = {run.label: [r for r in run.metrics if r.get("test_wer")] for run in runs}
    names = dict.fromkeys(name for records in along.values() for record in records for name in record["test_wer"])
    found = list[Drawing]()
    tested = [run for run in runs if along[run.label]]
    for name, slug in slugs(name for name in names if not any(run.is_chosen_on(name) for run in tested)).items():
        rates = {
            label: [(record["step"], record["test_wer"][name]) for record in records if name in record["test_wer"]]
            for label, records in along.items()
        }
        found += _line_drawing(
            f"along-{slug}",
            f"Error on {name} over the rounds",
            f"Word error rate on {name} (the paper's Figures 11 and 12). Nothing was chosen by it: the model that "
            "was kept is the one that was best on the dev speakers.",
            rates,
            _Axes(f"Word error rate on {name}", "rounds", f"word error rate, {name}", is_rate=True, top=top),
        )
    return found


def privacy_drawings(runs: Sequence[RunRecord]) -> list[Drawing]:
    """ε over rounds, and what each ε has bought."""
    top = rate_top(runs)
    found = _line_drawing(
        "epsilon",
        "ε spent over the rounds",
        "ε by RDP as the ledger charged it, at the run's own population, on a logarithmic axis. "
        "It can only grow; up to the dashed line (ε = 8) a guarantee is moderate, above it weak.",
        {run.label: series(run.metrics, "epsilon") for run in runs},
        _Axes("ε by RDP", "rounds", "ε (RDP)", marks=False, epsilon="y"),
    )
    for measure in MEASURES.values():
        is_rate, what = measure.is_rate, f"Dev {measure.in_full}"
        found += _line_drawing(
            "privacy-utility" if measure is WER else f"privacy-{measure.name}",
            "Privacy against utility",
            f"{what} at each evaluation against the ε spent until then. Down and to the left is better: "
            f"{'fewer errors' if is_rate else 'less loss'} for less ε. Whoever stops where "
            f"{'they are few' if is_rate else 'it is small'} has still promised ε of all rounds.",
            {run.label: _utility(run.metrics, measure) for run in runs},
            _Axes(
                f"{what} against ε",
                "ε (RDP)",
                f"{measure.in_full}, dev",
                is_rate,
                top if measure is WER else None,
                epsilon="x",
            ),
        )
    return found


def speed_drawings(runs: Sequence[RunRecord]) -> list[Drawing]:
    """Seconds of speech trained on in a second, over the run."""
    steps = _steps(runs)
    return _line_drawing(
        "throughput",
        "Speed of training",
        f"Seconds of speech trained on in one second of computing, over {steps}.",
        {run.label: series(run.metrics, "audio_seconds_per_second") for run in runs},
        _Axes("Seconds of speech per second", steps, "speech seconds per second", marks=False),
    )


def series(records: Sequence[Record], name: str) -> LinePoints:
    """The finite values of `name`, with their steps."""
    return [(record["step"], record[name]) for record in records if _is_number(record.get(name))]


def _utility(metrics: Sequence[Record], measure: Measure) -> LinePoints:
    score = measure.key("dev")
    both = [record for record in metrics if all(_is_number(record.get(name)) for name in ("epsilon", score))]
    return [(record["epsilon"], record[score]) for record in both if record["epsilon"] > 0]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _steps(runs: Sequence[RunRecord]) -> str:
    kinds = {run.is_federated for run in runs}
    return "rounds or steps" if len(kinds) == 2 else "rounds" if True in kinds else "steps"


def told_ends(what: str, lines: dict[str, LinePoints], *, as_percent: bool = False) -> str:
    """The figure in words: where each line begins and ends."""

    def number(value: float) -> str:
        return f"{value:.1%}" if as_percent else f"{value:,.4g}"

    ends = [f"{label} from {number(p[0][1])} to {number(p[-1][1])}" for label, p in lines.items() if p]
    return f"{what}: {'; '.join(ends)}."


@dataclass(frozen=True)
class _Axes:
    """What a figure of lines is called in words, its axes, and which of them is a logarithmic one of ε."""

    told: str
    x: str
    y: str
    is_rate: bool = False
    top: float | None = None
    marks: bool = True
    epsilon: Literal["x", "y", ""] = ""


def _line_drawing(name: str, title: str, caption: str, lines: dict[str, LinePoints], axes: _Axes) -> list[Drawing]:
    """A line for each run; nothing where no run has any."""
    told = told_ends(axes.told, lines, as_percent=axes.is_rate)
    return [Drawing(name, title, caption, told, partial(_lines, lines, axes))] if any(lines.values()) else []


def _lines(lines: dict[str, LinePoints], wanted: _Axes) -> Figure:
    figure, axes = new_axes()
    for pen, points in zip(pens(list(lines)), lines.values(), strict=True):
        if points:
            plot(axes, pen, points, marks=wanted.marks)
    if wanted.epsilon != "y":
        axes.set_ylim(0, wanted.top)
        axes.yaxis.set_major_formatter(percents() if wanted.is_rate else number_labels())
    if wanted.epsilon:
        is_x = wanted.epsilon == "x"
        axes.set(**{f"{wanted.epsilon}scale": "log"})
        (axes.axvline if is_x else axes.axhline)(8, color=FAINT, linestyle=(0, (4, 3)), linewidth=1)
        label_decades(axes.xaxis if is_x else axes.yaxis)
    dress(axes, x=wanted.x, y=wanted.y)
    return figure
