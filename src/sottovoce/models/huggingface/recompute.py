"""Layers that keep their inputs alone and are computed again on the way back: more time, much less memory."""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, final

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

Scope = Callable[[], AbstractContextManager[None]]


def recompute_layers(module: nn.Module, *, share: float, scope: Scope, draws: bool) -> None:
    """Let a `share` of the repeated layers of `module` be computed again, in the `scope` of its calls.

    It is the first ones: when they are computed again, what the others kept is free. `draws`: they draw dropout, and
    must draw the same.
    """
    for name, layers in module.named_modules():
        if isinstance(layers, nn.ModuleList) and name.split(".")[-1] == "layers":
            for layer in layers[: math.ceil(share * len(layers))]:
                if next(layer.children(), None) is not None:
                    layer.forward = _Recomputed(layer, scope=scope, draws=draws)


@final
class _Recomputed:
    """A layer's `forward`. Its tensors are those of the call, which are not in it any more on the way back."""

    def __init__(self, layer: nn.Module, *, scope: Scope, draws: bool) -> None:
        self._forward, self._scope, self._draws = layer.forward, scope, draws
        self._owners: list[dict[str, Any]] = [
            owner for part in layer.modules() for owner in (part._parameters, part._buffers) if owner
        ]

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*inputs, **options)
        tensors = [dict(owner) for owner in self._owners]

        def forward(*inputs: Any, **options: Any) -> Any:
            with self._scope(), self._holding(tensors):
                return self._forward(*inputs, **options)

        return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=self._draws, **options)

    @contextmanager
    def _holding(self, tensors: list[dict[str, Any]]) -> Iterator[None]:
        before = [dict(owner) for owner in self._owners]
        try:
            for owner, own in zip(self._owners, tensors, strict=True):
                owner.update(own)
            yield
        finally:
            for owner, own in zip(self._owners, before, strict=True):
                owner.update(own)
