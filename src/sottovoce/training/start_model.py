"""The model of step 0, and which part of it clients train."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sottovoce.base.errors import InputError
from sottovoce.base.seeds import torch_stream
from sottovoce.config import Recipe
from sottovoce.data.store import Store
from sottovoce.data.text.tokens import Tokens
from sottovoce.models.family import find_family
from sottovoce.models.recogniser import Recogniser, adapt_parameters, create_recogniser, describe_inherited
from sottovoce.models.trainable import Part, Trainable, parse_part, split_parameters
from sottovoce.training.loop import Say
from sottovoce.training.parent_model import ParentModel
from sottovoce.training.run_folder import BASE_MODEL
from sottovoce.training.tokens import check_no_other_tokens, choose_tokens

FLOAT32_BYTES = 4


def build_start_model(
    recipe: Recipe,
    parent: ParentModel | None,
    store: Store,
    *,
    taken: Tokens | None = None,
    say: Say = lambda _: None,
) -> Recogniser:
    """The model of round 0 of a federated run: the parent's, or a fresh one, where it takes tokens with those."""
    found = None if parent is None else parent.load()
    if found is not None and found.family.name == recipe.model.family:
        check_no_other_tokens(recipe)
        language = found.language if found.family.recognition is not None else store.language
        start = init_start_model(recipe, found.tokens, found, language=language)
    else:
        # A parent of another family knows neither tokens nor a language; a part of its parameters may fit.
        may_read = not recipe.federated.privacy.adds_noise
        tokens = choose_tokens(recipe, store, may_read_texts=may_read, taken=taken)
        start = init_start_model(recipe, tokens, found, language=store.language)
        if found is not None:
            say(describe_inherited(start, found))
    factor = recipe.federated.rescale_norms
    if factor is None:
        return start
    if start.family.transfer.rescale is None:
        raise InputError(f"federation.rescale_norms={factor}: models of family={start.family.name} cannot be rescaled")
    return replace(
        start, parameters=start.family.transfer.rescale(start.parameters, factor=factor, settings=start.settings)
    )


def init_start_model(recipe: Recipe, tokens: Tokens, parent: Recogniser | None, *, language: str) -> Recogniser:
    """Fresh parameters, or those of `parent` as far as they fit (`adapt_parameters`)."""
    family, settings = find_family(recipe.model.family), recipe.model.settings(tokens=tokens.size + 1)
    generator = torch_stream(recipe.seed, "init")
    if parent is None:
        return create_recogniser(family, settings, tokens, language=language, generator=generator)
    parameters = adapt_parameters(parent, settings, tokens, family=family, generator=generator)
    return Recogniser(family, settings, tokens, parameters, language)


def split_trained_part(recipe: Recipe, start: Recogniser) -> Trainable:
    """What of `start` the clients train; the same whenever it is asked for."""
    part = choose_trained_part(recipe, start)
    generator = torch_stream(recipe.seed, "low rank")
    return split_parameters(
        part, start.parameters, is_lora_target=start.family.transfer.is_lora_target, generator=generator
    )


def check_trained_part(start: Recogniser, part: Trainable) -> None:
    """Refuse what its family knows that it cannot be trained."""
    if (check := start.family.training.check) is not None:
        check(start.family, start.settings, part)


def choose_trained_part(recipe: Recipe, start: Recogniser) -> Part | None:
    """What of `start` is trained, by its own options or by the recipe; None is all of it."""
    own: Part | None = start.family.transfer.part(start.settings)
    text = None if recipe.federation is None else recipe.federation.trainable
    if own is not None and text is not None:
        raise InputError(f"federation.trainable={text}: model.train={own.text} says what is trained; expected one")
    return own if text is None else parse_part(text)


def describe_base_model(start: Recogniser) -> dict[str, str]:
    """What of `start` came from outside, for `inputs.json`: a base model's name, revision and digests of its files."""
    return {f"{BASE_MODEL} {name}": value for name, value in start.family.transfer.origin(start.settings).items()}


def count_communication(
    part: Trainable, *, model_bits: int | None = None, has_base_files: bool = False
) -> dict[str, Any]:
    """Bytes per client and round, for `results.json`; what is frozen is sent once, to new clients.

    With `model_bits` the model is sent down in so many bits a number. With `has_base_files` clients have what is frozen
    from files of their own; what is in no file (a new head that is not trained, a seed model's changes) is not counted.
    """
    frozen = 0 if has_base_files else part.frozen_count
    trained, down = part.trained_count, FLOAT32_BYTES if model_bits is None else model_bits // 8
    return {
        "trained_parameters": trained,
        "frozen_parameters": part.frozen_count,
        "bytes_up": FLOAT32_BYTES * trained,
        "bytes_down": down * trained,
        "bytes_down_first": FLOAT32_BYTES * (trained + frozen),
    }


def describe_part(part: Trainable, *, model_bits: int | None = None) -> str:
    """How much of the model is trained and sent, in one line."""
    trained, total = part.trained_count, part.trained_count + part.frozen_count
    sent = format_communication(count_communication(part, model_bits=model_bits))
    share = f"{trained / total:.2%}" if trained / total >= 1e-4 else f"{100 * trained / total:.1g}%"
    return f"training {trained:,} of {total:,} parameters ({share}): {sent}"


def format_communication(sent: Mapping[str, Any]) -> str:
    """What `count_communication` found, in words."""
    up, down = (format_bytes(count) for count in (sent["bytes_up"], sent.get("bytes_down", sent["bytes_up"])))
    amount = f"{up} each way" if up == down else f"{up} up and {down} down"
    return f"{amount} per client and round"


def format_bytes(count: int) -> str:
    """In MB; in kB where that would be hundredths."""
    return f"{count / 1e6:,.2f} MB" if count >= 10_000 else f"{count / 1e3:,.1f} kB"
