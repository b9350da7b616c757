"""A personal part on disk: it comes back as it was, and belongs to one model."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sottovoce.base.errors import InputError
from sottovoce.data.text.tokens import CharacterTokens
from sottovoce.models.family import Family, find_family
from sottovoce.models.personal_part import (
    DESCRIPTION,
    TENSORS,
    apply_personal_part,
    build_personal_part,
    load_personal_part,
    parse_personal_part,
    save_personal_part,
)
from sottovoce.models.recogniser import Recogniser, create_recogniser
from sottovoce.models.trainable import Trainable, split_parameters


@pytest.fixture(scope="module")
def recogniser() -> Recogniser:
    family = find_family("ctc_transformer")
    options = family.Options(size="tiny", layers=2, width=32)  # type: ignore[call-arg]  # it is the transformer's
    tokens = CharacterTokens("abcde ")
    settings = options.settings(tokens=tokens.size + 1)
    return create_recogniser(family, settings, tokens, language="en", generator=torch.Generator().manual_seed(1))


def split(recogniser: Recogniser, text: str) -> Trainable:
    return split_parameters(
        parse_personal_part(text, recogniser.family, recogniser.settings),
        recogniser.parameters,
        is_lora_target=recogniser.family.transfer.is_lora_target,
        generator=torch.Generator().manual_seed(2),
    )


@pytest.mark.parametrize(
    "text", ["lora(r=2)", "lora(r=2, factors=b)", "biases", "output", "lora(r=2, alpha=4), biases"]
)
def test_a_part_comes_back_and_gives_the_model_it_was(recogniser: Recogniser, text: str, tmp_path: Path) -> None:
    parts = split(recogniser, text)
    trained = {name: tensor + 0.5 for name, tensor in parts.initial.items()}
    part = build_personal_part(recogniser, parts, trained, part=text, about={"steps": 3})
    save_personal_part(part, tmp_path / "part")
    assert {(tmp_path / "part" / name).stat().st_mode & 0o777 for name in (DESCRIPTION, TENSORS)} == {0o600}
    assert (tmp_path / "part").stat().st_mode & 0o777 == 0o700
    found = load_personal_part(tmp_path / "part")
    assert (found.base, found.part, found.scale, found.about) == (part.base, text, part.scale, {"steps": 3})
    own, merged = apply_personal_part(recogniser, found, where="part"), parts.frozen.merged(trained)
    assert list(own.parameters) == list(recogniser.parameters)
    for name, tensor in own.parameters.items():
        torch.testing.assert_close(tensor, merged[name], rtol=0, atol=0)
    assert any(not torch.equal(own.parameters[name], p) for name, p in recogniser.parameters.items())


def test_biases_are_the_tensors_with_one_axis(recogniser: Recogniser) -> None:
    chosen = split(recogniser, "biases").initial
    assert chosen.keys() == {name for name, p in recogniser.parameters.items() if p.dim() == 1}
    assert "output.bias" in chosen


@pytest.mark.parametrize("name", ["ctc_transformer", "crdnn", "transducer"])
@pytest.mark.parametrize("text", ["lora(r=1)", "biases", "output"])
def test_every_family_has_these_parts(name: str, text: str) -> None:
    family: Family[object, object] = find_family(name)
    settings = family.Options(**family.smoke_options).settings(tokens=6)
    parameters = family.init(settings, generator=torch.Generator().manual_seed(1))
    part = split_parameters(
        parse_personal_part(text, family, settings),
        parameters,
        is_lora_target=family.transfer.is_lora_target,
        generator=torch.Generator().manual_seed(2),
    )
    assert 0 < part.trained_count < sum(p.numel() for p in parameters.values())
    assert not part.initial.keys() & family.training.statistics(settings)


def test_a_part_that_is_not_kept_has_no_tensors(recogniser: Recogniser, tmp_path: Path) -> None:
    parts = split(recogniser, "output")
    kept = build_personal_part(recogniser, parts, parts.initial, part="output", about={})
    save_personal_part(kept, tmp_path / "part")
    save_personal_part(build_personal_part(recogniser, parts, None, part="output", about={}), tmp_path / "part")
    assert [file.name for file in (tmp_path / "part").iterdir()] == [DESCRIPTION]
    found = load_personal_part(tmp_path / "part")
    assert not found.is_kept
    assert apply_personal_part(recogniser, found, where="part") is recogniser


def test_a_part_of_another_model_is_refused(recogniser: Recogniser) -> None:
    parts = split(recogniser, "output")
    part = build_personal_part(recogniser, parts, parts.initial, part="output", about={})
    moved = {name: p + 1e-6 if name == "output.bias" else p for name, p in recogniser.parameters.items()}
    with pytest.raises(InputError, match=r"^mine belongs to another model \([0-9a-f]{12}…\) than this one"):
        apply_personal_part(replace(recogniser, parameters=moved), part, where="mine")


def test_what_was_changed_or_is_no_part_is_refused(recogniser: Recogniser, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no personal part here"):
        load_personal_part(tmp_path)
    parts = split(recogniser, "output")
    place = tmp_path / "part"
    save_personal_part(build_personal_part(recogniser, parts, parts.initial, part="output", about={}), place)
    content = (place / TENSORS).read_bytes()
    (place / TENSORS).write_bytes(content[:-4] + bytes([content[-4] ^ 1]) + content[-3:])
    with pytest.raises(InputError, match="is damaged: it was changed after it was written"):
        load_personal_part(place)
    (place / TENSORS).unlink()
    with pytest.raises(InputError, match="cannot be read"):
        load_personal_part(place)
    (place / DESCRIPTION).write_text((place / DESCRIPTION).read_text().replace('"output"', '"outputs"'))
    with pytest.raises(InputError, match="is damaged"):
        load_personal_part(place)
