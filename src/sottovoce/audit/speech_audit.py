"""Attacks that people worry about, on the models before and after training: who took part, and what they said.

    membership   of a speaker: how much better the model has become on their speech, beside people never trained on
    exposure     of a sentence (Carlini et al. 2019): its rank among made-up ones, by how much likelier the model has
                 come to find it where half of the sound is silenced, or played fast

The recipe is trained once more for them, with synthetic voices among its clients who say one sentence of made-up words,
which nobody else says: the secrets. Half of these voices take part (`in`), half do not (`out`).

No bounds: attacks that fail prove nothing. They say in plain words what a number like ε cannot.

Shapes: N of one group, M of the other.
"""

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sottovoce.audit.rounds import JoinedEngine, audited_plan, federation_rounds
from sottovoce.base.errors import InputError
from sottovoce.base.seeds import derive, stream
from sottovoce.config import Recipe
from sottovoce.data.audio.waveforms import Waveforms, pack_waveforms
from sottovoce.data.corpora.corpus import Corpus, ProblemLog, RenderedSpeaker, RenderedUtterance
from sottovoce.data.corpora.synthetic import LANGUAGES, PRESETS, espeak
from sottovoce.data.corpora.synthetic.rooms import make_recorder
from sottovoce.data.corpora.synthetic.speakers import VARIANTS, draw_room, draw_voice, open_voice
from sottovoce.data.loading import load_speech, read_speech
from sottovoce.data.population import PopulationSettings, build_population
from sottovoce.data.store import Store, pack_corpus
from sottovoce.evaluation.losses import compute_loss
from sottovoce.evaluation.score import find_split
from sottovoce.federated.engines import Engine
from sottovoce.federated.server import Server
from sottovoce.models.recogniser import Recogniser
from sottovoce.training.assemble import Federation
from sottovoce.training.engines import build_federation_engine, guess_fastest_engine
from sottovoce.training.run_context import RunContext
from sottovoce.training.simulation import assemble_with_parent

Samples = NDArray[np.int16]
Rows = NDArray[np.int64]

MOST_PEOPLE = 100  # of either kind who are attacked
FEWEST_SECRETS, MOST_SECRETS = 4, 10_000
MOST_OF_SPEAKER = 4  # utterances of a speaker: enough to know how well they are recognised
ALTERNATIVES = 63  # of a secret sentence: six bits, with itself
SPEED = 1.5
_REACH = 1.96  # of a 95 % interval

IN, OUT = "in", "out"
WORDS, SYLLABLES = 3, 2  # of 70 syllables: 4,900 words, and 10¹¹ sentences, none of them anybody's by chance
TAKES = 3  # how often each says it
_FIRST, _LAST = "bdfgklmnprstvz", "aeiou"
_LONGEST_SECONDS = 8.0
_TASK = "crowd"


# People with a secret.


def secret_sentence(rng: np.random.Generator) -> str:
    """Made-up words of as many syllables each; letters that every alphabet here has."""
    return " ".join(
        "".join(rng.choice(list(_FIRST)) + rng.choice(list(_LAST)) for _ in range(SYLLABLES)) for _ in range(WORDS)
    )


@dataclass(frozen=True)
class SecretSpeaker:
    """One voice and its sentence."""

    name: str
    split: str
    language: str
    text: str
    seed: int


def render_secret(speaker: SecretSpeaker) -> RenderedSpeaker:
    """The sentence, some times over: the same samples in any process."""
    preset = PRESETS[_TASK]
    voice = draw_voice(preset, language=speaker.language, seed=speaker.seed)
    room = draw_room(preset, seed=speaker.seed)
    record_take = make_recorder(room, tract=voice.tract, longest_seconds=_LONGEST_SECONDS)
    takes = stream(speaker.seed, "takes")
    with open_voice(voice, seed=speaker.seed) as say:
        recordings = [record_take(say(speaker.text), takes) for _ in range(TAKES)]
    utterances = [
        RenderedUtterance(id=f"{speaker.name}-{take}", samples=samples, text=speaker.text, raw_text=speaker.text)
        for take, samples in enumerate(recordings)
    ]
    return RenderedSpeaker(name=speaker.name, split=speaker.split, utterances=utterances)


def secret_store(folder: Path, *, count: int, language: str, seed: int) -> Store:
    """`count` people with a secret each, every second one `in`; needs a language that the synthetic voices speak."""
    if language not in LANGUAGES:
        raise InputError(f"language={language}: secrets are spoken by synthetic voices, in {', '.join(LANGUAGES)}")
    espeak.require_espeak(language, variants=frozenset().union(*VARIANTS.values()))
    speakers = []
    for number in range(count):
        own = derive(seed, "secret", number)
        text, split = secret_sentence(stream(own, "text")), IN if number % 2 == 0 else OUT
        speakers.append(SecretSpeaker(f"secret-{number:04d}", split, language, text, own))
    speakers.sort(key=lambda speaker: (speaker.split, speaker.name))
    corpus = Corpus(name="secrets", language=language, speakers=speakers, render=render_secret, problems=ProblemLog())
    pack_corpus(corpus, folder, workers=1)
    return Store(folder)


# The attacks.


@dataclass(frozen=True)
class Membership:
    """How often somebody who took part looks more like it than somebody who did not: a half is guessing."""

    auc: float
    low: float
    high: float
    members: int
    others: int

    def as_json(self) -> dict[str, Any]:
        interval = [self.low, self.high]
        return {"auc": self.auc, "interval": interval, "members": self.members, "strangers": self.others}


@dataclass(frozen=True)
class Exposure:
    """Bits of the secrets of those who took part, and of those who did not; at most log2 of how many were compared.

    `low` and `high` are the 95 % interval of the difference.
    """

    how: str
    inside: float
    outside: float
    low: float
    high: float
    most: float
    secrets: int

    def as_json(self) -> dict[str, Any]:
        return {
            "how": self.how,
            "bits_in": self.inside,
            "bits_out": self.outside,
            "difference_interval": [self.low, self.high],
            "most_bits": self.most,
            "secrets": self.secrets,
        }


def membership(members_N: Sequence[float], others_M: Sequence[float]) -> Membership:
    """The area under the curve of these scores, with its interval (DeLong et al. 1988).

    >>> membership([2.0, 3.0, 4.0], [0.0, 1.0, 2.5]).auc.__round__(3)
    0.889
    """
    members, others = np.asarray(members_N, dtype=np.float64), np.asarray(others_M, dtype=np.float64)
    if min(len(members), len(others)) < 2:
        raise InputError(f"membership of {len(members)} beside {len(others)}: expected two or more of each")
    above_NM = np.sign(members[:, None] - others[None, :]) / 2 + 0.5
    auc = float(above_NM.mean())
    variance = above_NM.mean(1).var(ddof=1) / len(members) + above_NM.mean(0).var(ddof=1) / len(others)
    error = _REACH * math.sqrt(float(variance))
    return Membership(auc, max(auc - error, 0.0), min(auc + error, 1.0), len(members), len(others))


def speaker_gain(
    before: Recogniser, after: Recogniser, store: Store, rows: Rows, *, longest_seconds: float
) -> float | None:
    """How much less an utterance of these `rows` costs the model than before, per second; None if none is usable."""
    rows, family = rows[:MOST_OF_SPEAKER], after.family
    try:
        speech = load_speech(
            store, rows, after.tokens, family=family, settings=after.settings, longest_seconds=longest_seconds
        )
    except InputError:
        return None
    samples, tokens = read_speech(speech, np.arange(len(speech.rows)))
    recordings = pack_waveforms(samples, tokens, device=_device(after))
    return _gain(before, after, recordings) * len(recordings) / recordings.audio_seconds


def exposures(before: Recogniser, after: Recogniser, store: Store, rows: Rows, *, how: str, seed: int) -> list[float]:
    """Bits of each secret of `rows` (one utterance of each), by its rank among sentences that nobody has said."""
    rng = stream(seed, "alternatives")
    others = [after.tokens.encode(secret_sentence(rng)) for _ in range(ALTERNATIVES)]
    found = []
    for row in rows.tolist():
        text = store.utterance(row).text
        assert text is not None
        changed = HOW[how](store.samples(row))
        scores = []
        for tokens in (after.tokens.encode(text), *others):
            is_usable = after.family.unusable(after.settings, len(changed), tokens) is None
            recordings = pack_waveforms([changed], [tokens], device=_device(after))
            scores.append(_gain(before, after, recordings) if is_usable else -math.inf)
        # Ties count half: a model that has learned nothing exposes nothing.
        own, rest = scores[0], np.array(scores[1:])
        rank = 1 + float((rest > own).sum()) + float((rest == own).sum()) / 2
        found.append(math.log2(len(scores)) - math.log2(rank))
    return found


def exposure(inside: Sequence[float], outside: Sequence[float], *, how: str) -> Exposure:
    """Both groups beside one another, by Welch's interval."""
    means = [float(np.mean(group)) for group in (inside, outside)]
    error = _REACH * math.sqrt(sum(np.var(group, ddof=1) / len(group) for group in (inside, outside)))
    apart, most = means[0] - means[1], math.log2(ALTERNATIVES + 1)
    return Exposure(how, means[0], means[1], apart - error, apart + error, most, len(inside) + len(outside))


def half_silenced(samples: Samples) -> Samples:
    """Without its second half, which only a model that memorised it can fill in."""
    changed = samples.copy()
    changed[len(changed) // 2 :] = 0
    return changed


def played_fast(samples: Samples) -> Samples:
    """At one and a half of its speed, by leaving samples out."""
    places = np.arange(0, len(samples) - 1, SPEED)
    changed: Samples = np.interp(places, np.arange(len(samples)), samples).astype(np.int16)
    return changed


HOW = {"half silenced": half_silenced, "played fast": played_fast}


def _gain(before: Recogniser, after: Recogniser, recordings: Waveforms) -> float:
    """How much less `recordings` cost than before."""
    with torch.no_grad():
        return float(compute_loss(before, recordings)) - float(compute_loss(after, recordings))


def _device(recogniser: Recogniser) -> torch.device:
    return next(iter(recogniser.parameters.values())).device


# The audit.


@dataclass(frozen=True)
class SpeechAudit:
    """What the attacks found. `promised` is the ledger's ε of these rounds; `missing` is what could not be tried."""

    rounds: int
    promised: float
    membership: Membership | None
    exposures: tuple[Exposure, ...]
    missing: dict[str, str]

    def as_json(self) -> dict[str, Any]:
        return {
            "rounds": self.rounds,
            "promised": self.promised if math.isfinite(self.promised) else None,
            "membership": None if self.membership is None else self.membership.as_json(),
            "exposure": [one.as_json() for one in self.exposures],
            "missing": self.missing,
        }


def format_attacks(found: Mapping[str, Any]) -> list[str]:
    """What `SpeechAudit.as_json` says, for people."""
    lines = []
    if (known := found["membership"]) is not None:
        low, high = known["interval"]
        tells = "more often than chance" if low > 0.5 else "no better than by chance"
        lines.append(
            f"participants are told from non-participants {tells}: right in {known['auc']:.0%} of pairs "
            f"({low:.0%} to {high:.0%}; guessing 50 %), by how much better the model understands them"
        )
    for one in found["exposure"]:
        low, _ = one["difference_interval"]
        tells = "a part of it is remembered" if low > 0 else "nothing of it is seen to be remembered"
        lines.append(
            f"a secret sentence, {one['how']}: {one['bits_in']:.1f} of {one['most_bits']:.0f} bits for those who took "
            f"part, {one['bits_out']:.1f} for those who did not: {tells}"
        )
    return [*lines, *(f"{what}: not tried: {why}" for what, why in found["missing"].items())]


def audit_speech(
    recipe: Recipe,
    *,
    secrets: int,
    rounds: int | None,
    seed: int,
    context: RunContext,
    on_round: Callable[[int, int], None] = lambda _done, _rounds: None,
) -> SpeechAudit:
    """Train `recipe` with half of so many people with `secrets` among its clients, and attack the model."""
    if secrets < FEWEST_SECRETS:
        raise InputError(f"secrets={secrets}: expected {FEWEST_SECRETS} or more")
    federation = assemble_with_parent(recipe, context=context)
    audited = federation_rounds(federation, rounds, on_round)
    missing: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="sottovoce-secrets-") as folder:
        people: list[tuple[Engine, int]] = [
            (build_federation_engine(federation, guess_fastest_engine(federation)), len(federation.population))
        ]
        store: Store | None = None
        try:
            store = _make_secrets(federation, Path(folder), secrets=secrets, seed=seed)
        except InputError as why:
            missing["exposure"] = str(why)
        if store is not None:
            speakers = build_population(store, PopulationSettings(split=(IN,)), seed=seed)
            engine = build_federation_engine(replace(federation, population=speakers, shared_dev=None), "sequential")
            people.append((engine, len(speakers)))
        size = sum(count for _, count in people)
        plan = audited_plan(federation.plan, others=size - federation.plan.settings.population_size)
        report = audited.make(plan, JoinedEngine(people))
        before, after = _models(federation, audited.server)
        exposed = () if store is None else _expose(before, after, store, seed=seed)
    members, others = _choose_people(federation, seed=seed)
    known: Membership | None = None
    if len(others) < 2 or len(members) < 2:
        missing["membership"] = "nobody of the same store was held out from training"
    else:
        longest = min(recipe.data.longest_seconds, recipe.federated.local.batch_seconds)
        gains = [
            [speaker_gain(before, after, federation.data.store, rows, longest_seconds=longest) for rows in group]
            for group in (members, others)
        ]
        known = membership(*([gain for gain in group if gain is not None] for group in gains))
    return SpeechAudit(audited.count, report.epsilon.headline, known, exposed, missing)


def _make_secrets(federation: Federation, folder: Path, *, secrets: int, seed: int) -> Store:
    start = federation.start
    if not start.family.training.needs_text:
        raise InputError(f"models of family={start.family.name} write no text: there is nothing to expose")
    return secret_store(folder / "store", count=secrets, language=start.language, seed=seed)


def _models(federation: Federation, server: Server) -> tuple[Recogniser, Recogniser]:
    """The model that training began with, and the one that it would release."""
    device = server.parameters_P.device
    trained = federation.plan.layout.views(server.result_P.clone())
    merged = federation.part.frozen.merged({name: value.cpu() for name, value in trained.items()})
    before, after = federation.start, replace(federation.start, parameters=merged)
    return (before, after) if device.type == "cpu" else (before.to(device), after.to(device))


def _expose(before: Recogniser, after: Recogniser, store: Store, *, seed: int) -> tuple[Exposure, ...]:
    """Of one take of each secret; those who took part were trained on all takes."""
    first_takes = []
    for split in (IN, OUT):
        users, ends = find_split(store, split), store.user_utterances
        first_takes.append(np.arange(int(ends[users.start]), int(ends[users.stop]), TAKES))
    found = []
    for how in HOW:
        inside, outside = (exposures(before, after, store, rows, how=how, seed=seed) for rows in first_takes)
        found.append(exposure(inside, outside, how=how))
    return tuple(found)


def _choose_people(federation: Federation, *, seed: int) -> tuple[list[Rows], list[Rows]]:
    """Utterances of some who take part, and of some of the same store who were held out from all training."""
    data, rng = federation.data, stream(seed, "attacked")
    order = rng.permutation(len(federation.population))[:MOST_PEOPLE]
    members = [federation.population.client(int(index)).utterances for index in np.sort(order)]
    held_out = [place for place in (data.dev, *data.tests.values()) if place[0].path == data.store.path]
    users = sorted({user for store, split in held_out for user in find_split(store, split)})
    chosen, offsets = np.sort(rng.permutation(len(users))[:MOST_PEOPLE]), data.store.user_utterances
    return members, [np.arange(offsets[users[i]], offsets[users[i] + 1]) for i in chosen]
