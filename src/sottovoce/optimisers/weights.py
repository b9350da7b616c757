"""A model's weights while it is trained: a float32 master, a copy to compute with, and the gradient, each one vector.

Shapes: P flat length, H parameter tensors. "..." is nothing (one model) or N (stacked clients, a row each).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from sottovoce.flat.layout import Layout
from sottovoce.optimisers.fused import FlatOptimiser
from sottovoce.optimisers.optimiser import Optimiser


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

        Nothing waits for the device, so a norm that is not finite is not acted upon here: it makes every weight NaN,
        and whoever reads it must stop before the weights are used.
        """
        if not self._statistics:
            return self._flat.step(self.gradient, lr=lr, max_norm=max_norm)
        moved = self._move_statistics()
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
        return self._flat.tensors()

    def restore_optimiser(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over a state that `optimiser_tensors` gave."""
        self._flat.restore(tensors)
