"""The section of the convergence bound: its terms, their sum where all are known, and whether its premises hold."""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from sottovoce.base.tables import NOTHING, Table
from sottovoce.privacy.bounds import POWERS_OF_T, Assumption, Bound
from sottovoce.report.convergence import TERMS, Convergence, convergence_bound
from sottovoce.report.drawings import Drawing, finish_axes, line_styles, new_axes, number_labels, plot_marker
from sottovoce.report.parts import (
    PagePart,
    PageSection,
    Paragraph,
    figure_text,
    make_drawing,
    make_section,
    make_table,
    merge_labels,
    notices,
    show_number,
)
from sottovoce.report.records import RunRecord

TOTAL = "their sum"
BOUNDED = "what it bounds"
# How each quantity was found, where the run was asked for it.
ESTIMATES = {
    "L(θ⁰) − L(θ*)": "at most this: the loss before the first round",
    "L": "at least this: the fastest change of a batch's gradient that was seen",
    "σ_loc": "at least this: the largest deviation of one client's batch gradients",
    "σ_glob": "an estimate: the largest over rounds of the deviation of clients' mean gradients",
    "M_h": "at least this: the largest norm of a batch's gradient, or of an update, in a layer; the largest layer's",
    "R_h": "the largest trust ratio of the layer's kind; the largest layer's",
    "P_h": "the largest ‖1 − p‖_∞ at the measured rounds; the largest layer's",
    "Ψ_intra": "an estimate: mean variance of the norm of a client's update, trained again; the largest layer's",
    "Ψ_inter": "an estimate: mean over rounds of that norm's variance over clients; the largest layer's",
}


def bound_section(runs: Sequence[RunRecord]) -> PageSection | None:
    """The terms of the bound, whether its premises hold, and which term is the largest."""
    found = {run.label: convergence_bound(run) for run in runs if run.is_federated}
    lacking = notices(((label, one.why) for label, one in found.items() if one.bound is None), "{}: no bound; {}.")
    largest = merge_labels((label, words) for label, one in found.items() if (words := _largest_term(one)))
    parts: list[PagePart] = [*bound_tables(found), *bound_drawings(found), *lacking]
    parts += [Paragraph(f"{label}: {words}") for label, words in largest]
    return make_section("bound", parts)


def bound_tables(found: Mapping[str, Convergence]) -> list[Table]:
    """Terms of the convergence bound and of Corollary 1, what they are made of, and whether the premises hold."""
    bounds = {label: one.bound for label, one in found.items() if one.bound is not None}
    if not bounds:
        return []
    names = [name for name in TERMS if any(name in bound.terms for bound in bounds.values())]
    unknown = [name for name in names if all(math.isnan(b.terms.get(name, math.nan)) for b in bounds.values())]
    known = [name for name in names if name not in unknown]
    with_total = {label: one for label, one in found.items() if one.corollary is not None}
    sums = (TOTAL, BOUNDED) if with_total else ()
    terms = [
        (
            label,
            *(_show_term(bound.terms.get(name)) for name in known),
            *((_show_term(found[label].total), show_number(found[label].bounded)) if sums else ()),
            show_number(bound.kappa),
        )
        for label, bound in bounds.items()
    ]
    apart = len(with_total) == len(bounds)
    within = " Variance over clients has that within them in it, which weighs the same."
    return [
        make_table(
            "bound-terms",
            terms,
            headings=("", *(TERMS[name] for name in known), *sums, "κ"),
            unknown=f" Not measured: {', '.join(TERMS[name] for name in unknown)}." if unknown else "",
            within=within if "inter_client" in known and not apart else "",
        ),
        *_estimate_tables(with_total),
        make_table("bound-premises", _premise_rows(found)),
    ]


def _estimate_rows(label: str, found: Convergence) -> Iterator[tuple[str, ...]]:
    run = found.measurement
    assert run is not None
    values = {
        "L(θ⁰) − L(θ*)": run.loss_gap,
        "L": run.smoothness,
        "σ_loc": run.gradient_deviation_local,
        "σ_glob": run.gradient_deviation_global,
        "M_h": max(layer.gradient_bound for layer in run.layers),
        "R_h": max(layer.trust_ratio for layer in run.layers),
        "P_h": max(layer.trust_deviation for layer in run.layers),
        "Ψ_intra": max(layer.intra_variance for layer in run.layers),
        "Ψ_inter": max(layer.inter_variance for layer in run.layers),
    }
    for name, words in ESTIMATES.items():
        yield label, name, show_number(values[name]), words


def _estimate_tables(found: Mapping[str, Convergence]) -> list[Table]:
    """What the terms are made of; Theorem 2 at Corollary 1's learning rates, and how each of its terms goes with T."""
    if not found:
        return []
    estimates = [row for label, one in found.items() for row in _estimate_rows(label, one)]
    names = [name for name in TERMS if name in POWERS_OF_T]
    powers = [f"T^{POWERS_OF_T[name]:g}" if POWERS_OF_T[name] else "does not" for name in names]
    rows = [("goes with T as", *powers, NOTHING, NOTHING)]
    for label, one in found.items():
        assert one.corollary is not None
        shown = (_show_term(one.corollary.terms[name]) for name in names)
        rows.append((label, *shown, _show_term(one.corollary.total), show_number(one.corollary.kappa)))
    headings = ("", *(TERMS[name] for name in names), TOTAL, "κ")
    return [make_table("bound-estimates", estimates), make_table("bound-corollary", rows, headings=headings)]


def _premise_rows(found: Mapping[str, Convergence]) -> list[tuple[str, ...]]:
    """Of each run's theorem, and of Corollary 1 where they differ: its learning rates are others."""
    premises = [
        (label, (f"{prefix}{a.name}", _premise_verdict(a), a.detail.replace("nan", "?")))
        for label, one in found.items()
        for prefix, bound in (("", one.bound), ("Corollary 1: ", one.corollary))
        for a in _assumptions(bound)
        if not prefix or a not in _assumptions(one.bound)
    ]
    return [(labels, *cells) for labels, cells in merge_labels(premises)]


def _assumptions(bound: Bound | None) -> tuple[Assumption, ...]:
    return () if bound is None else bound.assumptions


def _show_term(value: float | None) -> str:
    return NOTHING if value is None else "not measured" if math.isnan(value) else show_number(value)


def _premise_verdict(assumption: Assumption) -> str:
    """Whether a run meets a premise; unknown where it depends on what was not measured."""
    return "not measured" if "nan" in assumption.detail else "holds" if assumption.holds else "does not hold"


def _largest_term(found: Convergence) -> str:
    name = next(iter(found.measured), None)
    if found.bound is None or name is None or not found.measured[name] > 0:
        return ""
    holds = "All premises hold." if found.bound.holds else "Not all premises hold: the sum bounds nothing here."
    whole = "" if math.isnan(found.total) else f" The sum is {show_number(found.total)}."
    return f"by {found.bound.theorem}, the largest known term is that of {TERMS[name]}.{whole} {holds}"


def bound_drawings(found: Mapping[str, Convergence]) -> list[Drawing]:
    """Every term, and the sum, of the runs of which all are known."""
    whole = {label: one for label, one in found.items() if one.bound is not None and not math.isnan(one.total)}
    if not whole:
        return []
    sums = "; ".join(f"{label}: {show_number(one.total)}" for label, one in whole.items())
    return [make_drawing("bound-total", f"The sum of the bound's terms. {sums}", partial(_bound_figure, whole))]


def _bound_figure(found: Mapping[str, Convergence]) -> Figure:
    values = {label: _drawn_values(one) for label, one in found.items()}
    names = [
        *(
            name
            for name in (*TERMS.values(), TOTAL, BOUNDED)
            if any(value.get(name, 0) > 0 for value in values.values())
        )
    ]
    figure, axes = new_axes(height=1.0 + 0.25 * len(names))
    for style, own in zip(line_styles(values), values.values(), strict=True):
        shown = [(own[name], place) for place, name in enumerate(names) if own.get(name, 0) > 0]
        for number, (value, place) in enumerate(shown):
            plot_marker(axes, style, value, place, is_labelled=number == 0)
    axes.set_xscale("log")
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.xaxis.set_major_locator(LogLocator(numticks=5))  # terms span many decades: few labels have room
    axes.xaxis.set_major_formatter(number_labels())
    finish_axes(axes, x=figure_text("bound-total", "axis"), y="")
    return figure


def _drawn_values(found: Convergence) -> dict[str, float]:
    assert found.bound is not None
    terms = {TERMS[name]: value for name, value in found.bound.terms.items()}
    return {**terms, TOTAL: found.total, BOUNDED: found.bounded}
