"""What the paper's convergence bound is made of, estimated from a few clients at the server's model; simulations only.

    L            largest ‖∇ℓ(θ') − ∇ℓ(θ)‖/‖θ' − θ‖ that was seen, of one batch with the same masks at both (A1.2)
    M_h          largest norm of layer h of a batch's gradient (Eq. 20)
    σ_loc²       of a client's batch gradients around their mean, unbiased; the largest over clients (A2.2)
    σ_glob²      of clients' mean gradients around theirs, less the part that is chance in those means (A3)
    Ψ_h^intra    of the norm of a client's update over repeated local training, unbiased; mean over clients
    Ψ_h^inter    of the mean norm over clients, less the part that is chance in those means

The first three bound suprema over all models, clients and utterances: what was seen is never above them. A batch's
gradient is a mean over utterances, which makes L and M_h smaller still. σ_glob² and both Ψ are unbiased for this model,
but for the cut at 0.

Shapes: P flat length, H layers, N clients, R repetitions.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from sottovoce.base.errors import InputError
from sottovoce.base.seeds import derive, stream
from sottovoce.federated.client import (
    ClientContext,
    LoadedClient,
    gradients_of,
    load_client,
    plan_client,
    train_locally,
)
from sottovoce.federated.feature_cache import FeatureCache
from sottovoce.flat.layout import Layers, Layout
from sottovoce.flat.segments import layer_norms
from sottovoce.models.family import step_loss
from sottovoce.optimisers.weights import Weights

ASCENTS = 3  # towards the direction in which gradients change most


@dataclass(frozen=True, kw_only=True)
class BoundEstimation:
    """Before every so many rounds, from so many `clients`, each of which trains `repeats` times from there."""

    clients: int = 8
    every: int = 10
    repeats: int = 2

    def __post_init__(self) -> None:
        for name, least in (("clients", 2), ("every", 1), ("repeats", 2)):
            if (value := getattr(self, name)) < least:
                raise InputError(f"estimate_bound: {name}={value}, expected at least {least}")

    def is_due(self, step: int) -> bool:
        return step % self.every == 0


class ClientProblem(Protocol):
    """One client's loss as its local training sees it."""

    @property
    def batches(self) -> int:
        """How many batches it has."""
        ...

    def gradient(self, parameters_P: Tensor, batch: int) -> tuple[float, Tensor]:
        """The loss of a batch and its gradient [P], the same for the same arguments."""
        ...

    def update(self, parameters_P: Tensor, repeat: int) -> Tensor:
        """θ − θ_local of local training with other batches for each `repeat`."""
        ...


@dataclass(frozen=True)
class BoundEstimate:
    """What was found at one model. `gradient_norm_squared` is ‖∇L(θ)‖², which the bound is about, unbiased but ≥ 0."""

    clients: int
    loss: float
    gradient_norm_squared: float
    largest_gradient_norm: float
    smoothness: float
    local_variance: float
    global_variance: float
    gradient_bounds_H: Tensor
    intra_variances_H: Tensor
    inter_variances_H: Tensor

    def as_json(self, layers: Layers) -> dict[str, Any]:
        """In numbers, layers by name."""
        by_layer = {
            "gradient_bound": self.gradient_bounds_H.tolist(),
            "intra_variance": self.intra_variances_H.tolist(),
            "inter_variance": self.inter_variances_H.tolist(),
        }
        whole = {name: value for name, value in vars(self).items() if isinstance(value, int | float)}
        found = {name: {key: by_layer[key][h] for key in by_layer} for h, name in enumerate(layers.names)}
        return {**whole, "layers": found}


def estimate_bound(
    clients: Iterable[ClientProblem], parameters_P: Tensor, *, layers: Layers, repeats: int
) -> BoundEstimate | None:
    """Estimates at one model; None where fewer than two clients have at least two batches each."""
    found = [_look_at(client, parameters_P, layers, repeats) for client in clients if client.batches > 1]
    if len(found) < 2:
        return None
    count = len(found)
    means = _mean_and_variance(one.gradient_P for one in found)
    # Of the variance of the clients' means, what comes of each having few batches is not between clients.
    by_chance = sum(one.variance / one.batches for one in found) / count
    norms_NRH = torch.stack([one.update_norms_RH for one in found])
    intra_H = norms_NRH.var(dim=1).mean(dim=0)
    inter_H = norms_NRH.mean(dim=1).var(dim=0) - intra_H / repeats
    return BoundEstimate(
        clients=count,
        loss=sum(one.loss for one in found) / count,
        gradient_norm_squared=max(0.0, means.square - means.variance / count),
        largest_gradient_norm=max(one.largest_norm for one in found),
        smoothness=max(one.smoothness for one in found),
        local_variance=max(one.variance for one in found),
        global_variance=max(0.0, means.variance - by_chance),
        gradient_bounds_H=torch.stack([one.norms_H for one in found]).amax(dim=0),
        intra_variances_H=intra_H,
        inter_variances_H=inter_H.clamp(min=0.0),
    )


@dataclass(frozen=True)
class _Client:
    batches: int
    loss: float
    gradient_P: Tensor  # mean over batches
    variance: float
    largest_norm: float
    norms_H: Tensor  # the largest over batches
    smoothness: float
    update_norms_RH: Tensor


def _look_at(client: ClientProblem, parameters_P: Tensor, layers: Layers, repeats: int) -> _Client:
    losses, norms = [], []

    def gradients() -> Iterator[Tensor]:
        for batch in range(client.batches):
            loss, gradient_P = client.gradient(parameters_P, batch)
            losses.append(loss)
            norms.append(layer_norms(gradient_P, layers).cpu())
            yield gradient_P

    mean = _mean_and_variance(gradients())
    updates = [client.update(parameters_P, repeat) for repeat in range(repeats)]
    norms_BH = torch.stack(norms)
    return _Client(
        batches=client.batches,
        loss=sum(losses) / len(losses),
        gradient_P=mean.mean_P,
        variance=mean.variance,
        largest_norm=float(torch.linalg.vector_norm(norms_BH, dim=1).max()),
        norms_H=norms_BH.amax(dim=0),
        smoothness=largest_change(lambda at_P: client.gradient(at_P, 0)[1], parameters_P, away_P=-updates[0]),
        update_norms_RH=torch.stack([layer_norms(update_P, layers).cpu() for update_P in updates]),
    )


@dataclass(frozen=True)
class _Spread:
    mean_P: Tensor
    square: float  # ‖mean‖²
    variance: float  # Σ‖x − mean‖²/(n − 1)


def _mean_and_variance(vectors: Iterable[Tensor]) -> _Spread:
    """Of vectors that come one by one (Welford), in float64."""
    mean_P, total, count = torch.zeros(()), 0.0, 0
    for vector_P in vectors:
        count += 1
        if count == 1:
            mean_P = vector_P.double().clone()
            continue
        away_P = vector_P.double() - mean_P
        mean_P = mean_P + away_P / count
        total += float(away_P.square().sum()) * (count - 1) / count
    return _Spread(mean_P, float(mean_P.square().sum()), total / (count - 1))


def largest_change(gradient: Callable[[Tensor], Tensor], parameters_P: Tensor, *, away_P: Tensor) -> float:
    """Largest ‖g(θ + d) − g(θ)‖/‖d‖ over a few d as long as `away_P`: never above L.

    Each next d points to where the gradient has just changed: power iteration, on a quadratic towards its largest
    curvature.
    """
    length = float(torch.linalg.vector_norm(away_P))
    if not length > 0:
        return 0.0
    here_P, largest = gradient(parameters_P).clone(), 0.0
    for _ in range(1 + ASCENTS):
        change_P = gradient(parameters_P + away_P) - here_P
        size = float(torch.linalg.vector_norm(change_P))
        largest = max(largest, size / length)
        if not size > 0:
            break
        away_P = change_P * (length / size)
    return largest


def multiplier_deviations(multipliers_2H: Tensor, layers: Layers) -> dict[str, float]:
    """‖1 − p_h‖_∞ of each layer, from the smallest and the largest p of its tensors: P_h is the largest over rounds."""
    deviations = (1 - multipliers_2H).abs().amax(dim=0).tolist()
    found = dict.fromkeys(layers.names, 0.0)
    for layer, deviation in zip(layers.of_parameter, deviations, strict=True):
        found[layers.names[layer]] = max(found[layers.names[layer]], deviation)
    return found


class SpokenProblem:
    """A client of a population. `weights` are shared with the others."""

    def __init__(self, context: ClientContext, index: int, *, weights: Weights, step: int) -> None:
        self._context, self._index, self._weights, self._step = context, index, weights, step
        self._cache = FeatureCache(0)
        self._loaded = self._load(context)
        self._features = self._loaded.extract_features(self._cache, context, dtype=weights.dtype)
        self._statistics = context.family.training.statistics(context.model)

    def _load(self, context: ClientContext) -> LoadedClient:
        planned = plan_client(context, self._index, step=self._step)
        device = self._weights.master.device
        return load_client(context, planned, step=self._step, device=device, cache=self._cache)

    @property
    def batches(self) -> int:
        return len(self._loaded.lines)

    def gradient(self, parameters_P: Tensor, batch: int) -> tuple[float, Tensor]:
        context, weights = self._context, self._weights
        weights.reset(parameters_P)
        utterances, draws = self._features.take(self._loaded.lines[batch]), self._loaded.draws[batch]
        whole = context.frozen.with_trained(weights.working)
        loss = step_loss(context.family, whole, utterances, settings=context.model, draws=draws)
        weights.set_gradients(gradients_of(loss, list(weights.working.values())))
        gradient_P = weights.gradient.detach().clone()
        for name, view in weights.layout.views(gradient_P).items():
            if name in self._statistics:  # no gradient: counts of what was seen
                view.zero_()
        return float(loss.detach()), gradient_P

    def update(self, parameters_P: Tensor, repeat: int) -> Tensor:
        context = replace(self._context, seed=derive(self._context.seed, "bound", repeat))
        loaded = self._load(context)
        features = loaded.extract_features(self._cache, context, dtype=self._weights.dtype)
        train_locally(self._weights, loaded, features, context, server_P=parameters_P)
        return parameters_P - self._weights.master


class BoundEstimator:
    """Estimates from clients of a population, drawn anew each time. Always in float32: L is a difference of gradients.

    What it draws is its own: a run makes the same rounds with and without it.
    """

    def __init__(
        self, settings: BoundEstimation, context: ClientContext, layers: Layers, *, device: torch.device
    ) -> None:
        self._settings, self._layers = settings, layers
        self._context = context.on(device, torch.float32)
        self._weights = _new_weights(self._context, layers.layout, device)

    def measure(self, parameters_P: Tensor, *, step: int) -> Mapping[str, Any] | None:
        """What the bound needs at the model before round `step`; None where it is not due, or nothing can be said."""
        if not self._settings.is_due(step):
            return None
        here_P = parameters_P.detach().clone()
        found = estimate_bound(self._clients(step), here_P, layers=self._layers, repeats=self._settings.repeats)
        return None if found is None else found.as_json(self._layers)

    def _clients(self, step: int) -> Iterator[ClientProblem]:
        """Those drawn, one at a time, without any whose speech cannot be used."""
        size = len(self._context.population)
        order = stream(self._context.seed, "bound clients", step).permutation(size)
        for index in order[: self._settings.clients].tolist():
            try:
                yield SpokenProblem(self._context, index, weights=self._weights, step=step)
            except (InputError, OSError):
                continue


def _new_weights(context: ClientContext, layout: Layout, device: torch.device) -> Weights:
    statistics = context.family.training.statistics(context.model)
    optimiser = context.local.built_optimiser()
    return Weights(layout, optimiser, device=device, dtype=torch.float32, statistics=statistics)
