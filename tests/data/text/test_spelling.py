"""Spelling as the released code of Gao et al. does."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sottovoce.base.errors import InputError
from sottovoce.data.text.spelling import spell_as_gao


# Worked out by hand from what the released `common_voice_prepare.py` does with each character.
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Peut-être…", "peut être"),
        ("En 1984, l'été", "en 1984 l'été"),
        ("L’œuvre d’art", "l uvre d art"),  # neither ’ nor œ is kept
        ("“Où est-ce ?”", "où est ce"),
        ("e\u0301te\u0301", "e te"),  # accents that are characters of their own
        ("3 × 4 = 12", "3 4 12"),
        ("Straße", "strasse"),  # what capitals make of it
        ("Ленин", "ленин"),
        ("a_b\tc", "a b c"),
        ("!?", ""),
    ],
)
def test_spells_as_the_released_code_does(text: str, expected: str) -> None:
    assert spell_as_gao(text, "fr") == expected


@given(st.text())
def test_what_is_kept_is_kept_once_and_for_all(text: str) -> None:
    spelled = spell_as_gao(text, "it")
    assert re.fullmatch(r"([^\W_]|['. ])*", spelled)
    assert spelled == spelled.lower() == spelled.strip()
    assert spell_as_gao(spelled, "it") == spelled


def test_a_language_that_the_code_has_no_rules_for_is_refused() -> None:
    with pytest.raises(InputError, match="spelling=gao2022 with language=de: expected one of en, fr, it, rw"):
        spell_as_gao("ja", "de")
