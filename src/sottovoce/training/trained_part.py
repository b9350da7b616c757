"""Which part of a run's model is trained, and what that costs on the wire."""

from typing import Any

from sottovoce.config import Recipe
from sottovoce.models.saved import Recogniser
from sottovoce.models.trainable import Trainable, parse_part, split
from sottovoce.seeds import torch_stream

BYTES = 4  # float32, as everything is sent


def trained_part(recipe: Recipe, start: Recogniser) -> Trainable:
    """What of `start` the clients train; the same whenever it is asked for."""
    text = recipe.federated.trainable
    part = None if text is None else parse_part(text)
    return split(
        part, start.parameters, corrected=start.family.corrected, generator=torch_stream(recipe.seed, "low rank")
    )


def communication(part: Trainable) -> dict[str, Any]:
    """Bytes per client and round, for `results.json`. Who takes part for the first time needs what is frozen, once."""
    trained = part.trained_count
    return {
        "trained_parameters": trained,
        "frozen_parameters": part.frozen_count,
        "bytes_up": BYTES * trained,
        "bytes_down": BYTES * trained,
        "bytes_down_first": BYTES * (trained + part.frozen_count),
    }


def describe_part(part: Trainable) -> str:
    """For whoever watches a run."""
    trained, total = part.trained_count, part.trained_count + part.frozen_count
    return (
        f"training {trained:,} of {total:,} parameters ({trained / total:.2%}): "
        f"{BYTES * trained / 1e6:,.2f} MB each way per client and round"
    )
