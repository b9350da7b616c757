"""A SpeechBrain checkpoint becomes a model folder that computes the same."""

import json
import math
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.golden.make_crdnn import FILE, FRAMES, SETTINGS, TOKENS, features, weights
from typer.testing import CliRunner

from sottovoce.base.errors import InputError
from sottovoce.cli import app
from sottovoce.data.audio.waveforms import Features, pad_tokens
from sottovoce.data.text.tokens import train_sentence_pieces
from sottovoce.models.crdnn.network import encode
from sottovoce.models.recogniser import load_recogniser
from sottovoce.models.speechbrain import read_speechbrain, their_name


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
    loaded = load_recogniser(out)
    assert (loaded.family.name, loaded.language, loaded.settings.feature_deviation) == ("crdnn", "fr", (2.0,) * 80)
    batch = Features(features(), torch.tensor(FRAMES), *pad_tokens(TOKENS))
    parameters = {name: tensor.double() for name, tensor in loaded.parameters.items()}
    found = encode(parameters, batch, settings=loaded.settings).ctc_log_probs_UTV
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


def _state(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Their weights, with something done to them."""

    def harm(folder: Path) -> None:
        state = torch.load(folder / "model.ckpt", weights_only=True)
        change(state)
        torch.save(state, folder / "model.ckpt")

    return harm


def _each(make: Callable[[torch.Tensor], Any]) -> Callable[[Path], None]:
    """One tensor made into something else, of the same shape where it has one."""
    return _state(lambda state: state.update({"4.w.weight": make(state["4.w.weight"])}))


def _everywhere(make: Callable[[torch.Tensor], Any]) -> Callable[[Path], None]:
    return _state(lambda state: state.update({name: make(tensor) for name, tensor in state.items()}))


def _packed(folder: Path) -> None:
    """The same archive with its parts compressed: of zeros, a thousandth of the size."""
    state = torch.load(folder / "model.ckpt", weights_only=True)
    torch.save({name: torch.zeros_like(tensor) for name, tensor in state.items()}, folder / "zeros")
    with zipfile.ZipFile(folder / "zeros") as whole, zipfile.ZipFile(folder / "model.ckpt", "w") as packed:
        for part in whole.infolist():
            packed.writestr(part, whole.read(part), zipfile.ZIP_DEFLATED)


def _normaliser(**values: Any) -> Callable[[Path], None]:
    known = {"count": 3, "glob_mean": torch.zeros(80), "glob_std": torch.ones(80)}
    return lambda folder: torch.save(known | values, folder / "normalizer.ckpt")


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (_state(dict.clear), "3.w.bias is missing"),
        (lambda folder: torch.save([1, 2], folder / "model.ckpt"), "holds list, expected named tensors"),
        (lambda folder: torch.save({}, folder / "normalizer.ckpt"), "expected glob_mean and glob_std"),
        (_state(lambda state: state.update({7: torch.zeros(1)})), "a tensor is called 7"),
        (_each(lambda tensor: "x"), "4.w.weight is str, expected a tensor"),
        (_each(lambda tensor: tensor[:, :-1].clone()), r"4.w.weight has shape .* beside the others"),
        (_each(lambda tensor: tensor[None].clone()), r"4.w.weight has shape .* beside the others"),
        (_each(lambda tensor: tensor.to_sparse()), "4.w.weight is no plain tensor"),
        (_each(lambda tensor: tensor.to("meta")), "4.w.weight is no plain tensor"),
        (_each(lambda tensor: tensor.long()), "4.w.weight is torch.int64, expected floating-point"),
        (_each(lambda tensor: tensor.to(torch.complex64)), "4.w.weight is torch.complex64"),
        (_each(lambda tensor: tensor * math.nan), "4.w.weight has a number that is not finite"),
        (_each(lambda tensor: tensor.double() * 1e300), "4.w.weight has a number that is not finite in float32"),
        (_each(lambda tensor: torch.zeros(1).expand(50_000, 30_000)), "repeats? what the file holds"),
        (_everywhere(lambda tensor: torch.zeros(()).expand(tensor.shape)), "repeats? what the file holds"),
        (_state(lambda state: state.update({f"x{i}": state["4.w.weight"] for i in range(9_999)})), "they repeat what"),
        (_everywhere(lambda tensor: tensor.reshape(-1)), "expected 2 axes"),
        (_everywhere(lambda tensor: torch.zeros(())), "expected 1 axes"),
        (_state(lambda state: state.pop("0.CNN.block_0.conv_1.conv.bias")), "block_0.conv_1.conv.bias is missing"),
        (_packed, "packed into fewer"),
        (_normaliser(glob_mean=torch.zeros(3)), "3 means and 80 deviations, expected 80"),
        (_normaliser(glob_std=torch.zeros(80)), "the latter positive"),
        (_normaliser(glob_std=torch.full((80,), math.nan)), "not finite"),
        (_normaliser(glob_mean=torch.zeros(1).expand(10**9)), "repeats? what the file holds"),
        (_normaliser(glob_mean=[0.0] * 80), "expected glob_mean and glob_std"),
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
