"""The workload on Flower's simulation, put together as its guides do: a ClientApp run by Ray, FedAvg on the server,
wrapped in server-side differential privacy with fixed clipping.

    .venv-flower/bin/python benchmarks/peers/flower_side.py tiny [--processes 2 --threads 1] [--device cuda]

In its favour: each virtual client stands for another user in every round, so that nobody is sampled in vain; workers
keep users' data and the model between clients; nothing is evaluated; one client per core, one thread each.
"""

import os
from dataclasses import replace
from typing import Any

import torch
from flower_client import ONE_EACH, train_client
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg
from flwr.simulation import run_simulation
from turns import Turns, parse
from workload import CLIP_BOUND, RecogniserModule, Tally, Task


def serve(grid: Grid, task: Task, *, name: str, processes: int, threads: int) -> None:
    """All rounds. The strategy's hook between rounds is where this side waits for its turn."""
    module, total, workload = RecogniserModule(task.workload), Tally(), task.workload
    # The server computes with NumPy; only its workers touch the device.
    turns = Turns(replace(task, device=torch.device("cpu")), packages=("flwr", "ray"), processes=processes)

    def add_up(records: list[RecordDict], weighting_key: str) -> MetricRecord:
        for record in records:
            metrics = dict(record["metrics"])
            metrics.pop(ONE_EACH)
            total.merge(Tally(**metrics))
        return MetricRecord({})

    def between_rounds(round_number: int, arrays: ArrayRecord) -> None:
        if round_number == 1:  # the one that is saved and checked
            module.load_state_dict(arrays.to_torch_state_dict())
        if round_number > 0:
            turns.answer(total, module.by_name)
        if turns.more:
            turns.wait()

    fed_avg = FedAvg(fraction_evaluate=0.0, weighted_by_key=ONE_EACH, train_metrics_aggr_fn=add_up)
    strategy = DifferentialPrivacyServerSideFixedClipping(
        fed_avg,
        noise_multiplier=task.noise_multiplier,
        clipping_norm=CLIP_BOUND,
        num_sampled_clients=workload.cohort_size,
    )
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(module.state_dict()),
        num_rounds=task.rounds,
        train_config=ConfigRecord({"workload": name, "device": str(task.device), "threads": threads}),
        evaluate_fn=between_rounds,
    )


def main() -> None:
    os.environ.update(FLWR_TELEMETRY_ENABLED="0", RAY_USAGE_STATS_ENABLED="0")
    task, arguments = parse(__doc__)
    threads = arguments.threads or 1
    client_app, server_app = ClientApp(), ServerApp()
    client_app.train()(train_client)

    @server_app.main()  # type: ignore[untyped-decorator]
    def serve_all(grid: Grid, context: Context) -> None:
        serve(grid, task, name=arguments.workload, processes=arguments.processes, threads=threads)

    on_gpu = task.device.type == "cuda"
    resources: dict[str, Any] = {"num_cpus": 1, "num_gpus": 1 / arguments.processes if on_gpu else 0.0}
    run_simulation(
        server_app,
        client_app,
        num_supernodes=task.workload.cohort_size,
        backend_config={"client_resources": resources, "init_args": {"num_cpus": arguments.processes}},
    )


if __name__ == "__main__":
    main()
