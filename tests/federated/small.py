"""A federation that takes milliseconds: nine people, a small model of any family, and its twin in float64."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.reference_round import Gradient, Model, train_client

from sottovoce.base.seeds import torch_stream
from sottovoce.data.audio.features import MEL_COUNT
from sottovoce.data.audio.waveforms import Features
from sottovoce.data.population import PopulationSettings, build_population
from sottovoce.data.store import Store
from sottovoce.data.text.tokens import NO_TOKENS, CharacterTokens, Tokens
from sottovoce.evaluation.score import select_utterances
from sottovoce.federated.client import (
    ClientContext,
    LoadedClient,
    LocalTraining,
    SharedSpeech,
    load_client,
    plan_client,
)
from sottovoce.federated.client_stream import StreamPositions
from sottovoce.federated.cohort import Clients, LocalClients
from sottovoce.federated.diagnostics import RoundDiagnostics
from sottovoce.federated.engines import Engine, SequentialEngine
from sottovoce.federated.feature_cache import FeatureCache
from sottovoce.federated.round import AfterStep, OnRelease, Round, RoundState, run_round
from sottovoce.federated.server import Server, ServerSettings
from sottovoce.flat.layout import Layout
from sottovoce.models.family import DEFAULT, REGISTERED, Family, StepDraws, find_family, step_loss
from sottovoce.models.trainable import Trainable, parse_part, split_parameters
from sottovoce.privacy.clipping import Normalise, Share
from sottovoce.privacy.ledger import Ledger
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.settings import Mode, PrivacySettings, Sampling, Weighting

TOKENS = CharacterTokens.seen_in("abcde")
# What makes a family's model small; where nothing is said, its own `tiny`.
MODELS: dict[str, dict[str, Any]] = {
    DEFAULT: {"layers": 2, "width": 8, "heads": 2, "dropout": 0.0, "layer_drop": 0.0},
    "crdnn": {
        "channels": (2, 3),
        "rnn_layers": 2,
        "rnn_width": 6,
        "dnn_width": 8,
        "embedding": 4,
        "decoder_width": 7,
        "location_channels": 2,
        "location_reach": 3,
        "dropout": 0.15,
    },
}
# A pretrained model needs a folder: tests/models/huggingface goes through the same engines.
MADE_FROM_NOTHING = [name for name in REGISTERED if name != "huggingface"]
LOCAL: dict[str, Any] = {"batch_seconds": 2.0, "lr": 0.3, "local_steps": 2, "spec_augment": None}
CPU = torch.device("cpu")


def start_stream() -> torch.Generator:
    """What the server's first model is drawn from."""
    return torch_stream(3, "init")


def small_context(
    store: Path,
    *,
    model: dict[str, Any] | None = None,
    local: dict[str, Any] | None = None,
    people: dict[str, Any] | None = None,
    cohort_size: int = 3,
    family: str = DEFAULT,
    shared_dev: str | None = None,
) -> ClientContext:
    """`shared_dev` names a split that all clients have."""
    population = build_population(Store(store), PopulationSettings(split=("train",), **people or {}), seed=1)
    found = find_family(family)
    settings = small_settings(found, **model or {})
    chosen = LOCAL | (local or {})
    if "local_epochs" in chosen:
        chosen["local_steps"] = None
    return ClientContext(
        population,
        tokens_of(found),
        found,
        settings,
        LocalTraining(**chosen),
        seed=2,
        cohort_size=cohort_size,
        shared_dev=None if shared_dev is None else shared_speech(Store(store), shared_dev),
    )


def tokens_of(family: Family[Any, Any]) -> Tokens:
    return TOKENS if family.training.needs_text else NO_TOKENS


def shared_speech(store: Store, split: str) -> SharedSpeech:
    chosen = select_utterances(store, split=split)
    return SharedSpeech(store, chosen.rows, chosen.references)


def small_settings(family: Family[Any, Any], **model: Any) -> Any:
    if family.name in MODELS:
        return family.Settings(tokens=TOKENS.size + 1, **MODELS[family.name] | model)
    return family.Options(**{**family.smoke_options, **model}).settings(tokens=TOKENS.size + 1)


@dataclass
class Small:
    """A context, what makes rounds of it, and the server's model as the twin takes it."""

    context: ClientContext
    plan: Plan
    server: Server
    engine: Engine
    ledger: Ledger
    part: Trainable

    @property
    def layout(self) -> Layout:
        return self.plan.layout

    def round(
        self,
        step: int,
        *,
        clients: Clients | None = None,
        after_step: Sequence[AfterStep] = (),
        positions: StreamPositions | None = None,
        on_release: OnRelease | None = None,
    ) -> Round:
        """Make round `step`; with the engine here, unless other `clients` are given. `next_plan` is the plan after."""
        state = RoundState(self.server, self.plan, self.ledger, positions)
        done = run_round(
            state, clients or LocalClients(self.engine), step=step, after_step=after_step, on_release=on_release
        )
        self.next_plan = state.plan
        return done

    def figures(self, step: int, *, clients: Clients | None = None) -> RoundDiagnostics:
        """Make round `step`; what a simulation sees of it."""
        private = self.round(step, clients=clients).private
        assert private is not None
        return private

    def model(self) -> Model:
        return as_model(self.layout, self.server.parameters_P)

    def gradients(self, index: int, *, step: int, position: int = 0) -> list[Gradient]:
        """What client `index` computes in round `step`, batch by batch, in float64."""
        context, loaded = self.context, loaded_client(self.context, index, step=step, position=position)

        def gradient_of(batch: Features, draws: StepDraws) -> Gradient:
            def gradient(theta: Model) -> Model:
                parameters = {name: torch.from_numpy(layer).requires_grad_() for name, layer in theta.items()}
                whole = context.frozen.to(CPU, torch.float64).with_trained(parameters)
                loss = step_loss(context.family, whole, batch, settings=context.model, draws=draws)
                found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
                zeros = map(torch.zeros_like, parameters.values())
                pairs = zip(parameters, found, zeros, strict=True)
                return {name: (zero if g is None else g).numpy() for name, g, zero in pairs}

            return gradient

        heard = loaded.extract_features(FeatureCache(0), context, dtype=torch.float32)
        return [gradient_of(heard.take(lines), draws) for lines, draws in zip(loaded.lines, loaded.draws, strict=True)]


def loaded_client(context: ClientContext, index: int, *, step: int, position: int = 0) -> LoadedClient:
    """Client `index` as if it had never been heard before."""
    planned = plan_client(context, index, step=step, position=position)
    return load_client(context, planned, step=step, device=CPU, cache=FeatureCache(0))


def as_model(layout: Layout, flat_P: torch.Tensor) -> Model:
    return {name: view.double().numpy().copy() for name, view in layout.views(flat_P).items()}


def small(
    store: Path,
    ledger: Path,
    *,
    privacy: dict[str, Any] | None = None,
    server: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    part: str | None = None,
    **context: Any,
) -> Small:
    """A federation at its first round; dictionaries change its defaults. Clients train a `part`, in `dtype`."""
    made = small_context(store, **context)
    split = split_parameters(
        None if part is None else parse_part(part),
        made.family.init(made.model, generator=start_stream()),
        is_lora_target=made.family.transfer.is_lora_target,
        generator=torch_stream(3, "low rank"),
    )
    made, layout = replace(made, frozen=split.frozen), split.layout
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
    made = replace(made, weighting=plan.settings.weighting)
    of_server: dict[str, Any] = {"optimiser": {"name": "sgd"}, "schedule": {"name": "constant", "lr": 1.0}}
    return Small(
        made,
        plan,
        Server(ServerSettings(**of_server | (server or {})), layout, layout.flatten(split.initial)),
        SequentialEngine(made, layout, device=CPU, dtype=dtype),
        Ledger(ledger, header=plan.ledger_header(run="small")),
        split,
    )


def _named(privacy: dict[str, Any]) -> dict[str, Any]:
    """Choices by their names, as in a recipe."""
    kinds = {"share": Share, "normalise": Normalise, "weighting": Weighting, "mode": Mode, "sampling": Sampling}
    return {name: kinds[name](value) if name in kinds else value for name, value in privacy.items()}


def update_of(ours: Small, index: int, *, step: int = 0, batches: slice = slice(None)) -> Model:
    """What the twin makes of client `index` in round `step`."""
    local = ours.context.local
    proximal = None if local.proximal is None else (local.proximal.name, local.proximal.mu)
    gradients = ours.gradients(index, step=step)[batches]
    return train_client(
        ours.model(),
        gradients,
        lr=local.lr,
        local_bound=local.clip_gradients,
        proximal=proximal,
        statistics=ours.context.family.training.statistics(ours.context.model),
    )


# Rounding. Two ways to one result differ by the order of their sums, which changes with the library, the processor and
# the number of threads.

UNIT = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}  # what one operation may be off by, of its result
LONGEST_SUM = 7 * MEL_COUNT  # products that the convolution adds up; no sum of a small model has more
LOCAL_STEPS = 8  # at most, in these tests
AMPLIFIED = 2000.0  # what local training may make of a small difference; `test_round` measures it


def rounding(dtype: torch.dtype) -> float:
    """How far apart two ways of computing an ordinary update may be, of its length: every sum off by its worst case."""
    return LOCAL_STEPS * LONGEST_SUM * UNIT[dtype]


# Local steps of these sizes are not stable: a few clients among many make a hundred times as much of a difference, and
# when it reaches a ReLU within 1e-5 of its kink, whole activations come and go. That is no more than rounding (in
# float64 the same clients agree to fourteen digits), but no bound on float32 holds for it. So what is computed is
# compared in float64, for each client, and how precisely in float32, for the ordinary client.
EXACT = AMPLIFIED * rounding(torch.float64)  # 1e-9
SERVER_ROUNDINGS = 32.0  # 8 for the margin below the clip bound, 8 for nine clients, 12 for LAMB's arithmetic, 4 more


def furthest(ours: Model, twin: Model, start: Model) -> float:
    """How far two models are apart after a round, in the worst layer and of what float32 allows the server.

    A layer's error grows with its size, by the rounding of each stored number (once before and once after the step),
    and with the way that it came, by the rounding of what moves it.
    """
    apart = []
    for name in start:
        size, moved = np.linalg.norm(twin[name]), np.linalg.norm(twin[name] - start[name])
        allowed = UNIT[torch.float32] * (2 * size + SERVER_ROUNDINGS * moved)
        apart.append(float(np.linalg.norm(ours[name] - twin[name]) / allowed))
    return max(apart)
