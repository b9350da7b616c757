"""The contrastive loss: the formula written out, a naive loop, its gradient, padding, and which steps are rivals."""

import math

import pytest
import torch
from torch import Tensor

from sottovoce.base.seeds import torch_stream
from sottovoce.models.cpc.loss import (
    PLACE_BITS,
    accuracies,
    contrastive_losses,
    draw_places,
    even_places,
    rival_steps,
    score_steps,
)

DISTANCES, RIVALS, D, C, SCALE = 3, 5, 4, 6, 0.7
LENGTHS = [9, 4, 13]


def made(lengths: list[int] = LENGTHS) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]], Tensor]:
    generator = torch_stream(1, "cpc")

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    z_UTD, c_UTC = normal(len(lengths), max(lengths), D), normal(len(lengths), max(lengths), C)
    predictors = [(normal(D, C), normal(D)) for _ in range(DISTANCES)]
    places_USR = draw_places(len(lengths), max(lengths), RIVALS, generator=generator)
    return z_UTD, c_UTC, predictors, rival_steps(places_USR, torch.tensor(lengths), max(lengths))


def written_out(z_TD: Tensor, c_TC: Tensor, predictors: list[tuple[Tensor, Tensor]], rivals_SR: Tensor) -> Tensor:
    """App. A.1, term by term; `z_TD` and `c_TC` are of one utterance, without padding."""
    steps, loss = len(z_TD), torch.zeros((), dtype=torch.float64)
    for k, (weight, bias) in enumerate(predictors, start=1):
        for t in range(steps - k):
            predicted = weight @ c_TC[t] + bias
            true = torch.exp(z_TD[t + k] @ predicted * SCALE)
            others = sum(torch.exp(z_TD[rival] @ predicted * SCALE) for rival in rivals_SR[t + k].tolist())
            loss = loss - torch.log(true / (true + others)) / (steps - k)
    return loss


def test_it_is_the_formula_written_out() -> None:
    """Values and gradients, of utterances of several lengths in one batch."""
    z, c, predictors, rivals = made()
    leaves = [z, c, *(tensor for pair in predictors for tensor in pair)]
    for leaf in leaves:
        leaf.requires_grad_()
    found = contrastive_losses(score_steps(z, c, predictors), rivals, torch.tensor(LENGTHS), scale=SCALE)
    expected = torch.stack([written_out(z[u, :n], c[u, :n], predictors, rivals[u]) for u, n in enumerate(LENGTHS)])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    weights = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    for ours, theirs in zip(
        torch.autograd.grad((found * weights).sum(), leaves),
        torch.autograd.grad((expected * weights).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_padding_has_no_say_and_no_gradient() -> None:
    z, c, predictors, rivals = made()
    lengths = torch.tensor(LENGTHS)
    scores = score_steps(z, c, predictors)
    expected = contrastive_losses(scores, rivals, lengths, scale=SCALE), accuracies(scores, rivals, lengths)
    behind = torch.arange(max(LENGTHS)) >= lengths[:, None]
    z, c = (torch.where(behind[..., None], 1e6, x).requires_grad_() for x in (z, c))
    scores = score_steps(z, c, predictors)
    found = contrastive_losses(scores, rivals, lengths, scale=SCALE)
    assert torch.equal(found, expected[0])
    assert torch.equal(accuracies(scores, rivals, lengths), expected[1])
    for gradient in torch.autograd.grad(found.sum(), [z, c]):
        assert gradient[behind].eq(0).all()
        assert gradient[~behind].ne(0).any()


def test_the_accuracy_is_how_often_the_true_step_scores_highest() -> None:
    z, c, predictors, rivals = made([9])
    found = accuracies(score_steps(z, c, predictors), rivals, torch.tensor([9]))
    shares = []
    for k, (weight, bias) in enumerate(predictors, start=1):
        right = 0
        for t in range(9 - k):
            scores = z[0] @ (weight @ c[0, t] + bias)
            right += bool(scores[t + k] > scores[rivals[0, t + k]].max())
        shares.append(right / (9 - k))
    assert found.tolist() == pytest.approx([sum(shares) / DISTANCES])


def test_who_answers_the_same_everywhere_is_never_right_and_loses_what_chance_does() -> None:
    z, c, predictors, rivals = made()
    nothing = [(torch.zeros_like(weight), torch.zeros_like(bias)) for weight, bias in predictors]
    scores, lengths = score_steps(z, c, nothing), torch.tensor(LENGTHS)
    assert accuracies(scores, rivals, lengths).tolist() == [0.0] * 3
    assert contrastive_losses(scores, rivals, lengths, scale=SCALE).tolist() == pytest.approx(
        [DISTANCES * math.log(RIVALS + 1)] * 3
    )


def test_what_is_too_short_to_predict_anything_loses_nothing() -> None:
    z, c, predictors, _ = made([4, 4, 4])
    lengths = torch.tensor([0, 1, 2])
    rivals = rival_steps(even_places(RIVALS), lengths, 4)
    found = contrastive_losses(score_steps(z.requires_grad_(), c, predictors), rivals, lengths, scale=SCALE)
    assert found[:2].tolist() == [0.0, 0.0]
    assert found[2].item() > 0
    (gradient,) = torch.autograd.grad(found.sum(), [z])
    assert gradient.isfinite().all()


def test_rivals_are_the_other_steps_of_the_utterance_alike() -> None:
    """Each step is drawn as often as the others: 20,000 draws of one of 6, each within 5 standard deviations."""
    places = draw_places(1, 7, 20_000, generator=torch_stream(2, "cpc"))
    rivals = rival_steps(places, torch.tensor([7]), 7)[0]
    mean, deviation = 20_000 / 6, math.sqrt(20_000 * 1 / 6 * 5 / 6)
    for step in range(7):
        counts = torch.bincount(rivals[step], minlength=7)
        assert counts[step] == 0
        assert all(abs(int(count) - mean) < 5 * deviation for s, count in enumerate(counts) if s != step)


@pytest.mark.parametrize("length", [2, 6, 200])
def test_without_chance_rivals_are_spread_evenly(length: int) -> None:
    (rivals,) = rival_steps(even_places(50), torch.tensor([length]), length)
    for step, own in enumerate(rivals):
        counts = torch.bincount(own, minlength=length)
        assert counts[step] == 0
        others = torch.cat([counts[:step], counts[step + 1 :]])
        assert int(others.max() - others.min()) <= 1


def test_the_furthest_places_are_still_within_the_utterance() -> None:
    places = torch.tensor([0, 2**PLACE_BITS - 1], dtype=torch.int32)[None, None]
    for length in (2, 3, 1_000, 100_000):
        rivals = rival_steps(places, torch.tensor([length]), 1)
        assert rivals.tolist() == [[[1, length - 1]]]
