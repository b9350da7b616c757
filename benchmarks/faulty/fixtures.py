"""What the commands of a campaign need to have something to do: a store, a sound, models, keys, a checkpoint."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch

from sottovoce.base.seeds import stream, torch_stream
from sottovoce.data.corpora.corpus import SAMPLE_RATE, Corpus, ProblemLog, RenderedSpeaker, RenderedUtterance
from sottovoce.data.store import pack_corpus
from sottovoce.data.text.tokens import NO_TOKENS, CharacterTokens, train_sentence_pieces
from sottovoce.models import model_files
from sottovoce.models.crdnn.settings import Settings as Crdnn
from sottovoce.models.crdnn.settings import init
from sottovoce.models.family import find_family
from sottovoce.models.recogniser import create_recogniser, save_recogniser
from sottovoce.models.speechbrain import their_name
from sottovoce.network.keys import make_authority, make_node, make_server

CHARACTERS = CharacterTokens("abc ")
ENCODER = {"stack": 2, "dense_layers": 1, "dense_width": 8, "lstm_layers": 1, "lstm_width": 8}
# The smallest that each family can be.
MODELS: Mapping[str, Mapping[str, Any]] = {
    "ctc_transformer": {"layers": 1, "width": 8, "heads": 2},
    "crdnn": {
        "channels": (4,),
        "rnn_layers": 1,
        "rnn_width": 8,
        "dnn_layers": 1,
        "dnn_width": 8,
        "embedding": 4,
        "decoder_width": 8,
        "location_channels": 2,
        "location_reach": 3,
    },
    "transducer": {"encoder": ENCODER, "embedding": 8, "predictor_layers": 1},
    "cpc": {"encoder": ENCODER, "ahead": 2, "candidates": 4},
}


def build(folder: Path) -> None:
    """`store`, `sound.wav`, `models/…`, `keys/…` and `theirs`, in an empty folder."""
    torch.set_num_threads(1)  # cases are forked, and a fork has no threads but one
    pack_corpus(Corpus("four", "en", [0, 1, 2, 3], speaker, ProblemLog()), folder / "store", workers=1)
    soundfile.write(folder / "sound.wav", _noise(9, seconds=1.0), SAMPLE_RATE)
    for name, settings in MODELS.items():
        write_model(folder / "models" / name, name, settings)
    now = datetime.now(UTC)
    make_authority(folder / "keys" / "authority", now=now)
    make_server(folder / "keys" / "server", authority=folder / "keys" / "authority", hosts=["localhost"], now=now)
    make_node(folder / "keys" / "node")
    write_checkpoint(folder / "theirs")


def _noise(seed: int, *, seconds: float) -> np.ndarray:
    return stream(seed, "noise").integers(-9_000, 9_000, round(seconds * SAMPLE_RATE)).astype(np.int16)


def speaker(number: int) -> RenderedSpeaker:
    spoken = [
        RenderedUtterance(f"{number}-{i}", _noise(4 * number + i, seconds=0.6), "ab c", "Ab c.") for i in range(3)
    ]
    return RenderedSpeaker(f"person-{number}", ("dev", "test", "train", "train")[number], spoken, {"age": "30"})


def write_model(folder: Path, name: str, settings: Mapping[str, Any]) -> None:
    family = find_family(name)
    tokens = CHARACTERS if family.training.needs_text else NO_TOKENS
    made = {**settings, **({"tokens": CHARACTERS.size + 1} if family.training.needs_text else {})}
    if "encoder" in made:
        from sottovoce.models.speech_lstm import EncoderSettings

        made["encoder"] = EncoderSettings(**made["encoder"])
    folder.mkdir(parents=True)
    model = create_recogniser(family, family.Settings(**made), tokens, language="en", generator=torch_stream(1, name))
    save_recogniser(model, folder)


def change_config(folder: Path, change: Mapping[str, Any], *, settings: Mapping[str, Any] | None = None) -> None:
    """Another description of a model, without the seal that would show it; dots lead into sections."""
    path = folder / model_files.CONFIG
    content = {name: value for name, value in json.loads(path.read_text()).items() if name != "seal"} | dict(change)
    for name, value in (settings or {}).items():
        *sections, last = name.split(".")
        place = content["settings"]
        for section in sections:
            place = place[section]
        place[last] = value
    path.write_text(json.dumps(content))


def write_checkpoint(folder: Path) -> None:
    """A folder as SpeechBrain leaves it."""
    settings = Crdnn(tokens=7, **MODELS["crdnn"], norm="batch", as_released=True)
    folder.mkdir(parents=True)
    torch.save(
        {
            their_name(name): tensor.transpose(2, 3).contiguous() if tensor.dim() == 4 else tensor
            for name, tensor in init(settings, generator=torch_stream(1, "theirs")).items()
        },
        folder / "model.ckpt",
    )
    (folder / "tokenizer.ckpt").write_bytes(train_sentence_pieces(["ab ba", "abba c", "c ab"], size=6).model)
    torch.save({"count": 3, "glob_mean": torch.zeros(80), "glob_std": torch.ones(80)}, folder / "normalizer.ckpt")
