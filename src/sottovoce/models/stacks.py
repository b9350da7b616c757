"""Tensors of many clients, each with a leading client axis, for stacked models of any family.

Shapes: N clients, W utterances of the client with most, U utterances of all, I inputs, O outputs, M any others.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sottovoce.models.family import Parameters
from sottovoce.models.trainable import with_corrections

Weights = dict[str, Tensor]


def stacked_weights(parameters: Parameters, clients: int, shapes: Mapping[str, tuple[int, ...]]) -> Weights:
    """Every tensor with a client axis: what is not trained is shared."""
    return {
        name: weight.expand(clients, *shapes[name]) if weight.shape == shapes[name] else weight
        for name, weight in with_corrections(parameters).items()
    }


def stacked_linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    """[N, …, I] to [N, …, O], each client with its own matrix."""
    weight_NOI, bias_NO = weights[f"{name}.weight"], weights[f"{name}.bias"]
    found_NMO = torch.baddbmm(bias_NO[:, None], x.flatten(1, -2), weight_NOI.mT)
    return found_NMO.view(*x.shape[:-1], -1)


def line_places(rows_U: Sequence[int], clients: int) -> tuple[Tensor, int]:
    """Where among N·W lines each utterance stands, client by client, given whose it is; and W."""
    seen = [0] * clients
    order = []
    for row in rows_U:
        order.append(seen[row])
        seen[row] += 1
    width = max(seen)
    return torch.tensor(rows_U) * width + torch.tensor(order), width


def to_lines(own: Tensor, places_U: Tensor, lines: int) -> Tensor:
    """What utterances have, in their lines; zero in idle ones."""
    at_U = places_U.to(own.device, non_blocking=True)
    return own.new_zeros(lines, *own.shape[1:]).index_copy_(0, at_U, own)
