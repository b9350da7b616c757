"""The terms of the paper's convergence bound for a run, as far as its folder has what they are made of.

The loss's smoothness, the deviations of gradients, of trust ratios and within clients are known where the run was asked
for them (`federation.estimate_bound`). Elsewhere they enter as NaN, and so does every term that needs one. Known are
means and maxima of what was seen, so that most terms are estimates from below.

The variance over clients of a layer's update norm is always known. Each client trains on one draw of batches, so that
it is Ψ_intra + Ψ_inter: as both weigh the same in the bound, the term of the second, made of it, stands for both where
they are not known apart.
"""

import math
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from sottovoce.base.errors import InputError
from sottovoce.flat.layout import Layers, Layout, group_layers, tensor_layers
from sottovoce.optimisers import build_optimiser
from sottovoce.optimisers.layerwise import LAMB
from sottovoce.privacy.bounds import Bound, LayerMeasurement, RunMeasurement, corollary1, theorem2, theorem3
from sottovoce.privacy.clipping import Normalise, Share, layer_bounds
from sottovoce.report.curves import read_series
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
    """The bound, or why there is none.

    Where all of its terms are known there is Corollary 1 besides, and `bounded`: the left-hand side, κ times the mean
    squared gradient norm. `measurement` is what they are made of.
    """

    bound: Bound | None
    why: str = ""
    corollary: Bound | None = None
    bounded: float = math.nan
    measurement: RunMeasurement | None = None

    @property
    def total(self) -> float:
        """The sum of all terms; NaN where one is not known."""
        return math.nan if self.bound is None else self.bound.total

    @property
    def measured(self) -> dict[str, float]:
        """The terms that could be computed, largest first."""
        terms = {} if self.bound is None else self.bound.terms
        known = {name: value for name, value in terms.items() if not math.isnan(value)}
        return dict(sorted(known.items(), key=lambda item: -item[1]))


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
    bound = (theorem2 if measurement.sampling_rate == 1 else theorem3)(measurement)
    estimates = bound_estimates(run)
    if not estimates:
        return Convergence(bound, measurement=measurement)
    squares = fmean(estimate["gradient_norm_squared"] for estimate in estimates)
    return Convergence(bound, corollary=corollary1(measurement), bounded=bound.kappa * squares, measurement=measurement)


def bound_estimates(run: RunRecord) -> list[Any]:
    """What the run has estimated for the bound, round by round (`federated.bound_estimates`)."""
    return [record["bound"] for record in run.diagnostics if record.get("bound")]


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
    clip_bound, estimates = _clip_bound(run, plan), bound_estimates(run)

    def largest(name: str) -> float:
        return max((estimate[name] for estimate in estimates), default=NOT_MEASURED)

    return RunMeasurement(
        loss_gap=_loss_gap(run, estimates),
        smoothness=largest("smoothness"),
        gradient_deviation_local=math.sqrt(largest("local_variance")),
        gradient_deviation_global=math.sqrt(largest("global_variance")),
        server_lr=max(lr for _, lr in read_series(run.metrics, "lr")),
        local_lr=settings["local"]["lr"],
        local_steps=local_steps,
        central_steps=run.ledger.report.steps,
        clip_bound=clip_bound,
        sigma_dp=plan["sigma_dp"]
        or (plan["noise_multiplier"] or 0.0) / (plan.get("expected_answers") or plan["cohort_size"]),
        optimiser_eps=optimiser.eps,
        layers=_layers(run, plan, clip_bound, reach=settings["local"]["lr"] * local_steps),
        sampling_rate=plan["cohort_size"] / plan["population_size"],
        server_momentum=optimiser.b1,
        server_weight_decay=optimiser.weight_decay,
        local_clip=float(settings["local"]["clip_gradients"]),
        largest_gradient=largest("largest_gradient_norm"),
    )


def _loss_gap(run: RunRecord, estimates: list[Any]) -> float:
    """L(θ⁰) − L(θ*): at most the loss before the first round, as no loss here is negative.

    Where only the rounds' own losses are known, as far as they have come down, which is less.
    """
    if estimates:
        return float(estimates[0]["loss"])
    losses = [loss for _, loss in read_series(run.diagnostics, "loss")]
    return losses[0] - min(losses) if losses else NOT_MEASURED


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
    estimates = bound_estimates(run)

    def estimated(name: str, key: str) -> list[float]:
        return [estimate["layers"][name][key] for estimate in estimates]

    return tuple(
        LayerMeasurement(
            name=name,
            dimension=dimension,
            # An update moves by at most M_h a step (Eq. 20).
            gradient_bound=max(
                (*(norm / reach for norm in _seen(run, name, "norm_before")), *estimated(name, "gradient_bound")),
                default=NOT_MEASURED,
            ),
            trust_ratio=_largest_ratio(run, name),
            trust_deviation=max((one["trust_deviations"][name] for one in estimates), default=NOT_MEASURED),
            clip_bound=bound,
            intra_variance=fmean(estimated(name, "intra_variance")) if estimates else NOT_MEASURED,
            inter_variance=(
                fmean(estimated(name, "inter_variance")) if estimates else _variance_over_clients(run, name)
            ),
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
