"""ReLU and dropout together: on a CPU torch's own, on a GPU one kernel with the same meaning."""

import pytest
import torch
import torch.nn.functional as F

from sottovoce.base.seeds import torch_stream
from sottovoce.models.transformer.dropout import relu_dropout

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def test_without_dropout_it_is_relu() -> None:
    x = torch.randn(5, 7, generator=torch_stream(1, "x"))
    assert torch.equal(relu_dropout(x, 0.0), F.relu(x))


@needs_cuda
@pytest.mark.parametrize("shape", [(3, 1000, 129), (2, 7)])
def test_on_cuda_elements_are_dropped_scaled_and_differentiated_alike(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch_stream(1, "x")).cuda().requires_grad_()
    torch.cuda.manual_seed(3)
    y = relu_dropout(x, 0.3)
    kept = y > 0
    torch.testing.assert_close(y[kept], x[kept] / 0.7, rtol=1e-4, atol=0)
    assert not y[x <= 0].any()
    gradient = torch.randn(shape, generator=torch_stream(1, "gradient")).cuda()
    (found,) = torch.autograd.grad(y, x, gradient)
    torch.testing.assert_close(found, torch.where(kept, gradient / 0.7, 0), rtol=1e-4, atol=0)
    if x.numel() > 1000:
        share = float(kept.float().mean() / (x > 0).float().mean())
        assert abs(share - 0.7) < 0.005
    torch.cuda.manual_seed(3)
    assert torch.equal(relu_dropout(x, 0.3), y)
    assert x.numel() < 1000 or not torch.equal(relu_dropout(x, 0.3), y)
