"""Norms of tensor lists, trust ratios, and clipping of gradients; all of it stays on the device.

Shapes: H tensors in the list, C clients stacked.
"""

import math

import torch
from torch import Tensor

from sottovoce.optimisers.optimiser import Tensors


def tensor_norms(tensors: Tensors, *, stacked: bool = False) -> Tensor:
    """The L2 norm of every tensor, norms_H; of every client's row of it, norms_CH, when stacked."""
    if not stacked:
        return torch.stack(list(torch._foreach_norm(tensors)))
    rows = [tensor.reshape(tensor.shape[0], -1) for tensor in tensors]
    return torch.stack([torch.linalg.vector_norm(row, dim=1) for row in rows], dim=1)


def trust_ratios(parameters: Tensors, updates: Tensors, *, coefficient: float, eps: float, stacked: bool) -> Tensor:
    """coefficient·‖θ‖ / (‖u‖ + eps) for every tensor (and client), and 1 where either norm is zero.

    As optax.scale_by_trust_ratio has it: 1, not `coefficient`, so that a tensor starting at zero can leave it.
    """
    parameter_norms, update_norms = tensor_norms(parameters, stacked=stacked), tensor_norms(updates, stacked=stacked)
    ratios = coefficient * parameter_norms / (update_norms + eps)
    # masked_fill and not where: a scalar given to `where` is copied to the device, and the copy waits for it.
    return ratios.masked_fill((parameter_norms == 0) | (update_norms == 0), 1.0)


def per_tensor(values: Tensor, tensors: Tensors) -> list[Tensor]:
    """Splits values_H or values_CH into one factor for each of the `tensors`, which it broadcasts against."""
    if values.ndim == 1:
        return list(values.unbind())
    return [v_C.reshape(-1, *[1] * (t.ndim - 1)) for v_C, t in zip(values.unbind(dim=1), tensors, strict=True)]


@torch.no_grad()
def clip_gradients(gradients: Tensors, *, max_norm: float, stacked: bool = False) -> Tensor:
    """Scales `gradients`, in place, to a global norm of at most `max_norm`; returns the norm before, norm_C if stacked.

    A norm that is NaN or infinite makes *all* gradients (of that client) NaN: the step is visibly lost, none of it is
    half clipped, and the returned norm says so without waiting for the device. A client's update is then not finite,
    and counts as zero. `max_norm=inf` clips nothing.

    This steadies training and carries no privacy guarantee: users' updates are clipped elsewhere.

    >>> gradients = [torch.tensor([3.0]), torch.tensor([4.0])]
    >>> clip_gradients(gradients, max_norm=1.0)
    tensor(5.)
    >>> gradients
    [tensor([0.6000]), tensor([0.8000])]
    """
    assert max_norm > 0, f"{max_norm=}, expected a number above 0"
    norm: Tensor = torch.linalg.vector_norm(tensor_norms(gradients, stacked=stacked), dim=-1)
    # A zero norm gives max_norm/0 = inf, which the clamp makes 1.
    scale = (max_norm / norm).clamp(max=1.0).masked_fill(~norm.isfinite(), math.nan)
    if stacked:
        scale_CH = scale[:, None].expand(-1, len(gradients))
        torch._foreach_mul_(gradients, per_tensor(scale_CH, gradients))
    else:
        torch._foreach_mul_(gradients, scale)
    return norm
