"""The Poisson-sampled Gaussian mechanism: its moments for RDP, and one step's loss distribution for PLD.

Against adding or removing one user both are dp-accounting's, vectorised: the same operations in the same order on all
terms at once (the same bits, up to the C library's logarithms), five to ten times as fast as its loops.

Against *replacing* one client's update: with probability q the client is drawn and adds u to the sum, or u′ in its
place; |u|, |u′| ≤ C = 1. The pair of outputs

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
from scipy.special import gammaln, log_ndtr, logsumexp, ndtr

Array = NDArray[np.float64]

GAUSSIAN_REACH = 9.8  # standard deviations beyond which a Gaussian has mass e⁻⁵⁰, which dp-accounting drops
_MOST_TERMS = 1000  # of a series that has no end; one that needs more counts as not converged
_NEGLIGIBLE = 30.0  # as a logarithm
_MOST_POINTS = 100_000  # of an integral; below z ≈ 0.015 the series is exact anyway
_LARGEST_REPLACED_ORDER = 130.0  # the error of the trapezoidal rule grows with the order
_SAME = 1e-9  # relative: a loss as near as that to the one which no outcome reaches is that one


def log_density_ratio(x: Array, q: float, z: float) -> Array:
    """log of ((1 − q)·N(0, z²) + q·N(1, z²))/N(0, z²) at x."""
    found: Array = np.logaddexp(math.log1p(-q), math.log(q) + (2 * x - 1) / (2 * z * z))
    return found


# Adding or removing one user: moments (Mironov, Talwar, Zhang 2019, Section 3.3).


def log_moments(sampling_rate: float, noise_multiplier: float, orders: Array) -> Array:
    """log A_α at each of `orders`, and infinite where the series of a fractional order did not converge; 0 < q < 1."""
    is_whole = orders == np.floor(orders)
    moments = np.empty_like(orders)
    moments[is_whole] = _whole(sampling_rate, noise_multiplier, orders[is_whole].astype(np.int64))
    moments[~is_whole] = _fractional(sampling_rate, noise_multiplier, orders[~is_whole])
    return moments


def _whole(q: float, z: float, orders: NDArray[np.int64]) -> list[float]:
    """A_α = Σᵢ C(α, i) qⁱ (1 − q)^(α − i) exp((i² − i)/2z²), i = 0 … α."""
    log_factorial = gammaln(np.arange(orders.max(initial=0) + 1) + 1)
    moments = []
    for order in orders:
        i = np.arange(order + 1)
        log_terms = log_factorial[order] - log_factorial[i] - log_factorial[order - i]
        log_terms += i * math.log(q)
        log_terms += (order - i) * math.log1p(-q)
        log_terms += (i * i - i) / (2 * z**2)
        moments.append(float(np.logaddexp.reduce(log_terms)))
    return moments


def _fractional(q: float, z: float, orders: Array) -> Array:
    """The integrals of A_α below and above z₀, where both parts of the mixture are equal, each as a series."""
    z0 = z**2 * math.log(1 / q - 1) + 0.5
    i, order = np.arange(_MOST_TERMS, dtype=np.float64), orders[:, np.newaxis]
    j = order - i
    log_coefficient = gammaln(order + 1) - gammaln(i + 1) - gammaln(j + 1)
    below = log_coefficient + i * math.log(q) + j * math.log1p(-q)
    below += (i * i - i) / (2 * z**2)
    below += math.log(0.5) + _log_erfc((i - z0) / (math.sqrt(2) * z))
    above = log_coefficient + j * math.log(q) + i * math.log1p(-q)
    above += (j * j - j) / (2 * z**2)
    above += math.log(0.5) + _log_erfc((z0 - j) / (math.sqrt(2) * z))

    totals = np.logaddexp(np.logaddexp.accumulate(below, axis=1), np.logaddexp.accumulate(above, axis=1))
    falls = (np.diff(below) < 0) & (np.diff(above) < 0)
    is_enough = falls & (np.maximum(below, above)[:, 1:] < totals[:, 1:] - _NEGLIGIBLE)
    last = 1 + is_enough.argmax(axis=1)
    found: Array = np.where(is_enough.any(axis=1), totals[np.arange(len(orders)), last], np.inf)
    return found


def _log_erfc(x: Array) -> Array:
    found: Array = math.log(2) + log_ndtr(-x * 2**0.5)
    return found


# The same by the trapezoidal rule, rounded upwards. The integrands are analytic up to ±iπz² from the real line, so
# steps of z²/8 leave an error near exp(−16π²). Infinite where it would take too many points.


def integrate_log_moment(q: float, z: float, order: float) -> float:
    """log A_α = log E_{x∼N(0,z²)} (1 − q + q·exp((2x−1)/2z²))^α, for adding or removing one user."""
    x = _points(-12 * z, order + 12 * z, z, width=order + 24 * z)
    return math.inf if x is None else _log_integral(order * log_density_ratio(x, q, z) - x * x / (2 * z * z), z)


def integrate_log_replaced_moment(q: float, z: float, order: float) -> float:
    """log E_Q (P/Q)^α, for replacing one update."""
    x = _points(-2 * order - 12 * z, 1 + 12 * z, z, width=2 * order + 24 * z)
    if x is None or order > _LARGEST_REPLACED_ORDER:
        return math.inf
    upper, lower = log_density_ratio(-x, q, z), log_density_ratio(x, q, z)
    return _log_integral(-x * x / (2 * z * z) + order * upper + (1 - order) * lower, z)


def _points(low: float, high: float, z: float, *, width: float) -> Array | None:
    step = min(z, z * z) / 8
    return None if width / step > _MOST_POINTS else np.arange(low, high, step)


def _log_integral(log_integrand: Array, z: float) -> float:
    step = min(z, z * z) / 8
    log_a = logsumexp(log_integrand) + math.log(step / (z * math.sqrt(2 * math.pi)))
    return max(float(log_a), 0.0) + 1e-12


# Losses (Doroshenko et al. 2022: "Connect the Dots").


def sampled_step_pld(sampling_rate: float, noise_multiplier: float, *, interval: float) -> Any:
    """dp-accounting's PLD of one step, against removing and against adding one user; 0 < q < 1."""
    from dp_accounting.pld import pld_pmf, privacy_loss_distribution
    from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss

    def distribution(adjacency: AdjacencyType) -> Any:
        mechanism = GaussianPrivacyLoss(noise_multiplier, sampling_prob=sampling_rate, adjacency_type=adjacency)
        ends = mechanism.connect_dots_bounds()
        low, high = math.floor(ends.epsilon_lower / interval), math.ceil(ends.epsilon_upper / interval)
        losses = np.arange(low, high + 1) * interval
        sign = -1 if adjacency == AdjacencyType.ADD else 1
        deltas = _sampled_deltas(mechanism, sampling_rate, noise_multiplier, losses=losses, sign=sign)
        return pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(interval, low, high, deltas)

    return privacy_loss_distribution.PrivacyLossDistribution(
        distribution(AdjacencyType.REMOVE), distribution(AdjacencyType.ADD)
    )


def _sampled_deltas(mechanism: Any, q: float, z: float, *, losses: Array, sign: int) -> Array:
    """δ at each of the losses as ε, with the sign 1 for removing a user and −1 for adding one."""
    signed, smallest = sign * losses, math.log(1 - q)
    # With the user nothing is rarer than 1 − q times as before: no loss is beyond, and δ there is known.
    is_inside = signed > math.log1p(-q)
    deltas = np.zeros_like(losses)
    if sign > 0:
        deltas[~is_inside] = -np.expm1(losses[~is_inside])
    signed = signed[is_inside]
    # The loss without sampling: log(1 + (exp(loss) − 1)/q).
    log_first, log_second = signed + np.log(1 / q), np.log(-(1 - 1 / q))
    is_smallest = (np.abs(signed - smallest) <= _SAME * np.maximum(np.abs(signed), abs(smallest))) | (
        log_first <= log_second
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        unsampled = log_first + np.log1p(-np.exp(log_second - log_first))
    unsampled[signed == 0] = np.log(1 / q + (1 - 1 / q))
    unsampled[is_smallest] = -np.inf
    # The outcome that has it.
    x = -0.5 - sign * unsampled * z**2 + (0 if sign > 0 else 1)
    deltas[is_inside] = mechanism.mu_upper_cdf(x) - np.exp(losses[is_inside] + mechanism.mu_lower_log_cdf(x))
    return np.clip(deltas, 0, 1)


def replaced_losses(x: Array, q: float, z: float) -> Array:
    """The privacy loss log P(x)/Q(x) of replacing one update; it falls as x grows."""
    return log_density_ratio(-x, q, z) - log_density_ratio(x, q, z)


def largest_replaced_loss(q: float, z: float) -> float:
    """Beyond which P has mass e⁻⁵⁰ or so."""
    return float(replaced_losses(np.array([-1 - GAUSSIAN_REACH * z]), q, z)[0])


def replaced_step_pld(sampling_rate: float, noise_multiplier: float, *, interval: float) -> Any:
    """dp-accounting's PLD of one step, against replacing one update; 0 < q < 1."""
    from dp_accounting.pld import pld_pmf, privacy_loss_distribution

    high = math.ceil(largest_replaced_loss(sampling_rate, noise_multiplier) / interval)
    losses: Array = np.arange(-high, high + 1, dtype=np.float64) * interval
    deltas = replaced_deltas(losses, sampling_rate, noise_multiplier)
    return privacy_loss_distribution.PrivacyLossDistribution(
        pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(interval, -high, high, deltas)
    )


def replaced_deltas(epsilons: Array, q: float, z: float) -> Array:
    """δ of one step at each ε: P(x ≤ x*) − e^ε·Q(x ≤ x*), where the loss at x* is ε."""
    x = _replaced_outcomes(epsilons, q, z)
    log_lower = np.logaddexp(math.log1p(-q) + log_ndtr(x / z), math.log(q) + log_ndtr((x - 1) / z))
    found: Array = (1 - q) * ndtr(x / z) + q * ndtr((x + 1) / z) - np.exp(epsilons + log_lower)
    return np.clip(found, 0.0, 1.0)


def _replaced_outcomes(losses: Array, q: float, z: float) -> Array:
    """x with the given loss: z²·(arsinh(−A·sinh(loss/2)) − loss/2) with A = (1 − q)/q·exp(1/2z²), without overflow."""
    half = np.abs(losses) / 2
    with np.errstate(divide="ignore"):
        log_sinh = half + np.log1p(-np.exp(-2 * half)) - math.log(2)
    log_a = math.log1p(-q) - math.log(q) + 1 / (2 * z * z) + log_sinh
    with np.errstate(over="ignore"):
        inverse = np.where(log_a > 20, math.log(2) + log_a, np.arcsinh(np.exp(np.minimum(log_a, 20))))
    return z * z * (-np.sign(losses) * inverse - losses / 2)
