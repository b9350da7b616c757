"""A run that starts from a model of another family takes what its own family inherits, and nothing else."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.training.listener import FAMILY

from sottovoce.base.errors import InputError
from sottovoce.base.seeds import torch_stream
from sottovoce.config.loading import load_recipe
from sottovoce.config.recipe import Recipe
from sottovoce.data.store import Store
from sottovoce.data.text.tokens import CharacterTokens
from sottovoce.models.family import find_family
from sottovoce.models.recogniser import Recogniser, create_recogniser, load_recogniser, save_recogniser
from sottovoce.training.parent_model import resolve_parent_model
from sottovoce.training.start_model import build_start_model, init_start_model

OTHER_TOKENS = CharacterTokens.seen_in(["xyz"])


@pytest.fixture
def pretrained(tmp_path: Path) -> Path:
    """Of a family that listens only, with tokens that the recipes do not have, and numbers that are nobody else's."""
    folder = tmp_path / "pretrained"
    folder.mkdir()
    settings = FAMILY.Options(size="tiny").settings(tokens=OTHER_TOKENS.size + 1)
    made = create_recogniser(FAMILY, settings, OTHER_TOKENS, language="en", generator=torch_stream(9, "init"))
    save_recogniser(replace(made, parameters={name: p + 1 for name, p in made.parameters.items()}), folder)
    find_family(FAMILY.name)  # as `--family` does: a folder alone has nothing imported
    return folder


def with_transducer(recipe: Path, size: str = "tiny") -> Recipe:
    text = recipe.read_text(encoding="utf-8")
    plain = "{size: tiny, dropout: 0.1, layer_drop: 0.2}"
    assert plain in text
    recipe.write_text(text.replace(plain, f"{{family: transducer, size: {size}}}"), encoding="utf-8")
    return load_recipe(str(recipe))


def inherited(start: Recogniser, folder: Path) -> set[str]:
    """The tensors that are the seed's."""
    seed = load_recogniser(folder).parameters
    pairs = ((name, tensor, seed[name]) for name, tensor in start.parameters.items())
    return {name for name, own, its in pairs if own.shape == its.shape and torch.equal(own, its)}


def test_the_encoder_is_the_seeds_and_the_tokens_are_the_recipes(
    recipe_file: Path, federated_recipe: Path, stores: Path, pretrained: Path, tmp_path: Path
) -> None:
    store = Store(stores / "tones")
    federated = build_start_model(
        with_transducer(federated_recipe), resolve_parent_model(str(pretrained), runs=tmp_path, root_seed=1), store
    )
    central = init_start_model(
        with_transducer(recipe_file), federated.tokens, load_recogniser(pretrained), language="en"
    )
    for start in (central, federated):
        assert start.family.name == "transducer"
        assert start.tokens.digest != OTHER_TOKENS.digest
        assert inherited(start, pretrained) == {name for name in start.parameters if name.startswith("encoder.")}


def test_another_encoder_or_another_direction_is_refused(
    recipe_file: Path, federated_recipe: Path, pretrained: Path
) -> None:
    with pytest.raises(InputError, match="the model to start from has Encoder"):
        init_start_model(
            with_transducer(recipe_file, "small"), OTHER_TOKENS, load_recogniser(pretrained), language="en"
        )
    plain = load_recipe(str(federated_recipe))
    with pytest.raises(InputError, match=r"is of family=tests\.training\.listener:FAMILY, expected ctc_transformer"):
        init_start_model(plain, OTHER_TOKENS, load_recogniser(pretrained), language="en")
