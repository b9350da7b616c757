"""The Poisson-sampled Gaussian mechanism against *replacing* one client's update by another: RDP and PLD of one step.

With probability q the client is drawn and adds u to the sum, or u′ in its place; |u|, |u′| ≤ C = 1. The pair of outputs

    P = (1 − q)·N(0, z²) + q·N(−1, z²)    and    Q = (1 − q)·N(0, z²) + q·N(1, z²)

is the worst of all such pairs, for each α: it dominates them, and so do compositions of it. For by advanced joint
convexity (Balle, Barthe, Gaboardi 2018, Theorem 2) the divergence at α′ = 1 + q·(α − 1) ≥ 1 of a pair is

    q·sup_E [N(u)(E) − α·(1 − β)·N(0)(E) − α·β·N(u′)(E)],    β = α′/α,

and the best E is a sublevel set of a·exp(−u·x) + b·exp((u′ − u)·x) with a, b > 0. Let t be the direction in which u′
turns away from u. Both exponents grow along t, so E ends there, and ∫_E (x·t) N(u′)(dx) ≤ 0: to turn u′ away from u
takes mass of N(u′) from E, and the divergence grows. Once u′ is opposite to u, E is a half line, and longer vectors
make it grow. For α′ < 1 exchange the two. At q = 1 this is one Gaussian with sensitivity 2C.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr, logsumexp, ndtr

Array = NDArray[np.float64]

_REACH = 9.8  # standard deviations beyond which a Gaussian has mass e⁻⁵⁰, as in `pld`
# Orders above are left to the bound without sampling: the error of the trapezoidal rule grows with the order.
LARGEST_ORDER = 130.0
_MOST_POINTS = 100_000


def log_moment(sampling_rate: float, noise_multiplier: float, order: float) -> float:
    """log E_Q (P/Q)^α by the trapezoidal rule, rounded upwards; infinite where it would take too many points.

    The integrand is analytic up to ±iπz² from the real line, as that of adding and removing is (`rdp`).
    """
    q, z = sampling_rate, noise_multiplier
    step = min(z, z * z) / 8
    if order > LARGEST_ORDER or (2 * order + 24 * z) / step > _MOST_POINTS:
        return math.inf
    x = np.arange(-2 * order - 12 * z, 1 + 12 * z, step)
    common = -x * x / (2 * z * z)
    upper, lower = _log_density_ratio(-x, q, z), _log_density_ratio(x, q, z)
    log_a = logsumexp(common + order * upper + (1 - order) * lower) + math.log(step / (z * math.sqrt(2 * math.pi)))
    return max(float(log_a), 0.0) + 1e-12


def losses_of(x: Array, q: float, z: float) -> Array:
    """The privacy loss log P(x)/Q(x); it falls as x grows."""
    return _log_density_ratio(-x, q, z) - _log_density_ratio(x, q, z)


def largest_loss(q: float, z: float) -> float:
    """Beyond which P has mass e⁻⁵⁰ or so."""
    return float(losses_of(np.array([-1 - _REACH * z]), q, z)[0])


def step_distribution(sampling_rate: float, noise_multiplier: float, *, interval: float) -> Any:
    """dp-accounting's PLD of one step, on a grid ("connect the dots"); 0 < q < 1."""
    from dp_accounting.pld import pld_pmf, privacy_loss_distribution

    high = math.ceil(largest_loss(sampling_rate, noise_multiplier) / interval)
    losses: Array = np.arange(-high, high + 1, dtype=np.float64) * interval
    deltas = deltas_of(losses, sampling_rate, noise_multiplier)
    return privacy_loss_distribution.PrivacyLossDistribution(
        pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(interval, -high, high, deltas)
    )


def deltas_of(epsilons: Array, q: float, z: float) -> Array:
    """δ of one step at each ε: P(x ≤ x*) − e^ε·Q(x ≤ x*), where the loss at x* is ε."""
    x = _outcomes(epsilons, q, z)
    log_lower = np.logaddexp(math.log1p(-q) + log_ndtr(x / z), math.log(q) + log_ndtr((x - 1) / z))
    found: Array = (1 - q) * ndtr(x / z) + q * ndtr((x + 1) / z) - np.exp(epsilons + log_lower)
    return np.clip(found, 0.0, 1.0)


def _outcomes(losses: Array, q: float, z: float) -> Array:
    """x with the given loss: z²·(arsinh(−A·sinh(loss/2)) − loss/2) with A = (1 − q)/q·exp(1/2z²), without overflow."""
    half = np.abs(losses) / 2
    with np.errstate(divide="ignore"):
        log_sinh = half + np.log1p(-np.exp(-2 * half)) - math.log(2)
    log_a = math.log1p(-q) - math.log(q) + 1 / (2 * z * z) + log_sinh
    with np.errstate(over="ignore"):
        inverse = np.where(log_a > 20, math.log(2) + log_a, np.arcsinh(np.exp(np.minimum(log_a, 20))))
    return z * z * (-np.sign(losses) * inverse - losses / 2)


def _log_density_ratio(x: Array, q: float, z: float) -> Array:
    """log of ((1 − q)·N(0) + q·N(1))/N(0) at x."""
    found: Array = np.logaddexp(math.log1p(-q), math.log(q) + (2 * x - 1) / (2 * z * z))
    return found
