"""Any module as a family: what it may not remember, what is kept fixed, and LoRA."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sottovoce.base.errors import InputError
from sottovoce.base.seeds import stream, torch_stream
from sottovoce.data.audio.waveforms import Features, pad_waveforms
from sottovoce.models.family import Family
from sottovoce.models.module import ctc_family
from sottovoce.models.trainable import with_corrections


@dataclass(frozen=True)
class Settings:
    layer: type[nn.Module]
    tokens: int = 5


class Frames(nn.Module):
    """Each frame by itself, but for one layer on its channels, [U, F, T]."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.between = settings.layer()
        self.output = nn.Linear(80, settings.tokens)

    def forward(self, features_UTF: Tensor, frames_U: Tensor) -> tuple[Tensor, Tensor]:
        return self.output(self.between(features_UTF.mT).mT), frames_U


class Statistics(nn.BatchNorm1d):
    def __init__(self) -> None:
        super().__init__(80)


class Groups(nn.GroupNorm):
    def __init__(self) -> None:
        super().__init__(4, 80)


class Remembering(nn.Module):
    """By a plain attribute, which no list of buffers names."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        before, self.last = self.last, x.detach().mean()
        return x + before


class CountingLong(nn.Module):
    """A buffer that changes with long utterances only, longer than a trial would be."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] > 300:
            self.count += 1
        return x + self.count


def family(*fixed: str) -> Family[Any, int]:
    return ctc_family(
        "tests:FAMILY",
        Options=object,
        Settings=Settings,
        build=Frames,
        stride=1,
        token_tensors=frozenset({"output.weight", "output.bias"}),
        smoke_options={},
        fixed=fixed,
    )


def said(seconds: float) -> Features:
    samples = stream(1, "noise").integers(-3000, 3000, size=int(16_000 * seconds)).astype(np.int16)
    return family().front_end.extract_features(pad_waveforms([samples], [[1, 2]]), settings=None, dtype=torch.float32)


def loss(made: Family[Any, int], settings: Settings, seconds: float) -> Tensor:
    parameters = made.init(settings, generator=torch_stream(1, "init"))
    return made.loss(parameters, said(seconds), settings=settings, draws=3)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (Statistics, r"training changes the buffer 'between.running_mean', .* or fixed=\('between',\)"),
        (Remembering, "depends on its inputs before, so that one client would move another's update"),
    ],
)
def test_a_module_that_remembers_its_speech_is_refused(layer: type[nn.Module], message: str) -> None:
    with pytest.raises(InputError, match=message):
        family().init(Settings(layer), generator=torch_stream(1, "init"))


def test_a_buffer_that_a_trial_does_not_see_changing_changes_for_nobody_else() -> None:
    settings = Settings(CountingLong)
    before = loss(family(), settings, 1.0)
    loss(family(), settings, 5.0)
    assert torch.equal(loss(family(), settings, 1.0), before)


@pytest.mark.parametrize(("layer", "fixed"), [(Statistics, ("between",)), (Groups, ())])
def test_statistics_that_are_fixed_and_norms_without_any_are_welcome(
    layer: type[nn.Module], fixed: tuple[str, ...]
) -> None:
    made, settings = family(*fixed), Settings(layer)
    first, again = (loss(made, settings, 1.0) for _ in range(2))
    assert torch.equal(first, again)
    assert made.shapes(settings)["output.weight"] == (5, 80)
    assert not [name for name in made.shapes(settings) if "running" in name]


def test_low_rank_corrections_are_added_to_their_matrices() -> None:
    generator = torch_stream(1, "corrections")
    weight, a, b = (torch.randn(shape, generator=generator) for shape in ((3, 4), (2, 4), (3, 2)))
    whole = with_corrections({"output.weight": weight, "output.lora_a": a, "output.lora_b": b})
    assert whole.keys() == {"output.weight"}
    torch.testing.assert_close(whole["output.weight"], weight + b @ a)
