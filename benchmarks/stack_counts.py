"""What a lock-step of stacked clients asks of a GPU, counted on any machine: kernels launched, shapes, and padding.

    python benchmarks/stack_counts.py [--rounds 6] [--row-multiple 384]

Operators are counted as they are dispatched, forwards, backwards and with the optimiser's step, without those that only
look at memory in another way; attention counts as one each way, as its kernel is. On a GPU the optimiser's step is two
kernels. Shapes and padding are those of the lock-steps of the workload `5M-gpu` of `benchmarks/peers.py`.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "peers"))

import numpy as np
import torch
from sottovoce_clients import indices_of, workload_context
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from workload import WORKLOADS, cohort

from sottovoce.base.seeds import torch_stream
from sottovoce.data.audio.features import frame_count
from sottovoce.data.audio.waveforms import Features
from sottovoce.federated.client import PlannedClient, plan_client
from sottovoce.flat.layout import Layout
from sottovoce.models.transformer import network
from sottovoce.models.transformer.draws import draw_several, join_draws
from sottovoce.models.transformer.family import row_multiple, stacked_losses
from sottovoce.models.transformer.recorded_stacks import arrange_stack, pad_stack, take_apart
from sottovoce.models.transformer.settings import init, named_settings
from sottovoce.optimisers import SGD
from sottovoce.optimisers.weights import Weights

WORKLOAD = "5M-gpu"
# Operators that make no kernel.
VIEWS = (
    *("view", "detach", "expand", "transpose", "squeeze", "select.int", "split", "unbind", "permute", "as_strided"),
    *("aten.t.", "slice", "alias", "empty", "unfold.", "lift_fresh", "_local_scalar"),
)


class OperatorCount(TorchDispatchMode):
    """How many operators are dispatched while it is active."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators = 0

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.operators += not any(word in str(operator) for word in VIEWS)
        return operator(*args, **(kwargs or {}))


class _OneKernel(torch.autograd.Function):
    """In place of attention: one operator forwards, one backwards."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        once = gradient.clone()
        return once, once, once


def count_operators(*, clients: int = 4, utterances: int = 2) -> dict[str, int]:
    """Those of a lock-step of `small`, whatever its sizes: all, and of them what precedes and follows the recorded."""
    settings = named_settings("small", tokens=30, dropout=0.0, layer_drop=0.0)
    start = init(settings, generator=torch_stream(1, "init"))
    layout = Layout.of(start)
    weights = Weights(layout, SGD(), device=torch.device("cpu"), dtype=torch.float32, rows=clients)
    weights.reset(layout.flatten(start))
    count = clients * utterances
    whole = torch.full((count,), 96)
    features = Features(torch.zeros(count, 96, 80), whole, torch.ones(count, 5, dtype=torch.int64), whole.clamp(max=5))
    drawn = draw_several(settings, batch_sizes=[utterances] * clients, generator=torch_stream(1, "draws"))
    rows = [row for row in range(clients) for _ in range(utterances)]
    stack: dict[str, Any] = {"rows_U": rows, "clients": clients, "settings": settings}
    attend: Any = _OneKernel.apply
    setattr(network, "attend_segments", lambda q, k, v, **_: attend(q, k, v))  # noqa: B010
    with OperatorCount() as passes:
        losses_N = stacked_losses(weights.working, features, draws=join_draws(drawn), **stack)
        gradients = torch.autograd.grad(losses_N.sum(), list(weights.working.values()))
    with OperatorCount() as padding:
        padded = pad_stack(features)
        take_apart(arrange_stack(padded, join_draws(drawn), row_multiple=64, **stack), settings)
    with OperatorCount() as taking:
        weights.set_gradients(gradients)
    return {"forwards and backwards": passes.operators, "padding": padding.operators, "taking": taking.operators}


def lock_steps(rounds: int) -> Iterator[list[tuple[PlannedClient, int]]]:
    """Who has a batch in each lock-step of some rounds, and its number; every cohort is one stack."""
    workload, context = WORKLOADS[WORKLOAD], workload_context(WORKLOAD)
    indices = indices_of(context)
    for step in range(rounds):
        planned = [plan_client(context, index, step=step) for index in indices(cohort(workload, step)).tolist()]
        for number in range(workload.local_steps):
            yield [(client, number) for client in planned if number < len(client.batches)]


def count_shapes(rounds: int, *, multiple: int) -> tuple[Counter[tuple[Any, ...]], float]:
    """How often each shape of a lock-step's tensors occurs, and the share of all frames that are speech."""
    workload = WORKLOADS[WORKLOAD]
    clients, shapes, shares = workload.cohort_size, Counter[tuple[Any, ...]](), []
    for active in lock_steps(rounds):
        rows, frames, tokens = [], [], []
        for row, (client, number) in enumerate(active):
            for place in client.batches[number].rows:
                rows.append(row)
                frames.append(frame_count(int(client.speech.lengths[place])))
                tokens.append(len(client.speech.tokens[place]))
        none = torch.empty(len(rows), max(tokens), dtype=torch.int64)
        batch = Features(torch.empty(len(rows), max(frames), 1), torch.tensor(frames), none, torch.tensor(tokens))
        padded = pad_stack(batch)
        drawn = join_draws([None] * clients)
        stack: dict[str, Any] = {"rows_U": rows, "clients": clients, "settings": workload.settings}
        arranged = arrange_stack(padded, drawn, row_multiple=multiple, **stack)
        tensors, fixed = take_apart(arranged, workload.settings)
        texts = padded.features_UTF.shape, padded.tokens_UL.shape
        shapes[(texts, *(own.shape for own in tensors.values()), fixed)] += 1
        shares.append(sum(count // 3 for count in frames) / tensors["from_batch_NL"].numel())
    return shapes, float(np.mean(shares))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    multiple = row_multiple(WORKLOADS[WORKLOAD].batch_seconds)
    parser.add_argument("--row-multiple", type=int, default=multiple, help="what rows end on")
    arguments = parser.parse_args()
    for name, operators in count_operators().items():
        print(f"{name}: {operators} operators")
    shapes, share = count_shapes(arguments.rounds, multiple=arguments.row_multiple)
    print(f"{sum(shapes.values())} lock-steps of {WORKLOAD}: {len(shapes)} shapes; {share:.0%} of frames are speech")


if __name__ == "__main__":
    main()
