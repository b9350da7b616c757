"""What changes over a run, one line for each run: errors, loss, ε, speed, and norms on the way to the model."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

from matplotlib.figure import Figure

from sottovoce.evaluation.measures import MEASURES, WER, Measure
from sottovoce.privacy.membership_odds import GUARANTEE
from sottovoce.report.drawings import (
    REFERENCE_LINE,
    Drawing,
    Points,
    draw_lines,
    finish_axes,
    label_decades,
    line_styles,
    number_labels,
    percent_labels,
)
from sottovoce.report.parts import PageSection, figure_text, make_drawing, make_section, notices, unique_slugs
from sottovoce.report.records import Record, RunRecord
from sottovoce.report.run_facts import SECURE_KEEPS_NOTHING

LinePoints = list[tuple[float, float]]
Lines = Mapping[str, Points]

PRIVATE_LOSS = (
    " In a federated run it is the clients' own, a by-product of their data that no ε covers: only simulations keep it."
)


@dataclass(frozen=True)
class LinePlot:
    """A figure of lines: what it shows, the names of its axes, and which of them is a logarithmic one of ε."""

    shows: str
    x: str
    y: str
    is_rate: bool = False
    top: float | None = None
    markers: bool = True
    epsilon: Literal["x", "y", ""] = ""

    def drawing(self, name: str, lines: Lines, *, kind: str = "", **values: Any) -> list[Drawing]:
        """One line for each run; nothing where no run has any."""
        if not any(lines.values()):
            return []
        alt = describe_line_ends(self.shows, lines, as_percent=self.is_rate)
        return [make_drawing(name, alt, partial(self._figure, lines), kind=kind, **values)]

    def _figure(self, lines: Lines) -> Figure:
        figure, axes = draw_lines(lines, markers=self.markers)
        if self.epsilon != "y":
            axes.set_ylim(0, self.top)
            axes.yaxis.set_major_formatter(percent_labels() if self.is_rate else number_labels())
        if self.epsilon:
            is_x = self.epsilon == "x"
            axes.set(**{f"{self.epsilon}scale": "log"})
            (axes.axvline if is_x else axes.axhline)(GUARANTEE, **REFERENCE_LINE)
            label_decades(axes.xaxis if is_x else axes.yaxis)
        finish_axes(axes, x=self.x, y=self.y)
        return figure


def describe_line_ends(shows: str, lines: Lines, *, as_percent: bool = False) -> str:
    """The alternative text of a figure: where each line begins and ends."""
    form = "{:.1%}" if as_percent else "{:,.4g}"
    ends = [f"{label} from {form.format(p[0][1])} to {form.format(p[-1][1])}" for label, p in lines.items() if p]
    return f"{shows}: {'; '.join(ends)}."


def read_series(records: Sequence[Record], name: str) -> LinePoints:
    """The finite values of `name`, with their steps."""
    return [(record["step"], record[name]) for record in records if _is_number(record.get(name))]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _metric_lines(runs: Sequence[RunRecord], name: str) -> Lines:
    return {run.label: read_series(run.metrics, name) for run in runs}


def _step_name(runs: Sequence[RunRecord]) -> str:
    kinds = {run.is_federated for run in runs}
    return "rounds or steps" if len(kinds) == 2 else "rounds" if True in kinds else "steps"


# Learning, privacy and speed.


def learning_section(runs: Sequence[RunRecord]) -> PageSection | None:
    found = learning_drawings(runs)
    silent = [(run.label, SECURE_KEEPS_NOTHING) for run in runs if run.is_release and not run.diagnostics]
    return make_section("learning", [*found, *notices(silent, "{} {}")]) if found else None


def learning_drawings(runs: Sequence[RunRecord]) -> list[Drawing]:
    """The dev score, by whichever measure, and training loss over rounds or steps."""
    steps, top, found = _step_name(runs), _rate_top(runs), list[Drawing]()
    for measure in MEASURES.values():
        score, plot_top = measure.in_full, top if measure is WER else None
        found += LinePlot(f"Dev {score}", steps, f"{score}, dev", measure.is_rate, plot_top).drawing(
            f"dev-{measure.name}",
            _metric_lines(runs, measure.key("dev")),
            kind="dev-score",
            score=score.capitalize(),
            steps=steps,
            what="Error" if measure.is_rate else "Loss",
        )
    accuracy = LinePlot("Dev accuracy", steps, "contrastive accuracy, dev", is_rate=True)
    found += accuracy.drawing("dev-accuracy", _metric_lines(runs, "dev_accuracy"), steps=steps)
    found += _test_drawings(runs, top=top)
    losses = {run.label: read_series(run.diagnostics or run.metrics, "loss") for run in runs}
    private = PRIVATE_LOSS if any(run.is_federated for run in runs) else ""
    found += LinePlot("Training loss", steps, "loss", markers=False).drawing(
        "loss", losses, steps=steps, private=private
    )
    return found


def _rate_top(runs: Sequence[RunRecord]) -> float | None:
    """Where axes of word error rates over rounds and over ε end: one value for all, to be compared side by side."""
    dev = [rate for run in runs for _, rate in read_series(run.metrics, WER.key("dev"))]
    along = [rate for run in runs for record in run.metrics for rate in (record.get("test_wer") or {}).values()]
    rates = [rate for rate in (*dev, *along) if _is_number(rate)]
    return 1.05 * max(rates) if rates and max(rates) > 0 else None


def _test_drawings(runs: Sequence[RunRecord], *, top: float | None) -> list[Drawing]:
    """The test sets over the rounds, of runs that were asked for it; not the set that models are chosen on."""
    along = {run.label: [record for record in run.metrics if record.get("test_wer")] for run in runs}
    names = dict.fromkeys(name for records in along.values() for record in records for name in record["test_wer"])
    tested, found = [run for run in runs if along[run.label]], list[Drawing]()
    for name, slug in unique_slugs(name for name in names if not any(run.is_chosen_on(name) for run in tested)).items():
        rates = {
            label: [(record["step"], record["test_wer"][name]) for record in records if name in record["test_wer"]]
            for label, records in along.items()
        }
        plot = LinePlot(f"Word error rate on {name}", "rounds", f"word error rate, {name}", is_rate=True, top=top)
        found += plot.drawing(f"along-{slug}", rates, kind="along", test=name)
    return found


def privacy_drawings(runs: Sequence[RunRecord]) -> list[Drawing]:
    """ε over rounds, and the dev score against it."""
    top, spent = _rate_top(runs), LinePlot("ε by RDP", "rounds", "ε (RDP)", markers=False, epsilon="y")
    found = spent.drawing("epsilon", _metric_lines(runs, "epsilon"))
    for measure in MEASURES.values():
        is_rate, score, plot_top = measure.is_rate, measure.in_full, top if measure is WER else None
        plot = LinePlot(f"Dev {score} against ε", "ε (RDP)", f"{score}, dev", is_rate, plot_top, epsilon="x")
        found += plot.drawing(
            "privacy-utility" if measure is WER else f"privacy-{measure.name}",
            {run.label: _utility(run.metrics, measure) for run in runs},
            kind="privacy-utility",
            score=score,
            gain="fewer errors" if is_rate else "less loss",
        )
    return found


def _utility(metrics: Sequence[Record], measure: Measure) -> LinePoints:
    score = measure.key("dev")
    both = [record for record in metrics if all(_is_number(record.get(name)) for name in ("epsilon", score))]
    return [(record["epsilon"], record[score]) for record in both if record["epsilon"] > 0]


def speed_drawings(runs: Sequence[RunRecord]) -> list[Drawing]:
    """Seconds of speech trained on in a second, over the run."""
    steps = _step_name(runs)
    plot = LinePlot("Seconds of speech per second", steps, "speech seconds per second", markers=False)
    return plot.drawing("throughput", _metric_lines(runs, "audio_seconds_per_second"), steps=steps)


# Norms over the rounds of a simulation: the flagship paper's Figures 7, 13 and 14.

SHADED_RUNS = 3  # beyond which the band of each run would hide the others
WIDE_RANGE = 20  # largest over smallest value, beyond which an axis is logarithmic
NOISED = "pseudo_gradient_noised"


class _Quantity(NamedTuple):
    """A figure, the number of a round's diagnostics that it draws, and the one that says how clients differ.

    Those of one `scale` are before and after the same thing, and have the same axis.
    """

    name: str
    key: str
    spread: str = ""
    scale: str = ""


QUANTITIES = (
    _Quantity("gradients-local", "gradient_norm", "gradient_norm_std"),
    _Quantity("updates-before", "norm", "norm_std", "updates"),
    _Quantity("updates-after", "norm_after", "norm_after_std", "updates"),
    _Quantity("pseudo-gradient", "pseudo_gradient_norm", scale="mean"),
    _Quantity("pseudo-gradient-noised", NOISED, scale="mean"),
)


def dynamics_section(runs: Sequence[RunRecord]) -> PageSection | None:
    """Norms over rounds, one figure a quantity, one line a run. All but the last are private by-products."""
    if not any(run.diagnostics and not run.is_release for run in runs):
        return None
    return make_section("dynamics", [drawing for quantity in QUANTITIES for drawing in _norm_drawing(quantity, runs)])


def noised_norms(metrics: Sequence[Record]) -> LinePoints:
    """The norm of every round's noised mean, from those of its kinds of parameters."""
    found = ((record["step"], record["server_norms"].values()) for record in metrics if record.get("server_norms"))
    return [
        (step, math.hypot(*(norm for one in kinds for norm in (one if isinstance(one, list) else [one]))))
        for step, kinds in found
    ]


def _norm_lines(key: str, runs: Sequence[RunRecord]) -> Lines:
    """Of all runs, so that each keeps its colour; nothing of releases."""
    kept = {run.label: (run, [] if run.is_release else run.diagnostics) for run in runs}
    return {
        label: noised_norms(run.metrics) if key == NOISED and seen else read_series(seen, key)
        for label, (run, seen) in kept.items()
    }


def _norm_drawing(quantity: _Quantity, runs: Sequence[RunRecord]) -> list[Drawing]:
    lines, spreads = _norm_lines(quantity.key, runs), _norm_lines(quantity.spread, runs)
    if not any(lines.values()):
        return []
    is_shaded = sum(map(bool, lines.values())) <= SHADED_RUNS and any(spreads.values())
    compared, y = _compared_values(quantity, runs), figure_text(quantity.name, "axis")
    draw = partial(_norm_figure, lines, spreads if is_shaded else {}, y=y, compared=compared)
    alt = describe_line_ends(figure_text(quantity.name, "title"), lines)
    band = " The band is one standard deviation over clients to either side." if is_shaded else ""
    return [make_drawing(quantity.name, alt, draw, band=band)]


def _compared_values(quantity: _Quantity, runs: Sequence[RunRecord]) -> list[float]:
    """All that has to fit on its axis: values of the quantities on the same scale, with the bands around them."""
    found = []
    for one in (other for other in QUANTITIES if quantity.scale and other.scale == quantity.scale):
        spreads = _norm_lines(one.spread, runs)
        for label, points in _norm_lines(one.key, runs).items():
            deviations = dict(spreads[label])
            found += [end for step, value in points for end in (value, value + deviations.get(step, 0.0))]
    return [value for value in found if value > 0]


def _norm_figure(lines: Lines, spreads: Lines, *, y: str, compared: Sequence[float]) -> Figure:
    figure, axes = draw_lines(lines, markers=False)
    for style, (label, points) in zip(line_styles(lines), lines.items(), strict=True):
        if points and (deviations := dict(spreads.get(label, ()))):
            ends = [(step, value, deviations.get(step, 0.0)) for step, value in points]
            low, high = [max(value - d, 0.0) for _, value, d in ends], [value + d for _, value, d in ends]
            axes.fill_between([end[0] for end in ends], low, high, color=style.colour, alpha=0.18, linewidth=0)
    values = compared or [value for points in lines.values() for _, value in points if value > 0]
    if values and max(values) > WIDE_RANGE * min(values):
        axes.set_yscale("log")
        if compared:
            axes.set_ylim(min(compared) / 1.5, max(compared) * 1.5)
        label_decades(axes.yaxis)
    else:
        top = 1.15 * max(compared) if compared else max(axes.get_ylim()[1], 1.05 * max(values, default=1.0))
        axes.set_ylim(0, top)
        axes.yaxis.set_major_formatter(number_labels())
    finish_axes(axes, x="rounds", y=y)
    return figure
