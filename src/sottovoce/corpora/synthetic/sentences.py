"""What the crowd says: sentences from a grammar of our own, a topic at a time.

A language's `phrases/*.yaml` holds sentences with {slots} and the words that fill them. Numbers are spelled out
and surnames coined from syllables, so the vocabulary is open and a sentence hardly ever comes twice.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

import numpy as np
import yaml

from sottovoce.base.errors import InputError
from sottovoce.corpora.synthetic.numerals import spell

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
def grammar(language: str) -> Grammar:
    if language not in LANGUAGES:
        raise InputError(f"language={language!r}: the synthetic crowd speaks {', '.join(LANGUAGES)}")
    text = (resources.files(__package__) / "phrases" / f"{language}.yaml").read_text(encoding="utf-8")
    content = yaml.safe_load(text)
    words = {slot: tuple(part.strip() for part in phrases.split(",")) for slot, phrases in content["words"].items()}
    return Grammar(language, content["topics"], words, content["syllables"], content["repairs"])


def sentence(rules: Grammar, *, topic: str, rng: np.random.Generator) -> str:
    """A sentence on `topic`, as one would write it: a capital first, a full stop or question mark last."""
    text = _fill(_choose(rules.topics[topic], rng), rules, rng)
    for pattern, replacement in rules.repairs.items():
        text = re.sub(pattern, replacement, text)
    return text[0].upper() + text[1:] + ("" if text.endswith("?") else ".")


def digit_string(language: str, *, count: int, rng: np.random.Generator) -> str:
    """`count` digits, one after another, in words."""
    return " ".join(spell(int(digit), language) for digit in rng.integers(10, size=count))


def _fill(phrase: str, rules: Grammar, rng: np.random.Generator) -> str:
    def fill_slot(match: re.Match[str]) -> str:
        slot, low, high = match.groups()
        if low is None:
            return _coin(rules, rng) if slot == "coined" else _fill(_choose(rules.words[slot], rng), rules, rng)
        number = int(rng.integers(int(low), int(high) + 1))
        if slot == "digits":
            return digit_string(rules.language, count=number, rng=rng)
        assert slot == "number", f"unknown slot {match[0]}"
        return spell(number, rules.language)

    return _SLOT.sub(fill_slot, phrase)


def _coin(rules: Grammar, rng: np.random.Generator) -> str:
    """A name nobody has heard: one or two syllables and an ending."""
    open_syllables = ("onset", "nucleus") * int(rng.integers(1, 3))
    return "".join(_choose(rules.syllables[part], rng) for part in (*open_syllables, "coda", "ending"))


def _choose(options: Sequence[str], rng: np.random.Generator) -> str:
    return options[int(rng.random() * len(options))]
