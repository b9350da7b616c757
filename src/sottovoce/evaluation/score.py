"""The error rates of a recogniser on a store: overall, by speaker and by group.

Shapes: U utterances, S speakers; columns as in `error_rates`.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sottovoce.base.errors import InputError
from sottovoce.base.seeds import stream
from sottovoce.data.corpora.corpus import SAMPLE_RATE
from sottovoce.data.store import Store
from sottovoce.data.text.normalisation import OURS, Normaliser, choose_normaliser
from sottovoce.evaluation.decoder import Decoder
from sottovoce.evaluation.error_rates import (
    Counts,
    Interval,
    SpeakerSpread,
    Tally,
    bootstrap_interval,
    compute_rates,
    count_character_errors,
    count_word_errors,
    measure_spread,
    sum_by_owner,
    sum_counts,
)
from sottovoce.evaluation.recognise import Progress, recognise_utterances
from sottovoce.models.attention_search import SearchOptions
from sottovoce.models.recogniser import Recogniser

# What a corpus may know of a speaker, and what stands for a speaker of whom it is unknown.
FACTS = ("gender", "age", "accent")
UNKNOWN = "unknown"
OTHERS = "others"
LONGEST_SECONDS = 60.0
MANY_COLLAPSED = 0.1  # of the utterances: from here on it is reported


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """Utterances of a store that can be scored, and how many of the asked-for cannot."""

    rows: NDArray[np.int64]
    references: tuple[str, ...]
    ids: tuple[str, ...]
    without_text: int
    too_long: int


@dataclass(frozen=True, slots=True)
class SpeakerGroup:
    """The speakers who share a fact, such as female speakers."""

    name: str
    speakers: int
    words: Tally
    interval: Interval | None

    def as_json(self) -> dict[str, Any]:
        return {"speakers": self.speakers, "wer": self.words.rate, "wer_interval": self.interval, **_counts(self.words)}


@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    """The errors of one recogniser on one choice of utterances. `groups` maps a fact to those who share each value.

    `facts` has for each speaker what is known of them, by group. `speech` is a digest of what was said, by which
    another evaluation of the same is known, `normalisation` the rules by which texts were spelled. `collapsed` counts
    utterances in which the attention collapsed; None where nothing was searched with attention.
    """

    store: str
    splits: tuple[str, ...]
    utterances: int
    audio_seconds: float
    without_text: int
    too_long: int
    words: Tally
    characters: Tally
    interval: Interval | None
    speakers: tuple[str, ...]
    facts: tuple[Mapping[str, str], ...]
    speech: str
    speaker_counts_S4: Counts
    spread: SpeakerSpread
    groups: Mapping[str, tuple[SpeakerGroup, ...]]
    normalisation: Mapping[str, int | str]
    collapsed: int | None = None

    @property
    def wer(self) -> float:
        assert self.words.rate is not None, "an evaluation has at least one reference word"
        return self.words.rate

    @property
    def cer(self) -> float:
        assert self.characters.rate is not None, "an evaluation has at least one reference word"
        return self.characters.rate

    def as_json(self) -> dict[str, Any]:
        """Everything, for machines. Rates are shares (0.05 is five per cent); intervals hold 95 % of the draws."""
        speaker_rates = [None if np.isnan(rate) else float(rate) for rate in compute_rates(self.speaker_counts_S4)]
        lengths = self.speaker_counts_S4[:, 0].tolist()
        return {
            "store": self.store,
            "splits": list(self.splits),
            "utterances": self.utterances,
            "speakers": len(self.speakers),
            "audio_seconds": self.audio_seconds,
            "left_out": {"without_text": self.without_text, "too_long": self.too_long},
            "speech": self.speech,
            "normalisation": dict(self.normalisation),
            "wer": self.wer,
            "wer_interval": self.interval,
            **_counts(self.words),
            "cer": self.cer,
            "character_errors": asdict(self.characters),
            "spread": self.spread.as_json(),
            "groups": {fact: {group.name: group.as_json() for group in groups} for fact, groups in self.groups.items()},
            "per_speaker": [
                {"speaker": name, "wer": rate, "words": length, **({"groups": dict(known)} if known else {})}
                for name, rate, length, known in zip(self.speakers, speaker_rates, lengths, self.facts, strict=True)
            ],
            **({} if self.collapsed is None else {"collapsed": self.collapsed}),
        }


def format_collapsed(collapsed: int, utterances: int) -> str:
    return f"the attention collapsed in {collapsed:,} of {utterances:,} utterances"


def evaluate_recogniser(
    recogniser: Recogniser,
    store: Store,
    *,
    split: str | None = None,
    device: torch.device | str = "cpu",
    decode: Decoder | SearchOptions | None = None,
    longest_seconds: float = LONGEST_SECONDS,
    batch_seconds: float | None = None,
    normaliser: str = "sottovoce",
    seed: int = 1,
    on_progress: Progress | None = None,
) -> Evaluation:
    """Recognise `split` of `store` (all of it by default) and score it; `seed` decides the bootstrap's draws.

    `normaliser` has the rules by which texts are compared: `sottovoce`, `whisper-english` or `whisper-basic`.

    >>> evaluate(load_recogniser("runs/demo"), Store("stores/crowd"), split="test").wer      # doctest: +SKIP
    0.083
    """
    check_language(recogniser, store)
    rules = choose_normaliser(normaliser, language=store.language)
    chosen = select_utterances(store, split=split, longest_seconds=longest_seconds)
    collapses: list[int] = []
    hypotheses = recognise_utterances(
        recogniser,
        store,
        chosen.rows,
        device=device,
        decode=decode,
        batch_seconds=batch_seconds,
        on_progress=on_progress,
        on_collapse=collapses.append,
    )
    return score_hypotheses(store, chosen, hypotheses, normaliser=rules, seed=seed, collapses=collapses)


def check_language(recogniser: Recogniser, store: Store) -> None:
    """Refuse a store in another language than the model's (en-GB is en); a model without texts has no language."""
    if recogniser.family.training.needs_text and _primary(recogniser.language) != _primary(store.language):
        raise InputError(
            f"the model writes language={recogniser.language}, but store {store.path} is in language={store.language}"
        )


def select_utterances(store: Store, *, split: str | None = None, longest_seconds: float = LONGEST_SECONDS) -> Selection:
    """The utterances of `split` (of all splits by default) that have a text and are at most `longest_seconds` long."""
    users = find_split(store, split)
    first, last = int(store.user_utterances[users.start]), int(store.user_utterances[users.stop])
    seconds = np.diff(store.audio_offsets[first : last + 1]) / SAMPLE_RATE
    rows, references, ids = [], [], []
    without_text = 0
    for row in (first + np.flatnonzero(seconds <= longest_seconds)).tolist():
        utterance = store.utterance(row)
        if utterance.text is None:
            without_text += 1
            continue
        rows.append(row)
        references.append(utterance.text)
        ids.append(utterance.id)
    too_long = int((seconds > longest_seconds).sum())
    if not any(reference.split() for reference in references):
        where = f"{store.path}" + (f":{split}" if split else "")
        raise InputError(
            f"nothing to score in {where}: of {last - first} utterances {without_text} have no text and "
            f"{too_long} are longer than {longest_seconds:g} s"
        )
    return Selection(np.array(rows, dtype=np.int64), tuple(references), tuple(ids), without_text, too_long)


def score_hypotheses(
    store: Store,
    chosen: Selection,
    hypotheses: Sequence[str],
    *,
    normaliser: Normaliser = OURS,
    seed: int = 1,
    smallest_group: int = 1,
    collapses: Sequence[int] = (),
) -> Evaluation:
    """Count the errors of `hypotheses`, one for each utterance of `chosen`, and put them together by speaker.

    Groups of fewer than `smallest_group` people are put together as `OTHERS`. `collapses` are what
    `recognise_utterances` has counted, if anything.
    """
    references = [normaliser.spell(text) for text in _references(store, chosen, normaliser)]
    hypotheses = [normaliser.spell(text) for text in hypotheses]
    words_U4 = count_word_errors(references, hypotheses)
    if not words_U4[:, 0].any():
        raise InputError(
            f"nothing to score: normaliser={normaliser.name} leaves no word of {len(references)} references"
        )
    names, metadata, owners = find_speakers(store, chosen.rows)
    facts = unite_spellings(
        [{fact: _shared(fact, known[fact]) for fact in FACTS if known.get(fact)} for known in metadata]
    )
    counts_S4 = sum_by_owner(words_U4, owners, owner_count=len(names))
    lengths_U = store.audio_offsets[chosen.rows + 1] - store.audio_offsets[chosen.rows]
    return Evaluation(
        store=store.name,
        splits=tuple(dict.fromkeys(store.user(row).split for row in np.unique(_users(store, chosen.rows)).tolist())),
        utterances=len(chosen.rows),
        audio_seconds=int(lengths_U.sum()) / SAMPLE_RATE,
        without_text=chosen.without_text,
        too_long=chosen.too_long,
        words=sum_counts(words_U4),
        characters=sum_counts(count_character_errors(references, hypotheses)),
        interval=bootstrap_interval(counts_S4, generator=stream(seed, "evaluation", "bootstrap")),
        speakers=names,
        facts=facts,
        speech=_digest(chosen.ids, chosen.references, lengths_U.tolist()),
        speaker_counts_S4=counts_S4,
        spread=measure_spread(counts_S4),
        groups={
            fact: tuple(_score_group(counts_S4[who], fact=fact, value=value, seed=seed) for value, who in found.items())
            for fact, found in group_speakers(facts, smallest=smallest_group).items()
        },
        normalisation=normaliser.as_json() | ({} if normaliser.reads_originals else {"name": store.spelling}),
        collapsed=sum(collapses) if collapses else None,
    )


def _references(store: Store, chosen: Selection, normaliser: Normaliser) -> Sequence[str]:
    if not normaliser.reads_originals:
        return chosen.references
    return [store.utterance(row).raw_text or "" for row in chosen.rows.tolist()]


def find_split(store: Store, split: str | None) -> range:
    """The users of `split`, of all splits if it is None; refuses one that is not there."""
    if split is None:
        return range(store.user_count)
    if split not in store.splits:
        raise InputError(f"split={split!r} is not in {store.path}: expected one of {', '.join(store.splits)}")
    return store.splits[split]


def _users(store: Store, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """The user row of each utterance."""
    return np.searchsorted(store.user_utterances, rows, side="right").astype(np.int64) - 1


def find_speakers(
    store: Store, rows: NDArray[np.int64]
) -> tuple[tuple[str, ...], list[Mapping[str, str]], NDArray[np.int64]]:
    """The people behind `rows`: their names, what is known of them, and the owner of each utterance.

    A person in two splits is one person, and so is one whom the corpus lists as several users (`speaker`).
    """
    users, user_of_row = np.unique(_users(store, rows), return_inverse=True)
    index: dict[str, int] = {}
    facts: list[Mapping[str, str]] = []
    owner_of_user = np.empty(len(users), dtype=np.int64)
    for i, row in enumerate(users.tolist()):
        user = store.user(row)
        name = user.metadata.get("speaker", user.name)
        if name not in index:
            index[name] = len(index)
            facts.append(user.metadata)
        owner_of_user[i] = index[name]
    return tuple(index), facts, owner_of_user[user_of_row]


def group_speakers(facts: Sequence[Mapping[str, str]], *, smallest: int = 1) -> dict[str, dict[str, NDArray[np.bool_]]]:
    """For each fact that is known of anybody, who shares each value: in alphabetical order, the unknown last.

    Groups of fewer than `smallest` people are put together as `OTHERS`.

    >>> {value: who.tolist() for value, who in group_speakers([{}, {"age": "old"}])["age"].items()}
    {'old': [False, True], 'unknown': [True, False]}
    """
    found = {}
    for fact in FACTS:
        values_S = np.array(pool_small_groups([known.get(fact, UNKNOWN) for known in facts], smallest=smallest))
        values = sorted({*values_S.tolist()}, key=lambda value: (value == UNKNOWN, value))
        if {*values} - {OTHERS, UNKNOWN}:
            found[fact] = {value: values_S == value for value in values}
    return found


def _shared(fact: str, value: str) -> str:
    """The name of the group; ages in years are put together by decade, as Common Voice does itself."""
    if fact == "age" and value.isdecimal():
        return f"{int(value) // 10 * 10}–{int(value) // 10 * 10 + 9}"
    return value


def unite_spellings(facts: Sequence[Mapping[str, str]]) -> tuple[dict[str, str], ...]:
    """The same, with values that differ in case or spaces alone written alike: as most people's are.

    >>> unite_spellings([{"accent": "german"}, {"accent": "German"}, {"accent": "German "}, {"accent": "US"}])
    ({'accent': 'German'}, {'accent': 'German'}, {'accent': 'German'}, {'accent': 'US'})
    """
    spellings: dict[tuple[str, str], Counter[str]] = {}
    for known in facts:
        for fact, value in known.items():
            spellings.setdefault((fact, _folded(value)), Counter())[" ".join(value.split())] += 1
    usual = {key: min(found, key=lambda value: (-found[value], value)) for key, found in spellings.items()}
    return tuple({fact: usual[fact, _folded(value)] for fact, value in known.items()} for known in facts)


def _folded(value: str) -> str:
    return " ".join(value.split()).casefold()


def pool_small_groups(values: Sequence[str], *, smallest: int) -> list[str]:
    """Everybody's value, where at least `smallest` people share it, else `OTHERS`, who are as many themselves.

    >>> pool_small_groups(["en", "en", "en", "fr", "de", "de"], smallest=2)
    ['en', 'en', 'en', 'others', 'others', 'others']
    """
    rest: set[str] = set()
    people = 0
    for value, count in sorted(Counter(values).items(), key=lambda item: (item[1], item[0])):
        # One small group alone could be had from the sum of all by taking the others away: the next one joins it.
        if count < smallest or 0 < people < smallest:
            rest.add(value)
            people += count
    return [OTHERS if value in rest else value for value in values]


def _score_group(members_S4: Counts, *, fact: str, value: str, seed: int) -> SpeakerGroup:
    interval = bootstrap_interval(members_S4, generator=stream(seed, "evaluation", "bootstrap", fact, value))
    return SpeakerGroup(value, len(members_S4), sum_counts(members_S4), interval)


def _counts(words: Tally) -> dict[str, int]:
    counts = asdict(words)
    return {"words": counts.pop("length"), **counts}


def _digest(*said: Sequence[str] | Sequence[int]) -> str:
    return hashlib.blake2b(json.dumps(said).encode(), digest_size=16).hexdigest()


def _primary(language: str) -> str:
    return language.lower().replace("_", "-").split("-")[0]
