"""A SpeechBrain checkpoint becomes a model folder that computes the same."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.golden.make_crdnn import FILE, FRAMES, SETTINGS, TOKENS, features, weights
from typer.testing import CliRunner

from sottovoce.cli import app
from sottovoce.errors import InputError
from sottovoce.models import saved
from sottovoce.models.crdnn.network import encode
from sottovoce.models.crdnn.speechbrain import their_name
from sottovoce.models.importing import read_speechbrain
from sottovoce.models.utterances import Features, padded_tokens
from sottovoce.text.tokens import train_sentence_pieces


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A folder as SpeechBrain leaves it: weights by its names, a counter, sentence pieces, and the normaliser."""
    folder = tmp_path / "CKPT"
    folder.mkdir()
    state = {
        their_name(name): (t.transpose(2, 3) if name.startswith("cnn.") and t.dim() == 4 else t).float()
        for name, t in weights().items()
    }
    state["0.DNN.block_0.norm.norm.num_batches_tracked"] = torch.tensor(7)
    torch.save(state, folder / "model.ckpt")
    pieces = train_sentence_pieces(["ab ba", "abba c", "c ab"], size=SETTINGS.tokens - 1)
    (folder / "6_unigram.model").write_bytes(pieces.model)
    torch.save(
        {"count": 3, "glob_mean": torch.zeros(80), "glob_std": torch.full((80,), 2.0)}, folder / "normalizer.ckpt"
    )
    return folder


def test_an_imported_model_computes_what_speechbrain_does(theirs: Path, tmp_path: Path) -> None:
    out = tmp_path / "model"
    command = ["import", "speechbrain", str(theirs), "--language", "fr", "--out", str(out), "--json"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["whole"]
    loaded = saved.load(out)
    assert (loaded.family.name, loaded.language, loaded.settings.feature_deviation) == ("crdnn", "fr", (2.0,) * 80)
    heard = Features(features(), torch.tensor(FRAMES), *padded_tokens(TOKENS))
    parameters = {name: tensor.double() for name, tensor in loaded.parameters.items()}
    found = encode(parameters, heard, settings=loaded.settings).ctc_log_probs_UTV
    golden = torch.tensor(json.loads(FILE.read_text())["evaluation"]["ctc_log_probs"], dtype=torch.float64)
    torch.testing.assert_close(found, golden, rtol=1.5e-4, atol=1.5e-5)


def _without_weights(folder: Path) -> None:
    (folder / "model.ckpt").unlink()


def _cut_short(folder: Path) -> None:
    (folder / "model.ckpt").write_bytes(b"PK")


def _other_pieces(folder: Path) -> None:
    (folder / "6_unigram.model").write_bytes(train_sentence_pieces(["ab ba", "abba c"], size=4).model)


def _two_sets_of_pieces(folder: Path) -> None:
    (folder / "tokenizer.ckpt").write_bytes(b"")


def _normalised_by_speaker(folder: Path) -> None:
    torch.save({"count": 3}, folder / "normalizer.ckpt")


def _with_a_language_model(folder: Path) -> None:
    state = torch.load(folder / "model.ckpt", weights_only=True)
    torch.save({**state, "5.w.weight": torch.zeros(2)}, folder / "model.ckpt")


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (_without_weights, "expected one file with the weights .model.ckpt or asr.ckpt., has none"),
        (_cut_short, "cannot be read as a torch checkpoint"),
        (_other_pieces, "5 pieces, expected 6"),
        (_two_sets_of_pieces, "expected one file with the sentence pieces"),
        (_normalised_by_speaker, "expected glob_mean and glob_std"),
        (_with_a_language_model, "5.w.weight is no part of"),
    ],
)
def test_what_is_something_else_is_refused_with_one_line(theirs: Path, harm: Any, message: str) -> None:
    harm(theirs)
    with pytest.raises(InputError, match=message) as refused:
        read_speechbrain(theirs, language="fr")
    assert "\n" not in str(refused.value)
