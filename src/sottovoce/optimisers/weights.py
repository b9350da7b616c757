"""A model's weights while it is trained: a float32 master, a copy to compute with, and the gradient, each one vector.

A step clips, moves the master and refreshes the copy. On a CUDA device with Triton, SGD without momentum and LARS walk
over the vector twice (`fused_triton`): once for the norms, once to clip, step and write the copy. Everything else goes
through `Optimiser.step`. Both ways compute the same up to rounding, and neither waits for the device.

Shapes: P flat length, H parameter tensors. "..." is nothing (one model) or N (stacked clients, each as if alone).
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import ModuleType
from typing import final

import torch
from torch import Tensor

from sottovoce.flat.kernels import triton_kernels
from sottovoce.flat.layout import Layout, tensor_layers
from sottovoce.optimisers.elementwise import SGD, ElementwiseOptimiser
from sottovoce.optimisers.layerwise import LARS, trust_ratios
from sottovoce.optimisers.optimiser import Optimiser, State, restore_state, state_tensors, tensor_norms


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
        self.state = self._optimiser.init([self._master])
        slots = {name: self._layout.parts(flat) for name, (flat,) in self.state.slots.items()}
        self._state_by_tensor = State(slots, self.state.count)

    @torch.no_grad()
    def step(self, gradient: Tensor, *, lr: float, max_norm: float) -> tuple[Tensor, Tensor]:
        """See `Weights.step`. What `gradient` holds afterwards is undefined."""
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
            self._optimiser.step([self._master], [gradient], self.state, lr=lr, stacked=self._stacked)
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
        lars = self._optimiser if isinstance(self._optimiser, LARS) else None
        squares, parameter_squares, products = kernels.sums(
            gradient, None if lars is None else self._master, self._layers
        )
        norms = squares.sqrt()
        norm, scale = _clip_scale(norms, max_norm)
        terms = None
        if lars is not None:
            # ‖s·g + w·θ‖², from sums over the unclipped gradient.
            decay, s = lars.weight_decay, scale.unsqueeze(-1)
            update_norms = s**2 * squares + 2 * decay * s * products + decay**2 * parameter_squares
            update_norms = update_norms.clamp(min=0).sqrt()
            ratios = trust_ratios(
                parameter_squares.sqrt(), update_norms, coefficient=lars.trust_coefficient, eps=lars.eps
            )
            terms = kernels.LarsTerms(self.state.slots["momentum"][0], ratios, lars.momentum, decay)
        working = None if self._working is self._master else self._working
        kernels.fused_step(self._master, working, gradient, self._layers, scale=scale, lr=lr, lars=terms)
        self.state.advance()
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


@final
class Weights:
    """The weights of one model in training, or of `rows` clients at once; all zero until `reset` or `load`.

    `working` is what the forward pass takes, by name: the master itself in float32, or its copy in a narrower `dtype`
    (in float64 the master is as wide). Addresses never change. Gradients arrive by `set_gradients` in that same type;
    `step` clips them, moves the master and refreshes the copy. `statistics` names tensors that no optimiser moves: what
    arrives as their gradient is the way they go back, and is no part of any norm.

    >>> from sottovoce.optimisers import SGD
    >>> weights = Weights(Layout.of({"w": torch.zeros(2)}), SGD(), device=torch.device("cpu"), dtype=torch.float32)
    >>> weights.set_gradients([torch.tensor([3.0, 4.0])])
    >>> norm, norms = weights.step(lr=1.0, max_norm=1.0)
    >>> norm, weights.masters["w"]
    (tensor(5.), tensor([-0.6000, -0.8000]))
    """

    def __init__(
        self,
        layout: Layout,
        optimiser: Optimiser,
        *,
        device: torch.device,
        dtype: torch.dtype,
        rows: int | None = None,
        statistics: Collection[str] = (),
    ) -> None:
        self.layout = layout
        self._statistics = sorted(set(statistics) & set(layout.names))
        self._held: tuple[str, ...] = ()
        lead = () if rows is None else (rows,)
        self.master = layout.zeros(*lead, device=device, dtype=torch.promote_types(dtype, torch.float32))
        self._copy = self.master if dtype == self.master.dtype else layout.zeros(*lead, device=device, dtype=dtype)
        self._gradient = self.gradient = layout.zeros(*lead, device=device, dtype=dtype)
        self._gradient_views = [*layout.views(self._gradient).values()]
        self.masters: Mapping[str, Tensor] = layout.views(self.master)
        self.working = {name: view.detach().requires_grad_() for name, view in layout.views(self._copy).items()}
        self._flat = FlatOptimiser(optimiser, layout, master=self.master, working=self._copy)

    @torch.no_grad()
    def load(self, parameters: Mapping[str, Tensor]) -> None:
        """Take over the values of `parameters`; the optimiser's state stays as it is."""
        for name, view in self.masters.items():
            view.copy_(parameters[name])
        self._flat.refresh()

    @torch.no_grad()
    def reset(self, flat_P: Tensor) -> None:
        """Start anew (every row of it) from a flat vector of the same layout, with a fresh optimiser."""
        self.master.copy_(flat_P)
        self._flat.refresh()
        self._flat.reset()

    def hold(self, names: tuple[str, ...]) -> None:
        """Leave the tensors of these names as they are from now on: in no norm, whatever the optimiser does."""
        self._held = names

    @torch.no_grad()
    def set_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Take one gradient per parameter, in the model's order; None where a layer was left out."""
        self.gradient = self._gradient
        pairs = list(zip(self._gradient_views, gradients, strict=True))
        present = [(view, g) for view, g in pairs if g is not None]
        absent = [view for view, g in pairs if g is None]
        if present:
            torch._foreach_copy_([view for view, _ in present], [g for _, g in present])
        if absent:
            torch._foreach_zero_(absent)

    def sum_gradients(self, parts: Iterable[tuple[float, Sequence[Tensor | None]]]) -> None:
        """Take the weighted sum of several gradients, each as `set_gradients` has them and made as it is asked for.

        It has the master's type.
        """
        total = torch.zeros_like(self.master)
        for weight, gradients in parts:
            self.set_gradients(gradients)
            total.add_(self.gradient, alpha=weight)
        self.gradient = total

    @torch.no_grad()
    def add_to_gradients(self, flat_P: Tensor) -> None:
        """Add a flat vector to the gradients. The sum has the master's type: a small term would drown in bfloat16."""
        self.gradient = self.gradient.to(self.master.dtype).add_(flat_P)

    def step(self, *, lr: float, max_norm: float) -> tuple[Tensor, Tensor]:
        """One step against the gradients, clipped to `max_norm`; their norm before, and norms [..., H] (`norm_names`).

        Nothing waits for the device: a norm that is not finite makes every weight NaN, and whoever reads it must stop.
        """
        if not self._statistics and not self._held:
            return self._flat.step(self.gradient, lr=lr, max_norm=max_norm)
        moved = self._move_statistics() | self._keep_held()
        norms = self._flat.step(self.gradient, lr=lr, max_norm=max_norm)
        with torch.no_grad():
            for name, tensor in moved.items():
                self.masters[name].copy_(tensor)
        self._flat.refresh()
        return norms

    @torch.no_grad()
    def _move_statistics(self) -> dict[str, Tensor]:
        """The statistics after this step; their gradients become zero."""
        views, moved = self.layout.views(self.gradient), {}
        for name in self._statistics:
            moved[name] = self.masters[name] - views[name]
            views[name].zero_()
        return moved

    @torch.no_grad()
    def _keep_held(self) -> dict[str, Tensor]:
        """What is held, as it is; its gradients become zero."""
        self.layout.clear(self.gradient, self._held)
        return {name: self.masters[name].clone() for name in self._held}

    @property
    def dtype(self) -> torch.dtype:
        """What the forward pass computes in."""
        return self._copy.dtype

    @property
    def norm_names(self) -> list[str]:
        """The names that the norms of `step` go by."""
        return [*self.layout.names]

    def optimiser_tensors(self) -> dict[str, Tensor]:
        """The optimiser's state, ready to be saved."""
        return state_tensors(self._flat.state)

    def restore_optimiser(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over a state that `optimiser_tensors` gave."""
        restore_state(self._flat.state, tensors=tensors)
