"""Linear probes of an encoder: how much of who speaks, and of what is said, its vectors hold.

A linear layer is trained on vectors that stay as they are, and tested on speech that it was not trained on:

    speaker   the mean vector of an utterance ─► whose it is; other utterances of the same people
    letters   every vector ─► a letter or the blank, by CTC; utterances of other people

It is compared with an untrained model of the same shape, since much survives a random network, and with chance.

Shapes: U utterances, T steps, D width of a vector, S speakers, V letters with the blank.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sottovoce.base.errors import InputError
from sottovoce.base.seeds import derive, keyed_order, name_key, torch_stream
from sottovoce.data.audio.batches import plan_epoch
from sottovoce.data.audio.waveforms import pad_tokens
from sottovoce.data.client_utterances import utterance_keys
from sottovoce.data.corpora.corpus import SAMPLE_RATE
from sottovoce.data.loading import Speech, load_batch, load_speech, prefetch
from sottovoce.data.store import Store
from sottovoce.data.text.tokens import CharacterTokens
from sottovoce.evaluation.error_rates import count_character_errors, sum_counts
from sottovoce.evaluation.recognise import choose_batch_seconds, join_tokens, place_for_evaluation
from sottovoce.evaluation.score import LONGEST_SECONDS, find_speakers, find_split
from sottovoce.models import ctc
from sottovoce.models.decoding import decode_greedily
from sottovoce.models.family import extract_float32_features
from sottovoce.models.recogniser import Recogniser

MOST_UTTERANCES = 20  # of one speaker
HELD_OUT = 4  # of so many utterances, or speakers, one is not trained on; at least one is not
PULL = 1e-3  # towards zero, on the speaker layer's weights
LETTER_EPOCHS, LETTER_BATCH, LETTER_LR = 40, 32, 0.02

Vectors = Sequence[Tensor]  # [T, D] of each utterance


@dataclass(frozen=True)
class SpeakerProbe:
    """The share of utterances whose speaker was found: by the model, an untrained one, or always the same speaker."""

    accuracy: float
    untrained: float
    chance: float
    speakers: int
    trained_on: int
    tried_on: int


@dataclass(frozen=True)
class LetterProbe:
    """Errors per letter, spaces among them; by chance nothing is written, which is an error for every letter."""

    error_rate: float
    untrained: float
    chance: float
    letters: int
    trained_on: int
    tried_on: int


@dataclass(frozen=True)
class Probes:
    """A probe that could not be made is None, and `missing` says why."""

    store: str
    utterances: int
    audio_seconds: float
    speaker: SpeakerProbe | None
    letters: LetterProbe | None
    missing: dict[str, str]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def probe_encoder(
    recogniser: Recogniser,
    store: Store,
    *,
    split: str | None = None,
    minutes: float = 30.0,
    device: torch.device | str = "cpu",
    seed: int = 1,
    on_progress: Callable[[int, int], None] | None = None,
) -> Probes:
    """Probe the encoder of `recogniser` on at most so many `minutes` of `split`; the same for the same `seed`."""
    if recogniser.family.inspection.encode is None:
        raise InputError(f"models of family={recogniser.family.name} have no encoder that can be probed")
    speech, owners = choose_speech(recogniser, store, split=split, minutes=minutes, seed=seed)
    family, settings = recogniser.family, recogniser.settings
    random = replace(recogniser, parameters=family.init(settings, generator=torch_stream(seed, "probe", "untrained")))
    count, vectors = len(speech.rows), []
    for number, model in enumerate((recogniser, random)):
        report = None if on_progress is None else partial(_report_progress, on_progress, number * count, 2 * count)
        vectors.append(encode_utterances(model, speech, device=torch.device(device), on_progress=report))
    trained, untrained = vectors
    missing: dict[str, str] = {}
    found: dict[str, Any] = {}
    for name, tried in (("speaker", probe_speakers), ("letters", probe_letters)):
        try:
            found[name] = tried(trained, untrained, speech, owners, seed=seed)
        except InputError as error:
            found[name], missing[name] = None, str(error)
    return Probes(store.name, len(speech.rows), float(speech.lengths.sum()) / SAMPLE_RATE, **found, missing=missing)


def choose_speech(
    recogniser: Recogniser, store: Store, *, split: str | None, minutes: float, seed: int
) -> tuple[Speech, NDArray[np.int64]]:
    """Up to `MOST_UTTERANCES` of each speaker, speaker after speaker in an order by chance, and whose each is."""
    users = range(store.user_count) if split is None else find_split(store, split)
    rows = np.arange(int(store.user_utterances[users.start]), int(store.user_utterances[users.stop]))
    speech = load_speech(
        store, rows, None, family=recogniser.family, settings=recogniser.settings, longest_seconds=LONGEST_SECONDS
    )
    names, _, owners = find_speakers(store, speech.rows)
    keys = np.array([name_key(name) for name in names], dtype=np.uint64)
    shuffled = keyed_order(utterance_keys(store, speech.rows), derive(seed, "probe"), "utterances")
    left, chosen = minutes * 60 * SAMPLE_RATE, list[NDArray[np.int64]]()
    for speaker in keyed_order(keys, derive(seed, "probe"), "speakers").tolist():
        own = shuffled[owners[shuffled] == speaker][:MOST_UTTERANCES]
        left -= speech.lengths[own].sum()
        if chosen and left < 0:
            break
        chosen.append(own)
    places = np.concatenate(chosen)
    found = Speech(store, speech.rows[places], speech.lengths[places], [speech.tokens[i] for i in places.tolist()], {})
    return found, np.repeat(np.arange(len(chosen)), [len(own) for own in chosen])


def encode_utterances(
    recogniser: Recogniser, speech: Speech, *, device: torch.device, on_progress: Callable[[int], None] | None = None
) -> list[Tensor]:
    """The vectors of each utterance, in float32 on the host."""
    plan = plan_epoch(
        speech.lengths,
        max_seconds=choose_batch_seconds(device),
        seed=0,
        epoch=0,
        fixed_shapes=False,
        allow_overlong=True,
    )
    recogniser, done = place_for_evaluation(recogniser, device), 0
    family, settings = recogniser.family, recogniser.settings
    assert family.inspection.encode is not None
    vectors: dict[int, Tensor] = {}
    with torch.no_grad():
        read = ((batch, load_batch(speech, batch, device=device)) for batch in plan)
        for batch, recordings in prefetch(read):
            features = extract_float32_features(family, recordings, settings=settings)
            vectors_UTD, lengths_U = family.inspection.encode(recogniser.parameters, features, settings=settings)
            for place, own_TD, length in zip(batch.rows.tolist(), vectors_UTD.float().cpu(), lengths_U, strict=True):
                vectors[place] = own_TD[:length].clone()
            done += len(batch.rows)
            if on_progress is not None:
                on_progress(done)
    return [vectors[place] for place in range(len(speech.rows))]


# Who speaks.


def probe_speakers(
    model: Vectors, untrained: Vectors, speech: Speech, owners: NDArray[np.int64], *, seed: int
) -> SpeakerProbe:
    """One in `HELD_OUT` utterances of each speaker is tested on; speakers with a single one are left out."""
    trained_on, tried_on = [], []
    for speaker in range(int(owners.max()) + 1):
        own = np.flatnonzero(owners == speaker)
        if len(own) > 1:
            held_out = max(len(own) // HELD_OUT, 1)
            trained_on += own[held_out:].tolist()
            tried_on += own[:held_out].tolist()
    who, classes = np.unique(owners[trained_on], return_inverse=True)
    if len(who) < 2:
        raise InputError(f"store {speech.store.path}: {len(who)} speakers with several utterances, expected at least 2")
    expected = torch.from_numpy(np.searchsorted(who, owners[tried_on]))
    rights = []
    for vectors in (model, untrained):
        means_UD = torch.stack([own_TD.double().mean(dim=0) for own_TD in vectors])
        mean_D, deviation_D = _spread(means_UD[trained_on])
        scaled_UD = (means_UD - mean_D) / deviation_D
        given, asked = scaled_UD[trained_on], scaled_UD[tried_on]
        guessed = _linear_classes(given, torch.from_numpy(classes), asked, count=len(who))
        rights.append(float((guessed == expected).double().mean()))
    chance = float(torch.bincount(expected).max()) / len(expected)
    return SpeakerProbe(rights[0], rights[1], chance, len(who), len(trained_on), len(tried_on))


def _linear_classes(given_UD: Tensor, classes_U: Tensor, asked_UD: Tensor, *, count: int) -> Tensor:
    """Multinomial logistic regression, which has one best solution; the class of each of `asked_UD`."""
    weight = torch.zeros(count, given_UD.shape[1], dtype=given_UD.dtype, requires_grad=True)
    bias = torch.zeros(count, dtype=given_UD.dtype, requires_grad=True)
    optimiser = torch.optim.LBFGS([weight, bias], max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        value = F.cross_entropy(F.linear(given_UD, weight, bias), classes_U) + PULL / 2 * weight.square().sum()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimiser.step(closure)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        return F.linear(asked_UD, weight, bias).argmax(dim=1)


# What is said.


def probe_letters(
    model: Vectors, untrained: Vectors, speech: Speech, owners: NDArray[np.int64], *, seed: int
) -> LetterProbe:
    """One in `HELD_OUT` speakers is written down; texts that do not fit into their steps take no part."""
    texts = [speech.store.utterance(row).text or "" for row in speech.rows.tolist()]
    if not any(texts):
        raise InputError(f"store {speech.store.path}: no utterance has a text")
    tokens = CharacterTokens.seen_in(texts)
    ids = [tokens.encode(text) for text in texts]
    usable = [n for n, own in enumerate(ids) if own and ctc.required_frames(own) <= len(model[n])]
    people = list(dict.fromkeys(owners[usable].tolist()))
    if len(people) < 2:
        raise InputError(f"store {speech.store.path}: {len(people)} speakers with texts, expected at least 2")
    held_out = set(people[: max(len(people) // HELD_OUT, 1)])
    trained_on = [n for n in usable if owners[n] not in held_out]
    tried_on = [n for n in usable if owners[n] in held_out]
    rates = []
    for vectors in (model, untrained):
        every_TD = torch.cat([vectors[n] for n in trained_on])
        mean_D, deviation_D = _spread(every_TD)
        scaled = {n: (vectors[n] - mean_D) / deviation_D for n in usable}
        weight, bias = _linear_letters(scaled, ids, trained_on, outputs=tokens.size + 1, seed=seed)
        log_probs_UTV = F.linear(pad_sequence([scaled[n] for n in tried_on], batch_first=True), weight, bias)
        lengths_U = torch.tensor([len(scaled[n]) for n in tried_on])
        written = join_tokens(tokens, decode_greedily(log_probs_UTV.log_softmax(dim=-1), lengths_U))
        rate = sum_counts(count_character_errors([texts[n] for n in tried_on], written)).rate
        assert rate is not None, "every utterance has a letter"
        rates.append(rate)
    return LetterProbe(rates[0], rates[1], 1.0, tokens.size, len(trained_on), len(tried_on))


def _linear_letters(
    vectors: dict[int, Tensor], ids: Sequence[Sequence[int]], trained_on: list[int], *, outputs: int, seed: int
) -> tuple[Tensor, Tensor]:
    """A linear layer from vectors to letters, by CTC: so many epochs of Adam, its steps ever smaller."""
    weight = torch.zeros(outputs, vectors[trained_on[0]].shape[1], requires_grad=True)
    bias = torch.zeros(outputs, requires_grad=True)
    optimiser = torch.optim.Adam([weight, bias], lr=LETTER_LR)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, LETTER_EPOCHS)
    batches = [trained_on[first : first + LETTER_BATCH] for first in range(0, len(trained_on), LETTER_BATCH)]
    generator = torch_stream(seed, "probe", "letters")
    for _ in range(LETTER_EPOCHS):
        for number in torch.randperm(len(batches), generator=generator).tolist():
            own = batches[number]
            log_probs_UTV = F.linear(pad_sequence([vectors[n] for n in own], batch_first=True), weight, bias)
            lengths_U = torch.tensor([len(vectors[n]) for n in own])
            value = ctc.mean_ctc_loss(log_probs_UTV.log_softmax(dim=-1), lengths_U, *pad_tokens([ids[n] for n in own]))
            optimiser.zero_grad()
            value.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        schedule.step()
    return weight.detach(), bias.detach()


def _spread(given_UD: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation; a coordinate that never changes is left as it is."""
    deviation_D = given_UD.std(dim=0)
    return given_UD.mean(dim=0), torch.where(deviation_D > 0, deviation_D, 1.0)


def _report_progress(on_progress: Callable[[int, int], None], before: int, total: int, done: int) -> None:
    on_progress(before + done, total)
