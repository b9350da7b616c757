"""A model folder gives back what was put in, and a damaged or foreign one is refused in one line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sottovoce.errors import InputError
from sottovoce.models.saved import CONFIG, PARAMETERS, TOKENS, Recogniser, adapt, fresh, load, save
from sottovoce.models.transformer import FAMILY
from sottovoce.models.transformer.network import Settings
from sottovoce.seeds import torch_stream
from sottovoce.text.tokens import CharacterTokens, save_tokens

TOKEN_SET = CharacterTokens("abc ")
SETTINGS = Settings(layers=2, width=16, tokens=TOKEN_SET.size + 1)


@pytest.fixture
def model(tmp_path: Path) -> Recogniser:
    recogniser = fresh(FAMILY, SETTINGS, TOKEN_SET, language="en", generator=torch_stream(1, "init"))
    save(recogniser, tmp_path)
    return recogniser


def test_what_is_saved_is_loaded(model: Recogniser, tmp_path: Path) -> None:
    found = load(tmp_path)
    assert (found.settings, found.tokens.digest, found.language) == (SETTINGS, TOKEN_SET.digest, "en")
    assert found.parameters.keys() == model.parameters.keys()
    assert all(torch.equal(found.parameters[name], p) for name, p in model.parameters.items())


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
        load(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_seed_of_another_architecture_is_refused(model: Recogniser) -> None:
    other = Settings(layers=2, width=32, tokens=SETTINGS.tokens)
    with pytest.raises(InputError, match=r"does not fit `model`: parameter .* has shape"):
        adapt(model, other, TOKEN_SET, generator=torch_stream(2, "init"))


def test_only_another_token_set_renews_the_output_layer(model: Recogniser) -> None:
    same = adapt(model, SETTINGS, TOKEN_SET, generator=torch_stream(2, "init"))
    assert all(torch.equal(same[name], p) for name, p in model.parameters.items())
    # As many tokens, so only the digest can tell.
    other = adapt(model, SETTINGS, CharacterTokens("abd "), generator=torch_stream(2, "init"))
    changed = {name for name, p in model.parameters.items() if not torch.equal(other[name], p)}
    assert changed == {"output.weight", "output.bias"}


@pytest.mark.usefixtures("model")
def test_a_model_with_one_bit_changed_is_refused(tmp_path: Path) -> None:
    data = bytearray((tmp_path / PARAMETERS).read_bytes())
    data[-1] ^= 1
    (tmp_path / PARAMETERS).write_bytes(data)
    with pytest.raises(InputError, match=r"model\.safetensors is damaged: it was changed"):
        load(tmp_path)


@pytest.mark.usefixtures("model")
def test_a_model_with_one_letter_changed_in_its_description_is_refused(tmp_path: Path) -> None:
    config = tmp_path / CONFIG
    config.write_text(config.read_text().replace('"dropout": 0.3', '"dropout": 0.2'))
    with pytest.raises(InputError, match=r"config\.json is damaged: it was changed"):
        load(tmp_path)


@pytest.mark.usefixtures("model")
def test_a_model_of_an_older_release_is_read(tmp_path: Path) -> None:
    content = json.loads((tmp_path / CONFIG).read_text())
    del content["seal"], content["parameters"]
    (tmp_path / CONFIG).write_text(json.dumps(content))
    assert load(tmp_path).settings == SETTINGS
