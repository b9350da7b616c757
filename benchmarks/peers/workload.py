"""One federated workload, the same for every contestant: model, users' data, cohorts, local steps, clipping, noise.

Every side of the benchmark takes its users, batches and random draws from here and computes every loss by
`loss_of`, which keeps a tally of what was really computed. What a side adds around these steps is what is compared.
Batches and draws are those that Sottovoce's clients make for themselves, from the same seeds (`federated.client`): its
own side trains plain clients, and only its tally is taken from what they plan.

Users are synthetic (noise for speech, random texts): arithmetic does not depend on what is said. Waveforms go in, and
features are computed within the step, as in training. Lengths and amounts of speech differ between users.
"""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sottovoce.base.seeds import derive, name_key, stream, torch_stream
from sottovoce.data.audio.augment import SpecAugmentSettings
from sottovoce.data.audio.batches import plan_client_batches
from sottovoce.data.audio.waveforms import Waveforms, pad_waveforms
from sottovoce.data.corpora.corpus import SAMPLE_RATE
from sottovoce.models.family import Family, Parameters, StepDraws, draw_steps, extract_float32_features, step_loss
from sottovoce.models.precision import Precision, choose_dtype
from sottovoce.models.transformer import FAMILY
from sottovoce.models.transformer.draws import Draws
from sottovoce.models.transformer.settings import Settings, named_settings

SEED = 1
TOKENS = 30
CHARACTERS_PER_SECOND = 12

LOCAL_LR = 0.1
CLIP_GRADIENTS = 1.0
CLIP_BOUND = 0.1  # below what local steps move: clipping has work to do
NOISE_MULTIPLIER = 0.01
SERVER_LR = 1.0  # plain federated averaging: the one server optimiser that all contestants have


def nothing_drawn(settings: Settings, utterances: Sequence[int], **_: Any) -> list[Draws]:
    """Steps that leave nothing to chance: every block, and positions as they are in evaluation."""
    return [Draws(tuple(range(settings.layers)), positions=None, dropout_seed=None)] * len(utterances)


WITHOUT_CHANCE = replace(FAMILY, draw=nothing_drawn)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """`drop` is dropout and layer-drop; SpecAugment and moved positions come with it."""

    size: str
    users: int
    cohort_size: int
    local_steps: int
    batch_seconds: float
    utterance_seconds: tuple[float, float]
    drop: float = 0.0

    @property
    def settings(self) -> Settings:
        return named_settings(self.size, tokens=TOKENS, dropout=self.drop, layer_drop=self.drop)

    @property
    def family(self) -> Family[Settings, Draws]:
        return FAMILY if self.drop else WITHOUT_CHANCE

    @property
    def spec_augment(self) -> SpecAugmentSettings | None:
        return SpecAugmentSettings() if self.drop else None


WORKLOADS: Mapping[str, Workload] = {
    "tiny": Workload(
        size="tiny", users=64, cohort_size=32, local_steps=3, batch_seconds=8, utterance_seconds=(1.0, 4.0)
    ),
    "small": Workload(
        size="small", users=64, cohort_size=16, local_steps=3, batch_seconds=20, utterance_seconds=(2.0, 8.0)
    ),
    "5M-gpu": Workload(
        size="small", users=512, cohort_size=128, local_steps=10, batch_seconds=40, utterance_seconds=(3.0, 10.0)
    ),
    "base-gpu": Workload(
        size="base",
        users=256,
        cohort_size=64,
        local_steps=10,
        batch_seconds=120,
        utterance_seconds=(3.0, 10.0),
        drop=0.3,
    ),
}


@dataclass(frozen=True, eq=False)
class User:
    """One user's speech and texts, all in memory."""

    samples: list[NDArray[np.int16]]
    tokens: list[list[int]]

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.array([len(s) for s in self.samples], dtype=np.int64)


@cache
def _noise() -> NDArray[np.int16]:
    return stream(SEED, "noise").integers(-3000, 3000, size=60 * SAMPLE_RATE).astype(np.int16)


@cache
def user(workload: Workload, number: int) -> User:
    """User `number`: enough speech for one batch at least, for twice the local steps at most."""
    rng = stream(SEED, "user", number)
    shortest, longest = workload.utterance_seconds
    wanted_seconds = rng.uniform(workload.batch_seconds, 2 * workload.local_steps * workload.batch_seconds)
    samples: list[NDArray[np.int16]] = []
    tokens: list[list[int]] = []
    given_seconds = 0.0
    while given_seconds < wanted_seconds:
        seconds = rng.uniform(shortest, longest)
        start = int(rng.integers(len(_noise()) - int(longest * SAMPLE_RATE)))
        samples.append(_noise()[start : start + int(seconds * SAMPLE_RATE)])  # a view: users cost no memory
        tokens.append(rng.integers(1, TOKENS, size=int(seconds * CHARACTERS_PER_SECOND)).tolist())
        given_seconds += seconds
    return User(samples, tokens)


def cohort(workload: Workload, round_number: int) -> list[int]:
    """The users of one round. Of fixed size, because not every contestant can do otherwise."""
    rng = stream(SEED, "cohort", round_number)
    return [int(number) for number in rng.permutation(workload.users)[: workload.cohort_size]]


@dataclass(frozen=True, eq=False)
class Step:
    """One local step's batch and draws, and what it is called in the tally."""

    name: str
    batch: Waveforms
    draws: StepDraws


def step_name(number: int | str, *, round_number: int, local_step: int) -> str:
    return f"{round_number}/{number}/{local_step}"


def client_steps(
    workload: Workload, number: int, *, round_number: int, device: torch.device | str = "cpu"
) -> Iterator[Step]:
    """The local steps of user `number` in a round, batch after batch, which are made when they are asked for.

    Each is padded to its longest utterance, as Sottovoce's own are.
    """
    own, key = user(workload, number), name_key(str(number))
    lengths = own.lengths
    planned = list(
        plan_client_batches(
            lengths,
            max_seconds=workload.batch_seconds,
            seed=derive(SEED, "local batches", round_number, key),
            local_steps=workload.local_steps,
            fixed_shapes=True,
        )
    )
    draws = draw_steps(
        workload.family,
        [len(batch.rows) for batch in planned],
        samples=[int(lengths[batch.rows].max()) for batch in planned],
        settings=workload.settings,
        spec_augment=workload.spec_augment,
        generator=torch_stream(SEED, "local steps", round_number, key),
    )
    for local_step, (batch, drawn) in enumerate(zip(planned, draws, strict=True)):
        samples, tokens = [own.samples[row] for row in batch.rows], [own.tokens[row] for row in batch.rows]
        name = step_name(number, round_number=round_number, local_step=local_step)
        yield Step(name, pad_waveforms(samples, tokens, device=device), drawn)


@dataclass
class Tally:
    """What was computed: how many steps, on how much speech, and a checksum of their batches in any order."""

    steps: int = 0
    audio_seconds: float = 0.0
    checksum: int = 0

    def add(self, name: str, *, lengths: Sequence[int], token_sums: Sequence[int]) -> None:
        """A local step called `name`: its utterances' lengths in samples, and the sums of their tokens, in order."""
        self.steps += 1
        self.audio_seconds += sum(lengths) / SAMPLE_RATE
        self.checksum += zlib.crc32(f"{name}: {[*lengths, *token_sums]}".encode())

    def merge(self, other: "Tally") -> None:
        self.steps += other.steps
        self.audio_seconds += other.audio_seconds
        self.checksum += other.checksum


def loss_of(workload: Workload, parameters: Parameters, step: Step, tally: Tally) -> Tensor:
    """The loss of one local step."""
    batch, family, settings = step.batch, workload.family, workload.settings
    tally.add(step.name, lengths=batch.lengths_U.tolist(), token_sums=batch.tokens_UL.sum(dim=1).tolist())
    features = extract_float32_features(family, batch, settings=settings)
    return step_loss(family, parameters, features, settings=settings, draws=step.draws)


def start_parameters(workload: Workload) -> dict[str, Tensor]:
    """The server's model before the first round."""
    return workload.family.init(workload.settings, generator=torch_stream(SEED, "init"))


class RecogniserModule(torch.nn.Module):
    """The model as the contestants expect one: a module that owns its parameters, and a loss."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.workload = workload
        self.tally = Tally()
        start = start_parameters(workload)
        self.names = {name: name.replace(".", "/") for name in start}  # modules keep the dot for themselves
        self.weights = torch.nn.ParameterDict({self.names[name]: value for name, value in start.items()})

    @property
    def by_name(self) -> dict[str, Tensor]:
        return {name: self.weights[key] for name, key in self.names.items()}

    def loss(self, step: Step) -> Tensor:
        return loss_of(self.workload, self.by_name, step, self.tally)


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a side is asked to do."""

    workload: Workload
    rounds: int
    device: torch.device
    noise_multiplier: float = NOISE_MULTIPLIER
    save: str | None = field(default=None)  # where to write the server's model after the first round
    precision: Precision = "auto"

    @property
    def dtype(self) -> torch.dtype:
        """What Sottovoce computes in."""
        workload = self.workload
        return choose_dtype(self.precision, self.device, family=workload.family, settings=workload.settings)
