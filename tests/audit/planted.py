"""Faults that break the promise, planted in the real code: what an audit, or a test, has to find."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.audit.linear import LAYOUT
from torch import Tensor

from sottovoce.flat import segments
from sottovoce.privacy import clipping, randomness, round_noise
from sottovoce.privacy import plan as plans
from sottovoce.privacy.clipping import Clipper
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.randomness import RandomSource
from sottovoce.privacy.sampling import PoissonSampler

Plant = Callable[[pytest.MonkeyPatch], None]


def no_clipping(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(clipping, "layer_scales", lambda norms, *_, **__: torch.ones_like(norms))


def wrong_norm(patch: pytest.MonkeyPatch) -> None:
    """The largest element in place of the length."""
    layer_norms = segments.layer_norms

    def largest(update: Tensor, layers: Any) -> Tensor:
        if update.dim() == 2:
            return torch.stack([largest(row, layers) for row in update]) if len(update) else layer_norms(update, layers)
        return torch.stack([part.abs().max().double() for part in LAYOUT.parts(update)])

    patch.setattr(segments, "layer_norms", largest)


def each_layer_by_the_whole_bound(patch: pytest.MonkeyPatch) -> None:
    """Every layer is clipped to C, so that all of them together are longer."""
    scales = clipping.layer_scales

    def apart(norms: Tensor, norm: Tensor, **options: Any) -> Tensor:
        columns = [
            scales(one[..., None], one, **{**options, "bounds": options["bounds"][:1]}) for one in norms.unbind(-1)
        ]
        return torch.cat(columns, dim=-1) if norms.dim() == 2 else torch.cat(columns)

    patch.setattr(clipping, "layer_scales", apart)


def less_noise(factor: float) -> Plant:
    def plant(patch: pytest.MonkeyPatch) -> None:
        whole = round_noise.add_gaussian
        patch.setattr(
            round_noise, "add_gaussian", lambda total, *, std, **named: whole(total, std=std / factor, **named)
        )

    return plant


def quieter_plan(patch: pytest.MonkeyPatch) -> None:
    """Wrong where the plan works its noise out, so that all who ask the plan hear the same."""
    patch.setattr(Plan, "noise_std_sum", property(lambda self: self.settings.z * self.clip_bound / 2))


def no_noise_in(name: str) -> Plant:
    def plant(patch: pytest.MonkeyPatch) -> None:
        whole = round_noise.add_gaussian

        def but_one(total: Tensor, **named: Any) -> Tensor:
            view = LAYOUT.views(total)[name]
            before = view.clone()
            whole(total, **named)
            view.copy_(before)
            return total

        patch.setattr(round_noise, "add_gaussian", but_one)

    return plant


def noise_used_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RandomSource, "noise_seed", lambda self, step, attempt: 5)


def noise_used_again_after_a_resume(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(randomness, "_again", lambda attempt: ())


def everybody_sampled(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PoissonSampler, "sample", lambda self, size, *, words: np.arange(size, dtype=np.int64))


def added_twice(patch: pytest.MonkeyPatch) -> None:
    once = Clipper.accumulate

    def twice(self: Clipper, total: Tensor, update: Tensor, **named: Any) -> Any:
        once(self, total, update, **named)
        return once(self, total, update, **named)

    patch.setattr(Clipper, "accumulate", twice)


def weights_above_the_cap(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(plans, "bounded_weight", lambda amount, *, cap: amount / cap)


def weights_above_the_cap_unchecked(patch: pytest.MonkeyPatch) -> None:
    weights_above_the_cap(patch)
    patch.setattr(
        clipping,
        "_weighted",
        lambda scales, weight: (
            scales * (torch.as_tensor(weight).to(scales).reshape(-1, 1) if scales.dim() == 2 else weight)
        ),
    )


def bystander(patch: pytest.MonkeyPatch) -> None:
    """Who comes later counts less: one user's update decides how much of another's is left."""
    alone = Plan.accumulate

    def beside(self: Plan, total: Tensor, update: Tensor, **named: Any) -> Any:
        return alone(self, total, update / (1 + float(total.norm())), **named)

    patch.setattr(Plan, "accumulate", beside)


def count_without_noise(patch: pytest.MonkeyPatch) -> None:
    class Silent:
        def normal(self, mean: float, std: float) -> float:
            return 0.0

    patch.setattr(RandomSource, "count_noise", lambda self, step, attempt: Silent())


def is_far(value: float, claimed: float, *, draws: int) -> bool:
    """Whether a standard deviation of so many draws is further off than once in a million times."""
    return abs(value / claimed - 1) > 5 / math.sqrt(2 * draws)
