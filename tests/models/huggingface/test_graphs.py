"""A recorded network computes what the plain one computes, whatever the padding, one by one and in stacks.

Without a GPU the recorder does the work again (`ReplayingRecorder`): what is tested then is everything but CUDA itself.
On a CUDA device the same tests run on real graphs.
"""

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")

from tests.models.huggingface.test_family import assert_close, noise, part_of, settings_of  # noqa: E402
from tests.models.huggingface.tiny_models import write_tiny_model  # noqa: E402
from tests.models.replaying_recorder import ReplayingRecorder  # noqa: E402

from sottovoce.data.audio.waveforms import Features  # noqa: E402
from sottovoce.models.cuda_graphs import CudaRecorder, GraphRecorder  # noqa: E402
from sottovoce.models.huggingface import family, graphs  # noqa: E402
from sottovoce.models.huggingface.graphs import RecordedNetwork, padded_frames, padded_tokens  # noqa: E402
from sottovoce.models.huggingface.settings import Settings  # noqa: E402
from sottovoce.models.trainable import Trainable  # noqa: E402

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if CUDA else torch.device("cpu")
RECORDED = ["wav2vec2-bert", "parakeet_ctc", "whisper", "moonshine"]


class CountingRecorder(ReplayingRecorder):
    """Counts what was recorded."""

    count = 0

    def record(self, work: Any) -> Any:
        self.count += 1
        return super().record(work)


def make_recorder(device: torch.device) -> GraphRecorder:
    return CudaRecorder(device, keep_free_bytes=0) if device.type == "cuda" else ReplayingRecorder()


def on_device(part: Trainable) -> tuple[Trainable, dict[str, Tensor]]:
    frozen = replace(part.frozen, tensors={name: own.to(DEVICE) for name, own in part.frozen.tensors.items()})
    leaves = {name: own.to(DEVICE).requires_grad_() for name, own in part.initial.items()}
    return replace(part, frozen=frozen), leaves


def batches(settings: Settings) -> Iterator[Features]:
    """Several shapes, some of them twice, with noise of their own."""
    for number, utterances in enumerate((2, 1, 2, 3, 1, 2)):
        made = noise(settings, utterances=utterances)
        features_UTF = (made.features_UTF * (1 + 0.1 * number)).to(DEVICE)
        yield replace(made, features_UTF=features_UTF)


def gradients(loss: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    # Copied: those of a recorded pass are there until the next.
    return {
        name: torch.zeros_like(own) if gradient is None else gradient.clone()
        for (name, own), gradient in zip(leaves.items(), found, strict=True)
    }


@pytest.mark.parametrize("train", ["lora(r=2)", "lora(r=2, alpha=6)", "lora(r=2, factors=b)", "norms", "all"])
@pytest.mark.parametrize("kind", RECORDED)
def test_recorded_training_is_plain_training(kind: str, train: str, tmp_path: Path) -> None:
    settings = settings_of(write_tiny_model(kind, tmp_path), train=train)
    part, leaves = on_device(part_of(settings))
    recorded = RecordedNetwork(record=make_recorder)
    for features in batches(settings):
        with torch.no_grad():  # the same addresses, other values
            for own in leaves.values():
                own.mul_(0.97)
        losses, found = [], []
        for how in ({}, {"scores": recorded}):
            whole = part.frozen.with_trained(leaves)
            loss = family.loss(whole, features, settings=settings, draws=0, **how)  # type: ignore[arg-type]
            losses.append(float(loss.detach()))
            found.append(gradients(loss, leaves))
        assert losses[1] == pytest.approx(losses[0], rel=1e-9)
        assert_close(found[1], found[0])


@pytest.mark.parametrize(
    ("kind", "train"),
    [*((kind, "lora(r=2, alpha=6)") for kind in RECORDED if kind != "whisper"), ("moonshine", "all")],
)
def test_recorded_stacks_are_plain_stacks(kind: str, train: str, tmp_path: Path) -> None:
    settings = settings_of(write_tiny_model(kind, tmp_path), train=train)
    part, single = on_device(part_of(settings))
    recorded = RecordedNetwork(record=make_recorder)
    features = replace(made := noise(settings, utterances=5), features_UTF=made.features_UTF.to(DEVICE))
    for clients, rows_U in ((3, [0, 0, 1, 2, 2]), (5, [0, 1, 2, 3, 4]), (3, [0, 1, 1, 2, 2])):  # engines go to and fro
        leaves = {
            name: torch.stack([own.detach() * (1 - 0.01 * client) for client in range(clients)]).requires_grad_()
            for name, own in single.items()
        }
        for _ in range(2):
            found = []
            for how in ({}, {"scores": recorded}):
                losses_N = family.stacked_losses(
                    part.frozen.with_trained(leaves),
                    features,
                    rows_U=rows_U,
                    clients=clients,
                    settings=settings,
                    draws=None,
                    **how,  # type: ignore[arg-type]
                )
                found.append(gradients(losses_N.sum(), leaves))
            assert_close(found[1], found[0])


def test_a_shape_is_recorded_once_and_weights_are_let_go(tmp_path: Path) -> None:
    settings = settings_of(write_tiny_model("moonshine", tmp_path))
    recorder = CountingRecorder()
    recorded = RecordedNetwork(record=lambda _: recorder)
    part = part_of(settings)
    features = noise(settings, utterances=2)
    first: Any = None
    for number in range(graphs.MOST_WEIGHTS + 1):
        leaves = {name: own.clone().requires_grad_() for name, own in part.initial.items()}
        first = first or weakref.ref(leaves["model.encoder.layers.0.self_attn.q_proj.lora_a"])
        for frames in (11_999, 11_000, 10_001):  # of one padded length
            shorter = replace(
                features, features_UTF=features.features_UTF[:, :frames], frames_U=features.frames_U.clamp(max=frames)
            )
            whole = part.frozen.with_trained(leaves)
            gradients(family.loss(whole, shorter, settings=settings, draws=0, scores=recorded), leaves)
        assert recorder.count == 2 * (number + 1)  # forwards and backwards
    del leaves, whole
    gc.collect()
    assert first() is None


def test_large_passes_evaluation_and_what_cannot_be_recorded_run_plainly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(write_tiny_model("moonshine", tmp_path))
    part, features = part_of(settings), noise(settings)
    leaves = {name: own.requires_grad_() for name, own in part.initial.items()}
    whole = part.frozen.with_trained(leaves)
    recorder = CountingRecorder()
    large = RecordedNetwork(record=lambda _: recorder, most_bytes=0)
    family.loss(whole, features, settings=settings, draws=0, scores=large)
    small = RecordedNetwork(record=lambda _: recorder)
    with torch.no_grad():
        plain = family.loss(whole, features, settings=settings, draws=None, scores=small)
    assert recorder.count == 0

    def refuse(_self: Any, _work: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(CountingRecorder, "record", refuse)
    with pytest.warns(UserWarning, match=r"moonshine cannot be recorded, and is slower \(operation not permitted"):
        found = family.loss(whole, features, settings=settings, draws=0, scores=small)
    assert float(found.detach()) == pytest.approx(float(plain), rel=1e-9)
    family.loss(whole, features, settings=settings, draws=0, scores=small)  # and does not try again


class NoWaiting(TorchDispatchMode):
    """Refuses what a graph cannot record: reading a value on the host, or copying from there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.name()
        if name in ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select"):
            assert args[0].device.type == "cpu", name
        if name == "aten::index.Tensor":
            assert all(own is None or own.dtype != torch.bool for own in args[1]), name
        if name.startswith(("aten::index_put", "aten::_index_put_impl_")) and any(
            own is not None and own.dtype == torch.bool for own in args[1]
        ):
            assert args[2].numel() == 1, name  # one value is filled in, which needs no places
        found = func(*args, **kwargs)
        if name in ("aten::_to_copy", "aten::copy_"):
            source = args[1] if name == "aten::copy_" else args[0]
            assert source.device == found.device or source.dim() == 0, f"{name} from {source.device}"
        return found


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("train", ["lora(r=2, alpha=6)", "all"])
@pytest.mark.parametrize("kind", RECORDED)
def test_what_is_recorded_waits_for_nothing(
    kind: str, train: str, masked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device without values, forwards and backwards, while they are told that a stream is recorded."""
    monkeypatch.setattr(transformers.utils.import_utils, "is_cuda_stream_capturing", lambda: True)
    settings = settings_of(write_tiny_model(kind, tmp_path), train=train)
    part, made = part_of(settings), noise(settings)
    if not masked:
        made = made.take(torch.tensor([0]))
    inputs, norm_frames_U = network_tensors(made, settings)
    frozen = {name: own.to("meta") for name, own in part.frozen.tensors.items()}
    leaves = {name: own.to("meta").requires_grad_() for name, own in part.initial.items()}
    whole = replace(part.frozen, tensors=frozen).with_trained(leaves)
    given = {name: own.to("meta") for name, own in inputs.items()}
    norm = None if norm_frames_U is None else norm_frames_U.to("meta")
    graphs.network_scores(whole, settings, given, norm_frames_B=norm)  # tables are made at the first call
    with NoWaiting():
        scores = graphs.network_scores(whole, settings, given, norm_frames_B=norm)
        torch.autograd.grad(scores.sum(), list(leaves.values()), allow_unused=True)


def network_tensors(made: Features, settings: Settings) -> tuple[dict[str, Tensor], Tensor | None]:
    inputs, norm_frames_U, _ = family.network_inputs(made.features_UTF, made.frames_U, settings)
    if not settings.is_ctc:
        inputs["decoder_input_ids"] = made.tokens_UL
    return inputs, norm_frames_U


def test_lengths_are_few_and_little_longer(tmp_path: Path) -> None:
    settings = settings_of(write_tiny_model("moonshine", tmp_path))
    lengths = {frames: padded_frames(frames, settings) for frames in range(1_000, 500_000, 100)}
    assert len(set(lengths.values())) < 64
    assert all(frames <= own < frames * 1.125 + 2_000 for frames, own in lengths.items())
    assert padded_frames(64_000, settings) == 64_000
    assert [padded_tokens(tokens, longest=20) for tokens in (1, 8, 9, 17, 20, 23)] == [8, 8, 16, 20, 20, 23]
