"""Clipping: what must hold for every update, whatever its shapes, scales, types and accidents."""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sottovoce.base.errors import InputError
from sottovoce.flat import segments
from sottovoce.flat.layout import Layers, Layout, group_layers, tensor_layers
from sottovoce.privacy.clipping import (
    AdaptiveClipping,
    Clipper,
    Normalise,
    Share,
    centred_count,
    clip_sums,
    layer_bounds,
    next_clip_bound,
    summarise,
    update_noise_multiplier,
)

GENERATOR = torch.Generator().manual_seed(4)
SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -1e-45, 1.2e-38, 3.4e38]
HALF_RANGE = {torch.float16: (-6, 4), torch.bfloat16: (-30, 30), torch.float32: (-30, 30), torch.float64: (-30, 30)}


def exact_norm(flat: Tensor) -> float:
    """The norm without rounding but the last: squares and sum in exact arithmetic."""
    values = flat.double().numpy().ravel()
    scale = float(np.abs(values).max(initial=0.0))
    return 0.0 if scale == 0 else scale * math.sqrt(math.fsum((values / scale) ** 2))


@dataclass(frozen=True)
class Case:
    layers: Layers
    updates: Tensor  # [N, P]

    @property
    def layout(self) -> Layout:
        return self.layers.layout


@st.composite
def cases(draw: st.DrawFn, *, finite: bool = False, clients: int = 3) -> Case:
    shapes = draw(st.lists(st.lists(st.integers(1, 7), max_size=3).map(tuple), min_size=1, max_size=5))
    layout = Layout(tuple(f"p{i}" for i in range(len(shapes))), tuple(shapes))
    grouped = draw(st.booleans())
    layers = group_layers(layout, {"first": ["p0"]}) if grouped else tensor_layers(layout)
    dtype = draw(st.sampled_from(list(HALF_RANGE)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    updates = layout.zeros(clients, dtype=dtype)
    for part in layout.parts(updates):
        for row in part:
            exponent = draw(st.integers(*HALF_RANGE[dtype]))
            kind = draw(st.sampled_from(["normal", "normal", "zero", "one element"]))
            values = torch.randn(row.shape, generator=generator, dtype=torch.float64) * 10.0**exponent
            if kind == "zero":
                values.zero_()
            elif kind == "one element":
                values[1:] = 0
            row.copy_(values)
    if not finite and draw(st.booleans()):
        part = layout.parts(updates)[draw(st.integers(0, len(shapes) - 1))]
        part[draw(st.integers(0, clients - 1)), 0] = draw(st.sampled_from(SPECIAL))
    return Case(layers, updates)


CLIP_BOUNDS = st.sampled_from([1e-30, 1e-8, 0.01, 0.3, 1.0, 77.0, 1e30])
SHARES = st.sampled_from(list(Share))
NORMALISE = st.sampled_from(list(Normalise))
GRIDS = st.sampled_from([None, 2.0**-60, 2.0**-20])


@given(cases(), CLIP_BOUNDS, SHARES, NORMALISE, GRIDS)
@settings(max_examples=150, deadline=None)
def test_norm_never_exceeds_the_bound(
    case: Case, clip_bound: float, share: Share, normalise: Normalise, grid: float | None
) -> None:
    clipper = Clipper(layers=case.layers, clip_bound=clip_bound, share=share, normalise=normalise, grid=grid)
    clipped, stats = clipper.clip(case.updates)
    assert clipped.isfinite().all()
    for row in clipped:
        assert exact_norm(row) <= clip_bound
    if share is not Share.GLOBAL and normalise is not Normalise.ABOVE:
        for row in clipped:
            for bound, norm in zip(clipper.layer_bounds, norms_of_layers(case.layers, row), strict=True):
                assert norm <= bound * (1 + 1e-15)
    bad = ~case.updates.isfinite().all(-1)
    assert torch.equal(stats.non_finite, bad)
    assert not clipped[bad].any()


@given(cases(), CLIP_BOUNDS, SHARES, NORMALISE, GRIDS)
@settings(max_examples=100, deadline=None)
def test_clipping_again_changes_nothing(
    case: Case, clip_bound: float, share: Share, normalise: Normalise, grid: float | None
) -> None:
    if normalise is Normalise.ALWAYS and grid is not None:
        return  # a coarse grid cuts a little off each time
    clipper = Clipper(layers=case.layers, clip_bound=clip_bound, share=share, normalise=normalise, grid=grid)
    once, _ = clipper.clip(case.updates)
    twice, stats = clipper.clip(once)
    tiny = once.abs().amax(-1, keepdim=True) < 1e-36  # a float32 layer of a few subnormals cannot be hit exactly
    assert torch.equal(torch.where(tiny, 0, once), torch.where(tiny, 0, twice))
    assert not stats.non_finite.any()


@given(cases(), CLIP_BOUNDS, SHARES, NORMALISE)
@settings(max_examples=100, deadline=None)
def test_stacked_users_are_clipped_one_by_one(
    case: Case, clip_bound: float, share: Share, normalise: Normalise
) -> None:
    clipper = Clipper(layers=case.layers, clip_bound=clip_bound, share=share, normalise=normalise)
    stacked, stats = clipper.clip(case.updates)
    total, one_by_one = case.layout.zeros(), case.layout.zeros()
    clipper.accumulate(total, case.updates)
    for i, update in enumerate(case.updates):
        alone, its_stats = clipper.clip(update)
        clipper.accumulate(one_by_one, update)
        assert torch.equal(stacked[i], alone)
        assert torch.equal(stats.clipped[i], its_stats.clipped)
        assert torch.equal(stats.non_finite[i], its_stats.non_finite)
    assert torch.equal(total, one_by_one)


@given(cases(clients=4), st.sampled_from([0.01, 1.0, 30.0]), SHARES, NORMALISE, st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_one_user_moves_the_sum_by_at_most_the_bound(
    case: Case, clip_bound: float, share: Share, normalise: Normalise, user: int
) -> None:
    # On a grid, sums are exact in any order, so this holds to the last bit.
    grid = 2.0**-45
    clipper = Clipper(layers=case.layers, clip_bound=clip_bound, share=share, normalise=normalise, grid=grid)
    with_user, without, backwards = (case.layout.zeros(dtype=torch.float64) for _ in range(3))
    clipper.accumulate(with_user, case.updates)
    for i, update in enumerate(case.updates):
        if i != user:
            clipper.accumulate(without, update)
    for update in case.updates.flip(0):
        clipper.accumulate(backwards, update)
    assert exact_norm(with_user - without) <= clip_bound
    assert torch.equal(with_user, backwards)
    # In float32, what each user adds is bounded in the same way.
    assert exact_norm(Clipper(layers=case.layers, clip_bound=clip_bound).clip(case.updates)[0][user]) <= clip_bound


@given(cases(), st.sampled_from([0.01, 1.0]), SHARES, NORMALISE, GRIDS)
@settings(max_examples=25, deadline=None)
def test_kernels_agree_with_the_loops(
    case: Case, clip_bound: float, share: Share, normalise: Normalise, grid: float | None
) -> None:
    """On a CUDA device; or anywhere that has Triton, with TRITON_INTERPRET=1."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not (torch.cuda.is_available() or interpreted):
        pytest.skip("no CUDA device")
    pytest.importorskip("triton")
    from sottovoce.flat import segments_triton as kernels

    device = "cpu" if interpreted else "cuda"
    clipper = Clipper(layers=case.layers, clip_bound=clip_bound, share=share, normalise=normalise, grid=grid)
    norms = kernels.layer_norms_on_gpu(case.updates.to(device), case.layers, chunk=64).cpu()
    assert torch.allclose(norms, segments.layer_norms(case.updates, case.layers), rtol=1e-12, equal_nan=True)
    scales = clipper._measure(case.updates, 1.0)[0]
    dtype = torch.float32 if grid is None else torch.float64
    expected, total = case.layout.zeros(dtype=dtype), case.layout.zeros(dtype=dtype, device=device)
    segments.add_scaled(expected, case.updates, scales, case.layers, grid=grid)
    kernels.add_scaled_on_gpu(total, case.updates.to(device), scales.to(device), case.layers, grid=grid, chunk=64)
    tolerance = clip_bound * 1e-6 if grid is None else 0.0
    assert torch.allclose(total.cpu(), expected, rtol=0, atol=tolerance)


def norms_of_layers(layers: Layers, row: Tensor) -> list[float]:
    squares = [0.0] * len(layers.names)
    for layer, part in zip(layers.of_parameter, layers.layout.parts(row), strict=True):
        squares[layer] = math.hypot(squares[layer], exact_norm(part))
    return squares


def layout_of(*sizes: int) -> Layout:
    return Layout(tuple(f"p{i}" for i in range(len(sizes))), tuple((size,) for size in sizes))


def test_layer_bounds_of_the_paper() -> None:
    # Definition 3 by hand: sizes 1 and 3, C = 2. uniform 2/√2; dim 2·√(1/4), 2·√(3/4);
    # weighted with α = 3 on the first: 2·√(3/6) twice.
    layers = tensor_layers(layout_of(1, 3))

    def bounds(share: Share, alpha: dict[str, float] | None = None) -> tuple[float, ...]:
        return layer_bounds(layers, clip_bound=2.0, share=share, alpha=alpha)

    assert bounds(Share.UNIFORM) == pytest.approx((math.sqrt(2), math.sqrt(2)))
    assert bounds(Share.DIM) == pytest.approx((1.0, math.sqrt(3)))
    assert bounds(Share.WEIGHTED, {"p0": 3.0}) == pytest.approx((math.sqrt(2), math.sqrt(2)))


@given(st.integers(1, 9), st.integers(1, 40), st.floats(1e-6, 1e6))
def test_uniform_is_dim_when_layers_are_of_one_size(count: int, size: int, clip_bound: float) -> None:
    layers = tensor_layers(layout_of(*[size] * count))
    uniform = layer_bounds(layers, clip_bound=clip_bound, share=Share.UNIFORM)
    assert layer_bounds(layers, clip_bound=clip_bound, share=Share.DIM) == pytest.approx(uniform, rel=1e-12)


def test_clip_only_shrinks_and_normalise_enlarges() -> None:
    layout = layout_of(4, 4, 4)
    small, large = torch.full((4,), 1e-6), torch.full((4,), 1.0)
    update = layout.flatten({"p0": large, "p1": small, "p2": torch.zeros(4)})
    share = 1 / math.sqrt(3)

    def norms(normalise: Normalise, of: Tensor) -> list[float]:
        clipper = Clipper(layers=tensor_layers(layout), clip_bound=1.0, share=Share.UNIFORM, normalise=normalise)
        return norms_of_layers(clipper.layers, clipper.clip(of)[0])

    assert norms(Normalise.NEVER, update) == pytest.approx([share, 2e-6, 0.0], rel=1e-6)
    assert norms(Normalise.ABOVE, update) == pytest.approx([share, share, 0.0], rel=1e-6)
    # Below C, `above` does nothing and `always` rescales.
    assert norms(Normalise.ABOVE, update * 0.1) == pytest.approx([0.2, 2e-7, 0.0], rel=1e-6)
    assert norms(Normalise.ALWAYS, update * 0.1) == pytest.approx([share, share, 0.0], rel=1e-6)


def test_an_update_below_the_bound_keeps_its_bits() -> None:
    layout = layout_of(5, 6)
    update = layout.flatten({"p0": torch.randn(5, generator=GENERATOR), "p1": torch.randn(6, generator=GENERATOR)})
    clipped, stats = Clipper(layers=tensor_layers(layout), clip_bound=100.0).clip(update)
    assert torch.equal(clipped, update)
    assert not stats.clipped


def test_a_bad_user_leaves_the_others_alone() -> None:
    layout = layout_of(5)
    updates = torch.zeros(3, layout.flat_size)
    updates[:, :5] = torch.randn(3, 5, generator=GENERATOR)
    updates[1, 2] = math.nan
    clipper = Clipper(layers=tensor_layers(layout), clip_bound=1.0)
    total, expected = layout.zeros(), layout.zeros()
    stats = clipper.accumulate(total, updates)
    clipper.accumulate(expected, updates[[0, 2]])
    assert torch.equal(total, expected)
    assert stats.non_finite.tolist() == [False, True, False]
    summary = summarise(clip_sums([stats]), clipper.layers)
    assert summary["updates"] == 3
    assert summary["non_finite"] == 1
    assert math.isfinite(summary["norm"])  # type: ignore[arg-type]


def test_a_cohort_of_nobody_is_a_sum_of_nothing() -> None:
    layout = layout_of(5, 3)
    clipper = Clipper(layers=tensor_layers(layout), clip_bound=1.0, share=Share.DIM)
    total = layout.zeros()
    stats = clipper.accumulate(total, layout.zeros(0))
    assert not total.any()
    assert clipper.clip(layout.zeros(0))[0].shape == (0, layout.flat_size)
    assert float(centred_count(stats)) == 0
    assert summarise(clip_sums([stats]), clipper.layers)["updates"] == summarise(None, clipper.layers)["updates"] == 0


def test_no_bound_changes_nothing_but_the_non_finite() -> None:
    layout = layout_of(3)
    updates = layout.zeros(2)
    updates[0, :3], updates[1, :3] = torch.tensor([1e30, -1.0, 0.0]), math.inf
    clipped, _ = Clipper(layers=tensor_layers(layout), clip_bound=math.inf, share=Share.DIM).clip(updates)
    assert torch.equal(clipped[0], updates[0])
    assert not clipped[1].any()


def test_weights_shrink_and_never_enlarge() -> None:
    layout = layout_of(3)
    updates = layout.zeros(3)
    updates[:, :3] = 10.0
    clipper = Clipper(layers=tensor_layers(layout), clip_bound=1.0)
    clipped, _ = clipper.clip(updates, weight=torch.tensor([0.5, 7.0, math.nan]))
    assert [exact_norm(row) for row in clipped] == pytest.approx([0.5, 1.0, 0.0], rel=1e-6)
    with pytest.raises(AssertionError, match="clip bound"):
        clipper.clip(updates, weight=1.5)


def test_summary_measures_before_and_after() -> None:
    layout = layout_of(1, 1)
    clipper = Clipper(layers=tensor_layers(layout), clip_bound=1.0, share=Share.UNIFORM)
    updates = [layout.flatten({"p0": torch.tensor([a]), "p1": torch.tensor([0.1])}) for a in (3.0, 0.1)]
    summary = summarise(clip_sums([clipper.clip(update)[1] for update in updates]), clipper.layers)
    assert summary["clip_fraction"] == 0.5
    layer = summary["layers"]["p0"]  # type: ignore[index]
    assert layer["norm_before"] == pytest.approx(1.55)
    assert layer["norm_after"] == pytest.approx((math.sqrt(0.5) + 0.1) / 2, rel=1e-6)


REFUSED: list[tuple[str, Callable[[], object]]] = [
    ("clip_bound=0", lambda: Clipper(layers=tensor_layers(layout_of(1)), clip_bound=0.0)),
    ("clip_bound=nan", lambda: Clipper(layers=tensor_layers(layout_of(1)), clip_bound=math.nan)),
    ("expected share=weighted", lambda: Clipper(layers=tensor_layers(layout_of(1)), clip_bound=1, alpha=(("p0", 2),))),
    (
        "no share to rescale to",
        lambda: Clipper(layers=tensor_layers(layout_of(1)), clip_bound=math.inf, normalise=Normalise.ALWAYS),
    ),
    (
        "matches no layer",
        lambda: Clipper(layers=tensor_layers(layout_of(1)), clip_bound=1, share=Share.WEIGHTED, alpha=(("mlp*", 2.0),)),
    ),
    (
        "share of zero",
        lambda: Clipper(layers=tensor_layers(layout_of(1)), clip_bound=1, share=Share.WEIGHTED, alpha=(("*", 0.0),)),
    ),
    ("matches no parameter", lambda: group_layers(layout_of(1), {"mlp": ["*.w1"]})),
    ("in two groups", lambda: group_layers(layout_of(1), {"a": ["p0"], "b": ["p*"]})),
    ("target_quantile=None", lambda: AdaptiveClipping()),
    ("spends more", lambda: update_noise_multiplier(4.0, count_noise_std=2.0)),
]


@pytest.mark.parametrize(("message", "build"), REFUSED, ids=[message for message, _ in REFUSED])
def test_refusals(message: str, build: Callable[[], object]) -> None:
    with pytest.raises(InputError, match=message):
        build()


@given(st.floats(0.01, 10), st.floats(0.1, 100))
def test_adaptive_noise_share_adds_up(noise_multiplier: float, extra: float) -> None:
    # Andrew et al. 2021, Theorem 1: the count has sensitivity ½, so its multiplier is 2σ_b.
    count_noise_std = noise_multiplier / 2 + extra
    z_update = update_noise_multiplier(noise_multiplier, count_noise_std=count_noise_std)
    # Two sums over one cohort are one vector: its sensitivity in units of the noise is √(z_Δ⁻² + (2σ_b)⁻²).
    together = math.hypot(1 / z_update, 1 / (2 * count_noise_std))
    assert 1 / together == pytest.approx(noise_multiplier, rel=1e-9)


def test_adaptive_bound_finds_the_quantile() -> None:
    settings_ = AdaptiveClipping(target_quantile=0.5)
    norms = np.random.default_rng(0).lognormal(mean=1.0, sigma=0.7, size=201)
    bound = 0.01
    layout = layout_of(1)
    updates = layout.zeros(len(norms), dtype=torch.float64)
    updates[:, 0] = torch.from_numpy(norms)
    total = layout.zeros(dtype=torch.float64)
    for _ in range(100):
        stats = Clipper(layers=tensor_layers(layout), clip_bound=bound).accumulate(total, updates)
        bound = next_clip_bound(bound, float(centred_count(stats)), cohort_size=len(norms), settings=settings_)
    assert bound == pytest.approx(float(np.median(norms)), rel=0.05)


def test_flat_vector_round_trip() -> None:
    layout = Layout(("a", "b", "c"), ((2, 3), (), (40,)))
    tensors = {
        "a": torch.randn(5, 2, 3, generator=GENERATOR),
        "b": torch.randn(5, generator=GENERATOR),
        "c": torch.randn(5, 40, generator=GENERATOR),
    }
    flat = layout.flatten(tensors)
    assert flat.shape == (5, layout.flat_size)
    for name, view in layout.views(flat).items():
        assert torch.equal(view, tensors[name])
    layout.views(flat)["b"].fill_(9.0)
    assert (flat[:, layout.offsets[1]] == 9.0).all()


def test_one_walk_over_all_layers_adds_the_bits_of_one_over_each() -> None:
    layout = Layout(("a", "b", "c"), ((7, 5), (300, 301), (3,)))  # longer than what is scaled at a time
    update = layout.flatten(
        {n: torch.randn(s, generator=GENERATOR) for n, s in zip(layout.names, layout.shapes, strict=True)}
    )
    for bound in (0.1, 1e6):  # clipped, and as it is
        clipper = Clipper(layers=tensor_layers(layout), clip_bound=bound)
        total = layout.zeros()
        clipper.accumulate(total, update)
        assert torch.equal(total, clipper.clip(update)[0])
    update[-1] = math.nan  # padding, which belongs to nobody
    clipper.accumulate(total, update)
    assert total.isfinite().all()
