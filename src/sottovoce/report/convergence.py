"""The terms of the paper's convergence bound for a run, as far as its folder has what they are made of.

The loss's smoothness, the deviations of gradients and the variance within clients are not measured. They enter as NaN,
and so does every term that needs one. Known are means over what was seen, so that the other terms are estimates from
below.

The variance over clients of a layer's update norm is known. Each client trains on one draw of batches, so that it is
Ψ_intra + Ψ_inter: as both weigh the same in the bound, the term of the second, made of it, stands for both.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from sottovoce.base.errors import InputError
from sottovoce.base.tables import NOTHING, Table
from sottovoce.flat.layout import Layers, Layout, group_layers, tensor_layers
from sottovoce.optimisers import build_optimiser
from sottovoce.optimisers.layerwise import LAMB
from sottovoce.privacy.bounds import Assumption, Bound, LayerMeasurement, RunMeasurement, theorem2, theorem3
from sottovoce.privacy.clipping import Normalise, Share, layer_bounds
from sottovoce.report.curves import read_series
from sottovoce.report.parts import (
    PagePart,
    PageSection,
    Paragraph,
    make_section,
    make_table,
    merge_labels,
    notices,
    show_number,
)
from sottovoce.report.records import RunRecord

NOT_MEASURED = math.nan
TERMS = {
    "optimisation": "optimisation",
    "dp_noise": "noise for privacy",
    "clipping_bias": "clipping",
    "client_sampling": "sampling of clients",
    "local_drift": "drift in local training",
    "trust_ratio": "spread of trust ratios",
    "intra_client": "variance within a client",
    "inter_client": "variance over clients",
    "global_update_noise": "deviation of global gradients",
    "local_update_noise": "deviation of local gradients",
}


@dataclass(frozen=True)
class Convergence:
    """The bound, or why there is none."""

    bound: Bound | None
    why: str = ""

    @property
    def measured(self) -> dict[str, float]:
        """The terms that could be computed, largest first."""
        terms = {} if self.bound is None else self.bound.terms
        known = {name: value for name, value in terms.items() if not math.isnan(value)}
        return dict(sorted(known.items(), key=lambda item: -item[1]))


def bound_section(runs: Sequence[RunRecord]) -> PageSection | None:
    """The terms of the bound, whether its premises hold, and which term is the largest."""
    found = {run.label: convergence_bound(run) for run in runs if run.is_federated}
    lacking = notices(((label, one.why) for label, one in found.items() if one.bound is None), "{}: no bound; {}.")
    largest = merge_labels((label, words) for label, one in found.items() if (words := _largest_term(one)))
    parts: list[PagePart] = [*bound_tables(found), *lacking]
    parts += [Paragraph(f"{label}: {words}") for label, words in largest]
    return make_section("bound", parts)


def bound_tables(found: Mapping[str, Convergence]) -> list[Table]:
    """Terms of the convergence bound, and whether its premises hold."""
    bounds = {label: one.bound for label, one in found.items() if one.bound is not None}
    if not bounds:
        return []
    names = [name for name in TERMS if any(name in bound.terms for bound in bounds.values())]
    unknown = [name for name in names if all(math.isnan(b.terms.get(name, math.nan)) for b in bounds.values())]
    known = [name for name in names if name not in unknown]
    terms = [
        (label, *(_show_term(b.terms.get(name)) for name in known), show_number(b.kappa)) for label, b in bounds.items()
    ]
    premises = merge_labels(
        (label, (a.name, _premise_verdict(a), a.detail.replace("nan", "?")))
        for label, bound in bounds.items()
        for a in bound.assumptions
    )
    within = " Variance over clients has that within them in it, which weighs the same."
    return [
        make_table(
            "bound-terms",
            terms,
            headings=("", *(TERMS[name] for name in known), "κ"),
            unknown=", ".join(TERMS[name] for name in unknown),
            within=within if "inter_client" in known else "",
        ),
        make_table("bound-premises", [(labels, *cells) for labels, cells in premises]),
    ]


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
    return f"by {found.bound.theorem}, the largest known term is that of {TERMS[name]}. {holds}"


def convergence_bound(run: RunRecord) -> Convergence:
    """The bound of Theorem 2 (every client in every round) or 3 (clients are sampled)."""
    if not run.is_federated:
        return Convergence(None, "the bound is about federated training")
    if not run.diagnostics:
        why = "a release keeps no norms of updates" if run.is_release else "the run has written no diagnostics"
        return Convergence(None, f"{why}, and the bound is made of them")
    try:
        measurement = _measure(run)
    except (InputError, KeyError, TypeError, ValueError) as problem:
        return Convergence(None, f"the run's numbers do not suffice ({problem})")
    theorem = theorem2 if measurement.sampling_rate == 1 else theorem3
    return Convergence(theorem(measurement))


def _measure(run: RunRecord) -> RunMeasurement:
    settings = run.federation
    named = settings["server"]["optimiser"]
    if named["name"] != "lamb":  # not built: `module:Name` would import code that a run's folder names
        raise InputError(f"server optimiser={named['name']}: the theorems are about LAMB")
    optimiser = build_optimiser(**named)
    assert isinstance(optimiser, LAMB)
    local_steps = settings["local"]["local_steps"]
    if local_steps is None:
        raise InputError("local_epochs: the theorems want the same number of local steps everywhere")
    if run.ledger is None or run.ledger.report is None:
        raise InputError("there is no sound ledger")
    plan = run.ledger.report.header["plan"]
    if plan["noise_scope"] is not None:
        raise InputError("noise_scope: the theorems want the same noise in every layer")
    if plan.get("mechanism") is not None:
        raise InputError("mechanism: the theorems are about noise that is independent")
    if Normalise(plan["normalise"]) is not Normalise.NEVER:
        raise InputError(f"normalise={plan['normalise']}: the theorems are about clipping, which only ever shrinks")
    losses = [loss for _, loss in read_series(run.diagnostics, "loss")]
    clip_bound = _clip_bound(run, plan)
    return RunMeasurement(
        loss_gap=losses[0] - min(losses) if losses else NOT_MEASURED,
        smoothness=NOT_MEASURED,
        gradient_deviation_local=NOT_MEASURED,
        gradient_deviation_global=NOT_MEASURED,
        server_lr=max(lr for _, lr in read_series(run.metrics, "lr")),
        local_lr=settings["local"]["lr"],
        local_steps=local_steps,
        central_steps=run.ledger.report.steps,
        clip_bound=clip_bound,
        sigma_dp=plan["sigma_dp"] or (plan["noise_multiplier"] or 0.0) / plan["cohort_size"],
        optimiser_eps=optimiser.eps,
        layers=_layers(run, plan, clip_bound, reach=settings["local"]["lr"] * local_steps),
        sampling_rate=plan["cohort_size"] / plan["population_size"],
        server_momentum=optimiser.b1,
        server_weight_decay=optimiser.weight_decay,
    )


def _clip_bound(run: RunRecord, plan: dict[str, Any]) -> float:
    """C, the last one where it adapts; infinity where nothing is clipped (null in JSON)."""
    seen = read_series(run.metrics, "clip_bound")
    known = seen[-1][1] if seen else plan["clip_bound"]
    return math.inf if known is None else float(known)


def _layers(run: RunRecord, plan: dict[str, Any], clip_bound: float, *, reach: float) -> tuple[LayerMeasurement, ...]:
    layers, share = _clipped_layers(plan), Share(plan["share"])
    # Under one bound on the whole update, a layer alone is bounded by C.
    bounds = (
        [clip_bound] * len(layers.names)
        if share is Share.GLOBAL
        else layer_bounds(layers, clip_bound=clip_bound, share=share, alpha=plan.get("alpha"))
    )
    return tuple(
        LayerMeasurement(
            name=name,
            dimension=dimension,
            gradient_bound=max(_seen(run, name, "norm_before"), default=NOT_MEASURED) / reach,
            trust_ratio=_largest_ratio(run, name),
            trust_deviation=NOT_MEASURED,
            clip_bound=bound,
            intra_variance=NOT_MEASURED,
            inter_variance=_variance_over_clients(run, name),
        )
        for name, dimension, bound in zip(layers.names, layers.dimensions, bounds, strict=True)
    )


def _clipped_layers(plan: dict[str, Any]) -> Layers:
    layout = Layout(tuple(plan["layout"]), tuple(tuple(shape) for shape in plan["layout"].values()))
    groups = plan.get("layer_groups") or {}
    return group_layers(layout, groups) if groups else tensor_layers(layout)


def _seen(run: RunRecord, name: str, key: str) -> list[float]:
    """What the rounds record of a layer under that key."""
    norms = ((record.get("layers") or {}).get(name, {}) for record in run.diagnostics)
    return [layer[key] for layer in norms if layer.get(key) is not None]


def _variance_over_clients(run: RunRecord, name: str) -> float:
    """Of a layer's update norm before clipping, mean over rounds: E_t[Var_k ‖G_h,k‖] (Corollary 1)."""
    known = [deviation**2 for deviation in _seen(run, name, "std_before")]
    return fmean(known) if known else NOT_MEASURED


def _largest_ratio(run: RunRecord, name: str) -> float:
    """The largest trust ratio of a layer's kind; over all layers for what lies outside the blocks."""
    kind, layer = run.place(name)
    seen = [record["trust_ratios"][kind] for record in run.metrics if kind in (record.get("trust_ratios") or {})]
    values = [one if not isinstance(one, list) else max(one) if layer is None else one[layer] for one in seen]
    return max(values, default=NOT_MEASURED)
