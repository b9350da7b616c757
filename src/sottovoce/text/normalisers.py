"""The rules by which texts are spelled before their errors are counted: our own, or those that Whisper is measured by.

Whisper's two (Radford et al. 2022, Appendix C) come from the package `whisper-normalizer`, OpenAI's code by itself.
They are given references as the corpus wrote them: what they do with brackets, numbers and titles stands in these.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import version

from sottovoce.base.errors import InputError
from sottovoce.text import normalise

PACKAGE = "whisper-normalizer"


class NormaliserName(StrEnum):
    OURS = normalise.NAME
    WHISPER_ENGLISH = "whisper-english"
    WHISPER_BASIC = "whisper-basic"


@dataclass(frozen=True, slots=True)
class Normaliser:
    """`spell` gives a text back as it is compared; `version` is that of the rules or, of Whisper's, of the package."""

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
OURS = Normaliser(NormaliserName.OURS, normalise.VERSION, str)


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
