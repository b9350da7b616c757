"""Seeded noise as a kernel, against the same arithmetic in NumPy.

The twin is tested everywhere: its words against published ones, its normals against the distribution. The kernel is
compared with it on a CUDA device, or anywhere (slowly) with TRITON_INTERPRET=1 in the environment.
"""

import math
import os
import warnings
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from sottovoce.base.seeds import torch_stream
from sottovoce.flat.layout import Layout
from sottovoce.privacy import noise, noise_triton
from sottovoce.privacy.noise_triton import _normals

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError:  # the tests of the kernel are skipped then
    from types import SimpleNamespace

    triton = SimpleNamespace(jit=lambda kernel: kernel)
    tl = SimpleNamespace(constexpr=int)

Words = NDArray[np.uint32]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
KEYS = st.integers(-(2**63), 2**63 - 1)
SIZES = st.lists(st.integers(0, 300), min_size=1, max_size=5).filter(any)


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    pytest.importorskip("triton")
    if not (torch.cuda.is_available() or INTERPRETED):
        pytest.skip("no CUDA device")
    return noise_triton


def philox(counter: list[Words | int], key: tuple[int, int]) -> list[Words]:
    """Philox-4x32-10 (Salmon et al. 2011): ten rounds of two products, crossed over, under a key that counts up."""
    c0, c1, c2, c3 = (np.asarray(word, dtype=np.uint64) for word in counter)
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        low, high = np.uint64(2**32 - 1), np.uint64(32)
        c0, c1, c2, c3 = (p1 >> high) ^ c1 ^ np.uint64(k0), p1 & low, (p0 >> high) ^ c3 ^ np.uint64(k1), p0 & low
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [word.astype(np.uint32) for word in (c0, c1, c2, c3)]


def normals(a: Words, b: Words) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Box–Muller in float64, from a uniform and an angle rounded to float32 as the kernel does."""
    uniform = a.astype(np.float32) * np.float32(2.0**-32) + np.float32(2.0**-33)
    radius = np.sqrt(-2 * np.log(uniform.astype(np.float64))) * np.where(b >> np.uint32(31), -1, 1)
    angle = (b << np.uint32(2)).view(np.int32).astype(np.float32).astype(np.float64) * (2.0**-32 * math.pi / 2)
    swap = (b >> np.uint32(30)) & np.uint32(1) == 1
    x, y = np.cos(angle), np.sin(angle)
    return radius * np.where(swap, y, x), radius * np.where(swap, x, y)


def reference(count: int, key: int) -> NDArray[np.float64]:
    """N(0, 1) for elements 0 to `count`: four for each counter."""
    counters = np.arange(-(-count // 4), dtype=np.uint32)
    w0, w1, w2, w3 = philox([counters, 0, 0, 0], (key % 2**32, (key >> 32) % 2**32))
    return np.stack([*normals(w0, w1), *normals(w2, w3)], axis=1).reshape(-1)[:count]


def test_words_are_the_published_ones() -> None:
    # Known answers that come with Random123: zeros, ones, and the digits of π.
    ones = 2**32 - 1
    for counter, key, expected in (
        ([0, 0, 0, 0], (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([ones] * 4, (ones, ones), "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ):
        assert " ".join(f"{int(word):08x}" for word in philox(list(counter), key)) == expected


def test_normals_are_gaussian_and_independent() -> None:
    n = 400_000
    first, second = reference(n, key=5), reference(n, key=6)
    # Within five standard errors: mean 1/√n, variance √(2/n), kurtosis √(24/n).
    assert abs(first.mean()) < 5 / math.sqrt(n)
    assert abs(first.var() - 1) < 5 * math.sqrt(2 / n)
    assert abs(stats.kurtosis(first)) < 5 * math.sqrt(24 / n)
    assert stats.kstest(first, "norm").pvalue > 1e-6
    pairs = {"steps": (first, second)} | {f"distance {d}": (first[d:], first[:-d]) for d in (1, 2, 3, 4)}
    pairs |= {f"places {a}, {b}": (first[a::4], first[b::4]) for a in range(4) for b in range(a)}
    for what, (a, b) in pairs.items():
        for power in (1, 2):  # the two of a point share a radius: their squares would tell
            assert abs(np.corrcoef(a**power, b**power)[0, 1]) < 5 / math.sqrt(len(a)), what
    # A point's angle is uniform over the whole circle.
    angle = np.arctan2(first[1::2], first[::2]) / (2 * math.pi) + 0.5
    assert stats.kstest(angle, "uniform").pvalue > 1e-6


def test_the_farthest_and_the_nearest_draw() -> None:
    # Word 0 is the uniform 2⁻³³; the largest words round to 1. Angle 0 leaves the radius as it is.
    far, near = normals(np.array([0, 2**32 - 1], dtype=np.uint32), np.zeros(2, dtype=np.uint32))[0]
    assert far == pytest.approx(math.sqrt(66 * math.log(2)))
    assert near == 0


@triton.jit  # type: ignore[untyped-decorator]
def _apply_normals(a, b, x, y, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    index = tl.arange(0, COUNT)
    words = tl.load(a + index).to(tl.uint32, bitcast=True), tl.load(b + index).to(tl.uint32, bitcast=True)
    first, second = _normals(words[0], words[1])
    tl.store(x + index, first)
    tl.store(y + index, second)


def test_kernel_normals_at_the_edges(kernels: ModuleType) -> None:
    edges = [0, 1, 2**24, 2**29, 2**30 - 1, 2**30, 2**31 - 1, 2**31, 3 * 2**30, 2**32 - 2**9, 2**32 - 2**8, 2**32 - 1]
    a, b = (grid.reshape(-1) for grid in np.meshgrid(*[np.array(edges * 3, dtype=np.uint32)[:32]] * 2))
    inputs = [torch.from_numpy(words.view(np.int32)).to(DEVICE) for words in (a, b)]
    outputs = [torch.full((1024,), math.nan, device=DEVICE) for _ in "xy"]
    _apply_normals[(1,)](*inputs, *outputs, COUNT=1024)
    for found, expected in zip(outputs, normals(a, b), strict=True):
        np.testing.assert_allclose(found.cpu().numpy(), expected, rtol=1e-6, atol=2e-6)


def layout_of(sizes: list[int]) -> Layout:
    return Layout(tuple(f"t{i}" for i in range(len(sizes))), tuple((size,) for size in sizes))


def drawn(layout: Layout, key: int, *, factors: tuple[float, ...] | None = None, chunk: int = 64) -> Tensor:
    total = layout.zeros(device=DEVICE)
    on_device = torch.tensor([key], device=DEVICE)
    noise_triton.add_normal(total, std=0.25, key=on_device, layout=layout, factors=factors, chunk=chunk)
    return total.cpu()


@given(SIZES, KEYS, st.booleans())
@example([5000, 3], -1, True)
@settings(max_examples=15, deadline=None)
def test_kernel_draws_what_numpy_draws(kernels: ModuleType, sizes: list[int], key: int, scaled: bool) -> None:
    layout = layout_of(sizes)
    factors = tuple(0.5 * i for i in range(len(sizes))) if scaled else None
    expected = torch.from_numpy(reference(layout.flat_size, key) * 0.25)
    for part, factor in zip(layout.parts(expected), factors or [1.0] * len(sizes), strict=True):
        part.mul_(factor)
    layout.clear_padding(expected)
    found = drawn(layout, key, factors=factors)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)
    # However chunks fall: the same bits.
    assert torch.equal(found, drawn(layout, key, factors=factors, chunk=1024))


def test_kernel_adds_to_what_is_there_and_clears_padding(kernels: ModuleType) -> None:
    layout = layout_of([3, 70])
    total = torch.ones(layout.flat_size, device=DEVICE)
    noise_triton.add_normal(total, std=0.25, key=torch.tensor([9], device=DEVICE), layout=layout)
    expected = drawn(layout, 9) + 1
    layout.clear_padding(expected)
    torch.testing.assert_close(total.cpu(), expected, rtol=0, atol=1e-6)
    assert not layout.parts(total.cpu())[0].eq(1).any()
    assert int((total != 0).sum()) == layout.dimension


def test_seeded_noise_takes_the_kernel_and_moves_its_generator_on(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    if INTERPRETED:
        monkeypatch.setattr(noise, "_kernels", lambda total: kernels)
    layout = layout_of([4000, 31, 4000])

    def add(generator: torch.Generator, factors: list[float] | None = None) -> Tensor:
        total = layout.zeros(device=DEVICE)
        return noise.add_gaussian(total, std=0.25, generator=generator, layout=layout, factors=factors).cpu()

    generator = torch_stream(3, "noise", 0, device=DEVICE)
    first, second = add(generator), add(generator)
    key = torch.empty(1, dtype=torch.int64, device=DEVICE).random_(
        -(2**63), None, generator=torch_stream(3, "noise", 0, device=DEVICE)
    )
    assert torch.equal(first, drawn(layout, int(key)))
    assert not (first == second)[first != 0].any()
    assert torch.equal(first, add(torch_stream(3, "noise", 0, device=DEVICE)))
    assert not (first == add(torch_stream(3, "noise", 1, device=DEVICE)))[first != 0].any()
    # On a group of parameters: the same noise, elsewhere none.
    scoped = add(torch_stream(3, "noise", 0, device=DEVICE), [0.0, 0.0, 2.0])
    assert not torch.cat(layout.parts(scoped)[:2]).any()
    torch.testing.assert_close(layout.parts(scoped)[2], 2 * layout.parts(first)[2])


@pytest.mark.skipif(INTERPRETED, reason="a CUDA device is meant, not the interpreter")
def test_on_cuda_seeded_noise_waits_for_nothing(kernels: ModuleType) -> None:
    layout = layout_of([4000, 31])
    total, generator = layout.zeros(device="cuda"), torch_stream(1, "noise", device="cuda")
    noise.add_gaussian(total, std=1.0, generator=generator, layout=layout)  # compiles, and fills the tables
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        noise.add_gaussian(total, std=0.5, generator=generator, layout=layout)
    finally:
        torch.cuda.set_sync_debug_mode("default")
