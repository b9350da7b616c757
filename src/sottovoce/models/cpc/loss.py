"""Contrastive predictive coding: the next steps against others of the same utterance (Ramesh et al. 2023, App. A.1).

    z_t  step t by the dense layers        c_t  the same with all before it, by the LSTMs

    loss = Σ_k −1/(T−k) Σ_t log softmax of z_{t+k}ᵀ(W_k c_t + b_k)/κ over z_{t+k} and N−1 other steps of the utterance

Rows go by the step that is predicted, s = t + k: its rivals are drawn once for all distances k. All scores against all
steps are computed, and how often a step was drawn weighs its term: to gather N vectors z, or their scores, for every
step takes longer up to utterances of minutes.

Shapes: U utterances, K distances, T steps of the longest, S = T the steps to be predicted, D width of z, C of c, R = N
- 1 rivals of a step.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from sottovoce.data.audio.waveforms import Features
from sottovoce.models.cpc.settings import Settings, predictors
from sottovoce.models.family import Parameters
from sottovoce.models.speech_lstm import dense_steps, lstm_steps
from sottovoce.models.trainable import with_corrections

PLACE_BITS = 31  # of a draw, which stands for a place among an utterance's other steps
LEAST = -80.0  # exp of less is lost beside 1 in any precision


def draw_places(utterances: int, steps: int, rivals: int, *, generator: torch.Generator) -> Tensor:
    """What chance decides: a place in [0, 1) for each rival of each step, as integers of `PLACE_BITS` bits."""
    shape = (utterances, steps, rivals)
    return torch.randint(2**PLACE_BITS - 1, shape, dtype=torch.int32, generator=generator)


def even_places(rivals: int) -> Tensor:
    """Places without chance: evenly spread, the same for every step of every utterance."""
    places_R = torch.div((2 * torch.arange(rivals) + 1) << (PLACE_BITS - 1), rivals, rounding_mode="floor")
    return places_R.to(torch.int32)[None, None]


def contrast(
    parameters: Parameters, features: Features, *, settings: Settings, draws: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, rivals and lengths for `contrastive_losses`; without draws rivals are evenly spread."""
    weights, encoder = with_corrections(parameters), settings.encoder
    z_UTD = dense_steps(weights, features.features_UTF, settings=encoder)
    c_UTC, _ = lstm_steps(weights, z_UTD, settings=encoder)
    device, steps = z_UTD.device, z_UTD.shape[1]
    lengths_U = (features.frames_U // encoder.stack).to(device, non_blocking=True)
    # Draws may be for more padding than there is.
    places_USR = even_places(settings.candidates - 1) if draws is None else draws[:, :steps]
    rivals_USR = rival_steps(places_USR.to(device, non_blocking=True), lengths_U, steps)
    return score_steps(z_UTD, c_UTC, predictors(weights, settings=settings)), rivals_USR, lengths_U


def rival_steps(places_USR: Tensor, lengths_U: Tensor, steps: int) -> Tensor:
    """The steps that stand against each step: any other of the same utterance, all equally likely, [U, S, R].

    Behind an utterance's end, where nothing is predicted, they are some of its own steps.
    """
    lengths_U11 = lengths_U[:, None, None]
    others_U11 = (lengths_U11 - 1).clamp(min=0)
    onwards_USR = 1 + (places_USR.long() * others_U11 >> PLACE_BITS)
    true_S1 = torch.arange(steps, device=places_USR.device)[:, None]
    return (true_S1 + onwards_USR) % lengths_U11.clamp(min=1)


def score_steps(z_UTD: Tensor, c_UTC: Tensor, predictors: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """z_jᵀ(W_k c_{s-k} + b_k) for all steps s and j, [U, K, S, T]; where s < k, of no meaning."""
    utterances, steps, _ = z_UTD.shape
    predicted = [
        F.linear(F.pad(c_UTC, (0, 0, k, 0))[:, :steps], *predictor) for k, predictor in enumerate(predictors, start=1)
    ]
    predicted_UXD = torch.stack(predicted, dim=1).flatten(1, 2)
    return torch.bmm(predicted_UXD, z_UTD.mT).view(utterances, len(predictors), steps, steps)


def contrastive_losses(scores_UKST: Tensor, rivals_USR: Tensor, lengths_U: Tensor, *, scale: float) -> Tensor:
    """The loss of each utterance, [U]; nothing where it is too short to predict anything."""
    lost_UKS: Tensor = _Lost.apply(scores_UKST, _counts(rivals_USR, scores_UKST), scale)  # type: ignore[no-untyped-call]
    shares_UKS = _shares(lengths_U, lost_UKS)
    return torch.where(shares_UKS > 0, lost_UKS * shares_UKS, 0.0).sum(dim=(1, 2))


def accuracies(scores_UKST: Tensor, rivals_USR: Tensor, lengths_U: Tensor) -> Tensor:
    """How often the true step scores higher than all its rivals, the mean over distances: [U]."""
    true_UKS = scores_UKST.diagonal(dim1=2, dim2=3)
    against_UKSR = scores_UKST.gather(3, rivals_USR[:, None].expand(-1, scores_UKST.shape[1], -1, -1))
    right_UKS = true_UKS > against_UKSR.amax(dim=-1)
    shares_UKS = _shares(lengths_U, true_UKS.to(_precise(scores_UKST)))
    return (right_UKS * shares_UKS).sum(dim=(1, 2)) / scores_UKST.shape[1]


class _Lost(torch.autograd.Function):
    """log Σ_j n_sj exp(x_sj) − x_ss, where n counts candidates; of all passes over x only the shares are kept."""

    @staticmethod
    def forward(ctx: Any, scores_UKST: Tensor, counts_UST: Tensor, scale: float) -> Tensor:
        x_UKST = scores_UKST.to(counts_UST.dtype, copy=True).mul_(scale)
        true_UKS = x_UKST.diagonal(dim1=2, dim2=3).clone()
        others_UST = torch.where(counts_UST > 0, 0.0, -math.inf)
        highest_UKS1 = (x_UKST + others_UST[:, None]).amax(dim=-1, keepdim=True)
        # Who is no candidate may score anything, and counts as nothing; exp is slow where it has nothing to give.
        shares_UKST = x_UKST.sub_(highest_UKS1).clamp_(min=LEAST, max=0.0).exp_().mul_(counts_UST[:, None])
        whole_UKS1 = shares_UKST.sum(dim=-1, keepdim=True)
        ctx.save_for_backward(shares_UKST.div_(whole_UKS1))
        ctx.scale, ctx.dtype = scale, scores_UKST.dtype
        return (highest_UKS1 + whole_UKS1.log()).squeeze(-1) - true_UKS

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer_UKS: Tensor) -> tuple[Tensor, None, None]:
        (shares_UKST,) = ctx.saved_tensors
        outer_UKS = outer_UKS * ctx.scale
        gradient_UKST = shares_UKST * outer_UKS[..., None]
        gradient_UKST.diagonal(dim1=2, dim2=3).sub_(outer_UKS)
        return gradient_UKST.to(ctx.dtype), None, None


def _counts(rivals_USR: Tensor, scores_UKST: Tensor) -> Tensor:
    """How often each step is a candidate: [U, S, T]. The true step is one once."""
    utterances, _, steps, _ = scores_UKST.shape
    counts_UST = scores_UKST.new_zeros(utterances, steps, steps, dtype=_precise(scores_UKST))
    counts_UST.scatter_add_(2, rivals_USR, torch.ones_like(rivals_USR, dtype=counts_UST.dtype))
    counts_UST.diagonal(dim1=1, dim2=2).fill_(1.0)
    return counts_UST


def _precise(scores: Tensor) -> torch.dtype:
    return torch.promote_types(scores.dtype, torch.float32)


def _shares(lengths_U: Tensor, like_UKS: Tensor) -> Tensor:
    """1/(T−k) where step s can be predicted from k before it, else 0: [U, K, S]."""
    _, distances, steps = like_UKS.shape
    s_S = torch.arange(steps, device=lengths_U.device)
    k_K1 = torch.arange(1, distances + 1, device=lengths_U.device)[:, None]
    lengths_U11 = lengths_U[:, None, None]
    counts_UKS = (s_S >= k_K1) & (s_S < lengths_U11)
    return counts_UKS / (lengths_U11 - k_K1).clamp(min=1).to(like_UKS.dtype)
