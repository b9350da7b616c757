"""Transcripts as the recogniser spells them: lower case, no punctuation but apostrophe and hyphen.

A listed language (`languages.yaml`) has an alphabet: Latin letters from outside it are folded into it
(café → cafe in English, unchanged in French), as Appendix F of Pelikan et al. does with unidecode. What cannot
be folded (digits, symbols, other scripts) is *kept*, so that `foreign_characters` finds it and the caller can
leave the utterance out; dropping it would leave speech without its text.
"""

import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib import resources
from importlib.metadata import version
from typing import Any

import yaml
from unidecode import unidecode

from sottovoce.base.errors import InputError

# Written beside every error rate. Whatever changes what `normalise_text` returns raises the version: rates of texts
# that were spelled by other rules cannot be compared.
NAME, VERSION = "sottovoce", 1
PACKAGE = "whisper-normalizer"

# Joiners that shape letters in Persian and Indic scripts; elsewhere they are invisible noise.
_ZERO_WIDTH_JOINERS = "\u200c\u200d"
_CODE = re.compile(r"[a-z]{2,3}(-[a-z0-9]+)*")
_RUNS = re.compile(r"-{2,}|'{2,}")


def normalise_text(text: str, language: str) -> str:
    """`text` in the spelling of `language`; normalising twice changes nothing.

    >>> normalise_text("Naïve? It’s a co‐op — “really”!", "en")
    "naive it's a co-op really"
    >>> normalise_text("L’Été, peut-être…", "fr")
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

    >>> sorted(foreign_characters(normalise_text("Route 66 & back", "en"), "en"))
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
        if category == "Cf":  # soft hyphens, byte order marks, directions: never spoken
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
    source = resources.files("sottovoce.data.text").joinpath("languages.yaml").read_text(encoding="utf-8")
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


PUNCTUATION = frozenset('!"#$%&()*+,./:;<=>?@[\\]^_`{|}~')
_APOSTROPHE = "\u2019"
_PLAIN = frozenset(" abcdefghijklmnopqrstuvwxyz")


def spell_as_released(text: str, language: str) -> tuple[str, set[str]]:
    """`text` as the released code of Pelikan et al. (2025) spells it, and what was left out although a reader says it.

    It leaves out what no token writes, letter by letter, where `normalise_text` keeps it and the utterance is left out:
    the paper's numbers of speakers and its WERs are of corpora with all of them. Besides, it deletes punctuation where
    we put a space ("well...known" is one word), romanises letters of other scripts, and takes a typographic apostrophe
    beside punctuation for a quotation mark. Unlike it we strip spaces at the ends, and each language keeps its own
    letters (Appendix F); the released code keeps those of English, French and German, and romanises them later.

    >>> spelled, left_out = spell_as_released("Route 66 & back: “naïve”, isn’t it?", "en")
    >>> spelled, sorted(left_out)
    ("route back naive isn't it", ['&', '6'])
    >>> spell_as_released("L’Été à Köln…", "fr")[0]
    "l'été à koln"
    """
    known = alphabet(language)
    if known is None:
        raise InputError(f"language={language!r} has no alphabet here: it cannot be spelled as the released code does")
    lowered = text.lower()
    spelled: list[str] = []
    unwritten: set[str] = set()
    for place, character in enumerate(lowered):
        written = _written(character, known, beside=lowered[max(place - 1, 0) : place] + lowered[place + 1 : place + 2])
        spelled.append(written)
        if not written and _is_said(character):
            unwritten.add(character)
    without_dashes = "".join(spelled).replace("- ", " ").replace(" -", " ")
    return " ".join(without_dashes.split()), unwritten


def _written(character: str, known: str, *, beside: str) -> str:
    """What is written for one character; nothing for most signs. `beside` are its neighbours."""
    if character in PUNCTUATION:
        return ""
    if character in known:
        return character
    if character == _APOSTROPHE:
        return "" if any(unidecode(other) in PUNCTUATION | {"-"} for other in beside) else "'"
    romanised = unidecode(character).lower()
    return romanised if _PLAIN.issuperset(romanised) else ""


def _is_said(character: str) -> bool:
    """Whether leaving the character out takes something away from what was said."""
    return character in spoken_signs() or unicodedata.category(character)[0] in "LNS"


class NormaliserName(StrEnum):
    OURS = NAME
    WHISPER_ENGLISH = "whisper-english"
    WHISPER_BASIC = "whisper-basic"


@dataclass(frozen=True, slots=True)
class Normaliser:
    """Rules by which texts are spelled before their errors are counted: our own or Whisper's.

    Whisper's two (Radford et al. 2022, Appendix C) come from the package `whisper-normalizer` and read references as
    the corpus wrote them. `version` is that of our rules, or of that package.
    """

    name: NormaliserName
    version: int | str
    spell: Callable[[str], str]

    @property
    def reads_originals(self) -> bool:
        """Whether references are handed over as the corpus wrote them, or as the store spells them."""
        return self.name != NormaliserName.OURS

    def as_json(self) -> dict[str, int | str]:
        return {"name": str(self.name), "version": self.version}


# Stores and models spell by our own rules already.
OURS = Normaliser(NormaliserName.OURS, VERSION, str)


def choose_normaliser(name: str, *, language: str) -> Normaliser:
    """The rules called `name`, for texts in `language`.

    >>> choose_normaliser("sottovoce", language="fr").as_json()
    {'name': 'sottovoce', 'version': 1}
    """
    if name not in list(NormaliserName):
        raise InputError(f"normaliser={name}: expected one of {', '.join(NormaliserName)}")
    chosen = NormaliserName(name)
    if chosen == NormaliserName.OURS:
        return OURS
    if chosen == NormaliserName.WHISPER_ENGLISH and language.lower().replace("_", "-").split("-")[0] != "en":
        raise InputError(f"normaliser={chosen} spells English, and the texts are in language={language}: whisper-basic")
    try:
        from whisper_normalizer.basic import BasicTextNormalizer
        from whisper_normalizer.english import EnglishTextNormalizer
    except ImportError:
        raise InputError(f"normaliser={chosen} needs {PACKAGE}: pip install 'sottovoce[whisper]'") from None
    spell = EnglishTextNormalizer() if chosen == NormaliserName.WHISPER_ENGLISH else BasicTextNormalizer()
    return Normaliser(chosen, version(PACKAGE), spell)
