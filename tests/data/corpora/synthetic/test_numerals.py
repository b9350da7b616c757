import pytest

from sottovoce.data.corpora.synthetic.sentences import LANGUAGES, LARGEST, spell_number
from sottovoce.data.text.normalisation import foreign_characters, normalise_text


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_number_has_its_own_words(language: str) -> None:
    spelled = [spell_number(number, language) for number in range(LARGEST + 1)]
    assert len(set(spelled)) == LARGEST + 1
    assert not foreign_characters(" ".join(spelled), language)
    assert all(normalise_text(words, language) == words for words in spelled)


@pytest.mark.parametrize(
    ("language", "number", "words"),
    [
        ("en", 0, "zero"),
        ("en", 13, "thirteen"),
        ("en", 40, "forty"),
        ("en", 101, "one hundred and one"),
        ("en", 1999, "one thousand nine hundred and ninety nine"),
        ("en", 2005, "two thousand and five"),
        # The irregular corners of each language, from its grammar books.
        ("fr", 21, "vingt-et-un"),
        ("fr", 71, "soixante-et-onze"),
        ("fr", 77, "soixante-dix-sept"),
        ("fr", 80, "quatre-vingts"),
        ("fr", 81, "quatre-vingt-un"),
        ("fr", 91, "quatre-vingt-onze"),
        ("fr", 200, "deux cents"),
        ("fr", 1203, "mille deux cent trois"),
        ("de", 1, "eins"),
        ("de", 31, "einunddreißig"),
        ("de", 101, "einhunderteins"),
        ("de", 2416, "zweitausendvierhundertsechzehn"),
        ("it", 21, "ventuno"),
        ("it", 38, "trentotto"),
        ("it", 43, "quarantatré"),
        ("it", 100, "cento"),
        ("it", 1988, "millenovecentottantotto"),
        ("it", 3000, "tremila"),
    ],
)
def test_known_numbers(language: str, number: int, words: str) -> None:
    assert spell_number(number, language) == words
