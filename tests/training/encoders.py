"""Two families with one encoder: one learns without writing anything down, the other writes what it hears."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from sottovoce.models.family import Family
from sottovoce.models.module import ctc_family


@dataclass(frozen=True)
class Settings:
    tokens: int
    width: int
    layers: int


@dataclass(frozen=True, kw_only=True)
class Options:
    family: str
    width: int = 8
    layers: int = 1

    def settings(self, *, tokens: int) -> Settings:
        return Settings(tokens, self.width, self.layers)


class Network(nn.Module):
    """A frame at a time; `head` names what follows the encoder."""

    def __init__(self, settings: Settings, *, head: str) -> None:
        super().__init__()
        sizes = [80, *[settings.width] * settings.layers]
        self.encoder = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(sizes))
        self.head = head
        self.add_module(head, nn.Linear(settings.width, settings.tokens))

    def forward(self, features_UTF: Tensor, frames_U: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.encoder:
            features_UTF = layer(features_UTF).relu()
        scores_UTV: Tensor = self.get_submodule(self.head)(features_UTF)
        return scores_UTV, frames_U


def inherited(_other: Any, settings: Settings, *, shapes: Any) -> frozenset[str]:
    named: Mapping[str, tuple[int, ...]] = shapes(settings)
    return frozenset(name for name in named if name.startswith("encoder."))


def _family(name: str, head: str) -> Family[Any, Any]:
    made = ctc_family(
        f"tests.training.encoders:{name}",
        Options=Options,
        Settings=Settings,
        build=partial(Network, head=head),
        stride=1,
        token_tensors=frozenset({f"{head}.weight", f"{head}.bias"}),
        smoke_options={"width": 4, "layers": 1},
    )
    return replace(made, transfer=replace(made.transfer, inherited=partial(inherited, shapes=made.shapes)))


MUTE = replace(_family("MUTE", "guess"), recognition=None)
WRITER = _family("WRITER", "output")
