"""A product factored anew is the same product, with orthonormal rows, whatever its rank; and the same each time.

Tolerances: float64, with a few sums of at most 24 products each, of numbers of norm ‖b‖·‖a‖.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sottovoce.base.seeds import torch_stream
from sottovoce.models.low_rank import orthonormal_rows, singular_basis

WITHIN = 100 * 24 * 2.0**-53


def pair(seed: int, *, rank: int = 4, true_rank: int = 4, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """a [R, 24] and b [16, R] of which the product has `true_rank`."""
    generator = torch_stream(seed, "pair")
    a = torch.randn(rank, 24, generator=generator, dtype=torch.float64)
    b = scale * torch.randn(16, rank, generator=generator, dtype=torch.float64)
    mixed = torch.randn(rank, rank, generator=generator, dtype=torch.float64)
    mixed[:, true_rank:] = 0
    return a, b @ (mixed @ torch.linalg.pinv(mixed)) if true_rank < rank else b


@given(st.integers(0, 10**6), st.integers(0, 4), st.sampled_from([1e-6, 1.0, 1e4]))
def test_the_product_stays_and_the_rows_are_orthonormal_whatever_its_rank(
    seed: int, true_rank: int, scale: float
) -> None:
    a, b = pair(seed, true_rank=true_rank, scale=scale)
    rows, basis = singular_basis(a, b)
    size = float(a.norm() * b.norm())
    assert float((b @ basis @ rows - b @ a).norm()) <= WITHIN * size
    assert float((rows @ rows.T - torch.eye(4)).norm()) <= WITHIN
    # b·x is u·s: orthogonal columns, the longest first.
    columns = b @ basis
    lengths = columns.norm(dim=0)
    assert float((columns.T @ columns - torch.diag(lengths.square())).norm()) <= WITHIN * size**2
    assert bool((lengths[:-1] >= lengths[1:] - WITHIN * size).all())
    again = singular_basis(a.clone(), b.clone())
    assert torch.equal(rows, again[0])
    assert torch.equal(basis, again[1])


def test_they_are_the_right_singular_vectors_and_values_of_the_product() -> None:
    a, b = pair(1)
    rows, basis = singular_basis(a, b)
    _, values, vectors = np.linalg.svd((b @ a).numpy())
    np.testing.assert_allclose((b @ basis).norm(dim=0).numpy(), values[:4], rtol=1e-12)
    np.testing.assert_allclose(np.abs(rows.numpy() @ vectors[:4].T), np.eye(4), atol=1e-10)
    largest = basis.T @ torch.linalg.inv(orthonormal_rows(a)[0]).T
    assert bool((largest.gather(1, largest.abs().argmax(dim=1, keepdim=True)) > 0).all())


def test_where_there_is_no_product_yet_nothing_turns() -> None:
    _, rows = orthonormal_rows(pair(2)[0])
    found, basis = singular_basis(rows, torch.zeros(16, 4))
    torch.testing.assert_close(found, rows, rtol=0, atol=WITHIN)
    torch.testing.assert_close(basis, torch.eye(4, dtype=torch.float64), rtol=0, atol=WITHIN)


@pytest.mark.parametrize("true_rank", [0, 2, 4])
def test_rows_that_depend_on_each_other_are_completed(true_rank: int) -> None:
    a = torch.randn(4, 24, generator=torch_stream(3, "rows"), dtype=torch.float64)
    a[true_rank:] = a[:true_rank].sum(dim=0)
    factor, rows = orthonormal_rows(a)
    torch.testing.assert_close(rows @ rows.T, torch.eye(4, dtype=torch.float64), rtol=0, atol=WITHIN)
    torch.testing.assert_close(factor @ rows, a, rtol=0, atol=WITHIN * max(1.0, float(a.norm())))


def test_noise_on_b_is_as_large_in_the_product() -> None:
    """‖n·a‖ = ‖n‖, where a that was drawn for LoRA makes it 1/√3 as long on average: no factor amplifies noise."""
    noise = torch.randn(16, 4, generator=torch_stream(4, "noise"), dtype=torch.float64)
    _, rows = orthonormal_rows(pair(4)[0])
    assert float((noise @ rows).norm()) == pytest.approx(float(noise.norm()), rel=1e-12)
