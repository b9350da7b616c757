"""By whose rules a store's texts are spelled: our own, or those of a paper's released code.

sottovoce     `normalise_text`; an utterance with what its language cannot write (digits) is left out
pelikan2025   `spell_as_released`; what no token writes is left out of the text, and the utterance is kept
gao2022       `spell_as_gao`; hyphens part words, digits stay
"""

import re
from enum import StrEnum

from sottovoce.base.errors import InputError

SHORTEST_GAO = 3  # characters; texts with fewer are left out by that code
# What the released code of Gao et al. keeps of a text. It has these rules for the four languages alone.
_GAO_LANGUAGES = ("en", "fr", "it", "rw")
_NOT_GAO = re.compile(r"[^'A-Za-z0-9À-ÖØ-öø-ÿЀ-ӿ]+")


class Spelling(StrEnum):
    OURS = "sottovoce"
    PELIKAN = "pelikan2025"
    GAO = "gao2022"


def spell_as_gao(text: str, language: str) -> str:
    """`text` as the released code of Gao et al. (2022) spells it, but in lower case.

    It keeps Latin and Cyrillic letters up to U+00FF and U+04FF, digits and the straight apostrophe. All else parts
    words, so also the hyphen, the typographic apostrophe and œ. It writes capitals; where all texts are in one case,
    the same errors are counted in either.

    >>> spell_as_gao("Peut-être l'été 1984…", "fr")
    "peut être l'été 1984"
    >>> spell_as_gao("Un cœur d’or", "fr")
    'un c ur d or'
    """
    if language.lower().replace("_", "-").split("-")[0] not in _GAO_LANGUAGES:
        raise InputError(f"spelling=gao2022 with language={language}: expected one of {', '.join(_GAO_LANGUAGES)}")
    # Capitals first: theirs write ß as SS.
    return " ".join(_NOT_GAO.sub(" ", text).upper().lower().split())
