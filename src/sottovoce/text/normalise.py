"""Transcripts as the recogniser spells them: lower case, no punctuation but apostrophe and hyphen.

A listed language (`languages.yaml`) has an alphabet: Latin letters from outside it are folded into it
(café → cafe in English, unchanged in French), as Appendix F of Pelikan et al. does with unidecode. What cannot
be folded (digits, symbols, other scripts) is *kept*, so that `foreign_characters` can tell and the caller can
leave the utterance out; dropping it would leave speech without its text.
"""

import re
import unicodedata
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import yaml
from unidecode import unidecode

from sottovoce.base.errors import InputError

# Written beside every error rate. Whatever changes what `normalise` gives back raises the version: rates of texts that
# were spelled by other rules cannot be compared.
NAME, VERSION = "sottovoce", 1

# Joiners that shape letters in Persian and Indic scripts; elsewhere they are invisible noise.
_ZERO_WIDTH_JOINERS = "\u200c\u200d"
_CODE = re.compile(r"[a-z]{2,3}(-[a-z0-9]+)*")
_RUNS = re.compile(r"-{2,}|'{2,}")


def normalise(text: str, language: str) -> str:
    """`text` in the spelling of `language`; normalising twice changes nothing.

    >>> normalise("Naïve? It’s a co‐op — “really”!", "en")
    "naive it's a co-op really"
    >>> normalise("L’Été, peut-être…", "fr")
    "l'été peut-être"
    """
    table = _rules(language)
    lowered = unicodedata.normalize("NFC", text.lower())
    spelled = unicodedata.normalize("NFC", lowered.translate(table))
    # "--" is a dash in disguise, "''" a quotation mark.
    words = (word.strip("-" + _ZERO_WIDTH_JOINERS) for word in _RUNS.sub(" ", spelled).split())
    return " ".join(word for word in words if word.strip("-'" + _ZERO_WIDTH_JOINERS))


def foreign_characters(normalised: str, language: str) -> set[str]:
    """Characters of an already normalised text that `language` cannot spell: digits, symbols, other scripts.

    >>> sorted(foreign_characters(normalise("Route 66 & back", "en"), "en"))
    ['&', '6']
    """
    rules = _rules(language)
    return {character for character in set(normalised) if not rules.spells(character)}


def alphabet(language: str) -> str | None:
    """Every character a normalised text may hold: letters, space, apostrophe, hyphen. None: any letter of Unicode.

    >>> len(alphabet("en"))
    29
    """
    letters = _letters(language)
    return None if letters is None else letters + " '-"


def spoken_signs() -> frozenset[str]:
    """What Unicode calls punctuation, though a reader says it."""
    return _data().spoken


class _Rules(dict[int, str]):
    """A table for `str.translate` that works each character out when it is first met."""

    def __init__(self, letters: str | None) -> None:
        self.letters = None if letters is None else frozenset(letters)

    def spells(self, character: str) -> bool:
        if character in " '-":
            return True
        if self.letters is not None:
            return character in self.letters
        return unicodedata.category(character)[0] in "LM" or character in _ZERO_WIDTH_JOINERS

    def __missing__(self, codepoint: int) -> str:
        self[codepoint] = spelling = self._spell(chr(codepoint))
        return spelling

    def _spell(self, character: str) -> str:
        data = _data()
        if character in data.apostrophes:
            return "'"
        if character in data.hyphens:
            return "-"
        if self.spells(character) or character in data.spoken:
            return character
        category = unicodedata.category(character)
        if category == "Cf":  # soft hyphens, byte order marks, directions: nobody hears them
            return ""
        if category[0] in "PZ" or character.isspace():
            return " "
        return self._fold(character) if self.letters is not None else character

    def _fold(self, character: str) -> str:
        """The same letter inside the alphabet, else the character itself."""
        assert self.letters is not None
        if unicodedata.category(character)[0] == "M":
            return ""  # an accent that no composed letter carries: its letter stays
        # unidecode would romanise every script; a Cyrillic or Chinese sentence is not English, so Latin only.
        folded = unidecode(character).lower() if "LATIN" in unicodedata.name(character, "") else ""
        return folded if folded and self.letters.issuperset(folded) else character


@dataclass(frozen=True)
class _Data:
    apostrophes: frozenset[str]
    hyphens: frozenset[str]
    spoken: frozenset[str]
    letters: dict[str, str]


@cache
def _data() -> _Data:
    source = resources.files("sottovoce.text").joinpath("languages.yaml").read_text(encoding="utf-8")
    raw: dict[str, Any] = yaml.safe_load(source)
    signs = {name: frozenset(raw[name]) for name in ("apostrophes", "hyphens", "spoken")}
    return _Data(**signs, letters=raw["letters"])


@cache
def _rules(language: str) -> _Rules:
    return _Rules(_letters(language))


def _letters(language: str) -> str | None:
    code = language.lower().replace("_", "-")
    if not _CODE.fullmatch(code):
        raise InputError(f"language={language!r} is not a language code; expected something like 'en', 'fr' or 'zh-CN'")
    letters = _data().letters
    return letters.get(code, letters.get(code.split("-")[0]))  # en-GB spells as en does
