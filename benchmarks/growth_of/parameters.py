"""Seconds and memory of a round as the model grows: few clients, one short local step each, so that the model counts.

Each size has a process of its own on a CPU, whose peak memory is then its own.
"""

import multiprocessing
import statistics
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from growth_of.setting import MIB, SEED, Speech, describe_machine, make_context, peak_mib, spent
from sottovoce.federated.client import ClientContext
from sottovoce.federated.cohort import LocalClients
from sottovoce.federated.engines import SequentialEngine
from sottovoce.federated.round import RoundState, run_round
from sottovoce.federated.server import Server, ServerSettings
from sottovoce.flat.layout import Layout
from sottovoce.models.precision import choose_dtype
from sottovoce.models.transformer.settings import Settings, parameter_shapes
from sottovoce.privacy.clipping import Share
from sottovoce.privacy.fingerprint import fingerprint_tensor
from sottovoce.privacy.ledger import Charge, Ledger
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.settings import PrivacySettings

# Layers and width: `tiny`, `small`, two between, `base`, `deep`.
SIZES: Mapping[str, tuple[int, int]] = {
    "0.6M": (4, 96),
    "6.6M": (8, 256),
    "25M": (14, 384),
    "100M": (14, 768),
    "256M": (36, 768),
    "511M": (72, 768),
}
# On a CPU: beyond these the server's step would take 12 GB and more, and whole rounds 9 GB.
SERVER_BELOW, ROUNDS_BELOW = 300e6, 200e6
FEW, MORE = 2, 6  # clients of a round: from two of them what each client and what each round takes
REPEATS = 3


@dataclass(frozen=True)
class Sized:
    """A model of one size with its round's plan, and its parameters where everything is computed."""

    context: ClientContext
    layout: Layout
    start_P: Tensor
    device: torch.device

    def plan(self, cohort: int) -> Plan:
        settings = PrivacySettings(
            population_size=cohort,  # all of them: a rate of 1 is quick to account for
            privacy_unit="speaker",
            cohort_size=cohort,
            clip_bound=0.01,
            share=Share.DIM,
            noise_multiplier=1.0,
            delta=1e-6,
            root_seed=SEED,
        )
        return Plan(settings, self.layout)

    def server(self) -> Server:
        settings = ServerSettings(optimiser={"name": "lamb"}, schedule={"name": "constant", "lr": 1e-9})
        return Server(settings, self.layout, self.start_P)


def measure(sizes: list[str], *, device: torch.device, seconds: float) -> dict[str, Any]:
    """A row for each of `sizes`, with so many seconds of speech a client."""
    rows = []
    for size in sizes:
        if device.type == "cuda":
            rows.append(measure_size(size, str(device), seconds))
        else:
            with multiprocessing.get_context("spawn").Pool(1) as process:
                rows.append(process.apply(measure_size, (size, str(device), seconds)))
        print(rows[-1], flush=True)
    return {"machine": describe_machine(device), "audio_seconds": seconds, "sizes": rows}


def measure_size(size: str, device_name: str, seconds: float) -> dict[str, Any]:
    """One row: seconds of a client and of a round, of their parts, and the most memory that they needed."""
    torch.set_num_threads(1)
    device, (layers, width) = torch.device(device_name), SIZES[size]
    model = Settings(tokens=30, layers=layers, width=width, dropout=0.0, layer_drop=0.0)
    shapes = parameter_shapes(model)
    layout = Layout(tuple(shapes), tuple(shapes.values()))
    row: dict[str, Any] = {"size": size, "parameters": layout.dimension}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        speech = Speech(users=4 * MORE, seconds=seconds)
        context = replace(make_context(folder / "store", speech, model, batch_seconds=seconds), model=model)
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        else:
            row["before_mib"] = peak_mib()
        generator = torch.Generator(device).manual_seed(SEED)
        start_P = layout.zeros(device=device).normal_(0.0, 0.02, generator=generator)
        layout.clear_padding(start_P)
        sized = Sized(context, layout, start_P, device)
        row |= _parts(sized)
        on_gpu = device.type == "cuda"
        if on_gpu or layout.dimension < SERVER_BELOW:
            row |= _server_step(sized)
        if on_gpu or layout.dimension < ROUNDS_BELOW:
            row |= _rounds(sized, folder)
    row["peak_mib"] = torch.cuda.max_memory_allocated(device) / MIB if device.type == "cuda" else peak_mib()
    return {key: round(value, 5) if isinstance(value, float) else value for key, value in row.items()}


def _median(work: Callable[[], Any], device: torch.device) -> float:
    work()  # what is compiled or allocated for the first time
    return statistics.median(spent(work, device) for _ in range(REPEATS))


def _parts(sized: Sized) -> dict[str, float]:
    """What a client's update takes beside the training that it is made by; a round's noise, its model's digest."""
    plan, start_P = sized.plan(FEW), sized.start_P
    total, update_P = plan.new_total(device=sized.device), torch.empty_like(start_P)

    def send() -> None:
        update_P.copy_(start_P)  # the client's model at its beginning, and its difference at the end
        update_P.neg_().add_(start_P, alpha=1.5)
        plan.accumulate(total, update_P)

    steps = iter(range(1 + REPEATS))

    def noise() -> None:
        step = next(steps)
        plan.add_noise(total, Charge(plan.event, step=step, clip_bound=plan.clip_bound))

    return {
        "update_seconds": _median(send, sized.device),
        "noise_seconds": _median(noise, sized.device),
        "fingerprint_seconds": _median(lambda: fingerprint_tensor(start_P), sized.device),
    }


def _server_step(sized: Sized) -> dict[str, float]:
    server = sized.server()
    gradient_P = torch.full_like(sized.start_P, 1e-6)
    return {"server_seconds": _median(lambda: server.step(gradient_P, step=0), sized.device)}


def _rounds(sized: Sized, folder: Path) -> dict[str, float]:
    """Whole rounds of few clients and of more: their difference is the clients'."""
    dtype = choose_dtype("auto", sized.device, family=sized.context.family, settings=sized.context.model)
    engine = SequentialEngine(sized.context, sized.layout, device=sized.device, dtype=dtype)
    server = sized.server()
    took = {}
    for cohort in (FEW, MORE):
        plan = sized.plan(cohort)
        ledger = Ledger(folder / f"{cohort}.jsonl", header=plan.ledger_header(run="growth"))
        state, steps = RoundState(server, plan, ledger), iter(range(1 + REPEATS))
        took[cohort] = _median(
            lambda state=state, steps=steps: run_round(state, LocalClients(engine), step=next(steps)),  # type: ignore[misc]
            sized.device,
        )
    client = (took[MORE] - took[FEW]) / (MORE - FEW)
    return {
        "client_seconds": client,
        "round_seconds": took[FEW] - FEW * client,
        "precision_bits": float(dtype.itemsize * 8),
    }
