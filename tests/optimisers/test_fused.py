"""One flat vector, stepped whole, moves as its tensors do one by one; the kernels agree with the loops."""

import math
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sottovoce.base.seeds import torch_stream
from sottovoce.flat.layout import Layout
from sottovoce.optimisers import LAMB, LARS, SGD, Adadelta, AdaGrad, Adam, Optimiser, state_tensors, tensor_norms
from sottovoce.optimisers import weights as fused_module
from sottovoce.optimisers.weights import FlatOptimiser

SHAPES = {"w": (37, 5), "b": (3,), "zero": (40,), "v": (2, 2, 9)}
LAYOUT = Layout(tuple(SHAPES), tuple(SHAPES.values()))
OPTIMISERS: list[Optimiser] = [
    SGD(),
    SGD(momentum=0.9, nesterov=True),
    LARS(),
    LARS(momentum=0.5, trust_coefficient=0.02, weight_decay=0.1, eps=0.01),
    LAMB(weight_decay=0.1),
    Adam(),
    Adam(eps=0.0),
    AdaGrad(),
    Adadelta(),
]
KERNEL_OPTIMISERS = [optimiser for optimiser in OPTIMISERS if isinstance(optimiser, LARS)] + [SGD()]


def tensors(name: str, step: int = 0) -> dict[str, Tensor]:
    """Random tensors; `zero` is zero as a parameter, and in every second gradient (a block left out)."""
    generator = torch_stream(1, name, step)
    drawn = {n: torch.randn(shape, generator=generator) for n, shape in SHAPES.items()}
    if name == "parameters" or step % 2:
        drawn["zero"].zero_()
    return drawn


@pytest.mark.parametrize("optimiser", OPTIMISERS, ids=str)
@pytest.mark.parametrize("max_norm", [0.5, math.inf])
def test_flat_steps_are_the_steps_of_single_tensors(optimiser: Optimiser, max_norm: float) -> None:
    alone = [*tensors("parameters").values()]
    state = optimiser.init(alone)
    master = LAYOUT.flatten(tensors("parameters"))
    flat = FlatOptimiser(optimiser, LAYOUT, master=master, working=master)
    for step in range(3):
        gradients = [*tensors("gradients", step).values()]
        norms = tensor_norms(gradients)
        found = flat.step(LAYOUT.flatten(tensors("gradients", step)), lr=0.1, max_norm=max_norm)
        torch.testing.assert_close(found[1], norms)
        torch.testing.assert_close(found[0], norms.norm())
        gradients = [g * (max_norm / norms.norm()).clamp(max=1.0) for g in gradients]
        optimiser.step(alone, gradients, state, lr=0.1)
    for ours, theirs in zip(LAYOUT.views(master).values(), alone, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    padding = master.clone()
    for view in LAYOUT.views(padding).values():
        view.zero_()
    assert not padding.any()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_loses_the_whole_step(bad: float) -> None:
    master = LAYOUT.flatten(tensors("parameters"))
    flat = FlatOptimiser(SGD(), LAYOUT, master=master, working=master)
    gradient = tensors("gradients")
    gradient["b"][1] = bad
    norm, norms = flat.step(LAYOUT.flatten(gradient), lr=0.1, max_norm=1.0)
    assert not norm.isfinite()
    assert [name for name, n in zip(SHAPES, norms.tolist(), strict=True) if not math.isfinite(n)] == ["b"]
    assert all(view.isnan().all() for view in LAYOUT.views(master).values())


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> str:
    """The device that the kernels run on; with TRITON_INTERPRET=1 it is the CPU, wherever there is Triton."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        return "cuda"
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("no CUDA device")
    monkeypatch.setattr(fused_module, "_kernels", _interpreted)
    return "cpu"


def _interpreted(optimiser: Optimiser, device: torch.device) -> object:
    from sottovoce.optimisers import fused_triton

    return fused_triton if fused_module.has_kernels(optimiser) else None


@pytest.mark.parametrize("optimiser", KERNEL_OPTIMISERS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("max_norm", [0.5, math.inf])
def test_kernels_agree_with_the_loops(kernels: str, optimiser: Optimiser, dtype: torch.dtype, max_norm: float) -> None:
    device = torch.device(kernels)
    master, expected = (LAYOUT.flatten(tensors("parameters")).to(d) for d in (device, "cpu"))
    working = master if dtype == torch.float32 else master.to(dtype)
    fast = FlatOptimiser(optimiser, LAYOUT, master=master, working=working)
    assert fast._kernels is not None
    slow = FlatOptimiser(optimiser, LAYOUT, master=expected, working=expected)
    slow._kernels = None
    for step in range(3):
        gradient = LAYOUT.flatten(tensors("gradients", step)).to(dtype)
        found = fast.step(gradient.to(device), lr=0.1, max_norm=max_norm)
        for ours, theirs in zip(found, slow.step(gradient, lr=0.1, max_norm=max_norm), strict=True):
            torch.testing.assert_close(ours.cpu(), theirs)
        torch.testing.assert_close(master.cpu(), expected, rtol=1e-6, atol=1e-6)
        # A device rounds to nearest, as torch does; the interpreter cuts off.
        torch.testing.assert_close(working, master.to(dtype), rtol=0 if kernels == "cuda" else 2**-7, atol=0)
    for ours, theirs in zip(state_tensors(fast.state).values(), state_tensors(slow.state).values(), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("rows", [None, 3])
@pytest.mark.parametrize("optimiser", OPTIMISERS, ids=str)
def test_no_clipped_step_waits_for_the_device(optimiser: Optimiser, rows: int | None) -> None:
    lead = () if rows is None else (rows,)
    master = LAYOUT.zeros(*lead, device=torch.device("cuda")) + LAYOUT.flatten(tensors("parameters")).cuda()
    gradient = torch.zeros_like(master) + LAYOUT.flatten(tensors("gradients")).cuda()
    flat = FlatOptimiser(optimiser, LAYOUT, master=master, working=master)
    flat.step(gradient.clone(), lr=0.1, max_norm=1.0)  # kernels are compiled, and their tables made, once
    torch.cuda.set_sync_debug_mode("error")
    try:
        flat.step(gradient.clone(), lr=0.1, max_norm=1.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@given(st.lists(st.integers(1, 300), min_size=1, max_size=4), st.integers(0, 100))
@settings(max_examples=15, deadline=None)
def test_sums_of_every_tensor_however_chunks_fall(sizes: list[int], seed: int) -> None:
    pytest.importorskip("triton")
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not (torch.cuda.is_available() or interpreted):
        pytest.skip("no CUDA device")
    from sottovoce.flat.layout import tensor_layers
    from sottovoce.optimisers import fused_triton

    device = "cpu" if interpreted else "cuda"
    layout = Layout(tuple(f"t{i}" for i in range(len(sizes))), tuple((size,) for size in sizes))
    shapes = dict(zip(layout.names, layout.shapes, strict=True))
    made = [{n: torch.randn(shape, generator=torch_stream(seed, n, i)) for n, shape in shapes.items()} for i in (0, 1)]
    g, p = (layout.flatten(m).to(device) for m in made)
    found = fused_triton.sums(g, p, tensor_layers(layout), chunk=64)
    double = [[m[name].double() for name in layout.names] for m in made]
    for values, (a, b) in zip(found, ((0, 0), (1, 1), (0, 1)), strict=True):
        expected = torch.stack([x @ y for x, y in zip(double[a], double[b], strict=True)])
        torch.testing.assert_close(values.cpu(), expected, rtol=1e-12, atol=1e-12)
