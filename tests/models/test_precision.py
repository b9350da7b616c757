"""What a model computes in by default, where the processor multiplies bfloat16 and where it does not (both planted)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.federated.small import tokens_of

from sottovoce.base.seeds import torch_stream
from sottovoce.evaluation.recognise import place_for_evaluation
from sottovoce.models import precision
from sottovoce.models.family import DEFAULT, REGISTERED, find_family
from sottovoce.models.precision import Precision, choose_dtype, multiplies_bfloat16
from sottovoce.models.recogniser import create_recogniser

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TRANSFORMER = find_family(DEFAULT)


def settings_of(width: int, **others: Any) -> Any:
    return TRANSFORMER.Settings(tokens=6, layers=1, width=width, heads=4, dropout=0.0, layer_drop=0.0, **others)


@pytest.fixture
def known_anew() -> Iterator[None]:
    """What is known of this processor is found out anew, before and after."""
    multiplies_bfloat16.cache_clear()
    yield
    multiplies_bfloat16.cache_clear()


@pytest.mark.parametrize(
    ("asked", "device", "width", "has_instructions", "expected"),
    [
        ("auto", CPU, 256, True, torch.bfloat16),
        ("auto", CPU, 192, True, torch.bfloat16),
        ("auto", CPU, 144, True, torch.float32),  # the widest model with which CPU results were made
        ("auto", CPU, 96, True, torch.float32),  # `tiny`
        ("auto", CPU, 256, False, torch.float32),  # bfloat16 would be emulated
        ("auto", CUDA, 96, False, torch.bfloat16),
        ("float32", CPU, 256, True, torch.float32),
        ("float32", CUDA, 256, True, torch.float32),
        ("bfloat16", CPU, 96, False, torch.bfloat16),  # whoever asks for it gets it
    ],
)
def test_the_default_goes_by_width_and_processor(
    asked: Precision,
    device: torch.device,
    width: int,
    has_instructions: bool,
    expected: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(precision, "multiplies_bfloat16", lambda: has_instructions)
    assert choose_dtype(asked, device, family=TRANSFORMER, settings=settings_of(width)) == expected


@pytest.mark.parametrize("name", sorted(set(REGISTERED) - {DEFAULT}))
def test_families_that_were_not_measured_to_gain_stay_in_float32(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "multiplies_bfloat16", lambda: True)
    assert choose_dtype("auto", CPU, family=find_family(name), settings=None) == torch.float32


@pytest.mark.parametrize(
    ("flags", "capability", "expected"),
    [
        ("fpu avx2 avx512f avx512_bf16", "AVX512", True),
        ("fpu avx2 avx512f amx_bf16 amx_tile", "AVX512", True),
        ("fpu avx2 avx512f avx512_vnni", "AVX512", False),  # torch would emulate it
        ("fpu avx2 avx512f avx512_bf16", "AVX2", False),  # ATEN_CPU_CAPABILITY=avx2
        ("fpu avx2 avx512f avx512_bf16", "DEFAULT", False),
        ("", "AVX512", False),
    ],
)
@pytest.mark.usefixtures("known_anew")
def test_a_processor_is_known_by_its_flags(
    flags: str, capability: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(f"processor\t: 0\nflags\t\t: {flags}\nbogomips\t: 5192\n\nprocessor\t: 1\nflags\t\t: {flags}\n")
    monkeypatch.setattr(precision, "PROCESSOR_INFO", info)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert multiplies_bfloat16() is expected


@pytest.mark.usefixtures("known_anew")
def test_a_system_that_does_not_say_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "PROCESSOR_INFO", tmp_path / "nothing")
    assert not multiplies_bfloat16()


@pytest.mark.parametrize(("has_instructions", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_evaluation_computes_in_the_same(
    has_instructions: bool, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "multiplies_bfloat16", lambda: has_instructions)
    generator = torch_stream(1, "init")
    wide, narrow = (
        create_recogniser(TRANSFORMER, settings_of(width), tokens_of(TRANSFORMER), language="en", generator=generator)
        for width in (192, 96)
    )
    assert {p.dtype for p in place_for_evaluation(wide, CPU).parameters.values()} == {expected}
    assert {p.dtype for p in place_for_evaluation(narrow, CPU).parameters.values()} == {torch.float32}
