"""Norms of tensor lists and trust ratios; all of it stays on the device.

Shapes: H tensors in the list, C clients stacked.
"""

import torch
from torch import Tensor

from sottovoce.optimisers.optimiser import Tensors


def tensor_norms(tensors: Tensors, *, stacked: bool = False) -> Tensor:
    """The L2 norm of every tensor, norms_H; of every client's row of it, norms_CH, when stacked."""
    if not stacked:
        return torch.stack(list(torch._foreach_norm(tensors)))
    rows = [tensor.reshape(tensor.shape[0], -1) for tensor in tensors]
    return torch.stack([torch.linalg.vector_norm(row, dim=1) for row in rows], dim=1)


def trust_ratios(parameter_norms: Tensor, update_norms: Tensor, *, coefficient: float, eps: float) -> Tensor:
    """coefficient·‖θ‖ / (‖u‖ + eps) for every tensor (and client), and 1 where either norm is zero.

    As optax.scale_by_trust_ratio has it: 1, not `coefficient`, so that a tensor starting at zero can leave it.
    """
    ratios = coefficient * parameter_norms / (update_norms + eps)
    # masked_fill and not where: a scalar given to `where` is copied to the device, and the copy waits for it.
    return ratios.masked_fill((parameter_norms == 0) | (update_norms == 0), 1.0)


def per_tensor(values: Tensor, tensors: Tensors) -> list[Tensor]:
    """Splits values_H or values_CH into one factor for each of the `tensors`, which it broadcasts against."""
    if values.ndim == 1:
        return list(values.unbind())
    return [v_C.reshape(-1, *[1] * (t.ndim - 1)) for v_C, t in zip(values.unbind(dim=1), tensors, strict=True)]
