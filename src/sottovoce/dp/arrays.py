"""Models of other libraries as flat vectors and back: arrays by name, of NumPy or of torch.

Shapes: P flat length.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sottovoce.base.errors import InputError
from sottovoce.flat.layout import Layout, tensor_layers
from sottovoce.privacy.clipping import Clipper

Arrays = Mapping[str, Any]  # NumPy arrays or tensors, by the names of a model's parameters


@dataclass(frozen=True)
class ArrayForm:
    """How a model's parameters are given: their names and shapes, and of which library, type and device each is."""

    layout: Layout
    kinds: tuple[tuple[Any, torch.device] | np.dtype[Any], ...]

    @classmethod
    def of(cls, arrays: Arrays) -> "ArrayForm":
        """The form of `arrays`. InputError for whole numbers: nothing bounds and nothing noises those."""
        if not arrays:
            raise InputError("parameters={}: expected at least one array by name")
        tensors = {name: _tensor(name, array) for name, array in arrays.items()}
        kinds = tuple(
            (array.dtype, array.device) if isinstance(array, Tensor) else np.asarray(array).dtype
            for array in arrays.values()
        )
        return cls(Layout.of(tensors), kinds)

    @property
    def device(self) -> torch.device:
        """Where the first one lies, and so where sums are made."""
        kind = self.kinds[0]
        return kind[1] if isinstance(kind, tuple) else torch.device("cpu")

    def flatten(self, arrays: Arrays) -> Tensor:
        """[P]: float64 where one of them is, else float32. InputError where they are not of this form."""
        layout = self.layout
        if missing := [name for name in layout.names if name not in arrays]:
            raise InputError(f"no array {missing[0]!r}: expected {_listed(layout.names)}")
        if len(arrays) != len(layout.names):
            other = next(name for name in arrays if name not in layout.names)
            raise InputError(f"array {other!r} is no parameter: expected {_listed(layout.names)}")
        tensors = {name: _tensor(name, arrays[name]).to(self.device) for name in layout.names}
        for (name, tensor), shape in zip(tensors.items(), layout.shapes, strict=True):
            if tuple(tensor.shape) != shape:
                raise InputError(f"array {name!r} of shape {tuple(tensor.shape)}: expected {shape}")
        wide = any(tensor.dtype == torch.float64 for tensor in tensors.values())
        dtype = torch.float64 if wide else torch.float32
        return layout.flatten({name: tensor.to(dtype) for name, tensor in tensors.items()})

    def restore(self, flat_P: Tensor) -> dict[str, Any]:
        """The arrays of a flat vector, each of the library and type that it was given in."""
        views = self.layout.views(flat_P).items()
        return {name: _restored(view, kind) for (name, view), kind in zip(views, self.kinds, strict=True)}


def clip_update(update: Arrays, *, clip_bound: float) -> dict[str, Any]:
    """One user's update, no longer than `clip_bound` in L2 norm over all of its arrays together.

    Guarantee: the norm of what is returned is at most `clip_bound`, up to the rounding of types narrower than float32.
    An update with a NaN or an infinity becomes zero. An infinite bound changes nothing else.

    >>> clipped = clip_update({"w": np.array([3.0, 0.0]), "b": np.array([4.0])}, clip_bound=1.0)
    >>> [round(float(array.sum()), 5) for array in clipped.values()]
    [0.6, 0.8]
    """
    form = ArrayForm.of(update)
    clipper = Clipper(layers=tensor_layers(form.layout), clip_bound=clip_bound)
    return form.restore(clipper.clip(form.flatten(update))[0])


def _tensor(name: str, array: Any) -> Tensor:
    try:
        tensor = array.detach() if isinstance(array, Tensor) else torch.tensor(np.asarray(array))
    except (TypeError, ValueError):  # texts, objects, another order of bytes
        raise InputError(f"array {name!r} of {np.asarray(array).dtype}: expected floating-point numbers") from None
    if not tensor.is_floating_point():
        raise InputError(
            f"array {name!r} of {str(tensor.dtype).removeprefix('torch.')}: expected floating-point numbers; what "
            "counts (as batch normalisation does) is no part of an update"
        )
    return tensor


def _restored(view: Tensor, kind: tuple[Any, torch.device] | np.dtype[Any]) -> Any:
    if isinstance(kind, tuple):
        return view.to(device=kind[1], dtype=kind[0], copy=True)
    return view.cpu().numpy().astype(kind)


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
