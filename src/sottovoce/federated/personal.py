"""A personal part: what one person trains on top of the public model with their own speech, for themselves alone.

    public model ─► split ─► local steps on the person's speech ─► the part
                                                                     │
    the person's speech in folds: train on all but one, errors and losses on that one ─► guard: the part, or none

Training is a client's local training (`client`), from the public model, of a small part of it. Nothing of it is an
update: nobody else gets it, no sum has it, and no ε speaks of it.

The guard decides by the person's own training speech. Each fold is recognised by the public model and by a part that
was trained without it. The part is kept if it makes fewer errors by more than `margin` standard errors of the
difference, or no more errors and its loss is lower by as much: a good model makes no error in a few words, and only the
loss can say then which of two is better. At least two utterances have to agree, and with fewer than `FEWEST_UTTERANCES`
the public model is kept.
Speech that somebody is tested on is never looked at.

Shapes: U utterances of one person.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sottovoce.base.errors import InputError
from sottovoce.base.seeds import derive, keyed_order, torch_stream
from sottovoce.data.audio.batches import Batch
from sottovoce.data.client_utterances import utterance_keys
from sottovoce.data.loading import Speech, load_batch
from sottovoce.data.population import Client, Population
from sottovoce.evaluation.decoder import DecodingOptions, choose_decoder
from sottovoce.evaluation.error_rates import Counts, count_word_errors
from sottovoce.evaluation.losses import compute_loss
from sottovoce.evaluation.recognise import recognise_utterances
from sottovoce.federated.client import ClientContext, LocalTraining, PlannedClient, load_client, train_locally
from sottovoce.federated.feature_cache import FeatureCache
from sottovoce.models.personal_part import BIASES, PersonalPart, build_personal_part, parse_personal_part
from sottovoce.models.recogniser import Recogniser
from sottovoce.models.trainable import Trainable, parse_part, split_names, split_parameters
from sottovoce.optimisers.weights import Weights

FEWEST_UTTERANCES = 4  # with fewer, parts do harm, and no guard can tell (docs/personal.md)


@dataclass(frozen=True, kw_only=True)
class PersonalTraining:
    """How a personal part is trained: what of the model, so many `steps`, and by how much it must be better to be kept.

    `folds` of the speech are tried in turn; `margin` is in standard errors of the difference.
    """

    part: str = "lora(r=4)"
    steps: int = 20
    lr: float = 5e-3
    batch_seconds: float = 16.0
    optimiser: Mapping[str, Any] = field(default_factory=lambda: {"name": "adam"})
    folds: int = 4
    margin: float = 1.0

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("folds", 2)):
            if (value := getattr(self, name)) < least:
                raise InputError(f"personal: {name}={value}, expected at least {least}")
        if not (math.isfinite(self.margin) and self.margin >= 0):
            raise InputError(f"personal: margin={self.margin}, expected a finite number, at least 0")
        if not all(split_names(self.part)):
            raise InputError(f"personal: part={self.part!r}: expected lora(r=4), biases or output, or names of tensors")
        if others := [name for name in split_names(self.part) if name != BIASES]:
            parse_part(", ".join(others))
        self.local  # noqa: B018  # refuses what local training refuses

    @property
    def local(self) -> LocalTraining:
        return LocalTraining(
            batch_seconds=self.batch_seconds,
            lr=self.lr,
            local_steps=self.steps,
            optimiser=self.optimiser,
            spec_augment=None,
        )


@dataclass(frozen=True, eq=False)
class Personaliser:
    """What trains the parts of all people of `population`, one after another, on top of the public `model`."""

    model: Recogniser
    split: Trainable
    settings: PersonalTraining
    context: ClientContext
    weights: Weights
    device: torch.device
    decoding: DecodingOptions

    @property
    def parameter_count(self) -> int:
        return self.split.trained_count

    def speech(self, client: Client) -> Speech:
        """What `client` can train on; InputError where there is nothing."""
        return self.context.speech(client)

    def recognise(self, model: Recogniser, rows: NDArray[np.int64]) -> list[str]:
        """The texts of `rows` of the people's store."""
        decode = choose_decoder(model.family, model.tokens.pieces(), self.decoding, settings=model.settings)
        return recognise_utterances(model, self.context.store, rows, device=self.device, decode=decode)

    def measure(self, model: Recogniser, speech: Speech, found: Sequence[str]) -> "Trial":
        """How `model` does on each utterance of `speech`, which it has recognised as `found`."""
        texts = [self.context.store.utterance(row).text or "" for row in speech.rows.tolist()]
        model = model.to(self.device)
        alone = [Batch(np.array([place]), int(length)) for place, length in enumerate(speech.lengths.tolist())]
        with torch.no_grad():
            losses = [float(compute_loss(model, load_batch(speech, one, device=self.device))) for one in alone]
        return Trial(count_word_errors(texts, found), np.array(losses))

    def with_part(self, trained: Mapping[str, Tensor]) -> Recogniser:
        """The public model with somebody's part."""
        merged = self.split.frozen.merged(trained)
        return replace(self.model, parameters={name: merged[name] for name in self.model.parameters}, part=None)


def build_personaliser(
    model: Recogniser,
    population: Population,
    settings: PersonalTraining,
    *,
    seed: int,
    device: torch.device,
    decoding: DecodingOptions,
) -> Personaliser:
    """Everything that can be refused before anybody's part is trained is refused here."""
    if model.family.recognition is None:
        raise InputError(f"personal: models of family={model.family.name} write no text")
    split = split_parameters(
        parse_personal_part(settings.part, model.family, model.settings),
        model.parameters,
        is_lora_target=model.family.transfer.is_lora_target,
        generator=torch_stream(seed, "personal low rank"),
    )
    if not split.initial:
        raise InputError(f"personal: part={settings.part!r} names nothing of this model")
    if (check := model.family.training.check) is not None:
        check(model.family, model.settings, split)
    context = ClientContext(
        population,
        model.tokens,
        model.family,
        model.settings,
        settings.local,
        seed=derive(seed, "personal"),
        cohort_size=1,
        frozen=split.frozen,
    ).on(device, torch.float32)
    weights = Weights(
        split.layout,
        settings.local.built_optimiser(),
        device=device,
        dtype=torch.float32,
        statistics=model.family.training.statistics(model.settings),
    )
    return Personaliser(model, split, settings, context, weights, device, decoding)


def train_part(personaliser: Personaliser, client: Client, speech: Speech, *, stage: int = 0) -> dict[str, Tensor]:
    """The part of `client`, trained on `speech`. `stage` is 0 for all of it, or the number of the fold left out.

    Numbers that are not finite are a part that diverged; the guard keeps none of them.
    """
    context, weights, device = personaliser.context, personaliser.weights, personaliser.device
    batches = list(context.plan_batches(client, speech, step=stage))
    cache = FeatureCache(0)
    loaded = load_client(context, PlannedClient(client, speech, batches), step=stage, device=device, cache=cache)
    features = loaded.extract_features(cache, context, dtype=torch.float32)
    layout = personaliser.split.layout
    start_P = layout.flatten(personaliser.split.initial).to(device)
    train_locally(weights, loaded, features, context, server_P=start_P)
    return {name: tensor.detach().clone() for name, tensor in weights.masters.items()}


@dataclass(frozen=True, eq=False)
class Trial:
    """What a model does on each of U utterances: counts of words and errors, and its loss."""

    counts_U4: Counts
    losses_U: NDArray[np.float64]

    def with_others(self, places: NDArray[np.int64], other: "Trial") -> "Trial":
        """The same with what `other` does in place of those utterances."""
        counts_U4, losses_U = self.counts_U4.copy(), self.losses_U.copy()
        counts_U4[places], losses_U[places] = other.counts_U4, other.losses_U
        return Trial(counts_U4, losses_U)


@dataclass(frozen=True)
class Decision:
    """What the guard found on a person's own speech: errors and mean loss by the public model, and by parts that had
    not seen it.

    `needed` is how many errors fewer it takes, and more than that; `needed_loss` how much less of the loss, where there
    are no more errors.
    """

    utterances: int
    words: int
    public_errors: int
    personal_errors: int
    needed: float
    public_loss: float
    personal_loss: float
    needed_loss: float
    is_kept: bool

    def as_json(self) -> dict[str, Any]:
        """A loss that is no finite number is null."""
        found = asdict(self)
        losses = ("public_loss", "personal_loss", "needed_loss")
        return found | {name: found[name] if math.isfinite(found[name]) else None for name in losses}

    def describe(self) -> str:
        """In one line."""
        if self.utterances < FEWEST_UTTERANCES:
            few = f"{self.utterances} recordings with a text, expected at least {FEWEST_UTTERANCES}"
            return f"{few}: too little to try a personal part on; the public model is kept"
        found = (
            f"on {self.utterances} utterances that it had not seen, {self.words} words: {self.public_errors} errors by "
            f"the public model, {self.personal_errors} with the personal part, loss {self.public_loss:.3f} and "
            f"{self.personal_loss:.3f}"
        )
        if self.is_kept:
            return f"{found}; the part is kept"
        return (
            f"{found}; it takes more than {self.needed:.1f} errors fewer, or no more errors and a loss lower by more "
            f"than {self.needed_loss:.3f}: the public model is kept"
        )


def decide(public: Trial, personal: Trial, *, margin: float) -> Decision:
    """Keep the part if it is better on the same utterances by more than `margin` standard errors of the difference.

    By errors; or, with no more errors, by the loss. The standard error of a sum of U differences d is about √Σd². One
    utterance alone never suffices at margin=1: its difference is no more than that. Fewer than `FEWEST_UTTERANCES`
    never do. Losses that are not finite decide nothing.
    """
    count = len(public.counts_U4)
    public_U, personal_U = (trial.counts_U4[:, 1:].sum(axis=1) for trial in (public, personal))
    fewer_U = public_U - personal_U
    is_finite = bool(np.isfinite(public.losses_U).all() and np.isfinite(personal.losses_U).all())
    lower_U = public.losses_U - personal.losses_U if is_finite else np.zeros(count)
    needed, needed_loss = (margin * math.sqrt(float((d_U**2).sum())) for d_U in (fewer_U, lower_U))
    fewer = int(fewer_U.sum())
    is_better = fewer > needed or (fewer >= 0 and float(lower_U.sum()) > needed_loss)
    return Decision(
        utterances=count,
        words=int(public.counts_U4[:, 0].sum()),
        public_errors=int(public_U.sum()),
        personal_errors=int(personal_U.sum()),
        needed=needed,
        public_loss=float(public.losses_U.sum()) / max(count, 1),
        personal_loss=float(personal.losses_U.sum()) / max(count, 1),
        needed_loss=needed_loss / max(count, 1),
        is_kept=count >= FEWEST_UTTERANCES and is_better,
    )


def judge_part(personaliser: Personaliser, client: Client, speech: Speech, *, public: Sequence[str]) -> Decision:
    """What the guard says of `client`, whose `speech` the public model has recognised as `public`."""
    margin = personaliser.settings.margin
    before = personaliser.measure(personaliser.model, speech, public)
    found = before
    for number, left_out in enumerate(_folds(personaliser, speech), start=1):
        others = np.setdiff1d(np.arange(len(speech.rows)), left_out)
        trained = train_part(personaliser, client, take_speech(speech, others), stage=number)
        if not _is_finite(trained):
            return decide(before, before, margin=margin)
        model, tried = personaliser.with_part(trained), take_speech(speech, left_out)
        texts = personaliser.recognise(model, tried.rows)
        found = found.with_others(left_out, personaliser.measure(model, tried, texts))
    return decide(before, found, margin=margin)


def train_and_judge(
    personaliser: Personaliser, client: Client, speech: Speech, *, public: Sequence[str]
) -> tuple[dict[str, Tensor] | None, Decision]:
    """The part of `client`, trained on all of `speech`, and what the guard says; None where it diverged."""
    decision = judge_part(personaliser, client, speech, public=public)
    trained = train_part(personaliser, client, speech)
    if not _is_finite(trained):
        return None, replace(decision, is_kept=False)
    return trained, decision


def take_speech(speech: Speech, places: NDArray[np.int64]) -> Speech:
    """Some of a person's utterances."""
    return replace(
        speech,
        rows=speech.rows[places],
        lengths=speech.lengths[places],
        tokens=[speech.tokens[place] for place in places.tolist()],
    )


def order_speech(personaliser: Personaliser, speech: Speech) -> NDArray[np.int64]:
    """Places of utterances in an order that depends on nobody else: the first n of it are what n utterances are."""
    keys = utterance_keys(personaliser.context.store, speech.rows)
    return keyed_order(keys, personaliser.context.seed, "utterances")


def _folds(personaliser: Personaliser, speech: Speech) -> list[NDArray[np.int64]]:
    """Which utterances are left out in turn; none where there are too few."""
    if len(speech.rows) < FEWEST_UTTERANCES:
        return []
    count = min(personaliser.settings.folds, len(speech.rows))
    return [np.sort(part) for part in np.array_split(order_speech(personaliser, speech), count)]


def _is_finite(trained: Mapping[str, Tensor]) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in trained.values())


def train_own_part(personaliser: Personaliser, index: int) -> tuple[PersonalPart, Decision]:
    """The part of client `index`, trained on all that they have, as it is saved; without tensors where it is not kept.

    Nobody is tested here, so that what they would hold out is trained on, too.
    """
    found, settings = personaliser.context.population.client(index), personaliser.settings
    rows = np.union1d(found.utterances, found.held_out)
    client = replace(found, utterances=rows, held_out=rows[:0])
    speech = personaliser.speech(client)
    recognised = personaliser.recognise(personaliser.model, speech.rows)
    trained, decision = train_and_judge(personaliser, client, speech, public=recognised)
    about = {
        "steps": settings.steps,
        "lr": settings.lr,
        "folds": settings.folds,
        "margin": settings.margin,
        "guard": decision.as_json(),
    }
    kept = trained if decision.is_kept else None
    part = build_personal_part(personaliser.model, personaliser.split, kept, part=settings.part, about=about)
    return part, decision
