"""A model folder gives back what was put in, and a damaged or foreign one is refused in one line."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.federated.small import MADE_FROM_NOTHING

from sottovoce.base.errors import InputError
from sottovoce.base.seeds import torch_stream
from sottovoce.data.text.tokens import CharacterTokens, load_tokens, save_tokens
from sottovoce.models.family import find_family
from sottovoce.models.model_files import CONFIG, PARAMETERS, TOKENS
from sottovoce.models.recogniser import (
    Recogniser,
    adapt_parameters,
    create_recogniser,
    export_recogniser,
    load_recogniser,
    save_recogniser,
)
from sottovoce.models.transformer import FAMILY
from sottovoce.models.transformer.settings import Settings

TOKEN_SET = CharacterTokens("abc ")
SETTINGS = Settings(layers=2, width=16, tokens=TOKEN_SET.size + 1)


@pytest.fixture
def model(tmp_path: Path) -> Recogniser:
    recogniser = create_recogniser(FAMILY, SETTINGS, TOKEN_SET, language="en", generator=torch_stream(1, "init"))
    save_recogniser(recogniser, tmp_path)
    return recogniser


def test_what_is_saved_is_loaded(model: Recogniser, tmp_path: Path) -> None:
    found = load_recogniser(tmp_path)
    assert (found.settings, found.tokens.digest, found.language) == (SETTINGS, TOKEN_SET.digest, "en")
    assert found.parameters.keys() == model.parameters.keys()
    assert all(torch.equal(found.parameters[name], p) for name, p in model.parameters.items())


def test_an_export_is_for_others_and_its_folder_may_be_a_string(model: Recogniser, tmp_path: Path) -> None:
    written = export_recogniser(model, f"{tmp_path}/exported")
    assert written["folder"] == f"{tmp_path}/exported"
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "exported").iterdir()} == {0o644}
    assert load_recogniser(tmp_path / "exported").tokens.digest == TOKEN_SET.digest


def cut(folder: Path) -> None:
    content = (folder / PARAMETERS).read_bytes()
    (folder / PARAMETERS).write_bytes(content[: len(content) // 2])


def change(key: str, value: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        content = json.loads((folder / CONFIG).read_text())
        if key in content["settings"]:
            content["settings"][key] = value
        elif value is None:
            del content[key]
        else:
            content[key] = value
        (folder / CONFIG).write_text(json.dumps(content))

    return write


def halve(folder: Path) -> None:
    save_file({name: tensor.half() for name, tensor in load_file(folder / PARAMETERS).items()}, folder / PARAMETERS)


def fifo(name: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return write


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, "the model cannot be read .* it may be cut short"),
        (lambda folder: (folder / PARAMETERS).unlink(), "the model cannot be read"),
        (lambda folder: (folder / CONFIG).write_text("{"), "no model at"),
        (
            change("architecture", "conformer"),
            "family='conformer'.*'?ctc_transformer",
        ),
        (change("sample_rate", 8000), "a model for sample_rate=8000, expected 16000"),
        (change("layers", 3), "parameter 'blocks.02.* is missing: a model of another architecture"),
        (change("layers", 1), "unknown parameter 'blocks.01.*: a model of another architecture"),
        (change("width", 32), "has shape .*, expected"),
        (change("language", None), r"config\.json has no language"),
        (change("layers", 10**9), "settings have 1,000,000,000 layers, and its file 22 tensors"),
        (change("width", 10**12), r"settings\.width=1,000,000,000,000, and its file has .* numbers in all"),
        (change("heads", 10**12), "does not divide"),
        (change("features", 10**12), r"settings\.features=.*, and its file has"),
        (change("tokens", 10**9), r"settings\.tokens=1000000000, expected 5, as tokens\.json has"),
        (change("language", 5), "language=5, expected a text"),
        (change("about", []), r"about=\[\], expected names and values"),
        (change("settings", []), r"settings=\[\], expected names and values"),
        (change("architecture", ["ctc_transformer"]), "expected the name of a model family"),
        (change("dropout", math.nan), "dropout"),
        (halve, "is F16, expected float32"),
        (fifo(PARAMETERS), r"model\.safetensors is a named pipe, expected a file"),
        (fifo(CONFIG), r"config\.json is a named pipe, expected a file"),
        (fifo(TOKENS), r"tokens\.json is a named pipe, expected a file"),
        (
            lambda folder: save_tokens(CharacterTokens("abd "), folder / TOKENS),
            "tokens.json is not the token set this model was trained with",
        ),
    ],
)
@pytest.mark.usefixtures("model")
def test_a_damaged_or_foreign_model_is_refused(damage: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    damage(tmp_path)
    with pytest.raises(InputError, match=message) as caught:
        load_recogniser(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_seed_of_another_architecture_is_refused(model: Recogniser) -> None:
    other = Settings(layers=2, width=32, tokens=SETTINGS.tokens)
    with pytest.raises(InputError, match=r"does not fit `model`: parameter .* has shape"):
        adapt_parameters(model, other, TOKEN_SET, generator=torch_stream(2, "init"))


def test_only_another_token_set_renews_the_output_layer(model: Recogniser) -> None:
    same = adapt_parameters(model, SETTINGS, TOKEN_SET, generator=torch_stream(2, "init"))
    assert all(torch.equal(same[name], p) for name, p in model.parameters.items())
    # As many tokens, so only the digest can tell.
    other = adapt_parameters(model, SETTINGS, CharacterTokens("abd "), generator=torch_stream(2, "init"))
    changed = {name for name, p in model.parameters.items() if not torch.equal(other[name], p)}
    assert changed == {"output.weight", "output.bias"}


@pytest.mark.usefixtures("model")
def test_a_model_with_one_bit_changed_is_refused(tmp_path: Path) -> None:
    data = bytearray((tmp_path / PARAMETERS).read_bytes())
    data[-1] ^= 1
    (tmp_path / PARAMETERS).write_bytes(data)
    with pytest.raises(InputError, match=r"model\.safetensors is damaged: it was changed"):
        load_recogniser(tmp_path)


@pytest.mark.usefixtures("model")
def test_a_model_with_one_letter_changed_in_its_description_is_refused(tmp_path: Path) -> None:
    config = tmp_path / CONFIG
    config.write_text(config.read_text().replace('"dropout": 0.3', '"dropout": 0.2'))
    with pytest.raises(InputError, match=r"config\.json is damaged: it was changed"):
        load_recogniser(tmp_path)


@pytest.mark.usefixtures("model")
def test_a_model_of_an_older_release_is_read(tmp_path: Path) -> None:
    content = json.loads((tmp_path / CONFIG).read_text())
    del content["seal"], content["parameters"]
    (tmp_path / CONFIG).write_text(json.dumps(content))
    assert load_recogniser(tmp_path).settings == SETTINGS


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("crdnn", {"rnn_layers": 10**9, "tokens": 5}),
        ("crdnn", {"dnn_layers": 10**9, "tokens": 5}),
        ("transducer", {"predictor_layers": 10**9, "tokens": 5}),
        ("transducer", {"encoder": {"lstm_layers": 10**9}, "tokens": 5}),
        ("cpc", {"ahead": 10**9}),
        ("cpc", {"candidates": 10**9}),
        ("cpc", {"encoder": {"dense_layers": 10**9}}),
    ],
)
@pytest.mark.usefixtures("model")
def test_no_family_makes_more_layers_than_the_file_has_tensors(
    name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    change("settings", settings)(tmp_path)
    change("architecture", name)(tmp_path)
    with pytest.raises(InputError, match=r"layers, and its file|candidates=1000000000, expected at most"):
        load_recogniser(tmp_path)


def test_every_layer_has_tensors_of_its_own() -> None:
    """What a model's file is held against: `layers` never counts more than there are tensors."""
    for name in MADE_FROM_NOTHING:
        family = find_family(name)
        settings = family.Options(size="tiny", family=name).settings(tokens=5)
        assert 0 < family.transfer.layer_count(settings) <= len(family.shapes(settings))


@pytest.mark.parametrize("characters", [["a", "b"], "a\ud800"])
def test_tokens_are_whole_characters(characters: object, tmp_path: Path) -> None:
    (tmp_path / TOKENS).write_text(json.dumps({"kind": "characters", "characters": characters, "digest": ""}))
    with pytest.raises(InputError, match="expected one text, of whole characters"):
        load_tokens(tmp_path / TOKENS)
