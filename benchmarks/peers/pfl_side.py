"""The workload on Apple's `pfl`, put together as its guides do: FederatedAveraging over a SimulatedBackend, with the
Gaussian mechanism applied centrally.

    .venv-pfl/bin/python benchmarks/peers/pfl_side.py tiny [--processes 2 --threads 1] [--device cuda]

In its favour: users' data lie in memory, batches go to the device from pinned memory with their lengths left on the
host, and nothing is ever evaluated. With `--processes` the cohort is shared among processes by pfl's own means, with
`--precision bfloat16` its own autocast is on (as it always is on a GPU).
"""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from itertools import count
from typing import Any

import torch
from turns import Turns, parse
from workload import (
    CLIP_BOUND,
    CLIP_GRADIENTS,
    LOCAL_LR,
    SERVER_LR,
    RecogniserModule,
    Step,
    Tally,
    Task,
    client_steps,
    cohort,
    user,
)

RANK = int(os.environ.get("PFL_WORKER_RANK", "0"))


def start_workers(processes: int) -> list[subprocess.Popen[bytes]]:
    """Starts processes 1, 2, … with this process's own command line; pfl reads these two variables when imported."""
    if processes == 1 or RANK > 0:
        return []
    ports = [_free_port() for _ in range(processes)]
    os.environ["PFL_WORKER_ADDRESSES"] = ",".join(f"localhost:{port}" for port in ports)
    os.environ["PFL_WORKER_RANK"] = "0"
    return [
        subprocess.Popen(
            [sys.executable, *sys.argv],
            env={**os.environ, "PFL_WORKER_RANK": str(rank)},
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,  # standard output is for the first process's answers
        )
        for rank in range(1, processes)
    ]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def run(task: Task, *, processes: int) -> None:
    # Late: on import pfl reads the environment and connects its processes.
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics, Weighted
    from pfl.model.pytorch import PyTorchModel
    from pfl.privacy.gaussian_mechanism import GaussianMechanism
    from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism

    workload = task.workload
    halved = task.device.type == "cuda" or task.precision == "bfloat16"
    dtype = torch.bfloat16 if halved else torch.float32

    class UserSpeech(Dataset):  # type: ignore[misc]
        """One user in one round. pfl cuts batches of so many rows; ours hold so many seconds."""

        def __init__(self, round_and_number: tuple[int, int]) -> None:
            super().__init__(raw_data=(), user_id=str(round_and_number[1]))
            self.round_number, self.number = round_and_number

        def __len__(self) -> int:
            return len(user(workload, self.number).samples)

        def iter(self, batch_size: int | None) -> Iterator[list[Step]]:
            steps = client_steps(workload, self.number, round_number=self.round_number, device=task.device)
            return ([step] for step in steps)

    class SpeechModel(PyTorchModel):  # type: ignore[misc]
        @staticmethod
        def _prepare_batch(batch: list[Step]) -> list[Step]:
            return batch  # it is on the device already; pfl would move the lengths there too, and wait for them

    class Module(RecogniserModule):
        def metrics(self, *_: Any, **__: Any) -> dict[str, Any]:
            return {"loss": Weighted(0.0, 1.0)}  # pfl insists on a first evaluation: make it cost nothing

    class TakeTurns(TrainingProcessCallback):  # type: ignore[misc]
        """The first process waits and answers for all; the others wait for the first."""

        def on_train_begin(self, *, model: Any) -> Any:
            self.turns = Turns(task, packages=("pfl",), processes=processes, dtype=dtype) if RANK == 0 else None
            self._wait()
            return Metrics()

        def after_central_iteration(
            self, aggregate_metrics: Any, model: Any, *, central_iteration: int
        ) -> tuple[bool, Any]:
            tally = _summed(module.tally, processes=processes)
            if self.turns is not None:
                self.turns.answer(tally, module.by_name)
            if central_iteration + 1 < task.rounds:
                self._wait()
            return False, Metrics()

        def _wait(self) -> None:
            if self.turns is not None:
                self.turns.wait()
            if processes > 1:
                torch.distributed.barrier()

    def users() -> Iterator[tuple[int, int]]:
        for round_number in count():
            for number in cohort(workload, round_number):
                yield round_number, number

    module = Module(workload).to(task.device)
    model = SpeechModel(
        module,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(module.parameters(), lr=SERVER_LR),
        amp_dtype=dtype if halved else None,
    )
    data = FederatedDataset(UserSpeech, users().__next__)
    mechanism = CentrallyAppliedPrivacyMechanism(GaussianMechanism(CLIP_BOUND, task.noise_multiplier))
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=task.rounds,
            evaluation_frequency=10**9,
            train_cohort_size=workload.cohort_size,
            val_cohort_size=0,
        ),
        SimulatedBackend(training_data=data, val_data=data, postprocessors=[mechanism]),
        model,
        NNTrainHyperParams(
            local_batch_size=None,
            local_num_epochs=None,
            local_num_steps=workload.local_steps,
            local_learning_rate=LOCAL_LR,
            local_max_grad_norm=CLIP_GRADIENTS,
        ),
        NNEvalHyperParams(local_batch_size=None),
        callbacks=[TakeTurns()],
    )


def _summed(tally: Tally, *, processes: int) -> Tally:
    if processes == 1:
        return tally
    values = torch.tensor(list(asdict(tally).values()), dtype=torch.float64)
    torch.distributed.all_reduce(values)
    steps, audio_seconds, checksum = values.tolist()
    return Tally(int(steps), audio_seconds, int(checksum))


def main() -> None:
    task, arguments = parse(__doc__)
    os.environ["PFL_PYTORCH_DEVICE"] = str(task.device)
    workers = start_workers(arguments.processes)
    run(task, processes=arguments.processes)
    for worker in workers:
        worker.wait()


if __name__ == "__main__":
    main()
