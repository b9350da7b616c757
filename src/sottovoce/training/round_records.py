"""What is written down of a round: metrics, which are public, and diagnostics, which are a simulation's only."""

import math
import resource
from collections.abc import Callable

import torch

from sottovoce.federated.private import Private
from sottovoce.federated.round import Round
from sottovoce.models.family import ParameterPlace
from sottovoce.privacy.plan import Plan
from sottovoce.training.keeper import Record
from sottovoce.training.step_log import by_kind


def round_metrics(done: Round, step: int, *, plan: Plan, place: Callable[[str], ParameterPlace]) -> Record:
    """All of it came after the noise, or was known before the run. `plan` is the one that the round was made with."""
    names, server = plan.layout.names, done.server
    record: Record = {
        "step": step + 1,
        "lr": server.lr,
        "epsilon": done.epsilon,
        "noise_std": done.noise_std,
        "clip_bound": None if math.isinf(plan.clip_bound) else plan.clip_bound,
        "server_norms": by_kind(names, server.norms_H.tolist(), place=place, join=math.hypot),
    }
    if server.trust_ratios_H is not None:
        ratios = server.trust_ratios_H.tolist()
        record["trust_ratios"] = by_kind(names, ratios, place=place, join=lambda a, b: (a + b) / 2)
    return {**record, **done.figures}


def round_diagnostics(done: Round, step: int, *, plan: Plan) -> Record | None:
    """By-products of people's data, which no ε covers; None where nobody may see them."""
    if done.private is None:
        return None
    return {"step": step + 1, "accounted": False, **done.private.as_json(plan)}


class PendingRecords:
    """Records of rounds that no commit covers yet."""

    def __init__(self) -> None:
        self._metrics: list[Record] = []
        self._diagnostics: list[Record] = []

    def add(self, metrics: Record, diagnostics: Record | None) -> None:
        self._metrics.append(metrics)
        if diagnostics is not None:
            self._diagnostics.append(diagnostics)

    def add_to_last(self, found: Record) -> None:
        """What else is known of the last round."""
        self._metrics[-1] |= found

    def time(self, seconds: float, private: Private | None) -> None:
        """How long the last round took. How long depends on who was in it: a simulation's only."""
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        self._metrics[-1]["seconds"] = round(seconds, 4)
        if private is not None:
            self._metrics[-1] |= {
                "audio_seconds_per_second": round(private.audio_seconds / max(seconds, 1e-9), 1),
                "waited_for_data_seconds": round(private.waited_seconds, 4),
            }
        self._metrics[-1]["memory_mib"] = round(memory, 1)
        if torch.cuda.is_available():
            self._metrics[-1]["device_memory_mib"] = round(torch.cuda.max_memory_allocated() / 2**20, 1)

    def take(self) -> tuple[list[Record], list[Record]]:
        taken = self._metrics, self._diagnostics
        self._metrics, self._diagnostics = [], []
        return taken
