"""The convergence bounds of Pelikan et al. 2025 (Section 3, Appendix E) from measured quantities, term by term.

The left-hand side is always κ times the mean squared gradient norm over the run. Numbers in brackets are the paper's
equations. Two steps of the printed proofs deserve a caveat, and the results carry it:

* Eq. 40 applies Lemma 3 with U = η_loc·T_loc·M_h but drops a square, which is only right while U ≤ 1;
* Eq. 68 has P_h²/q where Eq. 42 times 5/q gives 2·P_h²/q; the latter is what is proved, and what is computed here.

Corollary 1 is Theorem 2 at rates that depend on T. They are given three times, and differently: here as its proof has
them (Eq. 54). √(T_loc/T), which they make of local_lr·local_steps, goes to 0 as T grows, and κ to −7.
"""

import math
from dataclasses import dataclass, replace

from sottovoce.base.errors import InputError

# Corollary 1: how its terms go with T, as powers of it (Eq. 54 and 55). For one (ε, δ) instead of one σ_DP the noise
# itself grows, σ_DP² ∝ T, and its term with it.
POWERS_OF_T = {
    "optimisation": -0.5,
    "global_update_noise": -1.0,
    "local_update_noise": -1.0,
    "dp_noise": 0.0,
    "local_drift": -2.0,
    "clipping_bias": -1.0,
    "trust_ratio": -1.0,
    "intra_client": -1.0,
    "inter_client": -1.0,
}


@dataclass(frozen=True)
class LayerMeasurement:
    """What a run must know of one layer h. Infinite `clip_bound` means no clipping."""

    name: str
    dimension: int  # d_h
    gradient_bound: float  # M_h ≥ ‖∇ℓ_h‖
    trust_ratio: float  # R_h ≥ r_h
    trust_deviation: float  # P_h ≥ ‖1 − p_h‖_∞
    clip_bound: float  # C_h
    intra_variance: float  # Ψ_h^intra: variance of a client's update norm over its batches
    inter_variance: float  # Ψ_h^inter: variance of the mean update norm over clients


@dataclass(frozen=True)
class RunMeasurement:
    """What a run must know of itself; see the glossary for names."""

    loss_gap: float  # L(θ⁰) − L(θ*)
    smoothness: float  # L
    gradient_deviation_local: float  # σ_loc
    gradient_deviation_global: float  # σ_glob
    server_lr: float
    local_lr: float
    local_steps: int
    central_steps: int
    clip_bound: float  # C
    sigma_dp: float
    optimiser_eps: float  # ξ of LAMB
    layers: tuple[LayerMeasurement, ...]
    sampling_rate: float = 1.0
    server_momentum: float = 0.0  # β₁
    server_weight_decay: float = 0.0  # λ
    local_clip: float = math.inf  # C_loc, of local gradients
    largest_gradient: float = math.nan  # of one batch, before that clipping

    def __post_init__(self) -> None:
        if not self.layers:
            raise InputError("layers=(): expected at least one layer")
        if not 0 < self.sampling_rate <= 1:
            raise InputError(f"sampling_rate={self.sampling_rate}: expected a probability in (0, 1]")
        for name in ("server_lr", "local_lr", "local_steps", "central_steps", "optimiser_eps"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name}={getattr(self, name)}: expected a positive number")
        if any(not layer.clip_bound > 0 for layer in self.layers):
            raise InputError("layer clip bounds: expected positive numbers (or infinity)")


@dataclass(frozen=True)
class Assumption:
    """One premise of a theorem, whether the run meets it, and the number that decides."""

    name: str
    holds: bool
    detail: str


@dataclass(frozen=True)
class Bound:
    """A right-hand side, term by term; `layer_terms` splits the terms that are sums over layers."""

    theorem: str
    kappa: float
    terms: dict[str, float]
    layer_terms: dict[str, dict[str, float]]
    assumptions: tuple[Assumption, ...]

    @property
    def total(self) -> float:
        """The whole right-hand side."""
        return math.fsum(self.terms.values())

    @property
    def holds(self) -> bool:
        """Whether every premise is met; otherwise the number bounds nothing."""
        return all(assumption.holds for assumption in self.assumptions)


def theorem2(run: RunMeasurement) -> Bound:
    """Theorem 2 (Eq. 51): all clients take part in every step (q = 1)."""
    bound = _bound("Theorem 2", run, factor=4, q=1.0)
    full = Assumption("every client in every step", run.sampling_rate == 1, f"sampling_rate = {run.sampling_rate:g}")
    return replace(bound, assumptions=(*bound.assumptions, full))


def corollary1(run: RunMeasurement) -> Bound:
    """Corollary 1 (Eq. 54): Theorem 2 with server_lr = 1/√T and local_lr = 1/√(T_loc·T), whatever the run's own are."""
    steps, local_steps = run.central_steps, run.local_steps
    chosen = replace(run, server_lr=steps**-0.5, local_lr=(local_steps * steps) ** -0.5)
    return replace(theorem2(chosen), theorem="Corollary 1")


def theorem3(run: RunMeasurement) -> Bound:
    """Theorem 3 (Eq. 68): clients are sampled with probability q."""
    q, reach2 = run.sampling_rate, (run.local_lr * run.local_steps) ** 2
    sampling = {x.name: 5 * reach2 * (1 - q) / q * x.gradient_bound**2 for x in run.layers}  # Eq. 73
    return _bound("Theorem 3", run, factor=5, q=q, more={"client_sampling": sampling})


def _bound(
    theorem: str, run: RunMeasurement, *, factor: int, q: float, more: dict[str, dict[str, float]] | None = None
) -> Bound:
    """What both theorems share: the coefficients of Theorem 3 (`factor` 5) are 5/4 of those of Theorem 2 (4)."""
    reach2, layers, h = (run.local_lr * run.local_steps) ** 2, run.layers, len(run.layers)  # η_loc²·T_loc²
    layer_terms = {
        "dp_noise": {x.name: _dp_noise(run, x) for x in layers},  # Eq. 71: the q of the noise cancels
        "local_drift": {x.name: 8 * factor * reach2**2 * run.smoothness**2 * x.gradient_bound**2 for x in layers},
        "clipping_bias": {x.name: factor / 2 * reach2 / q * (x.gradient_bound / x.clip_bound) ** 2 for x in layers},
        "trust_ratio": {x.name: 2 * factor * reach2 / q * (x.gradient_bound * x.trust_deviation) ** 2 for x in layers},
        **(more or {}),
        "intra_client": {x.name: factor * reach2 / q * _spread(run, x) * x.intra_variance for x in layers},
        "inter_client": {x.name: factor * reach2 / q * _spread(run, x) * x.inter_variance for x in layers},
    }
    terms = {
        "optimisation": 2 * run.loss_gap / (run.server_lr * run.central_steps),
        "global_update_noise": 4 * factor * h * reach2 * run.gradient_deviation_global**2,
        "local_update_noise": 8 * factor * h * reach2 * run.gradient_deviation_local**2,
    } | {name: math.fsum(by_layer.values()) for name, by_layer in layer_terms.items()}
    kappa = 1 - 2 * factor * (1 - run.local_lr * run.local_steps) ** 2
    return Bound(theorem, kappa, terms, layer_terms, _common_assumptions(run, kappa, 2 * factor))


def _dp_noise(run: RunMeasurement, layer: LayerMeasurement) -> float:
    """Eq. 33: R_h²·d_h·C²·σ_DP²/ξ²; without noise it vanishes even at C = ∞."""
    if run.sigma_dp == 0:
        return 0.0
    return (layer.trust_ratio * run.clip_bound * run.sigma_dp / run.optimiser_eps) ** 2 * layer.dimension


def _spread(run: RunMeasurement, layer: LayerMeasurement) -> float:
    """R_h²·M_h²/(ξ²·C_h²), the weight of the variances in Eq. 45 and 48."""
    return (layer.trust_ratio * layer.gradient_bound / layer.clip_bound) ** 2 / run.optimiser_eps**2


def _common_assumptions(run: RunMeasurement, kappa: float, factor: int) -> tuple[Assumption, ...]:
    reach = run.local_lr * run.local_steps
    half_width = 1 / math.sqrt(factor)
    longest = max(reach * layer.gradient_bound for layer in run.layers)
    return (
        Assumption(
            "κ > 0",
            kappa > 0,
            f"κ = {kappa:.3g}: local_lr·local_steps = {reach:.3g}, "
            f"expected within ({1 - half_width:.3g}, {1 + half_width:.3g})",
        ),
        Assumption(
            "server_lr·L < 1",
            run.server_lr * run.smoothness < 1,
            f"server_lr·L = {run.server_lr * run.smoothness:.3g}",
        ),
        Assumption(
            "local_lr·local_steps·M_h ≤ 1 (or no clipping)",
            longest <= 1 or all(math.isinf(layer.clip_bound) for layer in run.layers),
            f"largest local_lr·local_steps·M_h = {longest:.3g}; Eq. 40 drops a square beyond 1",
        ),
        Assumption(
            "no server momentum or weight decay",
            run.server_momentum == 0 and run.server_weight_decay == 0,
            f"server_momentum = {run.server_momentum:g}, server_weight_decay = {run.server_weight_decay:g}",
        ),
        Assumption(
            "local gradients are unbiased: none is clipped",
            math.isinf(run.local_clip) or run.largest_gradient <= run.local_clip,
            f"clip_gradients = {run.local_clip:g}"
            + ("" if math.isinf(run.local_clip) else f"; the largest norm seen = {run.largest_gradient:.3g}"),
        ),
    )
