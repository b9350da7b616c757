"""What a local step of pretrained models computes, moves and keeps, by count: no GPU, and no numbers, are needed.

    python benchmarks/pretrained_counts.py
    python benchmarks/pretrained_counts.py --models moonshine-tiny-en --clients 64 --operations

The network of `pretrained.py` with LoRA, bfloat16, ten utterances of 4 s a client, forwards and backwards, without the
loss, is run on torch's `meta` device, whose tensors have shapes and no values.

- `kept` is what autograd keeps for the way back, each memory once, and `foreseen` what `memory.activation_bytes` says.
- `Tflop` is of matrix products, convolutions and attention, as torch counts them.
- `moved` is what all operations read and write, as if none were fused and no cache held anything. Attention is counted
  as the kernels that a GPU runs: it is told apart by its mask.
- `bound` is the sum of both at 790 Tflop/s and 4.8 TB/s (H200), in milliseconds, and audio seconds a second by it.
"""

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from pretrained_ways import TOKENS, USUAL, Bench, find_model, make_bench
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from sottovoce.models.huggingface.graphs import network_scores, padded_tokens
from sottovoce.models.huggingface.inputs import network_inputs
from sottovoce.models.huggingface.memory import activation_bytes, extent

META = torch.device("meta")
FLOPS, BYTES = 790e12, 4.8e12  # a second, of an H200
_MAKES_NOTHING = ("aten::_unsafe_view", "aten::detach", "aten::empty", "aten::new_empty", "aten::alias")


class CountMoved(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes that operations read and write, by their names."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.by_name: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = func.name()
        if not func.is_view and not name.startswith(_MAKES_NOTHING):
            self.by_name[name] += sum(_bytes(own) for own in tree_leaves((args, kwargs, found)))
        return found


def _bytes(value: Any) -> int:
    if not isinstance(value, Tensor):
        return 0
    numbers = 1
    for size, stride in zip(value.shape, value.stride(), strict=True):
        numbers *= size if stride else 1  # what is expanded is there once
    return numbers * value.element_size()


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    **_: Any,
) -> Tensor:
    """As GPUs have it: flash attention, or the kernel that takes a mask."""
    if attn_mask is None:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]  # type: ignore[no-any-return]
    mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    with_mask = torch.ops.aten._scaled_dot_product_efficient_attention
    return with_mask(query, key, value, mask, True, dropout_p, is_causal, scale=scale)[0]  # type: ignore[no-any-return]


class _Silu(torch.autograd.Function):
    """Of one operation each way, as on a GPU; without one torch takes it apart."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0]  # type: ignore[no-any-return]


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Operations as a GPU has them; transformers looks at no values, as while a graph is recorded."""
    with (
        patch("torch.nn.functional.scaled_dot_product_attention", _attention),
        patch("torch.nn.functional.silu", lambda x, inplace=False: _Silu.apply(x)),  # type: ignore[no-untyped-call]
        patch("transformers.utils.import_utils.is_cuda_stream_capturing", lambda: True),
    ):
        yield


def count(bench: Bench, clients: int, *, recompute: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The counts, and bytes by operation."""
    settings, dtype = bench.settings, torch.bfloat16
    frozen = {name: own.to(META, dtype) for name, own in bench.part.frozen.tensors.items()}
    leaves = {
        name: torch.empty(own.shape if clients == 1 else (clients, *own.shape), device=META, dtype=dtype)
        for name, own in bench.part.initial.items()
    }
    whole = replace(bench.part.frozen, tensors=frozen).with_trained(
        {name: own.requires_grad_() for name, own in leaves.items()}
    )
    features = bench.features(USUAL, 1).features_UTF
    utterances, frames = USUAL.count * clients, features.shape[1]
    inputs, norm_frames_U, _ = network_inputs(
        torch.empty(utterances, frames, features.shape[2], device=META, dtype=dtype),
        torch.full((utterances,), frames),
        settings,
    )
    if not settings.is_ctc:
        tokens = padded_tokens(TOKENS, longest=100)
        inputs["decoder_input_ids"] = torch.zeros(utterances, tokens, dtype=torch.long, device=META)

    weights = {own.untyped_storage()._cdata for own in whole.values()}
    kept: dict[int, Tensor] = {}

    def keep(own: Tensor) -> Tensor:
        place = own.untyped_storage()._cdata
        if place not in weights:
            kept[place] = own  # alive, so that no place is used again
        return own

    def forward() -> Tensor:
        return network_scores(whole, settings, inputs, norm_frames_B=norm_frames_U, recompute=recompute)

    flops, moved = [FlopCounterMode(display=False) for _ in range(2)], [CountMoved() for _ in range(2)]
    with as_on_a_gpu():
        forward()  # tables are made at the first call
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda own: own), moved[0], flops[0]:
            scores = forward()
        with moved[1], flops[1]:
            torch.autograd.grad(scores, list(leaves.values()), torch.empty_like(scores), allow_unused=True)
    done, went = [own.get_total_flops() for own in flops], [sum(own.by_name.values()) for own in moved]
    seconds = sum(done) / FLOPS + sum(went) / BYTES
    first = next(iter(inputs.values()))
    found = {
        "clients": clients,
        "layers computed again": recompute,
        "kept GiB": round(sum(own.untyped_storage().nbytes() for own in kept.values()) / 2**30, 2),
        "foreseen GiB": round(activation_bytes(settings, *extent(first, settings), recompute=recompute) / 2**30, 2),
        "Tflop": [round(own / 1e12, 2) for own in done],
        "moved GB": [round(own / 1e9, 1) for own in went],
        "bound ms": round(seconds * 1e3, 1),
        "bound audio s/s": round(USUAL.seconds * utterances / seconds),
    }
    return found, {name: round(own / 1e9, 2) for name, own in (moved[0].by_name + moved[1].by_name).most_common(15)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["moonshine-tiny-en", "wav2vec2-bert-300m"])
    parser.add_argument("--train", default="lora(r=8)")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--operations", action="store_true", help="gigabytes by operation too, the largest first")
    parser.add_argument("--random-from", type=Path, help="Moonshine's folder without its weights")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        for name in arguments.models:
            bench = make_bench(
                find_model(name, Path(temporary), arguments.random_from), arguments.train, torch.device("cpu")
            )
            largest = max(arguments.clients)
            for clients, recompute in [*((own, False) for own in arguments.clients), (largest, True)]:
                found, operations = count(bench, clients, recompute=recompute)
                print(json.dumps({"model": name, **found}), flush=True)
                if arguments.operations:
                    print(json.dumps(operations, indent=1), flush=True)


if __name__ == "__main__":
    main()
