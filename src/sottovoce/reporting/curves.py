"""What changes over a run, one line for each: error, loss, ε, speed."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sottovoce.drawing import FAINT
from sottovoce.evaluation.measures import MEASURES, WER, Measure
from sottovoce.reporting.cells import slugs
from sottovoce.reporting.drawings import Drawing, dress, label_decades, new_axes, number_labels, pens, percents, plot
from sottovoce.reporting.records import Record, RunRecord

Points = list[tuple[float, float]]

PRIVATE_LOSS = (
    " In a federated run it is the clients' own, a by-product of their data that no ε covers: only simulations keep it."
)


def learning_drawings(runs: Sequence[RunRecord]) -> list[Drawing]:
    """The dev score, by whichever measure, and training loss over rounds or steps."""
    steps = _steps(runs)
    losses = {run.label: series(run.diagnostics or run.metrics, "loss") for run in runs}
    private = any(run.is_federated for run in runs)
    top = rate_top(runs)
    found = []
    for measure in MEASURES.values():
        scores = {run.label: series(run.metrics, measure.key("dev")) for run in runs}
        if any(scores.values()):
            found.append(_scored(measure, scores, steps=steps, top=top))
    accuracies = {run.label: series(run.metrics, "dev_accuracy") for run in runs}
    if any(accuracies.values()):
        found.append(
            Drawing(
                "dev-accuracy",
                "Right guesses on speakers who are not trained on",
                f"How often a model tells what comes next from what is said elsewhere in an utterance of the dev "
                f"speakers, over {steps}. Higher is better; the first point is the start.",
                told_ends("Dev accuracy", accuracies, as_percent=True),
                lambda: _lines(accuracies, x=steps, y="contrastive accuracy, dev", finish=_as_percents),
            )
        )
    found += _tested_along(runs, top=top)
    if any(losses.values()):
        found.append(
            Drawing(
                "loss",
                "Training loss",
                f"Mean loss in training, over {steps}; models of different families have different losses."
                + (PRIVATE_LOSS if private else ""),
                told_ends("Training loss", losses),
                lambda: _lines(losses, x=steps, y="loss", finish=_from_zero, marks=False),
            )
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
    found = []
    tested = [run for run in runs if along[run.label]]
    for name, slug in slugs(name for name in names if not any(run.is_chosen_on(name) for run in tested)).items():
        rates = {
            label: [(record["step"], record["test_wer"][name]) for record in records if name in record["test_wer"]]
            for label, records in along.items()
        }
        found.append(
            Drawing(
                f"along-{slug}",
                f"Error on {name} over the rounds",
                f"Word error rate on {name} (the paper's Figures 11 and 12). Nothing was chosen by it: the model that "
                "was kept is the one that was best on the dev speakers.",
                told_ends(f"Word error rate on {name}", rates, as_percent=True),
                partial(_lines, rates, x="rounds", y=f"word error rate, {name}", finish=partial(_as_percents, top=top)),
            )
        )
    return found


def _scored(measure: Measure, scores: dict[str, Points], *, steps: str, top: float | None) -> Drawing:
    is_rate = measure.is_rate
    finish = partial(_as_percents, top=top if measure is WER else None) if is_rate else _from_zero
    return Drawing(
        f"dev-{measure.name}",
        f"{'Error' if is_rate else 'Loss'} on speakers who are not trained on",
        f"{measure.in_full.capitalize()} of the dev speakers, by whom the model was chosen, over {steps}. "
        "Lower is better; the first point is the start.",
        told_ends(f"Dev {measure.in_full}", scores, as_percent=is_rate),
        lambda: _lines(scores, x=steps, y=f"{measure.in_full}, dev", finish=finish),
    )


def privacy_drawings(runs: Sequence[RunRecord]) -> list[Drawing]:
    """ε over rounds, and what each ε has bought."""
    spent = {run.label: series(run.metrics, "epsilon") for run in runs}
    found, top = [], rate_top(runs)
    if any(spent.values()):
        found.append(
            Drawing(
                "epsilon",
                "ε spent over the rounds",
                "ε by RDP as the ledger charged it, at the run's own population, on a logarithmic axis. "
                "It can only grow; up to the dashed line (ε = 8) a guarantee is moderate, above it weak.",
                told_ends("ε by RDP", spent),
                lambda: _lines(spent, x="rounds", y="ε (RDP)", finish=_logarithmic_epsilon_y, marks=False),
            )
        )
    for measure in MEASURES.values():
        bought = {run.label: _utility(run.metrics, measure) for run in runs}
        if any(bought.values()):
            found.append(_bought(measure, bought, top=top))
    return found


def _bought(measure: Measure, bought: dict[str, Points], *, top: float | None) -> Drawing:
    is_rate, what = measure.is_rate, f"Dev {measure.in_full}"
    finish = partial(_epsilon_and_percents, top=top if measure is WER else None) if is_rate else _epsilon_and_numbers
    return Drawing(
        "privacy-utility" if measure is WER else f"privacy-{measure.name}",
        "Privacy against utility",
        f"{what} at each evaluation against the ε spent until then. Down and to the left is better: "
        f"{'fewer errors' if is_rate else 'less loss'} for less ε. Whoever stops where "
        f"{'they are few' if is_rate else 'it is small'} has still promised ε of all rounds.",
        told_ends(f"{what} against ε", bought, as_percent=is_rate),
        lambda: _lines(
            bought,
            x="ε (RDP)",
            y=f"{measure.in_full}, dev",
            finish=finish,
        ),
    )


def speed_drawings(runs: Sequence[RunRecord]) -> list[Drawing]:
    """Seconds of speech trained on in a second, over the run."""
    rates = {run.label: series(run.metrics, "audio_seconds_per_second") for run in runs}
    if not any(rates.values()):
        return []
    steps = _steps(runs)
    return [
        Drawing(
            "throughput",
            "Speed of training",
            f"Seconds of speech trained on in one second of computing, over {steps}.",
            told_ends("Seconds of speech per second", rates),
            lambda: _lines(rates, x=steps, y="speech seconds per second", finish=_from_zero, marks=False),
        )
    ]


def series(records: Sequence[Record], name: str) -> Points:
    """The finite values of `name`, with their steps."""
    return [(record["step"], record[name]) for record in records if _is_number(record.get(name))]


def _utility(metrics: Sequence[Record], measure: Measure) -> Points:
    score = measure.key("dev")
    both = [record for record in metrics if all(_is_number(record.get(name)) for name in ("epsilon", score))]
    return [(record["epsilon"], record[score]) for record in both if record["epsilon"] > 0]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _steps(runs: Sequence[RunRecord]) -> str:
    kinds = {run.is_federated for run in runs}
    return "rounds or steps" if len(kinds) == 2 else "rounds" if True in kinds else "steps"


def told_ends(what: str, lines: dict[str, Points], *, as_percent: bool = False) -> str:
    """The figure in words: where each line begins and ends."""

    def number(value: float) -> str:
        return f"{value:.1%}" if as_percent else f"{value:,.4g}"

    ends = [f"{label} from {number(p[0][1])} to {number(p[-1][1])}" for label, p in lines.items() if p]
    return f"{what}: {'; '.join(ends)}."


def _lines(lines: dict[str, Points], *, x: str, y: str, finish: Callable[[Axes], None], marks: bool = True) -> Figure:
    figure, axes = new_axes()
    for pen, points in zip(pens(list(lines)), lines.values(), strict=True):
        if points:
            plot(axes, pen, points, marks=marks)
    finish(axes)
    dress(axes, x=x, y=y)
    return figure


def _from_zero(axes: Axes) -> None:
    axes.set_ylim(0, None)
    axes.yaxis.set_major_formatter(number_labels())


def _as_percents(axes: Axes, *, top: float | None = None) -> None:
    axes.set_ylim(0, top)
    axes.yaxis.set_major_formatter(percents())


def _logarithmic_epsilon_y(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.axhline(8, color=FAINT, linestyle=(0, (4, 3)), linewidth=1)
    label_decades(axes.yaxis)


def _epsilon_and_percents(axes: Axes, *, top: float | None = None) -> None:
    _as_percents(axes, top=top)
    _logarithmic_epsilon_x(axes)


def _epsilon_and_numbers(axes: Axes) -> None:
    _from_zero(axes)
    _logarithmic_epsilon_x(axes)


def _logarithmic_epsilon_x(axes: Axes) -> None:
    axes.set_xscale("log")
    axes.axvline(8, color=FAINT, linestyle=(0, (4, 3)), linewidth=1)
    label_decades(axes.xaxis)
