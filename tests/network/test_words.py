"""What travels as numbers comes back as it was, and sums of words are sums of updates."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.federated.small import MADE_FROM_NOTHING

from sottovoce.base.errors import InputError, InvariantError
from sottovoce.data.text.tokens import NO_TOKENS, CharacterTokens
from sottovoce.federated.cohort import quantise_model
from sottovoce.flat.layout import Layout
from sottovoce.models.family import find_family
from sottovoce.models.recogniser import Recogniser, create_recogniser
from sottovoce.network.messages import Refused
from sottovoce.network.model_transfer import read_round_model, read_start_model, write_round_model, write_start_model
from sottovoce.network.secure_sum.words import decode_sum, encode_update, read_update, update_bytes
from sottovoce.privacy.ledger import Charge
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.settings import PrivacySettings

LAYOUT = Layout(("a", "b"), ((5, 7), (3,)))


def plan_of(bits: int | None, *, z: float = 0.5, clip_bound: float = 0.3, population_size: int = 1000) -> Plan:
    settings = PrivacySettings(
        population_size=population_size,
        privacy_unit="speaker",
        cohort_size=10,
        clip_bound=clip_bound,
        noise_multiplier=z,
        delta=1e-6,
        root_seed=7,
    )
    return Plan(settings, LAYOUT, sum_bits=bits)


def updates(count: int) -> torch.Tensor:
    drawn = torch.randn(count, LAYOUT.flat_size, generator=torch.Generator().manual_seed(3))
    LAYOUT.clear_padding(drawn)
    return drawn


def test_a_model_comes_back() -> None:
    model_P = updates(1)[0]
    sent = write_round_model(model_P, LAYOUT)
    assert len(sent) == 4 * LAYOUT.dimension
    assert torch.equal(read_round_model(sent, LAYOUT), model_P)


WILD = [0.0, 1.0, -1 / 3, 1e-9, 6e-8, -1e30, 70_000.0, 65_504.0, torch.inf, -torch.inf]


def test_of_16_bits_it_is_half_as_long_and_comes_back_as_it_was_rounded() -> None:
    model_P = updates(1)[0]
    model_P[: len(WILD)] = torch.tensor(WILD)
    sent_P = quantise_model(model_P, 16)
    sent = write_round_model(sent_P, LAYOUT, model_bits=16)
    assert len(sent) == 2 * LAYOUT.dimension
    assert torch.equal(read_round_model(sent, LAYOUT, model_bits=16), sent_P)
    assert torch.equal(quantise_model(sent_P, 16), sent_P)
    assert quantise_model(model_P, None) is model_P
    with pytest.raises(Refused):
        read_round_model(sent, LAYOUT)
    with pytest.raises(InvariantError, match="more bits than it is sent with"):
        write_round_model(updates(1)[0], LAYOUT, model_bits=16)


@given(st.floats(width=32, allow_nan=False))
def test_float16_is_within_half_of_its_last_place(value: float) -> None:
    """2⁻¹¹ of itself where float16 is normal, 2⁻²⁵ below that; and never infinite."""
    rounded = float(quantise_model(torch.tensor([value]), 16))
    kept = min(max(value, -65_504.0), 65_504.0)
    assert abs(rounded - kept) <= max(abs(kept) * 2.0**-11, 2.0**-25)


@given(length=st.integers(0, 400))
def test_a_model_of_another_length_is_refused(length: int) -> None:
    if length == 4 * LAYOUT.dimension:
        return
    with pytest.raises(Refused):
        read_round_model(bytes(length), LAYOUT)


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("z", [0.0, 0.5, 40.0])
def test_sums_of_words_are_sums_of_updates(bits: int, z: float) -> None:
    plan = plan_of(bits, z=z)
    together = plan.new_total()
    words = np.zeros(LAYOUT.dimension, dtype=f"<u{bits // 8}")
    for update_P in updates(20):
        plan.accumulate(together, update_P)
        alone = plan.new_total()
        plan.accumulate(alone, update_P)
        sent = encode_update(alone, plan).tobytes()
        assert len(sent) == update_bytes(plan)
        words += read_update(sent, plan)
    assert torch.equal(decode_sum(words, plan), together)
    # The mean of what was lost to the grid is below one cell of each coordinate.
    exact = sum(plan_of(None, z=z).clip(update_P).double() for update_P in updates(20))
    assert (exact - together).abs().max() <= 20 * (plan.grid or 0) + 20 * 2.0**-24 * plan.clip_bound


@given(population_size=st.integers(10, 10**6), clip_bound=st.floats(1e-6, 1e6), z=st.sampled_from([0.0, 0.3, 5.0]))
def test_the_largest_sum_fits(population_size: int, clip_bound: float, z: float) -> None:
    plan = plan_of(32, z=z, clip_bound=clip_bound, population_size=population_size)
    one = LAYOUT.zeros()
    one[0] = 2 * clip_bound  # everybody has all of their bound in one coordinate
    total = plan.new_total()
    plan.accumulate(total, one)
    assert int(encode_update(total, plan)[0]) * population_size < 2**31
    words = encode_update(total, plan) * np.uint32(population_size)
    assert torch.equal(decode_sum(words, plan), total * population_size)


@pytest.mark.parametrize("bits", [32, 64])
def test_a_simulations_noise_is_the_same_on_a_grid(bits: int) -> None:
    noised = []
    for plan in (plan_of(None), plan_of(bits)):
        charge = Charge(plan.event, step=3, clip_bound=plan.clip_bound)
        noised.append(plan.add_noise(plan.new_total(), charge))
    assert torch.equal(*noised)


def test_a_plan_without_sum_bits_is_as_before() -> None:
    plan = plan_of(None)
    assert plan.grid is None
    assert plan.new_total().dtype == torch.float32
    assert "sum_bits" not in plan.describe()
    assert plan_of(64).describe()["sum_bits"] == 64


def test_what_cannot_be_summed_is_refused() -> None:
    with pytest.raises(InputError, match="sum_bits=16: expected 32 or 64"):
        plan_of(16)
    with pytest.raises(InputError, match="nothing bounds a sum"):
        plan_of(32, clip_bound=float("inf"), z=0.0)
    plan = plan_of(64)
    off = plan.new_total()
    off[0] = (plan.grid or 1.0) / 2
    with pytest.raises(InvariantError, match="off the grid"):
        encode_update(off, plan)
    small = plan_of(32)
    for cells in (2.0**31, -(2.0**31) - 1, 2.0**70, float("nan")):
        large = small.new_total()
        large[0] = cells * (small.grid or 1.0)
        with pytest.raises(InvariantError, match="too large for a word"):
            encode_update(large, small)
    with pytest.raises(Refused):
        read_update(bytes(8), plan)


# Start models.


@pytest.fixture(scope="module", params=sorted(MADE_FROM_NOTHING))
def start(request: pytest.FixtureRequest) -> tuple[Recogniser, Any]:
    """A small model of each family, and the section of a recipe that it is of."""
    family = find_family(request.param)
    tokens = CharacterTokens("abc") if family.training.needs_text else NO_TOKENS
    options = family.Options(**{**family.smoke_options, "family": family.name})
    drawn = torch.Generator().manual_seed(1)
    return create_recogniser(
        family, options.settings(tokens=tokens.size + 1), tokens, language="de", generator=drawn
    ), options


def test_a_start_model_comes_back(start: tuple[Recogniser, Any]) -> None:
    sent, options = start
    found = read_start_model(write_start_model(sent, options), options)
    assert (found.family, found.settings, found.tokens, found.language) == (
        sent.family,
        sent.settings,
        sent.tokens,
        "de",
    )
    assert list(found.parameters) == list(sent.parameters)
    assert all(torch.equal(found.parameters[name], tensor) for name, tensor in sent.parameters.items())


@given(data=st.data())
def test_any_other_start_model_is_one_line(start: tuple[Recogniser, Any], data: st.DataObject) -> None:
    """Cut short, or with some bytes of its first 4,000 changed: refused, or still a model of the same shapes."""
    sent, options = start
    content = bytearray(write_start_model(sent, options))
    for at in data.draw(st.lists(st.integers(0, 3999), max_size=3)):
        content[at % len(content)] = data.draw(st.integers(0, 255))
    kept = data.draw(st.integers(0, len(content)) | st.just(len(content)))
    try:
        found = read_start_model(bytes(content[:kept]), options)
    except InputError as error:
        problem = str(error)
        assert "\n" not in problem
        return
    assert {name: tensor.shape for name, tensor in found.parameters.items()} == {
        name: tensor.shape for name, tensor in sent.parameters.items()
    }


def test_a_start_model_of_another_kind_is_refused(start: tuple[Recogniser, Any]) -> None:
    sent, options = start
    name = next(iter(sent.parameters))
    for changed, problem in (
        ({name: torch.zeros(3, 3, 3)}, "has shape"),
        ({"stray": torch.zeros(1)}, "unknown parameter 'stray'"),
    ):
        with pytest.raises(InputError, match=problem):
            read_start_model(
                write_start_model(replace(sent, parameters={**sent.parameters, **changed}), options), options
            )
    others = {each: value for each, value in sent.parameters.items() if each != name}
    with pytest.raises(InputError, match="is missing"):
        read_start_model(write_start_model(replace(sent, parameters=others), options), options)
