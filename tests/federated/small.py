"""A federation that takes milliseconds: nine people, a model of a few thousand parameters, and its twin in float64."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.reference_round import Gradient, Model

from sottovoce.federated.client import ClientRoom, LoadedClient, LocalTraining, load_client, plan_client
from sottovoce.federated.engines import SequentialEngine
from sottovoce.federated.heard_before import HeardBefore
from sottovoce.federated.round import Round, run_round
from sottovoce.federated.server import Server, ServerSettings
from sottovoce.flat.layout import Layout
from sottovoce.models.ctc_transformer import Settings, init
from sottovoce.models.heard import HeardBatch
from sottovoce.models.recogniser import StepDraws, batch_loss
from sottovoce.privacy.clipping import Normalise, Share
from sottovoce.privacy.fingerprint import fingerprint
from sottovoce.privacy.ledger import Ledger
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.settings import Mode, PrivacySettings, Sampling, Weighting
from sottovoce.seeds import torch_stream
from sottovoce.store import Store
from sottovoce.text.tokens import CharacterTokens
from sottovoce.users import PopulationSettings, build_population

TOKENS = CharacterTokens.seen_in("abcde")
MODEL: dict[str, Any] = {"layers": 2, "width": 8, "heads": 2, "dropout": 0.0, "layer_drop": 0.0}
LOCAL: dict[str, Any] = {"batch_seconds": 2.0, "lr": 0.3, "local_steps": 2, "spec_augment": None}
CPU = torch.device("cpu")


def start_stream() -> torch.Generator:
    """What the server's first model is drawn from."""
    return torch_stream(3, "init")


def small_room(
    store: Path,
    *,
    model: dict[str, Any] | None = None,
    local: dict[str, Any] | None = None,
    people: dict[str, Any] | None = None,
    cohort_size: int = 3,
) -> ClientRoom:
    population = build_population(Store(store), PopulationSettings(split=("train",), **people or {}), seed=1)
    settings = Settings(tokens=TOKENS.size + 1, **MODEL | (model or {}))
    chosen = LOCAL | (local or {})
    if "local_epochs" in chosen:
        chosen["local_steps"] = None
    return ClientRoom(population, TOKENS, settings, LocalTraining(**chosen), seed=2, cohort_size=cohort_size)


@dataclass
class Small:
    """A room, what makes rounds of it, and the server's model as the twin takes it."""

    room: ClientRoom
    plan: Plan
    server: Server
    engine: SequentialEngine
    ledger: Ledger

    @property
    def layout(self) -> Layout:
        return self.plan.layout

    def round(self, step: int) -> Round:
        """Make round `step`."""
        digest = fingerprint(self.server.parameters_P)
        return run_round(self.server, plan=self.plan, engine=self.engine, ledger=self.ledger, step=step, digest=digest)

    def model(self) -> Model:
        return as_model(self.layout, self.server.parameters_P)

    def gradients(self, index: int, *, step: int) -> list[Gradient]:
        """What client `index` computes in round `step`, batch by batch, in float64."""
        room, loaded = self.room, loaded_client(self.room, index, step=step)

        def gradient_of(batch: HeardBatch, draws: StepDraws) -> Gradient:
            def gradient(theta: Model) -> Model:
                parameters = {name: torch.from_numpy(layer).requires_grad_() for name, layer in theta.items()}
                spec_augment = room.local.spec_augment_at(step)
                loss = batch_loss(parameters, batch, settings=room.model, spec_augment=spec_augment, draws=draws)
                found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
                zeros = map(torch.zeros_like, parameters.values())
                pairs = zip(parameters, found, zeros, strict=True)
                return {name: (zero if g is None else g).numpy() for name, g, zero in pairs}

            return gradient

        heard = loaded.heard(HeardBefore(0), dtype=torch.float32)
        return [gradient_of(heard.batch(lines), draws) for lines, draws in zip(loaded.lines, loaded.draws, strict=True)]


def loaded_client(room: ClientRoom, index: int, *, step: int) -> LoadedClient:
    """Client `index` as if it had never been heard before."""
    return load_client(room, plan_client(room, index, step=step), step=step, device=CPU, before=HeardBefore(0))


def as_model(layout: Layout, flat_P: torch.Tensor) -> Model:
    return {name: view.double().numpy().copy() for name, view in layout.views(flat_P).items()}


def small(
    store: Path,
    ledger: Path,
    *,
    privacy: dict[str, Any] | None = None,
    server: dict[str, Any] | None = None,
    **room: Any,
) -> Small:
    """A federation at its first round; dictionaries change its defaults."""
    made = small_room(store, **room)
    parameters = init(made.model, generator=start_stream())
    layout = Layout.of(parameters)
    settings: dict[str, Any] = {
        "population_size": len(made.population),
        "privacy_unit": "speaker",
        "cohort_size": made.cohort_size,
        "clip_bound": 0.2,
        "noise_multiplier": 0.0,
        "delta": 1e-5,
        "root_seed": 4,
    }
    plan = Plan(PrivacySettings(**settings | _named(privacy or {})), layout)
    of_server: dict[str, Any] = {"optimiser": {"name": "sgd"}, "schedule": {"name": "constant", "lr": 1.0}}
    return Small(
        made,
        plan,
        Server(ServerSettings(**of_server | (server or {})), layout, layout.flatten(parameters)),
        SequentialEngine(made, layout, device=CPU, weighting=plan.settings.weighting),
        Ledger(ledger, header=plan.ledger_header(run="small")),
    )


def _named(privacy: dict[str, Any]) -> dict[str, Any]:
    """Choices by their names, as in a recipe."""
    kinds = {"share": Share, "normalise": Normalise, "weighting": Weighting, "mode": Mode, "sampling": Sampling}
    return {name: kinds[name](value) if name in kinds else value for name, value in privacy.items()}


def furthest(ours: Model, twin: Model, start: Model) -> float:
    """How far two models are apart in the worst layer, in units of float32's rounding (2⁻²⁴).

    A layer's error may grow with its size, by the rounding of each stored number, and with the way that it came, by the
    rounding of gradients.
    """
    apart = []
    for name in start:
        size, moved = np.linalg.norm(twin[name]), np.linalg.norm(twin[name] - start[name])
        apart.append(float(np.linalg.norm(ours[name] - twin[name]) / (size + 100 * moved)))
    return max(apart) * 2.0**24
