"""The Poisson-sampled Gaussian mechanism: its moments for RDP, and one step's distribution for PLD.

Both are dp-accounting's, which goes from term to term and from point to point in Python and takes five to ten times as
long. Here are the same operations in the same order on all of them at once: the same bits, but for C libraries that
compute many logarithms otherwise than one.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln, log_ndtr

Array = NDArray[np.float64]

# Moments (Mironov, Talwar, Zhang 2019, Section 3.3).

_MOST_TERMS = 1000  # of a series that has no end; one that needs more counts as not converged
_NEGLIGIBLE = 30.0  # as a logarithm


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


# Losses (Doroshenko et al. 2022: "Connect the Dots").

_SAME = 1e-9  # relative: a loss as near as that to the one which no outcome reaches is that one


def step_distribution(sampling_rate: float, noise_multiplier: float, *, interval: float) -> Any:
    """dp-accounting's PLD of one step, against removing and against adding one user; 0 < q < 1."""
    from dp_accounting.pld import pld_pmf, privacy_loss_distribution
    from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss

    def distribution(adjacency: AdjacencyType) -> Any:
        mechanism = GaussianPrivacyLoss(noise_multiplier, sampling_prob=sampling_rate, adjacency_type=adjacency)
        ends = mechanism.connect_dots_bounds()
        low, high = math.floor(ends.epsilon_lower / interval), math.ceil(ends.epsilon_upper / interval)
        losses = np.arange(low, high + 1) * interval
        sign = -1 if adjacency == AdjacencyType.ADD else 1
        deltas = _deltas(mechanism, sampling_rate, noise_multiplier, losses=losses, sign=sign)
        return pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(interval, low, high, deltas)

    return privacy_loss_distribution.PrivacyLossDistribution(
        distribution(AdjacencyType.REMOVE), distribution(AdjacencyType.ADD)
    )


def _deltas(mechanism: Any, q: float, z: float, *, losses: Array, sign: int) -> Array:
    """δ at each of the losses as ε, with the sign 1 for removing a user and −1 for adding one."""
    signed, smallest = sign * losses, math.log(1 - q)
    # With the user nothing is rarer than 1 − q times as before: no loss is beyond, and what is asked there is plain.
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
