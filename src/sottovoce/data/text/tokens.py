"""Tokens: what a recogniser writes. Characters of a language, or sentence pieces trained on its texts.

Tokens are numbered from 1 to `size`; 0 is the CTC blank, so a model has `size` + 1 outputs. There is no unknown token:
a text that cannot be written is an `InputError`, for callers to count. Texts are normalised before, and
`decode(encode(text))` gives back every character.
"""

import base64
import binascii
import hashlib
import io
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import sentencepiece

from sottovoce.base.errors import InputError
from sottovoce.base.files import read_file, write_json
from sottovoce.base.parsing import ParseError, parse_json

DEFAULT_PIECES = 2_500
MADE_FROM = "made_from"
# Sentence pieces write the space that begins a word as this character.
WORD_START = "\u2581"
# A text longer than this many bytes would be left out of the training by the library, without an error.
LONGEST_TEXT_BYTES = 1 << 24


class Tokens(ABC):
    """A set of tokens, numbered 1 … size."""

    @property
    @abstractmethod
    def size(self) -> int:
        """How many tokens there are, the blank not counted."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """The tokens of `text`; `InputError` naming the first character that none can write."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, which hold no blank."""

    @abstractmethod
    def pieces(self) -> list[str]:
        """The text of every output of the model by its number; a piece that begins a word begins with a space."""

    def spell(self, joined: str, ids: Sequence[int]) -> str:
        """A word of the tokens `ids`, whose pieces are `joined`, as transcripts write it."""
        return joined

    @abstractmethod
    def as_json(self) -> dict[str, object]:
        """All there is to know, for `tokens.json`."""

    @property
    def digest(self) -> str:
        """A fingerprint of the set: equal digests encode equally."""
        return hashlib.blake2b(json.dumps(self.as_json(), sort_keys=True).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class CharacterTokens(Tokens):
    """One token per character, in the order of `characters`.

    >>> tokens = CharacterTokens.seen_in(["ab", "a b"])
    >>> tokens.encode("b a"), tokens.decode([3, 1, 2]), tokens.size
    ([3, 1, 2], 'b a', 3)
    """

    characters: str

    def __post_init__(self) -> None:
        if not self.characters or len(set(self.characters)) != len(self.characters):
            raise InputError(f"characters={self.characters!r}: at least one expected, and none twice")

    @classmethod
    def seen_in(cls, texts: Iterable[str]) -> "CharacterTokens":
        """All characters of `texts` (or of a language's alphabet), in the order of their code points."""
        return cls("".join(sorted(set().union(*texts))))

    @property
    def size(self) -> int:
        return len(self.characters)

    def encode(self, text: str) -> list[int]:
        try:
            return [self._ids[character] for character in text]
        except KeyError:
            raise _foreign(text, known=self._ids) from None

    def decode(self, ids: Sequence[int]) -> str:
        assert all(0 < i <= self.size for i in ids), f"ids must be within 1 … {self.size}"
        return "".join(self.characters[i - 1] for i in ids)

    def pieces(self) -> list[str]:
        return ["", *self.characters]

    def as_json(self) -> dict[str, object]:
        return {"kind": "characters", "characters": self.characters}

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {character: i for i, character in enumerate(self.characters, start=1)}


@dataclass(frozen=True)
class SentencePieceTokens(Tokens):
    """The pieces of a trained unigram model. The library's unknown piece has the number 0, which is our blank."""

    model: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if self._pieces.unk_id() != 0 or self.size < 1:
            raise InputError("sentence-piece model: expected its unknown piece first, and other pieces after it")

    @property
    def size(self) -> int:
        return int(self._pieces.get_piece_size()) - 1

    def encode(self, text: str) -> list[int]:
        if not self._known.issuperset(text):
            raise _foreign(text, known=self._known)
        return list(self._pieces.encode(text))

    def decode(self, ids: Sequence[int]) -> str:
        assert all(0 < i <= self.size for i in ids), f"ids must be within 1 … {self.size}"
        return str(self._pieces.decode([int(i) for i in ids]))

    def pieces(self) -> list[str]:
        known = range(1, self.size + 1)
        return ["", *(self._pieces.id_to_piece(i).replace(WORD_START, " ") for i in known)]

    def as_json(self) -> dict[str, object]:
        return {"kind": "sentence pieces", "model": base64.b64encode(self.model).decode("ascii")}

    @cached_property
    def _pieces(self) -> sentencepiece.SentencePieceProcessor:
        try:
            return sentencepiece.SentencePieceProcessor(model_proto=self.model)
        except RuntimeError as error:
            raise InputError(f"not a sentence-piece model: {len(self.model)} bytes that the library refuses") from error

    @cached_property
    def _known(self) -> frozenset[str]:
        # Training keeps every character as a piece of its own, so these can always be written.
        pieces = (self._pieces.id_to_piece(i) for i in range(1, self.size + 1))
        return frozenset(piece.replace(WORD_START, " ") for piece in pieces if len(piece) == 1)


@dataclass(frozen=True)
class NoTokens(Tokens):
    """The tokens of a model that learns from speech alone: none."""

    @property
    def size(self) -> int:
        return 0

    def encode(self, text: str) -> list[int]:
        raise InputError("a model that learns from speech alone has no tokens to write a text with")

    def decode(self, ids: Sequence[int]) -> str:
        assert not ids, "there are no tokens"
        return ""

    def pieces(self) -> list[str]:
        return []

    def as_json(self) -> dict[str, object]:
        return {"kind": "none"}


NO_TOKENS = NoTokens()


def train_sentence_pieces(texts: Iterable[str], *, size: int = DEFAULT_PIECES) -> SentencePieceTokens:
    """`size` sentence pieces that can write every text of `texts`; the same texts in the same order give the same set.

    An `InputError` says so when the texts are too few for so many pieces, or have more characters than that.
    """
    seen: set[str] = set()
    writer = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_watched(texts, seen),
            model_writer=writer,
            model_type="unigram",
            vocab_size=size + 1,
            character_coverage=1.0,
            # Texts are normalised already, and no space is to be lost.
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            unk_id=0,
            bos_id=-1,
            eos_id=-1,
            pad_id=-1,
            max_sentence_length=LONGEST_TEXT_BYTES,
            num_threads=1,  # sums in another order could give other pieces
            minloglevel=3,
        )
    except RuntimeError as error:
        raise _training_error(str(error), size=size, characters=len(seen and {*seen, " "})) from error
    return SentencePieceTokens(writer.getvalue())


def save_tokens(tokens: Tokens, path: Path, *, made_from: Sequence[Mapping[str, str | None]] | None = None) -> None:
    """Writes `tokens.json`: whole, or not at all.

    `made_from` says which stores' texts the set was made from (`store`, its `digest` and the `split`, or None for all
    of it); a release takes a file only if it says that, and none of its clients are in there. A model's own tokens do
    not say it: its run does, and a release keeps no digests of data.
    """
    written = tokens_as_json(tokens)
    write_json(path, written if made_from is None else written | {MADE_FROM: [dict(one) for one in made_from]})


def tokens_as_json(tokens: Tokens) -> dict[str, object]:
    """What `tokens.json` holds."""
    return {**tokens.as_json(), "size": tokens.size, "digest": tokens.digest}


def load_tokens(path: Path) -> Tokens:
    """Reads what `save_tokens` wrote; `InputError` when the file is missing, damaged or of an unknown kind."""
    try:
        content = read_file(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); a tokens.json was expected") from error
    return parse_tokens(content, where=str(path))


def parse_tokens(text: bytes, *, where: str) -> Tokens:
    """The tokens in the text of a `tokens.json`."""
    try:
        content = parse_json(text)
        tokens = _from_json(content)
        written_digest = content["digest"]
    except (KeyError, TypeError, ParseError, binascii.Error, InputError) as error:
        raise InputError(f"{where}: not a tokens.json ({error})") from error
    if tokens.digest != written_digest:
        raise InputError(f"{where}: damaged: digest={written_digest} written, but its tokens give {tokens.digest}")
    return tokens


def _from_json(content: dict[str, str]) -> Tokens:
    if content["kind"] == "characters":
        characters = content["characters"]
        if not isinstance(characters, str) or any("\ud800" <= one <= "\udfff" for one in characters):
            raise InputError("characters: expected one text, of whole characters")
        return CharacterTokens(characters)
    if content["kind"] == "sentence pieces":
        return SentencePieceTokens(base64.b64decode(content["model"], validate=True))
    if content["kind"] == "none":
        return NO_TOKENS
    if content["kind"] == "pretrained":
        from sottovoce.data.text.pretrained_tokens import PretrainedTokens  # it is a kind of these

        return PretrainedTokens.from_json(content)
    raise InputError(f"kind={content['kind']!r}: 'characters' or 'sentence pieces' expected")


def _foreign(text: str, *, known: Iterable[str]) -> InputError:
    foreign = next(character for character in text if character not in set(known))
    # The text itself may be private: only the character is named.
    return InputError(f"character {foreign!r} (U+{ord(foreign):04X}) is not in the token set")


def _watched(texts: Iterable[str], seen: set[str]) -> Iterator[str]:
    """Passes the texts on and notes their characters, since they can be read only once."""
    for text in texts:
        if WORD_START in text or len(text.encode()) > LONGEST_TEXT_BYTES:
            raise InputError(
                f"a text holds U+2581 or more than {LONGEST_TEXT_BYTES} bytes: sentence pieces cannot write it"
            )
        seen.update(text)
        yield text


def _training_error(message: str, *, size: int, characters: int) -> InputError:
    """The library's complaint in the user's terms."""
    if not characters:
        return InputError("no text to train sentence pieces on")
    if characters > size:
        return InputError(
            f"size={size} sentence pieces cannot hold the texts' {characters} characters (the space counts)"
        )
    bound = re.search(r"value <= (\d+)", message)
    if bound:
        return InputError(f"size={size} sentence pieces are too many for these texts: at most {int(bound[1]) - 1}")
    return InputError(f"sentence pieces cannot be trained with size={size}: {message}")
