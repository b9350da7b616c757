"""What changes over a run, one line for each: error, loss, ε, speed."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sottovoce.drawing import FAINT
from sottovoce.reporting.drawings import Drawing, dress, label_decades, new_axes, pens, percents, plain_numbers, plot
from sottovoce.reporting.records import Record, RunRecord

Points = list[tuple[float, float]]

PRIVATE_LOSS = (
    " In a federated run it is the clients' own, a by-product of their data that no ε covers: only simulations keep it."
)


def learning(runs: Sequence[RunRecord]) -> list[Drawing]:
    """Dev WER and training loss over rounds or steps."""
    steps = _steps(runs)
    errors = {run.label: series(run.metrics, "dev_wer") for run in runs}
    losses = {run.label: series(run.diagnostics or run.metrics, "loss") for run in runs}
    private = any(run.is_federated for run in runs)
    found = []
    if any(errors.values()):
        found.append(
            Drawing(
                "dev-wer",
                "Error on speakers who are not trained on",
                f"Word error rate of the dev speakers over {steps}. Lower is better; the first point is the start.",
                _told("Dev word error rate", errors, as_percent=True),
                lambda: _lines(errors, x=steps, y="word error rate, dev", finish=_as_percents),
            )
        )
    if any(losses.values()):
        found.append(
            Drawing(
                "loss",
                "Training loss",
                f"Mean CTC loss of an utterance in training, over {steps}." + (PRIVATE_LOSS if private else ""),
                _told("Training loss", losses),
                lambda: _lines(losses, x=steps, y="loss", finish=_from_zero, marks=False),
            )
        )
    return found


def privacy(runs: Sequence[RunRecord]) -> list[Drawing]:
    """ε over rounds, and what each ε has bought."""
    spent = {run.label: series(run.metrics, "epsilon") for run in runs}
    bought = {run.label: _utility(run.metrics) for run in runs}
    found = []
    if any(spent.values()):
        found.append(
            Drawing(
                "epsilon",
                "ε spent over the rounds",
                "ε by RDP as the ledger charged it, at the run's own population, on a logarithmic axis. "
                "It can only grow; below the dashed line (ε = 8) a guarantee begins to be worth something.",
                _told("ε by RDP", spent),
                lambda: _lines(spent, x="rounds", y="ε (RDP)", finish=_logarithmic_epsilon_y, marks=False),
            )
        )
    if any(bought.values()):
        found.append(
            Drawing(
                "privacy-utility",
                "Privacy against utility",
                "Dev word error rate at each evaluation against the ε spent until then. Down and to the left is "
                "better: fewer errors for less ε. Whoever stops where they are few has still promised ε of all "
                "rounds.",
                _told("Dev word error rate against ε", bought, as_percent=True),
                lambda: _lines(bought, x="ε (RDP)", y="word error rate, dev", finish=_epsilon_and_percents),
            )
        )
    return found


def speed(runs: Sequence[RunRecord]) -> list[Drawing]:
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
            _told("Seconds of speech per second", rates),
            lambda: _lines(rates, x=steps, y="speech seconds per second", finish=_from_zero, marks=False),
        )
    ]


def series(records: Sequence[Record], name: str) -> Points:
    """The finite values of `name`, with their steps."""
    return [(record["step"], record[name]) for record in records if _is_number(record.get(name))]


def _utility(metrics: Sequence[Record]) -> Points:
    both = [record for record in metrics if all(_is_number(record.get(name)) for name in ("epsilon", "dev_wer"))]
    return [(record["epsilon"], record["dev_wer"]) for record in both if record["epsilon"] > 0]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _steps(runs: Sequence[RunRecord]) -> str:
    kinds = {run.is_federated for run in runs}
    return "rounds or steps" if len(kinds) == 2 else "rounds" if True in kinds else "steps"


def _told(what: str, lines: dict[str, Points], *, as_percent: bool = False) -> str:
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
    axes.yaxis.set_major_formatter(plain_numbers())


def _as_percents(axes: Axes) -> None:
    axes.set_ylim(0, None)
    axes.yaxis.set_major_formatter(percents())


def _logarithmic_epsilon_y(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.axhline(8, color=FAINT, linestyle=(0, (4, 3)), linewidth=1)
    label_decades(axes.yaxis)


def _epsilon_and_percents(axes: Axes) -> None:
    _as_percents(axes)
    axes.set_xscale("log")
    axes.axvline(8, color=FAINT, linestyle=(0, (4, 3)), linewidth=1)
    label_decades(axes.xaxis)
