"""Gradient clipping: never above the bound, nothing changed below it, and loud about what is not finite."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sottovoce.base.seeds import torch_stream
from sottovoce.flat.layout import Layout
from sottovoce.optimisers import SGD
from sottovoce.optimisers.weights import FlatOptimiser

SHAPES: list[tuple[int, ...]] = [(3, 4), (5,), ()]
LAYOUT = Layout(tuple("abc"), tuple(SHAPES))


def clip(gradients: list[torch.Tensor], *, max_norm: float) -> torch.Tensor:
    """Clip in place by a step of plain SGD: from zero and with a learning rate of one it ends at minus the gradient."""
    flat_P = LAYOUT.flatten(dict(zip(LAYOUT.names, gradients, strict=True)))
    master_P = torch.zeros_like(flat_P)
    norm, _ = FlatOptimiser(SGD(), LAYOUT, master=master_P, working=master_P).step(flat_P, lr=1.0, max_norm=max_norm)
    for gradient, stepped in zip(gradients, LAYOUT.views(master_P).values(), strict=True):
        gradient.copy_(-stepped)
    return norm


def draw(seed: int, *, rows: int | None = None, scale: float = 1.0) -> list[torch.Tensor]:
    shapes = SHAPES if rows is None else [(rows, *shape) for shape in SHAPES]
    generator = torch_stream(seed, "gradients")
    return [scale * torch.randn(shape, generator=generator) for shape in shapes]


def flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([t.double().flatten() for t in tensors])


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 99), exponent=st.floats(-15, 15), max_norm=st.floats(1e-6, 1e6))
def test_clipping_shortens_to_the_bound_and_keeps_the_direction(seed: int, exponent: float, max_norm: float) -> None:
    gradients = draw(seed, scale=10**exponent)
    before = flat(gradients)
    norm = clip(gradients, max_norm=max_norm)
    assert float(norm) == pytest.approx(float(before.norm()), rel=1e-5)
    expected = before * min(1.0, max_norm / float(before.norm()))
    torch.testing.assert_close(flat(gradients), expected, rtol=1e-5, atol=0)


def test_gradients_below_the_bound_keep_their_bits() -> None:
    for max_norm in (100.0, math.inf):
        gradients = draw(1)
        clip(gradients, max_norm=max_norm)
        assert all(torch.equal(g, again) for g, again in zip(gradients, draw(1), strict=True))


def test_zero_gradients_stay_zero() -> None:
    gradients = [torch.zeros(shape) for shape in SHAPES]
    assert clip(gradients, max_norm=1.0) == 0
    assert all(torch.equal(g, torch.zeros_like(g)) for g in gradients)


# 1e30 is finite, but its square is not in float32: a plain division would make zeros of such gradients, unseen.
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
def test_a_norm_that_is_not_finite_spoils_all_gradients(bad: float) -> None:
    gradients = draw(1)
    gradients[1][2] = bad
    assert not clip(gradients, max_norm=1.0).isfinite()
    assert all(g.isnan().all() for g in gradients)


@pytest.mark.parametrize("bad", [None, math.nan, math.inf])
def test_stacked_clients_are_clipped_one_by_one(bad: float | None) -> None:
    stacked = draw(1, rows=3)
    for gradients in stacked:
        gradients[0] *= 1e-3  # below the bound
        gradients[2] *= 1e3
    if bad is not None:
        stacked[0][1, 0, 0] = bad
    alone = [[g[row].clone() for g in stacked] for row in range(3)]
    norm_C = clip(stacked, max_norm=1.0)
    for row in range(3):
        norm = clip(alone[row], max_norm=1.0)
        torch.testing.assert_close(norm_C[row], norm, equal_nan=True)
        for together, separate in zip(stacked, alone[row], strict=True):
            torch.testing.assert_close(together[row], separate, equal_nan=True)
