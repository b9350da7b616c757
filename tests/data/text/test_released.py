"""Spelling as the released code of the flagship paper does."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sottovoce.base.errors import InputError
from sottovoce.data.text.normalisation import alphabet, spell_as_released


# Worked out by hand from what the released preprocessing does with each character.
@pytest.mark.parametrize(
    ("language", "text", "expected", "unwritten"),
    [
        ("en", "Hello, World!", "hello world", ""),
        ("en", "well...known", "wellknown", ""),  # punctuation is deleted and leaves no space
        ("en", "A & B: 100 %", "a b", "&10%"),
        ("en", "“Don’t,” she said.", "don't she said", ""),
        ("en", "the cats’.", "the cats", ""),  # an apostrophe beside punctuation is a quotation mark
        ("en", "'tis a co-op - really", "'tis a co-op really", ""),
        ("en", "a- -b", "a b", ""),
        ("en", "Москва", "moskva", ""),  # romanised, where we would leave the utterance out
        ("en", "Straße in Genève", "strasse in geneve", ""),
        ("de", "Straße in Genève", "straße in geneve", ""),
        ("fr", "L’œuvre d’été à Köln", "l'œuvre d'été à koln", ""),
        ("en", "1984", "", "1984"),
        ("en", "  two  spaces ", "two spaces", ""),
    ],
)
def test_spells_as_the_released_code_does(language: str, text: str, expected: str, unwritten: str) -> None:
    assert spell_as_released(text, language) == (expected, set(unwritten))


@given(st.text(), st.sampled_from(["en", "fr", "de"]))
def test_whatever_comes_can_be_written(text: str, language: str) -> None:
    spelled, _ = spell_as_released(text, language)
    known = alphabet(language)
    assert known is not None
    assert set(spelled) <= set(known)
    assert spell_as_released(spelled, language)[1] == set()


def test_a_language_without_an_alphabet_is_refused() -> None:
    with pytest.raises(InputError, match="language='zh'"):
        spell_as_released("你好", "zh")
