"""Token sets give back every text they can write, refuse the others by name, and survive a trip to disk."""

import json
import pickle
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sottovoce.base.errors import InputError
from sottovoce.data.text.tokens import (
    CharacterTokens,
    SentencePieceTokens,
    Tokens,
    load_tokens,
    save_tokens,
    train_sentence_pieces,
)

ENGLISH = "abcdefghijklmnopqrstuvwxyz '-"
TEXTS = [
    "the quick brown fox jumps over the lazy dog",
    "it's a well-known fact that the fox was quick",
    "pack my box with five dozen liquor jugs",
    "the five boxing wizards jump quickly",
] * 5
PIECES = train_sentence_pieces(TEXTS, size=48)
texts = st.text(alphabet=ENGLISH, max_size=48)


@given(text=st.text(max_size=80), more=st.text(max_size=5))
def test_characters_round_trip(text: str, more: str) -> None:
    tokens = CharacterTokens.seen_in([text, more, "a"])
    ids = tokens.encode(text)
    assert tokens.decode(ids) == text
    assert all(0 < i <= tokens.size for i in ids)


@given(text=texts)
@settings(deadline=None)
def test_sentence_pieces_round_trip_spaces_and_all(text: str) -> None:
    ids = PIECES.encode(text)
    assert PIECES.decode(ids) == text
    assert all(0 < i <= PIECES.size for i in ids)


def test_english_has_29_characters_and_the_blank_is_number_0() -> None:
    tokens = CharacterTokens.seen_in(ENGLISH)
    assert (tokens.size, min(tokens.encode(ENGLISH))) == (29, 1)
    # Order of code points: space, apostrophe, hyphen, then the letters.
    assert tokens.encode(" '-az") == [1, 2, 3, 4, 29]


def test_characters_of_a_language_nobody_listed() -> None:
    tokens = CharacterTokens.seen_in(["ngelaban ", "ŋ é"])
    assert tokens.characters == " abeglnéŋ"


@pytest.mark.parametrize("tokens", [CharacterTokens.seen_in(ENGLISH), PIECES], ids=["characters", "pieces"])
def test_a_foreign_character_is_named_and_the_text_is_not(tokens: Tokens) -> None:
    with pytest.raises(InputError, match=r"character 'é' \(U\+00E9\) is not in the token set") as caught:
        tokens.encode("the café")
    assert "caf" not in str(caught.value)


def test_the_library_s_own_word_mark_is_foreign_too() -> None:
    with pytest.raises(InputError, match="U\\+2581"):
        PIECES.encode("a\u2581b")


@pytest.mark.parametrize("characters", ["", "aba"])
def test_no_character_or_one_twice_is_refused(characters: str) -> None:
    with pytest.raises(InputError, match="at least one expected, and none twice"):
        CharacterTokens(characters)


def test_training_gives_the_size_asked_for_and_the_same_pieces_again() -> None:
    assert PIECES.size == 48
    again = train_sentence_pieces(iter(TEXTS), size=48)
    assert again == PIECES
    assert again.digest == PIECES.digest
    assert len(PIECES.encode("the quick fox")) < len("the quick fox")


@pytest.mark.parametrize(
    ("training_texts", "size", "message"),
    [
        (TEXTS, 2_500, r"size=2500 sentence pieces are too many for these texts: at most \d+"),
        (TEXTS, 10, "size=10 sentence pieces cannot hold the texts' 29 characters"),
        ([], 48, "no text"),
        (["", ""], 48, "no text"),
        (["a\u2581b"], 48, "U\\+2581"),
    ],
)
def test_texts_that_cannot_give_such_pieces(training_texts: list[str], size: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        train_sentence_pieces(training_texts, size=size)


def test_the_most_pieces_that_the_error_names_do_fit() -> None:
    with pytest.raises(InputError) as caught:
        train_sentence_pieces(TEXTS, size=2_500)
    most = int(str(caught.value).rsplit(" ", 1)[1])
    assert train_sentence_pieces(TEXTS, size=most).size == most


@pytest.mark.parametrize("tokens", [CharacterTokens.seen_in("aé 'ß"), PIECES], ids=["characters", "pieces"])
def test_saved_and_loaded_they_are_equal(tokens: Tokens, tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    save_tokens(tokens, path)
    loaded = load_tokens(path)
    assert loaded == tokens
    assert loaded.digest == tokens.digest
    assert pickle.loads(pickle.dumps(loaded)) == tokens
    assert [p.name for p in tmp_path.iterdir()] == ["tokens.json"]


def test_digests_tell_sets_apart() -> None:
    digests = {t.digest for t in (CharacterTokens("ab"), CharacterTokens("ba"), CharacterTokens("abc"), PIECES)}
    assert len(digests) == 4


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    with pytest.raises(InputError, match="cannot be read"):
        load_tokens(path)
    save_tokens(CharacterTokens("abc"), path)
    whole = json.loads(path.read_text())
    for damaged, message in [
        ({**whole, "characters": "abd"}, "damaged"),
        ({**whole, "kind": "words"}, "kind='words'"),
        ({**whole, "kind": "sentence pieces", "model": "AAAA"}, "not a tokens.json"),
        ({**whole, "kind": "sentence pieces", "model": "!"}, "not a tokens.json"),
        ({"kind": "characters"}, "not a tokens.json"),
        ([], "not a tokens.json"),
    ]:
        path.write_text(json.dumps(damaged))
        with pytest.raises(InputError, match=message):
            load_tokens(path)
    path.write_text(json.dumps(whole)[:-5])
    with pytest.raises(InputError, match=r"not a tokens\.json"):
        load_tokens(path)


def test_an_unreadable_model_is_refused() -> None:
    with pytest.raises(InputError, match="not a sentence-piece model: 3 bytes"):
        SentencePieceTokens(b"abc")
