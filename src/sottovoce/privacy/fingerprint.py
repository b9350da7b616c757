"""A digest of parameters computed on the device where they lie: hashing 1 GB on the host takes a second."""

import torch
from torch import Tensor

_CHUNK = {"cpu": 1 << 15, "cuda": 1 << 24}  # what stays in the cache, or fills the device
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LANES = (0x1F3D5B79_2468ACE1, 0x5851F42D_4C957F2D)


def fingerprint_tensor(tensor: Tensor) -> str:
    """128 bits that change with any bit, place, length or type in `tensor`; the same on every device.

    It finds accidents (another model, another order of additions), not forgeries: two tensors with one fingerprint can
    be built.

    >>> a = torch.arange(3.0)
    >>> fingerprint_tensor(a) == fingerprint_tensor(a.clone()), fingerprint_tensor(a) == fingerprint_tensor(a.flip(0))
    (True, False)
    """
    bits = tensor.detach().contiguous().view(-1).view(_INTEGERS[tensor.element_size()])
    sums = torch.zeros(len(_LANES), dtype=torch.int64, device=tensor.device)
    size = _CHUNK.get(tensor.device.type, 1 << 24)
    for start in range(0, bits.numel(), size):
        chunk = bits[start : start + size].long()
        places = torch.arange(start + 1, start + 1 + len(chunk), device=tensor.device)
        for lane, key in enumerate(_LANES):
            sums[lane] += _mix(chunk + _mix(places ^ key)).sum()  # one to one in the value, so no change is lost
    lanes = "".join(f"{value % 2**64:016x}" for value in sums.tolist())
    return f"{str(tensor.dtype).removeprefix('torch.')}-{bits.numel()}-{lanes}"


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser on int64, whose products wrap around."""
    x = (x ^ ((x >> 30) & (2**34 - 1))) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ ((x >> 27) & (2**37 - 1))) * (0x94D049BB133111EB - 2**64)
    return x ^ ((x >> 31) & (2**33 - 1))
