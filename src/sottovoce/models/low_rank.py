"""The factors of a low-rank correction b·a: their names, and bases in which noise on b is as large in b·a.

With orthonormal rows of a, ‖n·a‖ = ‖n‖ for any change n of b, and the gradient of b is no longer than that of b·a.

Shapes: R rank, I inputs and O outputs of the matrix that is corrected.
"""

import torch
from torch import Tensor


def low_rank_names(matrix: str) -> tuple[str, str]:
    """The names of the pair a, b that corrects a matrix W to W + b·a.

    >>> low_rank_names("blocks.07.mlp.hidden.weight")
    ('blocks.07.mlp.hidden.lora_a', 'blocks.07.mlp.hidden.lora_b')
    """
    stem = matrix.removesuffix("weight")
    return f"{stem}lora_a", f"{stem}lora_b"


def orthonormal_rows(a_RI: Tensor) -> tuple[Tensor, Tensor]:
    """l [R, R] and q [R, I] with a = l·q, in float64 on the host; q has orthonormal rows, whatever the rank of a."""
    q_IR, r_RR = torch.linalg.qr(a_RI.detach().cpu().double().T)
    signs_R = torch.where(r_RR.diagonal() < 0, -1.0, 1.0).double()  # so that there is one such pair
    return r_RR.T * signs_R, (q_IR * signs_R).T


def singular_basis(a_RI: Tensor, b_OR: Tensor) -> tuple[Tensor, Tensor]:
    """a' [R, I] and x [R, R] with (b·x)·a' = b·a, in float64 on the host: the thin singular value decomposition of b·a.

    The rows of a' are its right singular vectors, the strongest first, and orthonormal also where b·a has a lower rank
    than R, or is zero. Signs are such that the largest number of each vector of x is positive.
    """
    l_RR, q_RI = orthonormal_rows(a_RI)
    v_RR = torch.linalg.svd(b_OR.detach().cpu().double() @ l_RR, full_matrices=False).Vh
    largest_R1 = v_RR.abs().argmax(dim=1, keepdim=True)
    v_RR = v_RR * torch.where(v_RR.gather(1, largest_R1) < 0, -1.0, 1.0)
    return v_RR @ q_RI, l_RR @ v_RR.T
