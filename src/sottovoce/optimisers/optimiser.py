"""What every optimiser is: settings in a frozen dataclass, `init` for its state, `step` to move the parameters.

Clients, the server and central training share these. Parameters, gradients and state are lists of float32 tensors
in one order; a step changes parameters and state in place, leaves the gradients as they are, and never waits for
the device. A parameter that took no part in a batch (a dropped layer) has a zero gradient, not None.

Stacked: with `stacked=True` every tensor has a leading client axis, and each row is stepped as if it were alone.

Shapes: H tensors in the list, C clients stacked.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sottovoce.base.errors import InputError

Tensors = list[Tensor] | tuple[Tensor, ...]

COUNT = "count"


@dataclass(frozen=True)
class State:
    """What an optimiser remembers: named lists of tensors, one per parameter, and the number of steps taken.

    `count` is on the CPU, whatever the device: reading it never waits, and it is saved like any other tensor.
    """

    slots: Mapping[str, list[Tensor]] = field(default_factory=dict)
    count: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int64))

    def advance(self) -> int:
        """Counts one more step and returns its number, starting with 1."""
        self.count.add_(1)
        return int(self.count)


class Optimiser(ABC):
    """The interface of all optimisers; to write your own, fill in these two functions."""

    @abstractmethod
    def init(self, parameters: Tensors) -> State:
        """A fresh state for `parameters`, on their devices."""

    @abstractmethod
    def step(
        self, parameters: Tensors, gradients: Tensors, state: State, *, lr: float, stacked: bool = False
    ) -> Tensor | None:
        """Moves `parameters` against `gradients`, in place, and `state` with them.

        Returns the trust ratios of this step, ratios_H (ratios_CH when stacked), or None where there are none.
        """


def zeros_for(parameters: Tensors) -> list[Tensor]:
    """One zero tensor per parameter."""
    return [torch.zeros_like(parameter) for parameter in parameters]


def check_step(parameters: Tensors, gradients: Tensors, lr: float) -> None:
    """Callers' mistakes that broadcasting would otherwise hide."""
    assert 0 <= lr < math.inf, f"{lr=}, expected a finite number >= 0"
    assert len(parameters) == len(gradients), f"{len(parameters)} parameters but {len(gradients)} gradients"
    assert all(p.shape == g.shape for p, g in zip(parameters, gradients, strict=True)), "gradients of other shapes"


def check_range(owner: object, *names: str, low: float, below: float = math.inf) -> None:
    """Raises InputError unless the named settings of `owner` are numbers with low <= value < below."""
    for name in names:
        value = getattr(owner, name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (is_number and low <= value < below):
            expected = f"at least {low}" + ("" if below == math.inf else f" and below {below}")
            raise InputError(f"{type(owner).__name__}: {name}={value!r}, expected a finite number, {expected}")


def tensor_norms(tensors: Tensors, *, stacked: bool = False) -> Tensor:
    """The L2 norm of every tensor, norms_H; of every client's row of it, norms_CH, when stacked."""
    if not stacked:
        return torch.stack(list(torch._foreach_norm(tensors)))
    rows = [tensor.reshape(tensor.shape[0], -1) for tensor in tensors]
    return torch.stack([torch.linalg.vector_norm(row, dim=1) for row in rows], dim=1)


def state_tensors(state: State) -> dict[str, Tensor]:
    """`state` as a flat dictionary that safetensors can save; `restore_state` is its inverse.

    The tensors are the state's own where they can be: save them before the next step, or clone them.

    >>> from sottovoce.optimisers import SGD
    >>> sorted(state_tensors(SGD(momentum=0.9).init([torch.zeros(2), torch.zeros(3)])))
    ['count', 'momentum.0', 'momentum.1']
    """
    flat = {f"{slot}.{h}": tensor for slot, tensors in state.slots.items() for h, tensor in enumerate(tensors)}
    return {COUNT: state.count} | {name: tensor.contiguous() for name, tensor in flat.items()}


_LINEAR, _SQUARES = ("momentum", "first_moment"), ("second_moment", "squares", "moves")


def check_rotates(state: State) -> None:
    """Refuse a state of which `rotate_state` does not know what it means."""
    for slot in state.slots:
        if slot not in _LINEAR + _SQUARES:
            raise InputError(f"the optimiser's {slot!r} cannot be put into another basis; expected one of this package")


@torch.no_grad()
def rotate_state(state: State, place: int, *, basis_RR: Tensor) -> None:
    """What is remembered of the parameter at `place`, [..., R], whose rows are now in another basis: b ← b·x.

    Gradients turn with it, so that means of them are exact. Means of squares are those of numbers that do not correlate
    with each other: their sum over a row stays, and none is below zero.
    """
    check_rotates(state)
    for slot, tensors in state.slots.items():
        turned = basis_RR if slot in _LINEAR else basis_RR.square()
        tensors[place].copy_(tensors[place].to(turned) @ turned)


def restore_state(state: State, *, tensors: Mapping[str, Tensor]) -> None:
    """Fills a fresh `state` with saved `tensors`, to the bit; a state of another optimiser or model is refused."""
    expected = state_tensors(state)
    missing, unknown = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    if missing or unknown:
        what = f"lacks {missing[0]!r}" if missing else f"has an unknown {unknown[0]!r}"
        raise InputError(f"saved optimiser state {what}: it was saved by another optimiser or for another model")
    for name, tensor in expected.items():
        saved = tensors[name]
        if (saved.shape, saved.dtype) != (tensor.shape, tensor.dtype):
            raise InputError(
                f"saved optimiser state {name!r} is {list(saved.shape)} {saved.dtype}, "
                f"expected {list(tensor.shape)} {tensor.dtype}"
            )
    state.count.copy_(tensors[COUNT])
    for slot, own in state.slots.items():
        for h, tensor in enumerate(own):
            tensor.copy_(tensors[f"{slot}.{h}"])
