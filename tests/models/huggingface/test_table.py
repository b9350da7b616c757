"""Each cell of the guide's table of classes, and what "CPU" and "GPU" mean in it.

With a GPU, the same tests run there too.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="the extra hf is not installed")

from tests.guides import DOCS
from tests.models.huggingface.class_table import CLASSES, PARTS, YES, list_columns, make_table
from tests.models.huggingface.test_family import gradients_of, noise, part_of, settings_of
from tests.models.huggingface.tiny_models import KINDS

from sottovoce.data.audio.waveforms import Features
from sottovoce.models.huggingface import family
from sottovoce.models.huggingface.family import FAMILY
from sottovoce.models.trainable import Frozen
from sottovoce.training.run_context import deterministic_kernels

GUIDE = DOCS / "guides/pretrained-models.md"
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")),
]
# Of the largest gradient. Measured on a CPU, over all of KINDS and PARTS: at most 1.8e-5 (Wav2Vec2-BERT, LoRA). A GPU
# adds in another order, so ten times that is allowed.
CLOSE = 2e-4
NOT_TESTED = "not tested yet"
OF_THE_MACHINE = {"CPU", "GPU", "network"}  # not what a class alone decides: tested below, and in tests/network

Folders = Callable[[str], Path]


def rows_of(table: str) -> dict[str, dict[str, str]]:
    """Cells by class and column, with the words of refusals in the place of their numbers."""
    words = dict(re.findall(r"^(\d+)\. (.+)$", table, re.MULTILINE))
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]
    columns, _, *rows = lines
    refused = re.compile(r"no \((\d+)\)")
    return {
        name: {
            column: words[found[1]] if (found := refused.fullmatch(cell)) else cell
            for column, cell in zip(columns[1:], cells, strict=True)
        }
        for name, *cells in rows
    }


def test_the_guide_has_the_table_that_the_code_makes(folders: Folders) -> None:
    (shown,) = re.findall(r"^\| class \|.*?(?=^\S*[A-Z#])", GUIDE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    guide, made = rows_of(shown), rows_of(make_table(folders))
    assert list(guide) == list(made) == list(CLASSES.values())
    for name, cells in made.items():
        assert {column: guide[name][column] for column in list_columns()} == cells, name
        assert guide[name].keys() - cells.keys() <= OF_THE_MACHINE
        assert guide[name]["CPU"] == YES
        # Whoever has a GPU runs the tests below there, and may then say so.
        assert guide[name]["GPU"] == YES or (guide[name]["GPU"] == NOT_TESTED and not torch.cuda.is_available())


@pytest.fixture
def exact() -> Iterator[None]:
    """A GPU's convolutions in float32 and not in fewer bits."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


def on(device: str, speech: Features) -> Features:
    """In float32; lengths stay on the host."""
    return Features(
        speech.features_UTF.float().to(device),
        speech.frames_U,
        speech.tokens_UL.to(device),
        speech.token_lengths_U.to(device),
    )


def leaves_on(device: str, initial: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: own.detach().float().to(device).requires_grad_() for name, own in initial.items()}


def frozen_on(device: str, frozen: Frozen) -> Frozen:
    return frozen.to(torch.device(device), torch.float32)


def largest(gradients: dict[str, Tensor]) -> float:
    return max(float(own.abs().max()) for own in gradients.values())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_on_a_device_is_that_of_float64(
    kind: str, part: str, device: str, folders: Folders, exact: None
) -> None:
    settings = settings_of(folders(kind), train=PARTS[part])
    whole, speech = part_of(settings), noise(settings)
    leaves = {name: own.detach().clone().requires_grad_() for name, own in whole.initial.items()}
    loss = FAMILY.loss(whole.frozen.with_trained(leaves), speech, settings=settings, draws=None)
    expected = gradients_of(loss, leaves)
    own, frozen = leaves_on(device, dict(whole.initial)), frozen_on(device, whole.frozen)
    with deterministic_kernels(True, torch.device(device)):  # as `central.repeatable` asks for
        twice = []
        for _ in range(2):
            found = FAMILY.loss(frozen.with_trained(own), on(device, speech), settings=settings, draws=None)
            twice.append(gradients_of(found, own))
    assert float(found.detach()) == pytest.approx(float(loss.detach()), rel=CLOSE)
    scale = largest(expected)
    for name, gradient in expected.items():
        assert torch.equal(twice[0][name], twice[1][name]), name
        assert float((twice[0][name].cpu().double() - gradient).abs().max()) <= CLOSE * scale, name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("part", ["LoRA", "full"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_stack_on_a_device_is_its_clients_one_by_one(
    kind: str, part: str, device: str, folders: Folders, exact: None
) -> None:
    settings = settings_of(folders(kind), train=PARTS[part])
    if family.stack_obstacle(settings) is not None:
        return  # the table says why
    whole, rows_U, clients = part_of(settings), [0, 0, 1], 2
    speech, frozen = on(device, noise(settings, utterances=3)), frozen_on(device, whole.frozen)
    generator = torch.Generator().manual_seed(3)
    stacked = leaves_on(
        device,
        {
            name: own + 0.02 * torch.randn(clients, *own.shape, generator=generator, dtype=own.dtype)
            for name, own in whole.initial.items()
        },
    )
    losses_N = family.stacked_losses(
        frozen.with_trained(stacked), speech, rows_U=rows_U, clients=clients, settings=settings, draws=None
    )
    found = gradients_of(losses_N.sum(), stacked)
    for client in range(clients):
        own = leaves_on(device, {name: tensor[client] for name, tensor in stacked.items()})
        lines = torch.tensor([line for line, row in enumerate(rows_U) if row == client])
        loss = FAMILY.loss(frozen.with_trained(own), speech.take(lines), settings=settings, draws=0)
        expected = gradients_of(loss, own)
        scale = largest(expected)
        assert float(losses_N[client].detach()) == pytest.approx(float(loss.detach()), rel=CLOSE)
        for name, gradient in expected.items():
            assert float((found[name][client] - gradient).abs().max()) <= CLOSE * scale, name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_texts_on_a_device_are_the_processors(kind: str, device: str, folders: Folders, exact: None) -> None:
    """What a CTC model emits, or the encoder's vectors of one with a decoder."""
    settings = settings_of(folders(kind))
    start = {name: own.float() for name, own in FAMILY.init(settings, generator=torch.Generator()).items()}
    read = family.emit if settings.is_ctc else family.encode
    with torch.no_grad():
        expected, frames_U = read(start, on("cpu", noise(settings)), settings=settings)
        placed = {name: own.to(device) for name, own in start.items()}
        found, found_U = read(placed, on(device, noise(settings)), settings=settings)
    assert torch.equal(frames_U, found_U)
    for line, frames in enumerate(frames_U.tolist()):
        away = (found[line, :frames].cpu() - expected[line, :frames]).abs().max()
        assert float(away) <= CLOSE * float(expected.abs().max())
