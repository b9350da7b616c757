"""A federation without speech: people whose updates point anywhere, a server, and a plan. Audited in a second."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from sottovoce.audit.canary_audit import Audit, Observer, audit_rounds
from sottovoce.audit.rounds import AuditedRounds
from sottovoce.base.seeds import torch_stream
from sottovoce.federated.engines import Engine, Trained
from sottovoce.federated.server import Server, ServerSettings
from sottovoce.federated.weighting import ClientFigures
from sottovoce.flat.layout import Layout
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.settings import PrivacySettings

PEOPLE = 60
LAYOUT = Layout(("blocks.0.weight", "blocks.0.lora_a", "output"), ((40, 50), (15, 100), (10, 100)))
EVERYBODY: dict[str, Any] = {"cohort_size": PEOPLE, "noise_multiplier": 4.5}  # ε = 2 for four rounds
SOME: dict[str, Any] = {"cohort_size": PEOPLE // 10, "noise_multiplier": 1.2}  # ε = 2
ROUNDS = 4


class LinearPeople(Engine):
    """Everybody's update is of its own length and direction, nearly the same in every round, as learning is."""

    def train(
        self, server_P: Tensor, cohort: Sequence[int], *, step: int, positions: Sequence[int] | None = None
    ) -> Iterator[Trained]:
        for client in cohort:
            always, now = (torch.empty_like(server_P).normal_(generator=torch_stream(1, client, n)) for n in (-1, step))
            update_P = (always + 0.3 * now).mul_((1 + client % 5) / 60)
            LAYOUT.clear_padding(update_P)
            figures = (ClientFigures(utterances=1 + client % 7, seconds=2.0 + client % 9),)
            yield Trained(update_P, (client,), torch.tensor(1.0), figures, audio_seconds=1.0)


def plan_of(**changes: Any) -> Plan:
    values: dict[str, Any] = {
        "population_size": PEOPLE,
        "privacy_unit": "speaker",
        "clip_bound": 0.5,
        "delta": 1e-6,
        "root_seed": 7,
        **EVERYBODY,
    }
    return Plan(PrivacySettings(**{**values, **changes}), LAYOUT)


def server_of(layout: Layout = LAYOUT, *, device: str = "cpu", **optimiser: Any) -> Server:
    settings = ServerSettings(
        optimiser={"name": "sgd", **optimiser}, schedule={"name": "constant", "lr": 0.1}, ema=None
    )
    return Server(settings, layout, layout.zeros(device=device))


def audit_of(
    *, canaries: int = 1500, seed: int = 1, rounds: int = ROUNDS, observer: Observer = Observer.RELEASES, **plan: Any
) -> Audit:
    """With people and canaries."""
    return audit_rounds(
        plan_of(**plan),
        AuditedRounds(server_of(), rounds),
        [(LinearPeople(), PEOPLE)],
        canaries=canaries,
        seed=seed,
        observer=observer,
    )
