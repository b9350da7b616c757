"""Whisper's rules beside our own: what each makes of a text, and what is said where they cannot be had."""

import sys

import pytest

from sottovoce.base.errors import InputError
from sottovoce.data.text.normalisation import PACKAGE, VERSION, choose_normaliser


def test_our_own_rules_leave_texts_as_stores_and_models_spell_them() -> None:
    ours = choose_normaliser("sottovoce", language="fr")
    assert ours.spell("l'été") == "l'été"
    assert not ours.reads_originals
    assert ours.as_json() == {"name": "sottovoce", "version": VERSION}


@pytest.mark.parametrize(
    ("name", "text", "spelled"),
    [
        # Rules of Appendix C of Radford et al. (2022): titles, contractions, numbers, British spellings, hesitation.
        (
            "whisper-english",
            "Mr. Park visited Assoc. Prof. Kim Jr.",
            "mister park visited associate professor kim junior",
        ),
        ("whisper-english", "Uh, we'll pay twenty-five dollars [laughs]", "we will pay $25"),
        ("whisper-english", "one two three", "123"),
        ("whisper-english", "My favourite colour", "my favorite color"),
        ("whisper-basic", "L’Été, <rires> peut-être…", "l été peut être"),
    ],
)
def test_whispers_rules(name: str, text: str, spelled: str) -> None:
    pytest.importorskip("whisper_normalizer", reason=f"Whisper's rules come from {PACKAGE} (extra `whisper`)")
    rules = choose_normaliser(name, language="en-GB")
    assert rules.spell(text).split() == spelled.split()
    assert rules.reads_originals
    assert rules.as_json()["name"] == name


def test_mistakes_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        InputError, match=r"normaliser=wisper: expected one of sottovoce, whisper-english, whisper-basic"
    ):
        choose_normaliser("wisper", language="en")
    with pytest.raises(InputError, match=r"whisper-english spells English, and the texts are in language=fr"):
        choose_normaliser("whisper-english", language="fr")
    for part in ("basic", "english"):
        monkeypatch.setitem(sys.modules, f"whisper_normalizer.{part}", None)
    with pytest.raises(InputError, match=r"needs whisper-normalizer: pip install 'sottovoce\[whisper\]'"):
        choose_normaliser("whisper-basic", language="fr")
