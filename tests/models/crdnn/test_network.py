"""Convolutions at the ends of utterances, against a slower way to the same: values and gradients, in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sottovoce.base.seeds import torch_stream
from sottovoce.models.crdnn.network import reflected

ENDS = torch.tensor([9, 1, 2, 8, 7, 5])  # of nine frames: the whole batch, one or two frames, near its end


def drawn(*shape: int, stream: str) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch_stream(1, stream))


def each_alone(x_UCTF: Tensor, ends_U: Tensor) -> Tensor:
    """Every utterance reflected by itself, with zeros behind; one of a single frame has only that."""
    found = []
    for own_CTF, end in zip(x_UCTF, ends_U.tolist(), strict=True):
        alone_CTF = own_CTF[:, :end] if end > 1 else own_CTF[:, :1].expand(-1, 2, -1)
        padded_CTF = F.pad(alone_CTF[None], (1, 1, 1, 1), mode="reflect")[0][:, : end + 2]
        found.append(F.pad(padded_CTF, (0, 0, 0, x_UCTF.shape[2] + 2 - padded_CTF.shape[1])))
    return torch.stack(found)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_each_utterance_is_reflected_at_its_own_end(layout: torch.memory_format) -> None:
    x_UCTF = drawn(6, 3, 9, 5, stream="x").contiguous(memory_format=layout).requires_grad_()
    # Utterances of one frame are checked behind it alone: what stands before the first frame of a batch is not theirs.
    inside_UT = torch.arange(11) < (ENDS + 2)[:, None]
    inside_UT[1, 0] = False
    inside = inside_UT[:, None, :, None].double()
    weight = drawn(6, 3, 11, 7, stream="weight") * inside
    ours, alone = reflected(x_UCTF, ENDS), each_alone(x_UCTF, ENDS)
    torch.testing.assert_close(ours * inside, alone * inside, rtol=0, atol=0)
    (found,), (expected,) = (torch.autograd.grad((made * weight).sum(), x_UCTF) for made in (ours, alone))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)  # sums of some ten numbers
