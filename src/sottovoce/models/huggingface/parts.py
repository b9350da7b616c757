"""What of a pretrained model is trained: a recipe's `train`, by the names of the model's tensors."""

from dataclasses import replace
from functools import cache

import torch

from sottovoce.base.errors import InputError
from sottovoce.models.huggingface.network import Network, build_network, name_part
from sottovoce.models.huggingface.settings import PARTS, Settings
from sottovoce.models.trainable import Part, parse_part, split_parameters

# Layers that low-rank corrections are for where a recipe names none: queries and values, by all their names.
LORA_TARGETS = ("q_proj", "v_proj", "linear_q", "linear_v")


def is_lora_target(name: str) -> bool:
    return name.endswith(".weight") and name.split(".")[-2] in LORA_TARGETS


@cache
def choose_part(settings: Settings) -> Part:
    """What `train` means for this model, by the names of its tensors; statistics are never trained.

    A new head is trained with whatever else is: it was drawn by chance.
    """
    head = name_part(settings, "head") if settings.head is not None else []
    if settings.train in PARTS:
        return Part(settings.train, tuple(dict.fromkeys([*name_part(settings, settings.train), *head])), None)
    part, network = parse_part(settings.train), build_network(settings)
    if part.lora is not None:
        _check_targets(part, network)
    blank = {name: torch.empty(0) for name in network.trainable}
    named = split_parameters(
        replace(part, lora=None), blank, is_lora_target=is_lora_target, generator=torch.Generator()
    ).initial
    return replace(part, patterns=tuple(dict.fromkeys([*named, *head])))


def _check_targets(part: Part, network: Network) -> None:
    """Refuse corrections of layers that the model does not have, or that are not linear."""
    assert part.lora is not None
    matrices = [name for name, shape in network.shapes.items() if len(shape) == 2 and name.endswith(".weight")]
    linear = {n for n in matrices if isinstance(network.module.get_submodule(n.rpartition(".")[0]), torch.nn.Linear)}
    chosen = [name for name in matrices if part.lora.corrects(name, is_lora_target=is_lora_target)]
    if not chosen or not linear.issuperset(chosen):
        known = ", ".join(sorted({name.split(".")[-2] for name in linear}))
        raise InputError(f"model: train={part.text}: expected targets among its linear layers ({known})")
