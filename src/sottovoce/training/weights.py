"""A model's weights while it is trained: float32 masters, copies to compute with, gradients, and the optimiser's state.

Tensors of one kind from all blocks lie in one stack [layers, …]; what the model sees as `blocks.07.mlp.hidden.weight`
is a view of a row. One kernel then serves all layers, while norms and trust ratios are still taken per layer.

Shapes: L layers, K kinds of tensor in a block, M tensors outside the blocks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sottovoce.models.ctc_transformer import layer_index
from sottovoce.optimisers import Optimiser, restore_state, state_tensors, tensor_norms


@dataclass(frozen=True)
class _Stacked:
    """Named tensors of one dtype as views of stacks: `blocks` are [L, …], one per kind; `others` are as they are."""

    views: Mapping[str, Tensor]
    blocks: Sequence[Tensor]
    others: Sequence[Tensor]

    @property
    def all(self) -> list[Tensor]:
        return [*self.blocks, *self.others]


def _empty_stacks(parameters: Mapping[str, Tensor], *, device: torch.device, dtype: torch.dtype) -> _Stacked:
    rows: dict[str, list[str]] = {}
    for name in parameters:
        if layer_index(name) is not None:
            rows.setdefault(name.split(".", 2)[2], []).append(name)
    views: dict[str, Tensor] = {}
    blocks = []
    for names in rows.values():
        stack = torch.zeros(len(names), *parameters[names[0]].shape, device=device, dtype=dtype)
        blocks.append(stack)
        views |= dict(zip(names, stack.unbind(), strict=True))
    others = {
        name: torch.zeros(p.shape, device=device, dtype=dtype) for name, p in parameters.items() if name not in views
    }
    return _Stacked(
        views={name: (views | others)[name] for name in parameters}, blocks=blocks, others=[*others.values()]
    )


class Weights:
    """The weights of one model in training.

    `working` is what the forward pass takes: the masters themselves in float32, or bfloat16 copies of them. Gradients
    arrive by `set_gradients`, `clip` scales them, `step` moves the masters and refreshes the copies.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], optimiser: Optimiser, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._optimiser = optimiser
        self._masters = _empty_stacks(parameters, device=device, dtype=torch.float32)
        self._gradients = _empty_stacks(parameters, device=device, dtype=torch.float32)
        self._copies = self._masters
        if dtype != torch.float32:
            self._copies = _empty_stacks(parameters, device=device, dtype=dtype)
        self._states = [optimiser.init([*group]) for group in (self._masters.blocks, self._masters.others)]
        self.working = {name: view.detach().requires_grad_() for name, view in self._copies.views.items()}
        self.load(parameters)

    @property
    def masters(self) -> Mapping[str, Tensor]:
        """The float32 parameters by name."""
        return self._masters.views

    @property
    def gradients(self) -> Sequence[Tensor]:
        """All gradients as a few large tensors (to be summed over processes, say)."""
        return self._gradients.all

    @torch.no_grad()
    def load(self, parameters: Mapping[str, Tensor]) -> None:
        """Take over the values of `parameters`."""
        for name, view in self._masters.views.items():
            view.copy_(parameters[name])
        self._refresh()

    @torch.no_grad()
    def set_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Take one gradient per parameter, in the model's order; None where a layer was left out."""
        views = [*self._gradients.views.values()]
        present = [(view, g) for view, g in zip(views, gradients, strict=True) if g is not None]
        absent = [view for view, g in zip(views, gradients, strict=True) if g is None]
        torch._foreach_copy_([view for view, _ in present], [g for _, g in present])
        if absent:
            torch._foreach_zero_(absent)

    @torch.no_grad()
    def clip(self, max_norm: float) -> tuple[Tensor, Tensor]:
        """Scale the gradients to a norm of at most `max_norm`; returns the norm before, and norms by tensor.

        The second is [L·K + M], in the order of `norm_names`. Nothing waits for the device, so a norm that is not
        finite is not acted upon here: whoever reads it must stop before the weights are saved.
        """
        block_norms_LK = tensor_norms([*self._gradients.blocks], stacked=True)
        norms = torch.cat([block_norms_LK.flatten(), tensor_norms([*self._gradients.others])])
        norm: Tensor = torch.linalg.vector_norm(norms)
        scale = (max_norm / norm).clamp(max=1.0)
        torch._foreach_mul_(self._gradients.all, scale)
        return norm, norms

    @property
    def norm_names(self) -> list[str]:
        """The names that `clip`'s second result goes by: block after block, then what lies outside the blocks."""
        outside = [name for name in self._masters.views if layer_index(name) is None]
        return [name for name in self._masters.views if layer_index(name) is not None] + outside

    @torch.no_grad()
    def step(self, *, lr: float) -> None:
        """Move the masters against the gradients and refresh the copies."""
        groups = zip(
            (self._masters.blocks, self._masters.others),
            (self._gradients.blocks, self._gradients.others),
            self._states,
            (True, False),
            strict=True,
        )
        for parameters, gradients, state, stacked in groups:
            self._optimiser.step([*parameters], [*gradients], state, lr=lr, stacked=stacked)
        self._refresh()

    def _refresh(self) -> None:
        if self._copies is not self._masters:
            torch._foreach_copy_(self._copies.all, self._masters.all)

    def optimiser_tensors(self) -> dict[str, Tensor]:
        """The optimiser's state, ready to be saved."""
        blocks, others = (state_tensors(state) for state in self._states)
        return {f"blocks/{name}": t for name, t in blocks.items()} | {f"others/{name}": t for name, t in others.items()}

    def restore_optimiser(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over a state that `optimiser_tensors` gave."""
        for prefix, state in zip(("blocks/", "others/"), self._states, strict=True):
            own = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
            restore_state(state, tensors=own)
