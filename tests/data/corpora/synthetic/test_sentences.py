import re

import numpy as np
import pytest

from sottovoce.base.errors import InputError
from sottovoce.data.corpora.synthetic.sentences import LANGUAGES, draw_digits, draw_sentence, load_grammar
from sottovoce.data.corpora.synthetic.speakers import PRESETS
from sottovoce.data.text.normalisation import foreign_characters, normalise_text

SLOT = re.compile(r"\{[^}]*\}")


def draw(language: str, count: int, *, topics: tuple[str, ...], seed: int) -> list[str]:
    rng = np.random.default_rng(seed)
    rules = load_grammar(language)
    return [draw_sentence(rules, topic=topics[int(rng.integers(len(topics)))], rng=rng) for _ in range(count)]


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_phrase_fills_and_is_spelled_in_the_alphabet(language: str) -> None:
    rules = load_grammar(language)
    phrases = [phrase for group in (*rules.topics.values(), *rules.words.values()) for phrase in group]
    slots = {slot.strip("{}") for phrase in phrases for slot in SLOT.findall(phrase)}
    known = set(rules.words) | {"coined"}
    assert all(slot in known or re.fullmatch(r"(number|digits):\d+-\d+", slot) for slot in slots)
    assert set(rules.words) <= slots, "a word list that no sentence uses"
    assert all(isinstance(part, str) for parts in rules.syllables.values() for part in parts), (
        "YAML read a word as a bool"
    )
    texts = [normalise_text(text, language) for text in draw(language, 3000, topics=tuple(rules.topics), seed=0)]
    assert not foreign_characters(" ".join(texts), language)
    assert not any(character in text for text in texts for character in "{}:")


@pytest.mark.parametrize("language", LANGUAGES)
def test_all_languages_have_the_topics_of_the_tasks(language: str) -> None:
    assert {topic for preset in PRESETS.values() for topic in preset.topics} == set(load_grammar(language).topics)


@pytest.mark.parametrize(("language", "vocabulary"), [("en", 1500), ("fr", 700), ("de", 700), ("it", 700)])
def test_vocabulary_is_open_and_sentences_are_not_memorised(language: str, vocabulary: int) -> None:
    rules = load_grammar(language)
    phrases = [phrase for group in (*rules.topics.values(), *rules.words.values()) for phrase in group]
    words = {word for phrase in phrases for word in normalise_text(SLOT.sub(" ", phrase), language).split()}
    assert len(words) >= vocabulary
    topics = PRESETS["crowd"].topics
    # A 6-hour crowd's worth of training sentences; other seeds stand for other speakers.
    train = set(draw(language, 6000, topics=topics, seed=1))
    test = draw(language, 2000, topics=topics, seed=2)
    assert np.mean([text in train for text in test]) < 0.02


@pytest.mark.parametrize(
    ("language", "wrong"),
    [
        ("en", r"\ba (orange|hour|honest|uncle)\b|\ban (uniform|useful)\b"),
        ("fr", r"\b(de|à) les? |\bde [aeiou](?!nze)|\bque [aei]"),
        ("it", r"\b(a|di|da|su) (il|lo|la|gli|i|le) "),
    ],
)
def test_words_contract_as_in_writing(language: str, wrong: str) -> None:
    texts = draw(language, 5000, topics=tuple(load_grammar(language).topics), seed=3)
    assert [text for text in texts if re.search(wrong, text)] == []


def test_digit_strings_are_spelled() -> None:
    digits = draw_digits("de", count=500, rng=np.random.default_rng(0)).split()
    assert len(digits) == 500
    assert set(digits) == {"null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun"}


def test_unknown_language() -> None:
    with pytest.raises(InputError, match=r"language='xx': the synthetic crowd speaks en, fr, de, it"):
        load_grammar("xx")
