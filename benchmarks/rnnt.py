"""The transducer's loss, forward and backward: time, and memory beyond its inputs, beside `warprnnt_numba`.

    python benchmarks/rnnt.py                                                     # processor, one thread
    python benchmarks/rnnt.py --device cuda --batch 32 --frames 400 --tokens 80 --outputs 2501 --joint 1024

`warprnnt_numba` is no dependency: `pip install warprnnt_numba numba` where it is to be measured (on a GPU numba needs
CUDA of its own, and all logits must fit into memory). Sides take turns within each repeat; a time is the median over
repeats, with its quartiles. "products" are the joint's four matrix products alone, with nothing around them, in the
chunks that the loss works on: what the loss cannot be faster than. On a processor times are the process's own, whatever
else runs; `warprnnt_numba` walks its lattice in Python there and takes minutes for more than a few thousand nodes.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from sottovoce.models import rnnt

Side = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("batch", 8), ("frames", 200), ("tokens", 50), ("outputs", 500), ("joint", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--unequal", action="store_true", help="lengths from half to all of these")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--no-peer", action="store_true", help="without warprnnt_numba, were it there")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    os.environ["NUMBA_NUM_THREADS"] = str(given.threads)  # its threads wait busily, and would count as ours
    torch.manual_seed(1)
    device = torch.device(given.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shapes = (
        (given.batch, given.frames, given.joint),
        (given.batch, given.tokens + 1, given.joint),
        (given.outputs, given.joint),
        (given.outputs,),
    )
    inputs = [torch.randn(shape, device=device, dtype=dtype) / 4 for shape in shapes]
    tokens_BU = torch.randint(1, given.outputs, (given.batch, given.tokens))
    lengths_B, token_lengths_B = (
        torch.randint(most // 2, most + 1, (given.batch,)) if given.unequal else torch.full((given.batch,), most)
        for most in (given.frames, given.tokens)
    )
    lengths_B[0], token_lengths_B[0] = given.frames, given.tokens
    texts = (lengths_B, tokens_BU, token_lengths_B)
    sides: dict[str, Side] = {
        "ours, fused": lambda: step(inputs, lambda f, g, w, b: rnnt.joint_losses(f, g, w, b, *texts)),
        "products": products(inputs, lengths_B, token_lengths_B),
    }
    if device.type == "cpu":
        logits_BTWV = whole_joint(*inputs)
        sides["ours, logits given"] = lambda: step([logits_BTWV], lambda logits: rnnt.logit_losses(logits, *texts))
    if find_spec("warprnnt_numba") is not None and not given.no_peer:
        peer = peer_losses(texts, device)
        sides["warprnnt_numba, joint in torch"] = lambda: step(inputs, lambda *joint: peer(whole_joint(*joint)))
        if device.type == "cpu":
            sides["warprnnt_numba, logits given"] = lambda: step([logits_BTWV], peer)
            compare(logits_BTWV, texts, peer)
    report(sides, device=device, repeats=given.repeats)
    operations = 2 * sum((lengths_B * (token_lengths_B + 1)).tolist()) * given.joint * given.outputs
    print(f"the joint's products are 4 × {operations / 1e12:.3f} Tflop")


def step(inputs: list[Tensor], losses_of: Callable[..., Tensor]) -> tuple[Tensor, ...]:
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    return torch.autograd.grad(losses_of(*leaves).sum(), leaves)


def whole_joint(encoded_BTJ: Tensor, predicted_BWJ: Tensor, weight_VJ: Tensor, bias_V: Tensor) -> Tensor:
    return F.linear((encoded_BTJ[:, :, None] + predicted_BWJ[:, None]).tanh(), weight_VJ, bias_V)


def products(inputs: list[Tensor], lengths_B: Tensor, token_lengths_B: Tensor) -> Side:
    """Once forward, once again, twice for the gradients; on random numbers, for a GPU's clock depends on them."""
    weight_VJ, _ = rnnt._aligned(*inputs[2:])
    bias_V = torch.zeros_like(weight_VJ[:, 0])
    chunks = list(rnnt._chunks(lengths_B, token_lengths_B, outputs=len(inputs[3]), device=weight_VJ.device))
    most = max((chunk.last - chunk.first) * chunk.width for chunk in chunks)
    joined = torch.randn(most, weight_VJ.shape[1], device=weight_VJ.device).to(weight_VJ.dtype).tanh_()

    def multiply() -> None:
        for chunk in chunks:
            own = joined[: (chunk.last - chunk.first) * chunk.width]
            for _ in range(2):
                logits = F.linear(own, weight_VJ, bias_V)
            _ = logits @ weight_VJ
            _ = logits.T @ own

    return multiply


def peer_losses(texts: tuple[Tensor, Tensor, Tensor], device: torch.device) -> Callable[[Tensor], Tensor]:
    from warprnnt_numba import RNNTLossNumba  # type: ignore[import-not-found, unused-ignore]

    lengths_B, tokens_BU, token_lengths_B = (text.int().to(device) for text in texts)
    peer = RNNTLossNumba(blank=0, reduction="none")
    return lambda logits: peer(logits, tokens_BU, lengths_B, token_lengths_B)  # type: ignore[no-any-return, unused-ignore]


def compare(logits_BTWV: Tensor, texts: tuple[Tensor, Tensor, Tensor], peer: Callable[[Tensor], Tensor]) -> None:
    ours_B, theirs_B = rnnt.logit_losses(logits_BTWV, *texts), peer(logits_BTWV.contiguous())
    (ours,) = step([logits_BTWV], lambda logits: rnnt.logit_losses(logits, *texts))
    (theirs,) = step([logits_BTWV], peer)
    relative = ((ours_B - theirs_B) / ours_B).abs().max()
    print(f"ours and warprnnt_numba's: losses differ by {float(relative):.1e} of them, gradients by ", end="")
    print(f"{float((ours - theirs).abs().max()):.1e} (the largest is {float(theirs.abs().max()):.2f})")


def report(sides: dict[str, Side], *, device: torch.device, repeats: int) -> None:
    times: dict[str, list[float]] = {name: [] for name in sides}
    memory: dict[str, float] = {}
    clock = time.perf_counter if device.type == "cuda" else time.process_time  # whatever else runs on the processor
    for repeat in range(repeats + 1):
        for name, side in sides.items():
            if device.type == "cuda":
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            began = clock()
            side()
            if device.type == "cuda":
                torch.cuda.synchronize()
                memory[name] = (torch.cuda.max_memory_allocated() - before) / 1e9
            if repeat:
                times[name].append(clock() - began)
    for name, found in times.items():
        low, middle, high = (1000 * quartile for quartile in statistics.quantiles(found, n=4))
        beyond = f", {memory[name]:.2f} GB beyond its inputs" if name in memory else ""
        print(f"{name:32} {middle:8.1f} ms ({low:.1f}–{high:.1f}){beyond}")


if __name__ == "__main__":
    main()
