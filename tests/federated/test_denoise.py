"""The filter on releases is Wiener's, for a signal like the updates that it has learned from."""

import math

import pytest
import torch
from torch import Tensor

from sottovoce.errors import InputError
from sottovoce.federated import denoise
from sottovoce.federated.denoise import LEAST_COMMON, Moments, WienerFilter, matrix_shape
from sottovoce.flat.layout import Layout
from sottovoce.privacy.clipping import Share
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.settings import PrivacySettings
from sottovoce.seeds import torch_stream

SHAPES = {"matrix": (3, 4), "kernel": (4, 2, 3), "vector": (5,), "row": (1, 6), "number": ()}
LAYOUT = Layout.of({name: torch.zeros(shape) for name, shape in SHAPES.items()})
CPU = torch.device("cpu")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
# Two products each way of at most eight numbers, each off by 2⁻²⁴ of itself, and bases that are float32.
ROUNDING = 64 * 2.0**-24


def plan_of(layout: Layout, std: float, *, cohort_size: int = 10, denominator: float | None = None) -> Plan:
    """With noise of standard deviation `std` on the mean."""
    settings = PrivacySettings(
        population_size=100,
        privacy_unit="speaker",
        cohort_size=cohort_size,
        clip_bound=1.0,
        noise_multiplier=std * (denominator or cohort_size),
        denominator=denominator,
        delta=1e-5,
        root_seed=1,
    )
    return Plan(settings, layout)


def random_updates(layout: Layout, count: int, *, name: str = "people") -> Tensor:
    """[N, P], with something in common and most of it along few axes."""
    generator = torch_stream(1, name)
    flat_NP = layout.zeros(count)
    for view in layout.views(flat_NP).values():
        fading = torch.arange(1, view[0].numel() + 1, dtype=torch.float32).reciprocal().reshape(view.shape[1:])
        view.copy_((torch.randn(view.shape, generator=generator) + 0.7) * fading)
    return flat_NP


def learned(updates_NP: Tensor, layout: Layout = LAYOUT) -> WienerFilter:
    moments = Moments(layout, device=updates_NP.device)
    moments.add(updates_NP)
    return moments.filter()


def dense_filter(matrices_NOI: Tensor, plan: Plan, *, turned: tuple[bool, bool] = (True, True)) -> Tensor:
    """Σ·(Σ + σ²)⁻¹ [O·I, O·I] in float64, for the covariance Σ of the mean that follows from all people."""
    count, rows, columns = matrices_NOI.shape
    people = matrices_NOI.double()
    sides = [torch.einsum("noi,npi->op", people, people) / count, torch.einsum("noi,noj->ij", people, people) / count]
    for side, turns in enumerate(turned):
        if not turns or min(rows, columns) == 1:
            sides[side] = torch.diag(sides[side].diagonal())
    energy = float(people.square().sum()) / count
    common = (count * float(people.mean(0).square().sum()) - energy) / (count - 1) / energy
    common = min(max(common, LEAST_COMMON), 1.0)
    scale = (plan.cohort_size / plan.denominator) ** 2 * (common + (1 - common) / plan.cohort_size)
    covariance = scale * torch.kron(sides[0], sides[1]) / energy
    return covariance @ torch.linalg.inv(covariance + plan.noise_std_mean**2 * torch.eye(rows * columns))


def as_matrices(view_N: Tensor) -> Tensor:
    return view_N.reshape(len(view_N), *matrix_shape(view_N.shape[1:])).cpu()


def far(found: Tensor, expected: Tensor) -> float:
    """How far apart, of the length of what is expected."""
    return float((found.cpu().double().flatten() - expected.flatten()).norm() / expected.norm())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("std", [0.01, 0.1, 1.0])
@pytest.mark.parametrize("denominator", [None, 4.0])
def test_it_is_the_dense_wiener_filter(device: str, std: float, denominator: float | None) -> None:
    updates_NP = random_updates(LAYOUT, 6).to(device)
    mean_P, plan = random_updates(LAYOUT, 1, name="mean")[0].to(device), plan_of(LAYOUT, std, denominator=denominator)
    before_P = mean_P.clone()
    kept = learned(updates_NP)(mean_P, plan)
    for name, people in LAYOUT.views(updates_NP).items():
        given = LAYOUT.views(before_P)[name].cpu().double().flatten()
        expected = dense_filter(as_matrices(people), plan) @ given
        assert far(LAYOUT.views(mean_P)[name], expected) < ROUNDING, name
    assert kept == pytest.approx(float(mean_P.norm() / before_P.norm()) ** 2, rel=1e-5)
    assert 0 < kept < 1


@pytest.mark.parametrize(("widest", "turned"), [(3, (True, False)), (2, (False, False))])
def test_a_side_that_is_too_long_keeps_its_own_axes(
    widest: int, turned: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(denoise, "WIDEST", widest)
    layout = Layout.of({"matrix": torch.zeros(3, 4)})
    updates_NP, plan = random_updates(layout, 6), plan_of(layout, 0.1)
    mean_P = random_updates(layout, 1, name="mean")[0]
    given = layout.views(mean_P)["matrix"].double().flatten()
    expected = dense_filter(as_matrices(layout.views(updates_NP)["matrix"]), plan, turned=turned) @ given
    learned(updates_NP, layout)(mean_P, plan)
    assert far(layout.views(mean_P)["matrix"], expected) < ROUNDING


def test_people_may_come_one_by_one_or_together() -> None:
    updates_NP, one_by_one = random_updates(LAYOUT, 7), Moments(LAYOUT, device=CPU)
    one_by_one.add(updates_NP[:3])
    for update_P in updates_NP[3:]:
        one_by_one.add(update_P)
    found, plan = one_by_one.filter(), plan_of(LAYOUT, 0.1)
    apart_P, together_P = (random_updates(LAYOUT, 1, name="mean")[0] for _ in range(2))
    found(apart_P, plan)
    learned(updates_NP)(together_P, plan)
    assert (found.people, learned(updates_NP).people) == (7, 7)
    assert far(apart_P, together_P.double()) < ROUNDING


def test_without_noise_not_a_bit_is_changed_and_with_next_to_none_nearly_nothing() -> None:
    found, given_P = learned(random_updates(LAYOUT, 40)), random_updates(LAYOUT, 1, name="mean")[0]
    mean_P = given_P.clone()
    assert found(mean_P, plan_of(LAYOUT, 0.0)) == 1.0
    assert torch.equal(mean_P, given_P)
    found(mean_P, plan_of(LAYOUT, 1e-9))
    assert far(mean_P, given_P.double()) < ROUNDING


def test_with_endless_noise_nothing_is_left() -> None:
    """The gain is at most signal / σ², so no coordinate keeps more than that."""
    updates_NP, mean_P = random_updates(LAYOUT, 40), random_updates(LAYOUT, 1, name="mean")[0]
    most = float(updates_NP.square().sum(1).mean())  # no coordinate has more energy than all have together
    assert learned(updates_NP)(mean_P, plan_of(LAYOUT, 1e6)) <= (most / 1e12) ** 2
    assert bool(mean_P.isfinite().all())


def test_a_tensor_that_nobody_moves_stays_where_it_is() -> None:
    updates_NP, mean_P = random_updates(LAYOUT, 5), random_updates(LAYOUT, 1, name="mean")[0]
    LAYOUT.views(updates_NP)["matrix"].zero_()
    learned(updates_NP)(mean_P, plan_of(LAYOUT, 0.1))
    assert not LAYOUT.views(mean_P)["matrix"].any()
    assert bool(mean_P.isfinite().all())


def test_padding_stays_zero() -> None:
    mean_P = random_updates(LAYOUT, 1, name="mean")[0]
    learned(random_updates(LAYOUT, 5))(mean_P, plan_of(LAYOUT, 0.1))
    cleared_P = mean_P.clone()
    LAYOUT.clear_padding(cleared_P)
    assert torch.equal(mean_P, cleared_P)


# What is common to all.


def test_the_common_share_is_that_of_the_mean_without_its_luck() -> None:
    """Of n people μ ± d, in pairs: energy ‖μ‖² + ‖d‖², and ‖mean‖² = ‖μ‖², of which luck has had ‖d‖²/(n − 1)."""
    layout = Layout.of({"vector": torch.zeros(2)})
    people = torch.tensor([[3.0, 2.0], [3.0, -2.0]]).repeat(4, 1)
    updates_NP = layout.zeros(8)
    layout.views(updates_NP)["vector"].copy_(people)
    (spectrum,) = learned(updates_NP, layout).spectra
    assert spectrum.common == pytest.approx((9 - 4 / 7) / 13, rel=1e-6)
    same = layout.zeros(8) + updates_NP[0]
    assert learned(same, layout).spectra[0].common == pytest.approx(1.0, rel=1e-6)


def test_people_with_nothing_in_common_leave_a_little() -> None:
    layout = Layout.of({"vector": torch.zeros(2)})
    updates_NP = layout.zeros(4)
    layout.views(updates_NP)["vector"].copy_(torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 2.0], [0.0, -2.0]]))
    assert learned(updates_NP, layout).spectra[0].common == LEAST_COMMON


def test_one_person_is_too_few() -> None:
    with pytest.raises(InputError, match="1 public people could be trained, expected at least 2"):
        learned(random_updates(LAYOUT, 1))


# What it is good for.


def test_a_planted_signal_of_few_axes_comes_out_of_white_noise_as_predicted() -> None:
    """For a fixed signal m and a filter W: E‖W(m + n) − m‖² = ‖(W − 1)m‖² + σ²‖W‖², far below the noise's own P·σ².

    ‖W(m + n) − m‖² varies by 2σ⁴‖WᵀW‖² + 4σ²‖Wᵀ(W − 1)m‖²: the mean of many draws is held to six standard errors.
    """
    rows, columns, std, draws = 24, 20, 0.3, 400
    layout, generator = Layout.of({"matrix": torch.zeros(rows, columns)}), torch_stream(1, "planted")
    left, right = (torch.linalg.qr(torch.randn(size, 2, generator=generator))[0] for size in (rows, columns))
    people = left @ (torch.randn(60, 2, 2, generator=generator) + torch.diag(torch.tensor([3.0, 2.0]))) @ right.T
    signal = left @ torch.diag(torch.tensor([3.0, 2.0])) @ right.T
    updates_NP, plan = layout.zeros(len(people)), plan_of(layout, std)
    layout.views(updates_NP)["matrix"].copy_(people)
    found = learned(updates_NP, layout)
    errors = []
    for _ in range(draws):
        mean_P = layout.zeros()
        layout.views(mean_P)["matrix"].copy_(signal + std * torch.randn(rows, columns, generator=generator))
        found(mean_P, plan)
        errors.append(float((layout.views(mean_P)["matrix"] - signal).square().sum()))
    dense = dense_filter(people, plan)
    bias = (dense - torch.eye(rows * columns)) @ signal.double().flatten()
    expected = float(bias.square().sum() + std**2 * dense.square().sum())
    variance = float(2 * std**4 * (dense.T @ dense).square().sum() + 4 * std**2 * (dense.T @ bias).square().sum())
    assert abs(sum(errors) / draws - expected) < 6 * math.sqrt(variance / draws)
    assert expected < 0.02 * rows * columns * std**2


@pytest.mark.parametrize("share", list(Share))
def test_noise_is_the_same_on_every_coordinate_however_the_bound_is_shared(share: Share) -> None:
    """What the filter rests on: shares move bounds, and never noise."""
    whole = plan_of(LAYOUT, 0.1)
    alpha = {"matrix": 2.0} if share is Share.WEIGHTED else {}
    settings = PrivacySettings(**{**vars(whole.settings), "share": share, "alpha": alpha})
    assert Plan(settings, LAYOUT).noise_std_mean == whole.noise_std_mean == pytest.approx(0.1)


def test_it_says_what_it_has_learned() -> None:
    assert learned(random_updates(LAYOUT, 5)).about.startswith("denoise: learned from 5 public people")
