"""All parameters of a model as one flat vector, and which stretches of it belong together.

Clipping and noise see a model as a vector. One contiguous vector (instead of some 300 tensors) lets a GPU walk over
it once at full bandwidth, and gives many clients a natural shape: one more axis in front.

Shapes: P flat length (padding included), N clients, H layers.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

from sottovoce.base.errors import InputError, check_invariant

# Every tensor starts on a multiple of 32 elements, so that a GPU reads it in full 128-byte lines. The few elements
# in between are padding: always zero, never part of a norm, never noised.
ALIGNMENT = 32

Groups = Mapping[str, Sequence[str]]
REST = "rest"


@dataclass(frozen=True)
class Layout:
    """Where each parameter lies in the flat vector, and which of them a step leaves as they are.

    `held` names these, for one step after another and then from the beginning: step t holds held[t mod its length].

    >>> layout = Layout.of({"w": torch.zeros(2, 3), "b": torch.zeros(3)})
    >>> layout.offsets, layout.flat_size, layout.dimension
    ((0, 32), 64, 9)
    >>> {name: tuple(view.shape) for name, view in layout.views(layout.zeros()).items()}
    {'w': (2, 3), 'b': (3,)}
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    held: tuple[tuple[str, ...], ...] = ()

    def __post_init__(self) -> None:
        check_invariant(len(self.names) == len(self.shapes), f"{len(self.names)} names for {len(self.shapes)} shapes")
        if len(set(self.names)) != len(self.names):
            raise InputError(f"parameter names={self.names}: expected each name once")
        if self.dimension == 0:
            raise InputError("the model has no trainable parameters: expected at least one element")
        for held in self.held:
            check_invariant(set(held) < set(self.names), f"a step holds {held}: expected some of {self.names}")

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], *, held: tuple[tuple[str, ...], ...] = ()) -> "Layout":
        """The layout of named tensors, in their order."""
        return cls(tuple(tensors), tuple(tuple(tensor.shape) for tensor in tensors.values()), held)

    def held_at(self, step: int) -> tuple[str, ...]:
        """The parameters that `step` does not train."""
        return self.held[step % len(self.held)] if self.held else ()

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(prod(shape) for shape in self.shapes)

    @cached_property
    def padded_sizes(self) -> tuple[int, ...]:
        return tuple(-(-size // ALIGNMENT) * ALIGNMENT for size in self.sizes)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        return (0, *accumulate(self.padded_sizes))[:-1]

    @cached_property
    def flat_size(self) -> int:
        """P: the length of the flat vector, padding included."""
        return sum(self.padded_sizes)

    @cached_property
    def dimension(self) -> int:
        """Σd: the number of parameters, padding left out."""
        return sum(self.sizes)

    def zeros(self, *lead: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
        """An empty flat vector, or `lead` of them."""
        return torch.zeros(*lead, self.flat_size, device=device, dtype=dtype)

    def parts(self, flat: Tensor) -> list[Tensor]:
        """The parameters as one-dimensional windows on `flat` [..., P]; writing to one writes to `flat`."""
        self.check(flat)
        return [flat.narrow(-1, start, size) for start, size in zip(self.offsets, self.sizes, strict=True)]

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The parameters in their own shapes as windows on `flat` [..., P]; writing to one writes to `flat`."""
        lead = flat.shape[:-1]
        return {
            name: part.view((*lead, *shape))
            for name, shape, part in zip(self.names, self.shapes, self.parts(flat), strict=True)
        }

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Named tensors, each [..., *shape] with the same leading axes, as one new flat vector [..., P]."""
        if tuple(tensors) != self.names:
            raise InputError(f"tensors={tuple(tensors)}: expected the parameters {self.names}, in this order")
        first = tensors[self.names[0]]
        lead = first.shape[: first.dim() - len(self.shapes[0])]
        flat = self.zeros(*lead, device=first.device, dtype=first.dtype)
        for name, view in self.views(flat).items():
            view.copy_(tensors[name])
        return flat

    def clear_padding(self, flat: Tensor) -> None:
        """Sets what belongs to no parameter back to zero."""
        for start, size, padded in zip(self.offsets, self.sizes, self.padded_sizes, strict=True):
            if padded > size:
                flat.narrow(-1, start + size, padded - size).zero_()

    def clear(self, flat: Tensor, names: Collection[str]) -> None:
        """Sets the parameters of these names to zero."""
        for name, start, size in zip(self.names, self.offsets, self.sizes, strict=True):
            if name in names:
                flat.narrow(-1, start, size).zero_()

    def check(self, flat: Tensor) -> None:
        check_invariant(
            flat.shape[-1] == self.flat_size, f"shape={tuple(flat.shape)}: expected [..., {self.flat_size}]"
        )


@dataclass(frozen=True)
class Layers:
    """What counts as one layer for clipping: each parameter tensor, or named groups of them.

    Parameters that are `held` are zero in every update, and count for nothing.
    """

    layout: Layout
    names: tuple[str, ...]
    of_parameter: tuple[int, ...]  # the layer of each parameter
    held: tuple[str, ...] = ()

    @cached_property
    def dimensions(self) -> tuple[int, ...]:
        """d_h: the number of parameters of each layer."""
        totals = [0] * len(self.names)
        for layer, name, size in zip(self.of_parameter, self.layout.names, self.layout.sizes, strict=True):
            totals[layer] += 0 if name in self.held else size
        return tuple(totals)

    @cached_property
    def count(self) -> int:
        """H: how many layers have a parameter that is not held."""
        pairs = zip(self.of_parameter, self.layout.names, strict=True)
        return len({layer for layer, name in pairs if name not in self.held})

    @cached_property
    def are_tensors(self) -> bool:
        """Whether layer h is simply parameter h."""
        return self.of_parameter == tuple(range(len(self.layout.names)))


def tensor_layers(layout: Layout, *, held: tuple[str, ...] = ()) -> Layers:
    """One layer per parameter tensor (the paper's meaning of a layer)."""
    return Layers(layout, layout.names, tuple(range(len(layout.names))), held)


def group_layers(layout: Layout, groups: Groups, *, held: tuple[str, ...] = ()) -> Layers:
    """One layer per named group; parameters that no pattern names form the layer `rest`.

    >>> layout = Layout.of({"a.w1": torch.zeros(2), "a.w2": torch.zeros(2), "norm": torch.zeros(2)})
    >>> group_layers(layout, {"mlp": ["*.w?"]}).names
    ('mlp', 'rest')
    """
    group_of = match_groups(layout.names, groups)
    names = tuple(groups) + ((REST,) if None in group_of else ())
    of_parameter = tuple(names.index(group if group is not None else REST) for group in group_of)
    return Layers(layout, names, of_parameter, held)


def match_groups(names: Sequence[str], groups: Groups) -> list[str | None]:
    """The group of each name (None: no pattern matches). Patterns are shell-like: `blocks.*.w1`."""
    if REST in groups:
        raise InputError(f"group {REST!r}: the name is kept for the parameters that no group names")
    group_of: list[str | None] = [None] * len(names)
    for group, patterns in groups.items():
        for pattern in patterns:
            matched = [i for i, name in enumerate(names) if fnmatchcase(name, pattern)]
            if not matched:
                raise InputError(f"group {group!r}: pattern {pattern!r} matches no parameter (such as {names[0]!r})")
            for i in matched:
                if group_of[i] not in (None, group):
                    raise InputError(f"parameter {names[i]!r} is in two groups: {group_of[i]!r} and {group!r}")
                group_of[i] = group
    return group_of
