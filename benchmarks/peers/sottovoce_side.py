"""Sottovoce's side, and the floor below everybody: plain loops over the same local steps.

    python benchmarks/peers/sottovoce_side.py tiny --engine floor

`floor` trains every client of the cohort and does nothing else: no update, no clipping, no sum. `loop` is Algorithm 1
in the fewest lines, and what the models of all others are compared with.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from turns import Turns, parse
from workload import (
    CLIP_BOUND,
    CLIP_GRADIENTS,
    LOCAL_LR,
    SEED,
    SERVER_LR,
    Tally,
    Task,
    client_steps,
    cohort,
    start_parameters,
    step_loss,
)

from sottovoce.seeds import torch_stream

Parameters = Mapping[str, Tensor]
Round = Callable[[int, Tally], Parameters | None]


@dataclass(frozen=True)
class Client:
    """The one model that is trained: float32 masters, and what the forward pass takes (on a GPU, bfloat16 copies)."""

    masters: list[Tensor]
    working: dict[str, Tensor]

    @classmethod
    def like(cls, server: Parameters) -> "Client":
        masters = [p.clone() for p in server.values()]
        # `detach` shares the master's memory: in float32 there is nothing to copy.
        copies = [(p.bfloat16() if p.is_cuda else p.detach()).requires_grad_() for p in masters]
        return cls(masters, dict(zip(server, copies, strict=True)))

    @torch.no_grad()
    def load(self, server: Parameters) -> None:
        torch._foreach_copy_(self.masters, list(server.values()))
        self._refresh()

    @torch.no_grad()
    def step(self, gradients: list[Tensor | None]) -> None:
        """SGD with gradient clipping; layers that were left out have no gradient and stay."""
        pairs = [(p, g) for p, g in zip(self.masters, gradients, strict=True) if g is not None]
        moved, along = [p for p, _ in pairs], [g.float() for _, g in pairs]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(along)))
        torch._foreach_mul_(along, (CLIP_GRADIENTS / norm).clamp(max=1.0))
        torch._foreach_add_(moved, along, alpha=-LOCAL_LR)
        self._refresh()

    def _refresh(self) -> None:
        if self.masters[0].is_cuda:
            torch._foreach_copy_(list(self.working.values()), self.masters)


def trained(task: Task, server: Parameters, client: Client, *, round_number: int, tally: Tally) -> Iterator[None]:
    """Trains `client` as one user of the cohort after another, each from `server`, and halts after each."""
    for number in cohort(task.workload, round_number):
        client.load(server)
        for step in client_steps(task.workload, number, round_number=round_number, device=task.device):
            loss = step_loss(task.workload, client.working, step, tally)
            client.step(list(torch.autograd.grad(loss, list(client.working.values()), allow_unused=True)))
        yield


def _server(task: Task) -> dict[str, Tensor]:
    return {name: p.to(task.device) for name, p in start_parameters(task.workload).items()}


def floor(task: Task) -> Round:
    server = _server(task)
    client = Client.like(server)

    def one_round(round_number: int, tally: Tally) -> None:
        for _ in trained(task, server, client, round_number=round_number, tally=tally):
            pass

    return one_round


def loop(task: Task) -> Round:
    server = _server(task)
    client = Client.like(server)

    def one_round(round_number: int, tally: Tally) -> Parameters:
        total = [torch.zeros_like(p) for p in server.values()]
        for _ in trained(task, server, client, round_number=round_number, tally=tally):
            updates = torch._foreach_sub(list(server.values()), client.masters)
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(updates)))
            torch._foreach_mul_(updates, (CLIP_BOUND / norm).clamp(max=1.0))
            torch._foreach_add_(total, updates)
        generator = torch_stream(SEED, "noise", round_number, device=task.device)
        for p, summed in zip(server.values(), total, strict=True):
            noise = torch.randn(p.shape, generator=generator, device=task.device)
            summed.add_(noise, alpha=task.noise_multiplier * CLIP_BOUND)
            p.sub_(summed, alpha=SERVER_LR / task.workload.cohort_size)
        return server

    return one_round


ENGINES: Mapping[str, Callable[[Task], Round]] = {"floor": floor, "loop": loop}


def main() -> None:
    task, arguments = parse(__doc__)
    one_round = ENGINES[arguments.engine](task)
    turns, tally, round_number = Turns(task), Tally(), 0
    while turns.more:
        turns.wait()
        turns.answer(tally, one_round(round_number, tally))
        round_number += 1


if __name__ == "__main__":
    main()
