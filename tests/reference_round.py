"""The slow twin of `sottovoce.federated.round`: Algorithm 1 of Pelikan et al. (2025) as printed, in float64 NumPy.

It shares no code with the package. A model is a dictionary of arrays, one per layer (the paper's θ_1 … θ_H); a client
is what it can do with a model, one gradient per local step. Line numbers are those of the printed algorithm.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Model = dict[str, NDArray[np.float64]]
Gradient = Callable[[Model], Model]


def norm(v: Model) -> float:
    return math.sqrt(sum(float((layer**2).sum()) for layer in v.values()))


def times(v: Model, factor: float) -> Model:
    return {name: factor * layer for name, layer in v.items()}


def plus(a: Model, b: Model) -> Model:
    return {name: a[name] + b[name] for name in a}


def minus(a: Model, b: Model) -> Model:
    return {name: a[name] - b[name] for name in a}


# Clipping: the algorithm's inputs, Definition 3, and the rescaling of the paper's released code.


def clip(v: Model, bound: float) -> Model:
    """clip(v, C) = v · C / max(C, ‖v‖)."""
    return v if math.isinf(bound) else times(v, bound / max(bound, norm(v)))


def shares(v: Model, bound: float, share: str) -> dict[str, float]:
    """C_h of every layer: C/√H, or C·√(d_h/Σd)."""
    if share == "uniform":
        return dict.fromkeys(v, bound / math.sqrt(len(v)))
    whole = sum(layer.size for layer in v.values())
    return {name: bound * math.sqrt(layer.size / whole) for name, layer in v.items()}


def clip_update(update: Model, *, bound: float, share: str = "global", normalise: str = "never") -> Model:
    """The whole update, or each layer to its share; `normalise` brings layers below their share up to it."""
    rescales = normalise == "always" or (normalise == "above" and norm(update) > bound)
    if normalise == "above" and not rescales:
        return update
    if share == "global":
        return times(update, bound / norm(update)) if rescales else clip(update, bound)
    clipped = {}
    for name, layer_bound in shares(update, bound, share).items():
        layer = {name: update[name]}
        clipped |= times(layer, layer_bound / norm(layer)) if rescales else clip(layer, layer_bound)
    return clipped


# Optimisers.


@dataclass
class SGD:
    momentum: float = 0.0
    velocity: Model = field(default_factory=dict)

    def step(self, theta: Model, gradient: Model, *, lr: float) -> Model:
        self.velocity = plus(times(self.velocity, self.momentum), gradient) if self.velocity else gradient
        return minus(theta, times(self.velocity, lr))


@dataclass
class LAMB:
    """You et al. (2020), Algorithm 2, with the bias corrections and without weight decay."""

    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-6
    count: int = 0
    m: Model = field(default_factory=dict)
    v: Model = field(default_factory=dict)

    def step(self, theta: Model, gradient: Model, *, lr: float) -> Model:
        self.count += 1
        moved = {}
        for name, g in gradient.items():
            self.m[name] = self.b1 * self.m.get(name, 0.0) + (1 - self.b1) * g
            self.v[name] = self.b2 * self.v.get(name, 0.0) + (1 - self.b2) * g**2
            m, v = self.m[name] / (1 - self.b1**self.count), self.v[name] / (1 - self.b2**self.count)
            direction = m / (np.sqrt(v) + self.eps)
            length = norm({name: direction})
            weight = norm({name: theta[name]})
            ratio = weight / length if weight > 0 and length > 0 else 1.0
            moved[name] = theta[name] - lr * ratio * direction
        return moved


# The algorithm.


def pull(theta: Model, server: Model, *, name: str, mu: float) -> Model:
    """The gradient of (μ/2)·‖θ − θ₀‖² or of μ·‖θ − θ₀‖."""
    away = minus(theta, server)
    if name == "fedprox":
        return times(away, mu)
    return times(away, mu / norm(away) if norm(away) > 0 else 0.0)


def train_client(
    server: Model,
    batches: Sequence[Gradient],
    *,
    lr: float,
    local_bound: float,
    proximal: tuple[str, float] | None,
    statistics: Collection[str] = (),
) -> Model:
    """Lines 6 to 11: the client's delta. `statistics` (not the paper's) go their way back at no rate, in no norm."""
    theta, opt = server, SGD()
    for gradient_of in batches:
        gradient = gradient_of(theta)
        moved = {name: theta[name] - gradient[name] for name in statistics}
        gradient |= {name: np.zeros_like(theta[name]) for name in statistics}
        if proximal is not None:
            gradient = plus(gradient, pull(theta, server, name=proximal[0], mu=proximal[1]))
        theta = opt.step(theta, clip(gradient, local_bound), lr=lr) | moved
    return minus(server, theta)


def reference_round(
    server: Model,
    cohort: Sequence[Sequence[Gradient]],
    *,
    opt: SGD | LAMB,
    server_lr: float,
    local_lr: float,
    local_bound: float,
    expected_cohort: float,
    bound: float,
    share: str = "global",
    normalise: str = "never",
    proximal: tuple[str, float] | None = None,
    weights: Sequence[float] | None = None,
    noise: Model | None = None,
    statistics: Collection[str] = (),
) -> Model:
    """One turn of the outer loop: the central model after it.

    With ω_k = 1/K line 14 is 1/(qK)·Σ Δ_k = 1/S·Σ Δ_k, and the clients' noises of line 13 add up to one on the sum,
    which is given: it must be the very noise that the other implementation drew.
    """
    total = {name: np.zeros_like(layer) for name, layer in server.items()}
    for batches, weight in zip(cohort, weights or [1.0] * len(cohort), strict=True):
        update = train_client(
            server, batches, lr=local_lr, local_bound=local_bound, proximal=proximal, statistics=statistics
        )
        total = plus(total, times(clip_update(update, bound=bound, share=share, normalise=normalise), weight))
    if noise is not None:
        total = plus(total, noise)
    return opt.step(server, times(total, 1 / expected_cohort), lr=server_lr)
