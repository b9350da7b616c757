"""The blocks of a model in training as CUDA graphs: recorded once for every input shape, then launched whole.

A block is some thirty kernels forwards and backwards, which a host launches more slowly than a GPU runs them.

    S_0 ─► block 0 ─► S_1 ─► block 1 ─► S_2 … S_L      forwards, one graph a block
    D_0 ◄─ block 0 ◄─ D_1 ◄─ block 1 ◄─ D_2 … D_L      backwards: gradients of the S

Every S and D has a fixed address. Where layer-drop leaves blocks out, the last S (or D) is copied over the gap. One
pass at a time, as in `cuda_graphs`.

Shapes: B utterances and T frames, or one packed row and its frames; D model width, L blocks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sottovoce.models.cuda_graphs import KEEP_FREE_BYTES, CudaRecorder, GraphRecorder, Replay, Turn
from sottovoce.models.family import Parameters
from sottovoce.models.transformer.network import BlockWeights, block, block_weights, run_blocks
from sottovoce.models.transformer.settings import Settings

Blocks = Callable[..., Tensor]

# What a block keeps for its backward pass, as multiples of its input: 18 by count, the rest for what comes and goes.
ACTIVATIONS_PER_INPUT = 24


def graphed_blocks(
    parameters: Parameters,
    *,
    settings: Settings,
    block: Callable[..., Tensor] = block,
    keep_free_bytes: int = KEEP_FREE_BYTES,
) -> Blocks:
    """`run_blocks` over the blocks of `parameters`, through CUDA graphs where that is possible.

    `parameters` must stay at their addresses. It runs plainly in evaluation, with other parameters, in autocast,
    without CUDA, and for a new shape whose activations would leave less than `keep_free_bytes` free. The same seed
    (`seeded_kernels`) gives the same dropout masks as in a plain run.
    """
    stack = [block_weights(parameters, layer) for layer in range(settings.layers)]
    device = parameters["output.weight"].device
    if device.type != "cuda":
        return run_blocks
    return GraphedBlocks(stack, block=block, recorder=CudaRecorder(device, keep_free_bytes=keep_free_bytes))


# --- one shape -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Recorded:
    """The graphs of all blocks for one input shape, and the tensors between them."""

    forwards: Sequence[Replay]
    backwards: Sequence[Replay]
    streams: Sequence[Tensor]  # S_0 … S_L, each [B, T, D]
    stream_gradients: Sequence[Tensor]  # D_0 … D_L
    weight_gradients: Sequence[Sequence[Tensor]]
    where: Tensor

    def forward(self, x_BTD: Tensor, where: Tensor, kept: Sequence[int]) -> Tensor:
        self.where.copy_(where)
        for layer in kept:
            if x_BTD is not self.streams[layer]:
                self.streams[layer].copy_(x_BTD)
            self.forwards[layer]()
            x_BTD = self.streams[layer + 1]
        return x_BTD.clone()

    def backward(self, gradient_BTD: Tensor, kept: Sequence[int]) -> Tensor:
        for layer in reversed(kept):
            if gradient_BTD is not self.stream_gradients[layer + 1]:
                self.stream_gradients[layer + 1].copy_(gradient_BTD)
            self.backwards[layer]()
            gradient_BTD = self.stream_gradients[layer]
        return gradient_BTD


def _record(
    x_BTD: Tensor,
    where: Tensor,
    stack: Sequence[BlockWeights],
    *,
    block: Callable[..., Tensor],
    recorder: GraphRecorder,
    options: dict[str, Any],
) -> _Recorded:
    """Record every block for inputs like `x_BTD`, first all forwards, then all backwards, as a step would run them."""
    leaves = [BlockWeights(*(w.detach().requires_grad_() for w in _tensors(weights))) for weights in stack]
    own_where = where.clone()
    streams = [x_BTD.detach().clone(memory_format=torch.contiguous_format)]
    tape: dict[int, tuple[Tensor, Tensor]] = {}

    def forward(layer: int) -> Sequence[Tensor]:
        before = streams[layer].detach().requires_grad_()
        after = block(before, leaves[layer], where=own_where, **options)
        tape[layer] = before, after
        return [after.detach()]

    def backward(layer: int, gradient: Tensor) -> Sequence[Tensor]:
        before, after = tape.pop(layer)
        return torch.autograd.grad(after, [before, *_tensors(leaves[layer])], gradient)

    layers = range(len(stack))
    last_gradient = torch.zeros_like(streams[0])
    forwards, backwards, gradients = [], [], [[last_gradient]]
    with recorder.recording(lambda: (forward(0), backward(0, last_gradient))):
        for layer in layers:
            replay, (stream,) = recorder.record(lambda layer=layer: forward(layer))  # type: ignore[misc]
            forwards.append(replay)
            streams.append(stream)
        for layer in reversed(layers):
            above = gradients[-1][0]
            replay, results = recorder.record(lambda layer=layer, above=above: backward(layer, above))  # type: ignore[misc]
            backwards.append(replay)
            gradients.append([*results])
    # Borrowed only now: until all is recorded, nothing that is read between two graphs may be given away.
    by_layer = [[recorder.borrowed(t) for t in tensors] for tensors in reversed(gradients[1:])]
    return _Recorded(
        forwards=forwards,
        backwards=backwards[::-1],
        streams=[streams[0], *(recorder.borrowed(stream) for stream in streams[1:])],
        stream_gradients=[*(tensors[0] for tensors in by_layer), last_gradient],
        weight_gradients=[tensors[1:] for tensors in by_layer],
        where=own_where,
    )


def _tensors(weights: BlockWeights) -> list[Tensor]:
    """Every weight is one tensor: low-rank ones are not recorded."""
    tensors = [weight for weight in weights if isinstance(weight, Tensor)]
    assert len(tensors) == len(weights), "a block with low-rank weights cannot be recorded"
    return tensors


# --- the blocks ------------------------------------------------------------------------------------------------------


@final
class GraphedBlocks:
    """See `graphed_blocks`."""

    def __init__(
        self, stack: Sequence[BlockWeights], *, recorder: GraphRecorder, block: Callable[..., Tensor] = block
    ) -> None:
        assert all(weight.requires_grad for weights in stack for weight in _tensors(weights))
        self._stack, self._recorder, self._block = stack, recorder, block
        self._layer_of = {id(weights.qkv): layer for layer, weights in enumerate(stack)}
        self._recorded: dict[tuple[Any, ...], _Recorded | None] = {}
        self._turn = Turn()

    def __call__(self, x_BTD: Tensor, stack: Sequence[BlockWeights], *, where: Tensor, **options: Any) -> Tensor:
        kept = [self._layer_of.get(id(weights.qkv)) for weights in stack]
        replays = torch.is_grad_enabled() and not torch.is_autocast_enabled(x_BTD.device.type) and "kept" not in options
        if not (kept and replays) or None in kept:
            return run_blocks(x_BTD, stack, where=where, **options)
        recorded = self._for_shape(x_BTD, where, options)
        if recorded is None:
            return run_blocks(x_BTD, stack, where=where, **options)
        weights = [weight for of_block in stack for weight in _tensors(of_block)]
        return _Pass.apply(x_BTD, where, recorded, kept, self._turn, *weights)  # type: ignore[no-any-return,no-untyped-call]

    def _for_shape(self, x_BTD: Tensor, where: Tensor, options: dict[str, Any]) -> _Recorded | None:
        key = (x_BTD.shape, x_BTD.dtype, where.shape, *options.items())
        if key not in self._recorded:
            self._turn.number += 1  # recording uses the pool: a pass that is still under way is lost
            activation_bytes = ACTIVATIONS_PER_INPUT * len(self._stack) * x_BTD.numel() * x_BTD.element_size()
            self._recorded[key] = None
            if self._recorder.has_memory_for(activation_bytes):
                self._recorded[key] = _record(
                    x_BTD, where, self._stack, block=self._block, recorder=self._recorder, options=options
                )
        return self._recorded[key]


class _Pass(torch.autograd.Function):
    """One pass through the kept blocks; the weights are arguments so that autograd asks for their gradients."""

    @staticmethod
    def forward(
        ctx: Any, x_BTD: Tensor, where: Tensor, recorded: _Recorded, kept: list[int], turn: Turn, *_: Tensor
    ) -> Tensor:
        turn.number += 1
        ctx.recorded, ctx.kept, ctx.turn, ctx.number = recorded, kept, turn, turn.number
        return recorded.forward(x_BTD, where, kept)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_BTD: Tensor) -> tuple[Tensor | None, ...]:
        assert ctx.turn.number == ctx.number, (
            "the activations of this pass are gone: a later pass has taken their place"
        )
        ctx.turn.number += 1
        first = ctx.recorded.backward(gradient_BTD, ctx.kept)
        weight_gradients = (g for layer in ctx.kept for g in ctx.recorded.weight_gradients[layer])
        return first, None, None, None, None, *weight_gradients
