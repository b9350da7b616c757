"""Local training: what a client does with the server's model and its own speech (Algorithm 1, the inner loop).

    speech ─► batches by seconds ─► gradient (+ FedProx) ─► clip to norm ─► local optimiser ─► … ─► θ_server − θ_local

Nothing survives on a client between rounds but the features of its own speech, which are the same every time, and its
position in its stream where it has one (`client_stream`): batches, masks and optimiser state are made anew from (seed,
step, client). What chance decides for one client never depends on who else was sampled, so a user's presence moves
nobody's update but their own; the sensitivity that the plan accounts for rests on that.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sottovoce.base.errors import InputError
from sottovoce.base.seeds import derive, torch_stream
from sottovoce.data.audio.augment import NarrowBandSettings, SpecAugmentSettings, check_speeds
from sottovoce.data.audio.batches import Batch, plan_client_batches
from sottovoce.data.audio.time_domain import DroppedChunks, DroppedFrequencies, augment_waveforms
from sottovoce.data.audio.waveforms import Features, Waveforms, join_waveforms, pack_waveforms
from sottovoce.data.corpora.corpus import SAMPLE_RATE
from sottovoce.data.loading import Speech, load_batch, load_speech, plan_reading, read_speech
from sottovoce.data.population import Client, Population
from sottovoce.data.store import Store
from sottovoce.data.text.tokens import Tokens
from sottovoce.federated.client_stream import EXHAUSTED, StreamSettings, split_stream
from sottovoce.federated.feature_cache import ARRAY_BYTES, CLIENT_BYTES, FeatureCache, SizedCache, speech_bytes
from sottovoce.models.family import Family, StepDraws, TrainingProgress, draw_steps, step_loss
from sottovoce.models.trainable import NOTHING_FROZEN, Frozen
from sottovoce.optimisers import Optimiser, build_optimiser
from sottovoce.optimisers.weights import Weights
from sottovoce.privacy.settings import Weighting

# Of a client with at most so much, all features are computed, and can be kept for the client's next round.
WHOLE_SPEECH_SECONDS = 1200.0
KNOWN_BYTES = 2**28  # of clients' texts, which are kept as tokens


@dataclass(frozen=True, kw_only=True)
class Proximal:
    """A pull back towards the server's model, added to the local loss.

    `fedprox`: (μ/2)·‖θ − θ₀‖² (Li et al. 2020). `distance`: μ·‖θ − θ₀‖, not squared, as in the
    flagship's released code.
    """

    name: Literal["fedprox", "distance"] = "fedprox"
    mu: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.mu) and self.mu >= 0):
            raise InputError(f"proximal: mu={self.mu}, expected a finite number, at least 0")

    def pull(self, weights: Tensor, server_P: Tensor) -> Tensor:
        """The term's gradient at `weights`: [P], or [N, P] for each of N clients."""
        away = weights - server_P
        if self.name == "fedprox":
            return away.mul_(self.mu)
        distance = torch.linalg.vector_norm(away, dim=-1, keepdim=True)
        return away.mul_(self.mu / distance.clamp(min=torch.finfo(torch.float32).tiny))  # zero where it starts


@dataclass(frozen=True, kw_only=True)
class LocalTraining:
    """What every client does in a round. Exactly one of `local_steps` and `local_epochs` is set.

    With a `time_line` a client uses each of its utterances once, in order: the next `local_steps` batches (1 unless
    given) whenever it takes part.

    A batch has at most `batch_seconds` of padded speech, and at most `batch_utterances` where that is given. `order:
    ascending` takes a client's utterances from the shortest to the longest in every epoch; None shuffles them.
    SpecAugment is used from server step `spec_augment_from` on. `speeds`, `dropped_frequencies` and `dropped_chunks`
    are drawn anew for every utterance of every local step, whose samples are in memory together.
    """

    batch_seconds: float
    lr: float
    local_steps: int | None = None
    local_epochs: int | None = None
    optimiser: Mapping[str, Any] = field(default_factory=lambda: {"name": "sgd"})
    clip_gradients: float = 1.0
    spec_augment: SpecAugmentSettings | None = field(default_factory=SpecAugmentSettings)
    spec_augment_from: int = 0
    proximal: Proximal | None = None
    batch_utterances: int | None = None
    order: Literal["ascending"] | None = None
    time_line: StreamSettings | None = None
    narrow_band: NarrowBandSettings | None = None
    speeds: tuple[float, ...] | None = None
    dropped_frequencies: DroppedFrequencies | None = None
    dropped_chunks: DroppedChunks | None = None

    def __post_init__(self) -> None:
        if self.time_line is not None:
            self._check_time_line()
        if (self.local_steps is None) == (self.local_epochs is None):
            raise InputError(
                f"local: local_steps={self.local_steps}, local_epochs={self.local_epochs}: expected exactly one"
            )
        if self.order == "ascending" and self.local_epochs is None:
            raise InputError(
                f"local: order=ascending with local_steps={self.local_steps}: the longest utterances would never have "
                "their turn; expected local_epochs"
            )
        for name in ("local_steps", "local_epochs", "batch_utterances"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise InputError(f"local: {name}={value}, expected at least 1")
        for name in ("batch_seconds", "lr"):
            if not (math.isfinite(value := getattr(self, name)) and value > 0):
                raise InputError(f"local: {name}={value}, expected a positive number")
        if not self.clip_gradients > 0:
            raise InputError(f"local: clip_gradients={self.clip_gradients}, expected a positive number or inf")
        if self.spec_augment_from < 0:
            raise InputError(f"local: spec_augment_from={self.spec_augment_from}, expected at least 0")
        check_speeds(self.speeds or (), where="local: ")
        self.built_optimiser()

    def _check_time_line(self) -> None:
        if self.local_epochs is not None or self.order is not None:
            raise InputError(
                f"local: time_line with local_epochs={self.local_epochs}, order={self.order}: each utterance is used "
                "once, in the order of its time; expected neither"
            )
        if self.local_steps is None:
            object.__setattr__(self, "local_steps", 1)

    def built_optimiser(self) -> Optimiser:
        return build_optimiser(**self.optimiser)

    @cached_property
    def optimiser_remembers(self) -> bool:
        """Whether the local optimiser has a state, which would move a client even without a gradient."""
        return bool(self.built_optimiser().init([torch.zeros(1)]).slots)

    @property
    def augments_waveforms(self) -> bool:
        """Whether samples are changed before features are made of them, so that no features can be used again."""
        return bool(self.speeds) or self.dropped_frequencies is not None or self.dropped_chunks is not None

    def spec_augment_at(self, step: int) -> SpecAugmentSettings | None:
        """SpecAugment as it stands at server step `step`."""
        return self.spec_augment if step >= self.spec_augment_from else None


@dataclass(frozen=True, eq=False)
class SharedSpeech:
    """Utterances of a store that every client has a copy of, and what is said in them."""

    store: Store
    rows: NDArray[np.int64]
    texts: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class ClientContext:
    """Everything that a client's training is made of, whichever engine runs it. `frozen` is not trained.

    `shared_dev` is what every client's model is tried on where the `weighting` depends on that.

    `forgiving`: whatever goes wrong with one client, it is dropped and the round goes on, as a release must.
    """

    population: Population
    tokens: Tokens
    family: Family[Any, Any]
    model: Any
    local: LocalTraining
    seed: int
    cohort_size: int
    longest_seconds: float = 36.0
    frozen: Frozen = NOTHING_FROZEN
    forgiving: bool = False
    shared_dev: SharedSpeech | None = None
    weighting: Weighting = Weighting.UNIFORM
    _known: SizedCache[Speech] = field(default_factory=lambda: SizedCache(KNOWN_BYTES), repr=False)

    def on(self, device: torch.device, dtype: torch.dtype) -> "ClientContext":
        """The same with what is frozen where an engine computes, in its precision."""
        return replace(self, frozen=self.frozen.to(device, dtype))

    @cached_property
    def store(self) -> Store:
        assert isinstance(self.population.store, Store)
        return self.population.store

    def speech(self, client: Client) -> Speech:
        """What `client` can be trained on; InputError where there is nothing."""
        known = self._known.get(client.index)
        if known is None:
            rows, longest = client.utterances, min(self.longest_seconds, self.local.batch_seconds)
            known = load_speech(
                self.store,
                rows,
                self.tokens,
                family=self.family,
                settings=self.model,
                longest_seconds=longest,
                fastest=max(1.0, *(self.local.speeds or (1.0,))),
            )
            self._known.keep(client.index, known, size=speech_bytes(known))
        return known

    def plan_batches(self, client: Client, speech: Speech, *, step: int, position: int = 0) -> Iterator[Batch]:
        """The client's batches of round `step`, in order. `position` is in how many rounds it took part before."""
        if self.local.time_line is not None:
            parts = self.stream_parts(speech)
            if position >= len(parts):
                raise InputError(EXHAUSTED)
            return iter(parts[position])
        return plan_client_batches(
            speech.lengths,
            max_seconds=self.local.batch_seconds,
            seed=derive(self.seed, "local batches", step, client.key),
            local_steps=self.local.local_steps,
            local_epochs=self.local.local_epochs,
            max_utterances=self.local.batch_utterances,
            ascending=self.local.order == "ascending",
            fixed_shapes=True,
        )

    def stream_parts(self, speech: Speech) -> list[tuple[Batch, ...]]:
        """The batches of a client with this `speech` for each time that it takes part."""
        assert self.local.local_steps is not None
        return split_stream(
            speech.lengths,
            max_seconds=self.local.batch_seconds,
            max_utterances=self.local.batch_utterances,
            local_steps=self.local.local_steps,
        )

    def augment(
        self, client: Client, speech: Speech, batches: Sequence[Batch], *, step: int, device: torch.device
    ) -> list[Waveforms]:
        """The utterances of each of the local steps of `client`, augmented in the time domain by its own draws."""
        generator, local = torch_stream(self.seed, "local waveforms", step, client.key), self.local
        return [
            augment_waveforms(
                load_batch(speech, batch, device=device),
                speeds=local.speeds or (),
                dropped_frequencies=local.dropped_frequencies,
                dropped_chunks=local.dropped_chunks,
                generator=generator,
            )
            for batch in batches
        ]

    def draws(
        self, client: Client, speech: Speech, batches: Sequence[Batch], *, step: int, samples: Sequence[int]
    ) -> list[StepDraws]:
        """What chance decides in each of the local steps of `client`; `samples` are those of the longest in each."""
        sizes = [len(batch.rows) for batch in batches]
        begun = accumulate(sizes[:-1], initial=0)  # utterances before each step; a pass holds each of them once
        return draw_steps(
            self.family,
            sizes,
            samples=samples,
            settings=self.model,
            spec_augment=self.local.spec_augment_at(step),
            generator=torch_stream(self.seed, "local steps", step, client.key),
            progress=[TrainingProgress(number, count // len(speech.rows)) for number, count in enumerate(begun)],
            narrow_band=self.local.narrow_band,
        )


@dataclass(frozen=True, eq=False)
class PlannedClient:
    """A client's round before anything is read: which of its utterances make up each local step."""

    client: Client
    speech: Speech
    batches: list[Batch]

    @property
    def padded_samples(self) -> int:
        return sum(len(batch.rows) * batch.padded_samples for batch in self.batches)

    @property
    def held_bytes(self) -> int:
        """What it takes to keep it, with its speech, which may be kept nowhere else."""
        batches = sum(batch.rows.nbytes + 2 * ARRAY_BYTES for batch in self.batches)
        return CLIENT_BYTES + speech_bytes(self.speech) + batches


def plan_client(context: ClientContext, index: int, *, step: int, position: int = 0) -> PlannedClient:
    """What client `index` will train on in round `step`; InputError where there is nothing."""
    client = context.population.client(index)
    speech = context.speech(client)
    return PlannedClient(client, speech, list(context.plan_batches(client, speech, step=step, position=position)))


@dataclass(frozen=True, eq=False)
class LoadedClient:
    """A client's round on the way to the device: its utterances, and for each local step which of them, and the draws.

    `sound` holds every utterance once; `lines` are places in it. It is the client's `whole` speech, which may be kept
    for its next round, or only what this round needs: where it has far too much, or none of it will be used again.
    `utterances` and `seconds` are what its weight may depend on: all that it has, or on a time line what it uses now.
    """

    client: Client
    speech: Speech
    sound: Waveforms | Features
    whole: bool
    lines: list[Tensor]
    draws: list[StepDraws]
    audio_seconds: float
    utterances: int
    seconds: float

    def extract_features(self, cache: FeatureCache, context: ClientContext, *, dtype: torch.dtype) -> Features:
        """Its features, which are kept in the `cache` where they may be."""
        if isinstance(self.sound, Features):
            return self.sound
        features = context.family.front_end.extract_features(self.sound, settings=context.model, dtype=dtype)
        if self.whole:
            cache.keep(self.client.index, features)
        return features


def load_client(
    context: ClientContext, planned: PlannedClient, *, step: int, device: torch.device, cache: FeatureCache
) -> LoadedClient:
    """Read a client's speech, unless its features are in the `cache`; InputError or OSError where it cannot be used."""
    client, speech, batches = planned.client, planned.speech, planned.batches
    once = context.local.time_line is not None
    used, lines = plan_reading(speech, batches, most_seconds=0.0 if once else WHOLE_SPEECH_SECONDS)
    sound: Waveforms | Features
    if context.local.augments_waveforms:
        heard = context.augment(client, speech, batches, step=step, device=device)
        sound, whole = join_waveforms(heard), False
        lines = list(torch.split(torch.arange(len(sound)), [len(part) for part in heard]))
        longest = [int(part.lengths_U.max()) for part in heard]
    else:
        whole = not once and len(used) == len(speech.rows)
        kept = cache.get(client.index) if whole else None
        sound = kept or pack_waveforms(*read_speech(speech, used), device=device)
        longest = [int(speech.lengths[batch.rows].max()) for batch in batches]
    draws = context.draws(client, speech, batches, step=step, samples=longest)
    seconds = sum(float(speech.lengths[batch.rows].sum()) for batch in batches) / SAMPLE_RATE
    amount = (len(used), seconds) if once else (len(speech.rows), client.seconds)
    return LoadedClient(client, speech, sound, whole, lines, draws, seconds, *amount)


def train_locally(
    weights: Weights, loaded: LoadedClient, features: Features, context: ClientContext, *, server_P: Tensor
) -> tuple[Tensor, Tensor]:
    """Local training of one client on its `features`, from `server_P` to `weights.master`.

    Returns each local step's loss, and the norm of its gradient before clipping, on the device.
    """
    local = context.local
    weights.reset(server_P)
    losses, norms = [], []
    for lines, draws in zip(loaded.lines, loaded.draws, strict=True):
        whole = context.frozen.with_trained(weights.working)
        loss = step_loss(context.family, whole, features.take(lines), settings=context.model, draws=draws)
        weights.set_gradients(gradients_of(loss, list(weights.working.values())))
        if local.proximal is not None:
            weights.add_to_gradients(local.proximal.pull(weights.master, server_P))
        norm, _ = weights.step(lr=local.lr, max_norm=local.clip_gradients)
        losses.append(loss.detach())
        norms.append(norm)
    return torch.stack(losses), torch.stack(norms)


def gradients_of(loss: Tensor, leaves: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """The gradient of each leaf, None where the loss does not depend on it.

    It depends on none where a part is trained and layer-drop left out every block of it.
    """
    return torch.autograd.grad(loss, leaves, allow_unused=True) if loss.requires_grad else [None] * len(leaves)
