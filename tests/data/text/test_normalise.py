import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sottovoce.base.errors import InputError
from sottovoce.data.text.normalisation import NAME, VERSION, alphabet, foreign_characters, normalise_text

LANGUAGES = ("en", "fr", "de", "it", "es", "iba", "ja", "fa")
languages = st.sampled_from(LANGUAGES)
# Plain `st.text()` seldom meets what real transcripts are full of.
texts = st.text() | st.text(alphabet="aéßœŒñǅ İı'’‘`´-‐–—«»“”\"…,.?!&%12\u00ad\u200b\u200c\u0301\u0327\u0308北а ")


@pytest.mark.parametrize(
    ("language", "text", "expected"),
    [
        ("en", "“Don’t!” she said; the co-op’s naïve café.", "don't she said the co-op's naive cafe"),
        ("en", "He went — slowly – home...", "he went slowly home"),
        ("en", "wait--what, the non\u2011breaking soft\u00adware", "wait what the non-breaking software"),
        ("en", "STEEL'D SENSE", "steel'd sense"),  # as LibriSpeech writes
        ("en", "Ærø and Straße", "aero and strasse"),
        ("en", "- 'tis -", "'tis"),
        ("fr", "L’Été À Nîmes, où ça ? Peut-être.", "l'été à nîmes où ça peut-être"),
        ("fr", "C\u0327a e\u0301tait l'Œuvre", "ça était l'œuvre"),  # decomposed letters are composed
        ("fr", "le señor Müller", "le senor müller"),
        ("de", "Größe, ÄRGER und Fußball – im Café", "größe ärger und fußball im cafe"),
        ("it", "Perché l’università è così?", "perché l'università è così"),
        ("es", "¿Qué dice el señor, ¡ahora!?", "qué dice el señor ahora"),
        ("ja", "電柱に、電球が。", "電柱に 電球が"),
        ("en-GB", "Naïve", "naive"),
        ("en", "…?!", ""),
    ],
)
def test_spelling(language: str, text: str, expected: str) -> None:
    assert normalise_text(text, language) == expected
    assert foreign_characters(expected, language) == set()


def test_the_rules_have_a_name_and_a_version() -> None:
    """Error rates name them. Where an expectation of `test_spelling` changes, the version is another one."""
    assert (NAME, VERSION) == ("sottovoce", 1)


@pytest.mark.parametrize(
    ("language", "text", "foreign"),
    [
        ("en", "route 66", {"6"}),
        ("en", "rock & roll for 5%", {"&", "5", "%"}),  # read aloud, so not punctuation
        ("en", "€ and $", {"€", "$"}),
        ("en", "Москва", set("москва")),
        ("de", "das 北 Tor", {"北"}),
        ("ja", "電話 110", {"1", "0"}),
    ],
)
def test_what_cannot_be_spelled_is_kept_and_named(language: str, text: str, foreign: set[str]) -> None:
    assert foreign_characters(normalise_text(text, language), language) == foreign


@given(text=texts, language=languages)
def test_normalising_twice_changes_nothing(text: str, language: str) -> None:
    once = normalise_text(text, language)
    assert normalise_text(once, language) == once


@given(text=texts, language=languages)
def test_result_is_spelled_in_the_alphabet_or_reported(text: str, language: str) -> None:
    result = normalise_text(text, language)
    letters = alphabet(language)
    if letters is not None:
        assert set(result) - set(letters) == foreign_characters(result, language)
    assert result == " ".join(result.split())


@given(text=texts, language=languages)
def test_nothing_that_is_spoken_vanishes(text: str, language: str) -> None:
    apostrophes = "ʼʻ"  # letters to Unicode, signs to us
    spoken = [c for c in text if unicodedata.category(c)[0] in "LNS" and c not in apostrophes + "`´"]
    if spoken:
        assert normalise_text(text, language) != ""


def test_english_has_the_papers_29_characters() -> None:
    letters = alphabet("en")
    assert letters is not None
    # Pelikan et al., Appendix F: a–z, word boundary, apostrophe, hyphen.
    assert sorted(letters) == sorted("abcdefghijklmnopqrstuvwxyz '-")
    assert alphabet("ja") is None


@pytest.mark.parametrize("language", ["english", "", "e", "../en"])
def test_refuses_what_is_no_language_code(language: str) -> None:
    with pytest.raises(InputError, match="language="):
        normalise_text("hello", language)
