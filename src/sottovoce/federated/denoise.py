"""A Wiener filter on the noised mean: where the updates of public people are short, what a release says is noise.

    noised mean ─► turn to public updates' axes ─► shrink by signal / (signal + noise) ─► turn back ─► server's step

It comes after the noise and knows nothing of any client, so it is post-processing: no ε hangs on it. Each tensor is a
matrix X, whose axes are the eigenvectors of the means of X·Xᵀ and Xᵀ·X over public people, with eigenvalues a and b;
the energy at axes (o, i) is taken to be a_o·b_i / Σa (a Kronecker product). docs/decisions/033 has the arithmetic.

Shapes: P flat length, N people, O and I the sides of a tensor as a matrix, D one of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import final

import torch
from torch import Tensor

from sottovoce.errors import InputError
from sottovoce.flat.layout import Layout
from sottovoce.privacy.plan import Plan

WIDEST = 2048  # a longer side keeps its own axes: its eigenvectors would take more memory than the model
LEAST_COMMON = 1e-3  # what few people have in common cannot be told from nothing
LARGEST = 1e30  # signal over noise; beyond, nothing is shrunk in float32


@dataclass(frozen=True, eq=False)
class Axes:
    """One side of a matrix: unit vectors as columns (None: its own axes), and each one's mean energy in float64."""

    basis_DD: Tensor | None
    energies_D: Tensor


@dataclass(frozen=True, eq=False)
class Spectrum:
    """What public people's updates of one tensor are like; `common` is the share of their energy that all share."""

    rows: Axes
    columns: Axes
    common: float

    def signal_to_noise(self, plan: Plan) -> Tensor:
        """[O, I]: expected energy of the mean's coordinates over the noise's variance.

        Of a mean of S people, what is common to all stays, and the rest of one person's energy is left over S.
        """
        size, scale = plan.cohort_size, plan.cohort_size / plan.denominator
        of_mean = scale**2 * (self.common + (1 - self.common) / size)
        shares_O = self.rows.energies_D / self.rows.energies_D.sum().clamp(min=torch.finfo(torch.float64).tiny)
        ratios_I = self.columns.energies_D * (of_mean / plan.noise_std_mean / plan.noise_std_mean)
        return torch.outer(shares_O.float(), ratios_I.clamp(max=LARGEST).float())

    def shrink(self, matrix_OI: Tensor, plan: Plan) -> Tensor:
        """A new matrix: less of `matrix_OI` where noise is most of it."""
        rows_OO, columns_II = self.rows.basis_DD, self.columns.basis_DD
        turned_OI = matrix_OI if rows_OO is None else rows_OO.T @ matrix_OI
        turned_OI = turned_OI if columns_II is None else turned_OI @ columns_II
        ratio_OI = self.signal_to_noise(plan)
        kept_OI = turned_OI * (ratio_OI / (1 + ratio_OI))
        kept_OI = kept_OI if columns_II is None else kept_OI @ columns_II.T
        return kept_OI if rows_OO is None else rows_OO @ kept_OI


@dataclass(frozen=True, eq=False)
class WienerFilter:
    """One `Spectrum` for each tensor of `layout`, learned from so many `people`; `left_out` could not be trained."""

    layout: Layout
    spectra: tuple[Spectrum, ...]
    people: int
    left_out: int = 0

    @property
    def about(self) -> str:
        """In words."""
        energies = [float(spectrum.rows.energies_D.sum()) for spectrum in self.spectra]
        of_common = sum(energy * one.common for energy, one in zip(energies, self.spectra, strict=True))
        share = of_common / sum(energies) if sum(energies) else 0.0
        left_out = f" ({self.left_out:,} more could not be trained)" if self.left_out else ""
        people = f"{self.people:,} public people{left_out}"
        return f"denoise: learned from {people}, whose updates share {share:.1%} of their energy"

    @torch.no_grad()
    def __call__(self, mean_P: Tensor, plan: Plan) -> float:
        """Shrink the noised mean of a round of `plan`, in place; returns the share of its energy that is kept.

        Guarantee: a function of a release and of public people alone. Without noise nothing is changed.
        """
        if plan.noise_std_mean == 0:
            return 1.0
        before = mean_P.norm()
        for view, spectrum in zip(self.layout.views(mean_P).values(), self.spectra, strict=True):
            view.copy_(spectrum.shrink(view.reshape(matrix_shape(view.shape)), plan).view_as(view))
        return float((mean_P.norm() / before.clamp(min=torch.finfo(torch.float32).tiny)).square())


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """A tensor as a matrix: its first axis and all others; a vector is one row.

    >>> matrix_shape((8, 4, 3)), matrix_shape((5,)), matrix_shape(())
    ((8, 12), (1, 5), (1, 1))
    """
    return (shape[0], prod(shape[1:])) if len(shape) > 1 else (1, prod(shape))


@final
class Moments:
    """Second moments of public people's clipped updates, added up as they come: no update is kept."""

    def __init__(self, layout: Layout, *, device: torch.device) -> None:
        self._layout, self.people, self.left_out = layout, 0, 0
        self._sum_P = layout.zeros(device=device, dtype=torch.float64)
        sides = [_turned(*matrix_shape(shape)) for shape in layout.shapes]
        self._sides = [
            tuple(
                torch.zeros((size, size) if turns else (size,), dtype=torch.float64, device=device)
                for size, turns in zip(matrix_shape(shape), turned, strict=True)
            )
            for shape, turned in zip(layout.shapes, sides, strict=True)
        ]

    @torch.no_grad()
    def add(self, updates: Tensor) -> None:
        """The clipped updates of one person [P] or of several [N, P]."""
        updates_NP = updates.float().reshape(-1, self._layout.flat_size)
        self.people += len(updates_NP)
        self._sum_P += updates_NP.sum(0)
        for view, (rows, columns) in zip(self._layout.views(updates_NP).values(), self._sides, strict=True):
            matrices_NOI = view.reshape(len(view), *matrix_shape(view.shape[1:]))
            rows += _energies(matrices_NOI)
            columns += _energies(matrices_NOI.mT)

    def filter(self) -> WienerFilter:
        """What all of them say; InputError where they are too few to have anything in common."""
        if self.people < 2:
            raise InputError(f"denoise: {self.people} public people could be trained, expected at least 2")
        means = self._layout.parts(self._sum_P / self.people)
        spectra = [self._spectrum(mean, *sides) for mean, sides in zip(means, self._sides, strict=True)]
        return WienerFilter(self._layout, tuple(spectra), self.people, self.left_out)

    def _spectrum(self, mean: Tensor, rows: Tensor, columns: Tensor) -> Spectrum:
        count, of_rows, of_columns = self.people, _axes(rows / self.people), _axes(columns / self.people)
        energy = float(of_rows.energies_D.sum())
        # Unbiased: the mean of n people has the energy of what is common, and a share of 1/n of the rest.
        of_common = (count * float(mean.square().sum()) - energy) / (count - 1)
        common = min(max(of_common / energy if energy else 0.0, LEAST_COMMON), 1.0)
        return Spectrum(of_rows, of_columns, common)


def _turned(rows: int, columns: int) -> tuple[bool, bool]:
    """Which sides of a matrix have axes of their own; a vector's has none."""
    is_vector = min(rows, columns) < 2
    return not is_vector and rows <= WIDEST, not is_vector and columns <= WIDEST


def _energies(matrices_NDE: Tensor) -> Tensor:
    """Σ X·Xᵀ of all people [D, D], or its diagonal [D] where axes are not turned."""
    turned, _ = _turned(*matrices_NDE.shape[1:])
    if turned:
        return torch.einsum("nde,nfe->df", matrices_NDE, matrices_NDE)
    return matrices_NDE.square().sum((0, 2))


def _axes(energies: Tensor) -> Axes:
    """Eigenvectors, those with most energy first, of [D, D]; a diagonal [D] is its own."""
    if energies.dim() == 1:
        return Axes(None, energies)
    values_D, vectors_DD = torch.linalg.eigh(energies)
    return Axes(vectors_DD.flip(1).float().contiguous(), values_D.flip(0).clamp(min=0.0))
