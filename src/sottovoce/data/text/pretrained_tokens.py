"""Tokens of a pretrained model: its own tokenizer, under our numbers.

    a decoder's     ours = theirs + 1                          nothing is the blank
    CTC's           the blank is 0, the others keep their order

The tokenizer's files are kept as texts, so that a saved model needs no other folder.
"""

import base64
import inspect
import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from sottovoce.base.errors import InputError
from sottovoce.base.files import read_file
from sottovoce.base.importing import import_extra
from sottovoce.base.parsing import ParseError, parse_json
from sottovoce.data.text.normalisation import normalise_text
from sottovoce.data.text.tokens import WORD_START, Tokens

TEXTS = (
    *("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "special_tokens_map.json"),
    *("added_tokens.json", "normalizer.json"),
)
BINARIES = ("tokenizer.model", "spiece.model")
BASE64 = "base64:"
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_STARTS = (WORD_START, "Ġ", "|")  # how tokenizers write the space that begins a word


@dataclass(frozen=True)
class PretrainedTokens(Tokens):
    """The tokens of a model with so many `outputs`; `blank` is CTC's, `end` what ends a decoder's text.

    Texts are written in upper case where the tokenizer knows no other (`upper`), and what is decoded is spelled by the
    rules of `language`, as stores are: some models write capitals and punctuation.
    """

    files: tuple[tuple[str, str], ...]
    outputs: int
    language: str
    blank: int | None = None
    end: int | None = None
    upper: bool = False

    def __post_init__(self) -> None:
        if (self.blank is None) == (self.end is None):
            raise InputError(f"tokens: blank={self.blank}, end={self.end}: expected CTC's blank or a decoder's end")

    @property
    def size(self) -> int:
        return self.outputs if self.blank is None else self.outputs - 1

    def to_ours(self, theirs: Iterable[int]) -> list[int]:
        blank = self.outputs if self.blank is None else self.blank
        return [one + 1 if one < blank else one for one in theirs]

    def to_theirs(self, ours: Iterable[int]) -> list[int]:
        blank = self.outputs if self.blank is None else self.blank
        return [one - 1 if one <= blank else one for one in ours]

    def encode(self, text: str) -> list[int]:
        written = text.upper() if self.upper else text
        theirs = list(self._tokenizer(written, add_special_tokens=False)["input_ids"])
        unknown = self._tokenizer.unk_token_id
        if unknown in theirs or not theirs or (self.blank is not None and self.blank in theirs):
            raise self._foreign(written, unknown)
        return self.to_ours(theirs if self.end is None else [*theirs, self.end])

    def _foreign(self, text: str, unknown: int | None) -> InputError:
        # The text itself may be private: only the character is named.
        for one in text:
            if unknown in self._tokenizer(one, add_special_tokens=False)["input_ids"]:
                return InputError(f"character {one!r} (U+{ord(one):04X}) is not in the token set")
        return InputError("a text that the model's tokenizer cannot write")

    def decode(self, ids: Sequence[int]) -> str:
        return normalise_text(self._write(ids), self.language)

    def spell(self, joined: str, ids: Sequence[int]) -> str:
        """With the model's capitals and punctuation: its pieces may be bytes, of which a letter takes several."""
        written = self._write(ids).strip()
        return written.lower() if self.upper else written

    def _write(self, ids: Sequence[int]) -> str:
        assert all(0 < one <= self.size for one in ids), f"ids must be within 1 … {self.size}"
        # CTC's repeats are merged before: twice the same letter here is meant.
        options = {"group_tokens": False} if "group_tokens" in self._decode_options else {}
        return str(self._tokenizer.decode(self.to_theirs(ids), skip_special_tokens=True, **options))

    def pieces(self) -> list[str]:
        return list(self._pieces)

    @cached_property
    def _pieces(self) -> tuple[str, ...]:  # once: a tokenizer has tens of thousands
        known = self._tokenizer.convert_ids_to_tokens(self.to_theirs(range(1, self.size + 1)))
        theirs = [one or "" for one in known]  # a model may have more outputs than its tokenizer has tokens
        special = set(self._tokenizer.all_special_tokens)
        return ("", *(_spaced(one) if one in _STARTS or one not in special else "" for one in theirs))

    def as_json(self) -> dict[str, object]:
        return {
            "kind": "pretrained",
            "files": dict(self.files),
            "outputs": self.outputs,
            "language": self.language,
            "blank": self.blank,
            "end": self.end,
            "upper": self.upper,
        }

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> "PretrainedTokens":
        files = tuple(sorted((str(name), str(text)) for name, text in content["files"].items()))
        given = {name: content[name] for name in ("outputs", "language", "blank", "end", "upper")}
        return PretrainedTokens(files, **given)

    def __hash__(self) -> int:
        return hash((self.outputs, self.blank, self.end, self.digest))

    def write_files(self, folder: Path) -> None:
        """The tokenizer's own files, as they were read."""
        for name, text in self.files:
            if name not in (*TEXTS, *BINARIES):
                raise InputError(f"tokens: {name!r} is no file of a tokenizer")
            content = base64.b64decode(text.removeprefix(BASE64)) if text.startswith(BASE64) else text.encode()
            (folder / name).write_bytes(content)

    @cached_property
    def digest(self) -> str:  # once: a tokenizer has megabytes
        return super().digest

    @cached_property
    def _tokenizer(self) -> Any:
        transformers = import_extra("transformers", extra="hf", called="tokens of a pretrained model")
        with tempfile.TemporaryDirectory() as folder:
            self.write_files(Path(folder))
            try:
                return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
            except Exception as error:  # of many kinds, by tokenizer
                raise InputError(
                    f"tokens: the tokenizer cannot be read ({' '.join(str(error).split())[:200]})"
                ) from None

    @cached_property
    def _decode_options(self) -> frozenset[str]:
        own = getattr(self._tokenizer, "_decode", self._tokenizer.decode)
        return frozenset(inspect.signature(own).parameters)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_")}


def _spaced(piece: str) -> str:
    for start in _STARTS:
        piece = piece.replace(start, " ")
    return piece


def read_pretrained_tokens(folder: Path, *, config: Mapping[str, Any], language: str) -> PretrainedTokens:
    """The tokens of the model in `folder`, whose config.json is `config`."""
    found = {name: read_file(folder / name).decode() for name in TEXTS if (folder / name).is_file()}
    for name in BINARIES:
        if (folder / name).is_file():
            found[name] = BASE64 + base64.b64encode((folder / name).read_bytes()).decode()
    if not found.keys() - {"tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"}:
        raise InputError(f"{folder}: no tokenizer; expected tokenizer.json or vocab.json")
    try:
        settings = parse_json(found.get("tokenizer_config.json", "{}").encode())
    except ParseError as error:
        raise InputError(f"{folder}/tokenizer_config.json: cannot be read ({error})") from None
    if "auto_map" in settings:
        raise InputError(f"{folder}: its tokenizer has auto_map, code of its own, which is never run")
    is_ctc = (config.get("architectures") or [""])[0].endswith("ForCTC")
    tokens = PretrainedTokens(
        tuple(sorted(found.items())),
        outputs=int(config["vocab_size"]),
        language=language,
        blank=int(config.get("pad_token_id") or 0) if is_ctc else None,
        end=None if is_ctc else _first(config.get("eos_token_id")),
        upper=settings.get("tokenizer_class") == "Wav2Vec2CTCTokenizer" and _knows_upper_only(found),
    )
    if (known := len(tokens._tokenizer)) > tokens.outputs:
        raise InputError(f"{folder}: its tokenizer has {known:,} tokens, and its model {tokens.outputs:,} outputs")
    return tokens


def _first(end: Any) -> int:
    return int(end[0] if isinstance(end, list) else end)


def _knows_upper_only(files: Mapping[str, str]) -> bool:
    known = json.loads(files.get("vocab.json", "{}"))
    return not any(letter in known for letter in _LETTERS) and any(letter.upper() in known for letter in _LETTERS)
