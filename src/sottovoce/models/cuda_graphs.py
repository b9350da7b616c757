"""Functions as CUDA graphs: recorded once for every shape of their inputs, then launched whole.

One pass at a time: all shapes share one pool of memory, so activations last until the next pass begins, and so do the
gradients of its backward pass.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Replay = Callable[[], object]
KEEP_FREE_BYTES = 8 << 30  # of the device's memory


class GraphRecorder(ABC):
    """How work on a device is recorded, to be done again at the same addresses."""

    @abstractmethod
    def has_memory_for(self, activation_bytes: int) -> bool:
        """Whether a pass with so many bytes of activations may be recorded."""

    @abstractmethod
    @contextmanager
    def recording(self, rehearsal: Callable[[], object]) -> Iterator[None]:
        """Scope of all `record` calls for one shape. `rehearsal` is done first; it leaves no trace, even in chance."""

    @abstractmethod
    def record(self, work: Callable[[], Sequence[Tensor]]) -> tuple[Replay, Sequence[Tensor]]:
        """What does `work` again, and the tensors that hold its results, each time."""

    @abstractmethod
    def borrowed(self, tensor: Tensor) -> Tensor:
        """The same memory under a tensor that does not own it."""


@final
class CudaRecorder(GraphRecorder):
    """Records CUDA graphs, all with their memory in one pool."""

    def __init__(self, device: torch.device, *, keep_free_bytes: int = KEEP_FREE_BYTES) -> None:
        self._device, self._keep_free_bytes = device, keep_free_bytes
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._pool_bytes = 0

    def has_memory_for(self, activation_bytes: int) -> bool:
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self._device)
        growth = max(0, activation_bytes - self._pool_bytes)
        if free - growth < self._keep_free_bytes:
            return False
        self._pool_bytes += growth
        return True

    @contextmanager
    def recording(self, rehearsal: Callable[[], object]) -> Iterator[None]:
        generator = torch.cuda.default_generators[self._device.index]
        before = generator.get_state()
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            # Libraries set themselves up on first use, which no graph may record.
            for _ in range(2):
                rehearsal()
            yield
        current.wait_stream(self._stream)
        generator.set_state(before)

    def record(self, work: Callable[[], Sequence[Tensor]]) -> tuple[Replay, Sequence[Tensor]]:
        # Not `torch.cuda.graph`: it waits for the device and empties caches, once per graph.
        graph = torch.cuda.CUDAGraph()
        # Threads that load data go on allocating meanwhile; only this one must keep to what can be recorded.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            results = work()
        finally:
            graph.capture_end()
        return graph.replay, results

    def borrowed(self, tensor: Tensor) -> Tensor:
        """When the owners are gone the pool's memory serves the next shape as well."""
        elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        window = {
            "shape": (elements * tensor.element_size(),),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }
        raw = torch.as_tensor(SimpleNamespace(__cuda_array_interface__=window), device=tensor.device)
        return raw.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


@dataclass
class Turn:
    """The number of the pass whose activations the pool holds."""

    number: int = 0


# --- a function of tensors -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Recorded:
    """Both graphs of a function for one shape of its inputs, and the tensors that they read and write."""

    forward: Replay
    backward: Replay
    inputs: Sequence[Tensor]
    output: Tensor
    output_gradient: Tensor
    gradients: Sequence[Tensor]  # of the first input, where it is differentiated, then of the parameters
    through: bool


@final
class RecordedFunction:
    """`function(parameters, x, *others)`, through graphs where gradients are asked for.

    The result is one tensor, differentiated by all `parameters`, and by `x` where it requires a gradient. Parameters
    must stay at their addresses. `activation_bytes(x, *others)` is what a pass takes. It runs plainly where there is no
    memory for a shape, without gradients, and with other parameters. Functions with one recorder share their `turn`.
    """

    def __init__(
        self,
        function: Callable[..., Tensor],
        parameters: Mapping[str, Tensor],
        *,
        recorder: GraphRecorder,
        activation_bytes: Callable[..., int],
        turn: Turn | None = None,
    ) -> None:
        self._function, self._parameters, self._recorder = function, dict(parameters), recorder
        self._activation_bytes = activation_bytes
        self._recorded: dict[tuple[Any, ...], _Recorded | None] = {}
        self._turn = turn or Turn()

    def __call__(self, parameters: Mapping[str, Tensor], *inputs: Tensor, **options: Any) -> Tensor:
        own = all(parameters.get(name) is tensor for name, tensor in self._parameters.items())
        if not (own and torch.is_grad_enabled()) or torch.is_autocast_enabled(inputs[0].device.type):
            return self._function(parameters, *inputs, **options)
        key = (inputs[0].requires_grad, *((tensor.shape, tensor.dtype) for tensor in inputs), *options.items())
        if key not in self._recorded:
            self._turn.number += 1  # recording uses the pool: a pass that is still under way is lost
            fits = self._recorder.has_memory_for(self._activation_bytes(*inputs))
            self._recorded[key] = self._record(inputs, options) if fits else None
        recorded = self._recorded[key]
        if recorded is None:
            return self._function(parameters, *inputs, **options)
        return _Pass.apply(recorded, self._turn, inputs[1:], inputs[0], *self._parameters.values())  # type: ignore[no-any-return,no-untyped-call]

    def _record(self, inputs: Sequence[Tensor], options: Mapping[str, Any]) -> _Recorded:
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in self._parameters.items()}
        own = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in inputs]
        x, through = own[0].requires_grad_(inputs[0].requires_grad), inputs[0].requires_grad
        tape: list[Tensor] = []

        def forward() -> Sequence[Tensor]:
            tape[:] = [self._function(leaves, x, *own[1:], **options)]
            return [tape[0].detach()]

        def backward(gradient: Tensor) -> Sequence[Tensor]:
            return torch.autograd.grad(tape.pop(), [*([x] if through else []), *leaves.values()], gradient)

        def rehearsal() -> None:
            backward(torch.zeros_like(*forward()))

        with self._recorder.recording(rehearsal):
            forwards, (output,) = self._recorder.record(forward)
            output_gradient = torch.zeros_like(output)
            backwards, gradients = self._recorder.record(lambda: backward(output_gradient))
        # Borrowed only now: until all is recorded, nothing that is read between two graphs may be given away.
        return _Recorded(
            forward=forwards,
            backward=backwards,
            inputs=[tensor.detach() for tensor in own],
            output=self._recorder.borrowed(output),
            output_gradient=output_gradient,
            through=through,
            gradients=[self._recorder.borrowed(gradient) for gradient in gradients],
        )


class _Pass(torch.autograd.Function):
    """One pass; the parameters are arguments so that autograd asks for their gradients."""

    @staticmethod
    def forward(ctx: Any, recorded: _Recorded, turn: Turn, others: Sequence[Tensor], x: Tensor, *_: Tensor) -> Tensor:
        turn.number += 1
        ctx.recorded, ctx.turn, ctx.number = recorded, turn, turn.number
        torch._foreach_copy_(list(recorded.inputs), [x, *others])
        recorded.forward()
        return recorded.output.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        assert ctx.turn.number == ctx.number, "what this pass remembers is gone: a later pass has taken its place"
        ctx.turn.number += 1
        ctx.recorded.output_gradient.copy_(gradient)
        ctx.recorded.backward()
        return None, None, None, *([] if ctx.recorded.through else [None]), *ctx.recorded.gradients
