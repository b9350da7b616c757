"""Transcripts as the released code of Pelikan et al. (2025) spells them: what no token writes is left out, letter by
letter, and the rest of the sentence kept.

Our own rule (`normalise`) leaves such an utterance out, because its speech says more than its text. The paper's numbers
of speakers and its WERs are of corpora with all of them in. Three things differ besides: punctuation is deleted where
we put a space ("well...known" is one word), letters of other scripts are romanised, and a typographic apostrophe beside
punctuation is a quotation mark. Spaces at the ends are taken off, which the released code does not.

It keeps the letters of English, French and German in all three languages, and romanises them again later on; which of
the two its French and German numbers had cannot be told. Here a language keeps its own letters, as Appendix F says.
"""

import unicodedata

from unidecode import unidecode

from sottovoce.base.errors import InputError
from sottovoce.text.normalise import alphabet, spoken_signs

PUNCTUATION = frozenset('!"#$%&()*+,./:;<=>?@[\\]^_`{|}~')
_APOSTROPHE = "\u2019"
_PLAIN = frozenset(" abcdefghijklmnopqrstuvwxyz")


def spell_as_released(text: str, language: str) -> tuple[str, set[str]]:
    """`text` in the letters of `language`, and what was left out of it although a reader would say it.

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
