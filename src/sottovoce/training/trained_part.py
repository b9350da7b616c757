"""Which part of a run's model is trained, and what that costs on the wire."""

from collections.abc import Mapping
from typing import Any

from sottovoce.config import Recipe
from sottovoce.models.recogniser import Recogniser
from sottovoce.models.trainable import Trainable, parse_part, split_parameters
from sottovoce.seeds import torch_stream

BYTES = 4  # float32, as everything is sent but for models where a recipe says 16 bits


def trained_part(recipe: Recipe, start: Recogniser) -> Trainable:
    """What of `start` the clients train; the same whenever it is asked for."""
    text = recipe.federated.trainable
    part = None if text is None else parse_part(text)
    return split_parameters(
        part,
        start.parameters,
        is_lora_target=start.family.transfer.is_lora_target,
        generator=torch_stream(recipe.seed, "low rank"),
    )


def communication(part: Trainable, *, model_bits: int | None = None) -> dict[str, Any]:
    """Bytes per client and round, for `results.json`. Who takes part for the first time needs what is frozen, once.

    With `model_bits` a model comes down in as many bits a number.
    """
    trained, down = part.trained_count, BYTES if model_bits is None else model_bits // 8
    return {
        "trained_parameters": trained,
        "frozen_parameters": part.frozen_count,
        "bytes_up": BYTES * trained,
        "bytes_down": down * trained,
        "bytes_down_first": BYTES * (trained + part.frozen_count),
    }


def describe_part(part: Trainable, *, model_bits: int | None = None) -> str:
    """For whoever watches a run."""
    trained, total = part.trained_count, part.trained_count + part.frozen_count
    return f"training {trained:,} of {total:,} parameters ({trained / total:.2%}): " + told_bytes(
        communication(part, model_bits=model_bits)
    )


def told_bytes(sent: Mapping[str, Any]) -> str:
    """What `communication` found, in words."""
    up = sent["bytes_up"] / 1e6
    down = sent.get("bytes_down", sent["bytes_up"]) / 1e6
    amount = f"{up:,.2f} MB each way" if up == down else f"{up:,.2f} MB up and {down:,.2f} MB down"
    return f"{amount} per client and round"
