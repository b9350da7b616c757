"""Clip, step and refresh over one flat vector: all that training does with a gradient once it has one.

On a CUDA device with Triton, SGD without momentum and LARS take two walks (`fused_triton`): one for the norms, one
that clips, steps and writes the working copy. Everything else goes through `Optimiser.step`. Both ways compute the
same up to rounding, and neither waits for the device.

Shapes: P flat length, H parameter tensors. "..." is nothing (one model) or N (stacked clients, each as if alone).
"""

import math
from collections.abc import Mapping
from types import ModuleType
from typing import final

import torch
from torch import Tensor

from sottovoce.flat.kernels import triton_kernels
from sottovoce.flat.layout import Layout, tensor_layers
from sottovoce.optimisers.elementwise import SGD, ElementwiseOptimiser
from sottovoce.optimisers.lars import LARS
from sottovoce.optimisers.norms import tensor_norms, trust_ratios
from sottovoce.optimisers.optimiser import Optimiser, State, restore_state, state_tensors


@final
class FlatOptimiser:
    """An optimiser that moves `master` [..., P], and `working` (the same tensor, or a copy in another type) with it.

    Its state is flat as well: one tensor [..., P] for each of the optimiser's slots.
    """

    def __init__(self, optimiser: Optimiser, layout: Layout, *, master: Tensor, working: Tensor) -> None:
        self._optimiser, self._layout, self._layers = optimiser, layout, tensor_layers(layout)
        self._master, self._working = master, working
        self._stacked = master.dim() == 2
        self._parameters = layout.parts(master)
        self._kernels = _kernels(optimiser, master.device)
        self.reset()

    def reset(self) -> None:
        """Forget all that was remembered."""
        self._state = self._optimiser.init([self._master])
        slots = {name: self._layout.parts(flat) for name, (flat,) in self._state.slots.items()}
        self._state_by_tensor = State(slots, self._state.count)

    def tensors(self) -> dict[str, Tensor]:
        """The state, ready to be saved."""
        return state_tensors(self._state)

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over a state that `tensors` gave; one of another optimiser or model is refused."""
        restore_state(self._state, tensors=tensors)

    @torch.no_grad()
    def step(self, gradient: Tensor, *, lr: float, max_norm: float) -> tuple[Tensor, Tensor]:
        """Clip the gradient to `max_norm`, step, refresh the copy; the norm [...] before clipping, and norms [..., H].

        A norm that is not finite makes all weights (of that client) NaN: whoever reads it must stop before they are
        used. What `gradient` holds afterwards is undefined.
        """
        assert max_norm > 0, f"{max_norm=}, expected a number above 0"
        assert 0 <= lr < math.inf, f"{lr=}, expected a finite number >= 0"
        if self._kernels is not None:
            return self._fused(self._kernels, gradient, lr=lr, max_norm=max_norm)
        gradient = gradient.to(self._master.dtype)
        gradients = self._layout.parts(gradient)
        norms = tensor_norms(gradients, stacked=self._stacked)
        norm, scale = _clip_scale(norms, max_norm)
        gradient.mul_(scale.unsqueeze(-1) if self._stacked else scale)
        if isinstance(self._optimiser, ElementwiseOptimiser):
            self._optimiser.step([self._master], [gradient], self._state, lr=lr, stacked=self._stacked)
            self._layout.clear_padding(self._master)  # Adam with eps=0 makes 0/0 of it
        else:
            self._optimiser.step(self._parameters, gradients, self._state_by_tensor, lr=lr, stacked=self._stacked)
        self.refresh()
        return norm, norms

    def refresh(self) -> None:
        """Bring the working copy up to the master."""
        if self._working is not self._master:
            self._working.copy_(self._master)

    def _fused(self, kernels: ModuleType, gradient: Tensor, *, lr: float, max_norm: float) -> tuple[Tensor, Tensor]:
        optimiser = self._optimiser
        lars = optimiser if isinstance(optimiser, LARS) else None
        momentum = None if lars is None else self._state.slots["momentum"][0]
        squares, parameter_squares, products = kernels.sums(
            gradient, None if lars is None else self._master, self._layers
        )
        norms = squares.sqrt()
        norm, scale = _clip_scale(norms, max_norm)
        ratios = None
        if lars is not None:
            # ‖s·g + w·θ‖², from sums over the unclipped gradient.
            decay, s = lars.weight_decay, scale.unsqueeze(-1)
            update_squares = s**2 * squares + 2 * decay * s * products + decay**2 * parameter_squares
            ratios = trust_ratios(
                parameter_squares.sqrt(),
                update_squares.clamp(min=0).sqrt(),
                coefficient=lars.trust_coefficient,
                eps=lars.eps,
            )
        kernels.step(
            self._master,
            None if self._working is self._master else self._working,
            gradient,
            momentum,
            self._layers,
            scale=scale,
            ratios=ratios,
            lr=lr,
            momentum_factor=0.0 if lars is None else lars.momentum,
            weight_decay=0.0 if lars is None else lars.weight_decay,
        )
        self._state.advance()
        return norm.float(), norms.float()


def _clip_scale(norms: Tensor, max_norm: float) -> tuple[Tensor, Tensor]:
    """The norm of all, and what the gradient must be multiplied with: NaN where the norm is not finite.

    The step is then visibly lost, and none of it half clipped; a client's update is not finite, and counts as zero.
    This steadies training and carries no privacy guarantee: users' updates are clipped elsewhere.
    """
    norm: Tensor = torch.linalg.vector_norm(norms, dim=-1)
    # A zero norm gives max_norm/0 = inf, which the clamp makes 1.
    return norm, (max_norm / norm).clamp(max=1.0).masked_fill(~norm.isfinite(), math.nan)


def has_kernels(optimiser: Optimiser) -> bool:
    """Whether `fused_triton` knows this optimiser."""
    return isinstance(optimiser, LARS) or (isinstance(optimiser, SGD) and not optimiser.momentum)


def _kernels(optimiser: Optimiser, device: torch.device) -> ModuleType | None:
    if not has_kernels(optimiser) or device.type != "cuda":
        return None
    return triton_kernels("sottovoce.optimisers.fused_triton")
