"""What the crowd says: sentences from a grammar of our own, a topic at a time.

A language's `phrases/*.yaml` holds sentences with {slots} and the words that fill them. Numbers are spelled out
and surnames coined from syllables, so the vocabulary is open and a sentence hardly ever comes twice.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

import numpy as np
import yaml

from sottovoce.base.errors import InputError

LANGUAGES = ("en", "fr", "de", "it")
_SLOT = re.compile(r"\{(\w+)(?::(\d+)-(\d+))?\}")


@dataclass(frozen=True)
class Grammar:
    """One language's sentences by topic, and what may stand in each slot."""

    language: str
    topics: Mapping[str, Sequence[str]]
    words: Mapping[str, Sequence[str]]
    syllables: Mapping[str, Sequence[str]]
    repairs: Mapping[str, str]  # contractions, and "an" before a vowel


@cache
def load_grammar(language: str) -> Grammar:
    if language not in LANGUAGES:
        raise InputError(f"language={language!r}: the synthetic crowd speaks {', '.join(LANGUAGES)}")
    text = (resources.files(__package__) / "phrases" / f"{language}.yaml").read_text(encoding="utf-8")
    content = yaml.safe_load(text)
    words = {slot: tuple(part.strip() for part in phrases.split(",")) for slot, phrases in content["words"].items()}
    return Grammar(language, content["topics"], words, content["syllables"], content["repairs"])


def draw_sentence(rules: Grammar, *, topic: str, rng: np.random.Generator) -> str:
    """A sentence on `topic`, as one would write it: a capital first, a full stop or question mark last."""
    text = _fill(_choose(rules.topics[topic], rng), rules, rng)
    for pattern, replacement in rules.repairs.items():
        text = re.sub(pattern, replacement, text)
    return text[0].upper() + text[1:] + ("" if text.endswith("?") else ".")


def draw_digits(language: str, *, count: int, rng: np.random.Generator) -> str:
    """`count` digits, one after another, in words."""
    return " ".join(spell_number(int(digit), language) for digit in rng.integers(10, size=count))


def _fill(phrase: str, rules: Grammar, rng: np.random.Generator) -> str:
    def fill_slot(match: re.Match[str]) -> str:
        slot, low, high = match.groups()
        if low is None:
            return _coin(rules, rng) if slot == "coined" else _fill(_choose(rules.words[slot], rng), rules, rng)
        number = int(rng.integers(int(low), int(high) + 1))
        if slot == "digits":
            return draw_digits(rules.language, count=number, rng=rng)
        assert slot == "number", f"unknown slot {match[0]}"
        return spell_number(number, rules.language)

    return _SLOT.sub(fill_slot, phrase)


def _coin(rules: Grammar, rng: np.random.Generator) -> str:
    """A name nobody has heard: one or two syllables and an ending."""
    open_syllables = ("onset", "nucleus") * int(rng.integers(1, 3))
    return "".join(_choose(rules.syllables[part], rng) for part in (*open_syllables, "coda", "ending"))


def _choose(options: Sequence[str], rng: np.random.Generator) -> str:
    return options[int(rng.random() * len(options))]


LARGEST = 9_999


def spell_number(number: int, language: str) -> str:
    """`number` in words.

    >>> spell_number(342, "en"), spell_number(92, "fr"), spell_number(21, "de"), spell_number(28, "it")
    ('three hundred and forty two', 'quatre-vingt-douze', 'einundzwanzig', 'ventotto')
    """
    assert 0 <= number <= LARGEST, number
    return _SPELLERS[language](number)


def _english(number: int) -> str:
    if number < 20:
        return _SMALL["en"][number]
    if number < 100:
        return _tens("en", number) + (f" {_english(number % 10)}" if number % 10 else "")
    if number < 1000:
        hundreds, rest = divmod(number, 100)
        return f"{_english(hundreds)} hundred" + (f" and {_english(rest)}" if rest else "")
    thousands, rest = divmod(number, 1000)
    joint = " and " if rest < 100 else " "
    return f"{_english(thousands)} thousand" + (joint + _english(rest) if rest else "")


def _french(number: int) -> str:
    if number < 20:
        return _SMALL["fr"][number]
    if number == 80:
        return "quatre-vingts"
    if number < 100:
        tens, ones = divmod(number, 10)
        if tens in (7, 9):  # soixante-dix, quatre-vingt-dix
            ones += 10
        joint = "-et-" if ones in (1, 11) and tens < 8 else "-"
        return _tens("fr", number) + (joint + _french(ones) if ones else "")
    unit, word = (1000, "mille") if number >= 1000 else (100, "cent")
    count, rest = divmod(number, unit)
    plural = "s" if word == "cent" and count > 1 and not rest else ""
    return (f"{_french(count)} " if count > 1 else "") + word + plural + (f" {_french(rest)}" if rest else "")


def _german(number: int) -> str:
    if number < 20:
        return _SMALL["de"][number]
    if number < 100:
        ones = number % 10
        return (f"{_german_stem(ones)}und" if ones else "") + _tens("de", number)
    unit, word = (1000, "tausend") if number >= 1000 else (100, "hundert")
    count, rest = divmod(number, unit)
    return _german_stem(count) + word + (_german(rest) if rest else "")


def _german_stem(number: int) -> str:
    return "ein" if number == 1 else _german(number)


def _italian(number: int) -> str:
    if number < 20:
        return _SMALL["it"][number]
    if number < 100:
        stem, ones = _tens("it", number), number % 10
        if not ones:
            return stem
        # The vowel falls before another (ventuno, ventotto); a final "tre" is stressed (ventitré).
        return (stem[:-1] if ones in (1, 8) else stem) + ("tré" if ones == 3 else _italian(ones))
    if number < 1000:
        hundreds, rest = divmod(number, 100)
        tail = _italian(rest) if rest else ""
        return (_italian(hundreds) if hundreds > 1 else "") + ("cent" if tail.startswith("ott") else "cento") + tail
    thousands, rest = divmod(number, 1000)
    return (f"{_italian(thousands)}mila" if thousands > 1 else "mille") + (_italian(rest) if rest else "")


def _tens(language: str, number: int) -> str:
    return _TENS[language][number // 10 - 2]


_SPELLERS: dict[str, Callable[[int], str]] = {"en": _english, "fr": _french, "de": _german, "it": _italian}
_WORDS = yaml.safe_load((resources.files(__package__) / "numerals.yaml").read_text(encoding="utf-8"))
_SMALL: dict[str, list[str]] = {language: words["small"].split() for language, words in _WORDS.items()}
_TENS: dict[str, list[str]] = {language: words["tens"].split() for language, words in _WORDS.items()}
