"""Tokens of pretrained models: their tokenizer under our numbers, whole after a trip to disk or to a worker."""

import dataclasses
import json
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sottovoce.base.errors import InputError
from sottovoce.data.text.normalisation import normalise_text
from sottovoce.data.text.pretrained_tokens import PretrainedTokens, read_pretrained_tokens
from sottovoce.data.text.tokens import load_tokens, save_tokens

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

TEXTS = ["the quick brown fox jumps over the lazy dog", "it's a well-known fact", "five boxing wizards"] * 4
VOCABULARY = ["<pad>", "<s>", "</s>", "<unk>", "|", *"ABCDEFGHIJKLMNOPQRSTUVWXYZ'"]
CTC = {"architectures": ["Wav2Vec2ForCTC"], "model_type": "wav2vec2", "vocab_size": 32, "pad_token_id": 0}
DECODER = {"architectures": ["MoonshineForConditionalGeneration"], "model_type": "moonshine", "eos_token_id": 2}
words = st.lists(st.text("abcdefghijklmnopqrstuvwxyz'", min_size=1, max_size=9), min_size=1, max_size=5)


def make_ctc(folder: Path, **changes: Any) -> Path:
    """A tokenizer as wav2vec2 models have it, with upper-case letters only."""
    folder.mkdir()
    (folder / "letters.json").write_text(json.dumps({letter: i for i, letter in enumerate(VOCABULARY)}))
    transformers.Wav2Vec2CTCTokenizer(str(folder / "letters.json"), **changes).save_pretrained(folder)
    return folder


def make_bpe(folder: Path) -> tuple[Path, Mapping[str, Any]]:
    """A byte-level tokenizer as decoders have it, and its model's config."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    special = ["<unk>", "<s>", "</s>"]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    bpe.train_from_iterator(TEXTS, trainer)
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    made.save_pretrained(folder)
    return folder, {**DECODER, "vocab_size": bpe.get_vocab_size() + 3}  # models round their outputs up


@pytest.fixture(scope="module")
def ctc(tmp_path_factory: pytest.TempPathFactory) -> PretrainedTokens:
    return read_pretrained_tokens(make_ctc(tmp_path_factory.mktemp("made") / "ctc"), config=CTC, language="en")


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> PretrainedTokens:
    folder, config = make_bpe(tmp_path_factory.mktemp("made") / "bpe")
    return read_pretrained_tokens(folder, config=config, language="en")


@pytest.fixture(scope="module")
def moonshine() -> PretrainedTokens:
    models = os.environ.get("SOTTOVOCE_MODELS")
    if not models or not (folder := Path(models) / "moonshine-tiny-en").is_dir():
        pytest.skip("SOTTOVOCE_MODELS names no folder with moonshine-tiny-en")
    return read_pretrained_tokens(folder, config=json.loads((folder / "config.json").read_text()), language="en")


@pytest.fixture(params=["ctc", "bpe", "moonshine"])
def tokens(request: pytest.FixtureRequest) -> PretrainedTokens:
    found: PretrainedTokens = request.getfixturevalue(request.param)
    return found


@pytest.mark.parametrize("kind", ["ctc", "bpe", "moonshine"])
def test_normalised_texts_come_back(kind: str, request: pytest.FixtureRequest) -> None:
    tokens: PretrainedTokens = request.getfixturevalue(kind)

    @given(words)
    def comes_back(said: list[str]) -> None:
        text = normalise_text(" ".join(said), "en")
        if not text:
            return
        ids = tokens.encode(text)
        assert tokens.decode(ids) == text
        assert all(0 < one <= tokens.size for one in ids)

    comes_back()


def test_repeated_letters_are_not_merged_again(ctc: PretrainedTokens) -> None:
    assert ctc.decode(ctc.encode("hello all")) == "hello all"


def test_what_a_model_writes_is_spelled_as_stores_are(moonshine: PretrainedTokens) -> None:
    written = moonshine.to_ours(moonshine._tokenizer("Well, it's Fine.", add_special_tokens=False)["input_ids"])
    assert moonshine.decode(written) == "well it's fine"


def test_a_decoders_label_ends_with_its_end(bpe: PretrainedTokens) -> None:
    assert bpe.to_theirs(bpe.encode("fox"))[-1] == bpe.end == 2
    assert bpe.size == bpe.outputs


@pytest.mark.parametrize("blank", [0, 3, 31])
def test_a_blank_is_taken_out_and_the_others_keep_their_order(ctc: PretrainedTokens, blank: int) -> None:
    tokens = dataclasses.replace(ctc, blank=blank)
    theirs = tokens.to_theirs(range(1, tokens.size + 1))
    assert theirs == [one for one in range(32) if one != blank]
    assert tokens.to_ours(theirs) == list(range(1, tokens.size + 1))


def test_a_decoders_numbers_are_theirs_and_one(bpe: PretrainedTokens) -> None:
    ours = list(range(1, bpe.size + 1))
    assert bpe.to_theirs(ours) == list(range(bpe.outputs))
    assert bpe.to_ours(range(bpe.outputs)) == ours


def test_every_number_can_be_decoded(tokens: PretrainedTokens) -> None:
    for one in range(1, tokens.size + 1):
        assert isinstance(tokens.decode([one]), str)


def test_every_output_has_a_piece_and_the_blanks_is_empty(tokens: PretrainedTokens) -> None:
    pieces = tokens.pieces()
    assert (len(pieces), pieces[0]) == (tokens.size + 1, "")
    assert any(piece.startswith(" ") for piece in pieces)


def test_a_file_gives_the_same_tokens(tokens: PretrainedTokens, tmp_path: Path) -> None:
    save_tokens(tokens, tmp_path / "tokens.json")
    loaded = load_tokens(tmp_path / "tokens.json")
    assert loaded == tokens
    assert loaded.digest == tokens.digest
    assert loaded.encode("the fox") == tokens.encode("the fox")


def test_workers_get_them_with_or_without_a_tokenizer_made(tokens: PretrainedTokens) -> None:
    ids = tokens.encode("the fox")
    for sent in (tokens, dataclasses.replace(tokens)):
        assert pickle.loads(pickle.dumps(sent)).encode("the fox") == ids


def test_a_character_that_none_writes_is_named_and_the_text_is_not(ctc: PretrainedTokens) -> None:
    with pytest.raises(InputError, match=r"U\+0036") as caught:
        ctc.encode("my secret is 6")
    assert "secret" not in str(caught.value)


def test_an_empty_text_is_refused(ctc: PretrainedTokens) -> None:
    with pytest.raises(InputError):
        ctc.encode("")


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no tokenizer"):
        read_pretrained_tokens(tmp_path, config=CTC, language="en")


def test_code_of_a_folder_is_refused(tmp_path: Path) -> None:
    folder = make_ctc(tmp_path / "ctc")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["auto_map"] = {"AutoTokenizer": ["tok.Tok", None]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(InputError, match="auto_map"):
        read_pretrained_tokens(folder, config=CTC, language="en")


def test_more_tokens_than_outputs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="32 tokens, and its model 20 outputs"):
        read_pretrained_tokens(make_ctc(tmp_path / "ctc"), config={**CTC, "vocab_size": 20}, language="en")
