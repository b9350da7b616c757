"""What is checked of a pretrained model before anybody trains it: by trying it on noise, on the host.

- Every tensor that is trained moves: an adapter that no gradient reaches would be noise alone.
- An utterance is the same in any batch: padding must not change its loss.
- Training changes no buffer, and one utterance leaves nothing behind for the next.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from sottovoce.base.errors import InputError
from sottovoce.data.audio.waveforms import Features, pad_waveforms
from sottovoce.data.corpora.corpus import SAMPLE_RATE
from sottovoce.models.family import Family, Parameters
from sottovoce.models.huggingface.network import MERGED, build_network
from sottovoce.models.huggingface.settings import Settings
from sottovoce.models.trainable import Trainable

TRIED_SECONDS = (1.0, 0.7)
# Of the loss, relative: float32 with sums in another order, some layers deep.
PADDING_TOLERANCE = 1e-5


def check_can_be_trained(family: Family[Settings, int], settings: Settings, part: Trainable) -> None:
    """Refuse a model whose training would not be what its clients are promised."""
    generator = torch.Generator().manual_seed(0)
    # Corrections begin as b = 0, where no gradient reaches a.
    tried = {
        name: (
            torch.randn(tensor.shape, generator=generator) * 0.02 if name.endswith(".lora_b") else tensor.clone()
        ).to(tensor)
        for name, tensor in part.initial.items()
    }
    both = _noise(family, settings, TRIED_SECONDS, generator)
    whole = part.frozen.with_trained(tried)
    _check_padding(family, settings, whole, both)
    _check_buffers_stay(family, settings, whole, both)
    _check_every_tensor_moves(family, settings, part, tried, both)


def _noise(
    family: Family[Settings, int], settings: Settings, seconds: tuple[float, ...], generator: torch.Generator
) -> Features:
    samples = [
        (torch.randn(round(own * SAMPLE_RATE), generator=generator) * 3_000).to(torch.int16).numpy() for own in seconds
    ]
    tokens = [torch.randint(1, settings.tokens, (3,), generator=generator).tolist() for _ in seconds]
    recordings = pad_waveforms(samples, tokens)
    return family.front_end.extract_features(recordings, settings=settings, dtype=torch.float32)


def _check_padding(family: Family[Settings, int], settings: Settings, parameters: Parameters, both: Features) -> None:
    padded = Features(*(own[1:] for own in (both.features_UTF, both.frames_U, both.tokens_UL, both.token_lengths_U)))
    alone = both.take(torch.tensor([1]))
    with torch.no_grad():
        losses = [float(family.loss(parameters, one, settings=settings, draws=None)) for one in (alone, padded, alone)]
    if abs(losses[1] - losses[0]) > PADDING_TOLERANCE * abs(losses[0]):
        raise InputError(
            f"model: padding changes what {settings.kind} makes of an utterance (loss {losses[0]:.4g} alone, "
            f"{losses[1]:.4g} padded), so that clients would depend on how they are batched"
        )
    if losses[2] != losses[0]:
        raise InputError(f"model: what {settings.kind} makes of an utterance depends on those before it")


def _check_every_tensor_moves(
    family: Family[Settings, int], settings: Settings, part: Trainable, tried: dict[str, Tensor], both: Features
) -> None:
    leaves = {name: tensor.requires_grad_() for name, tensor in tried.items()}
    whole = part.frozen.with_trained(leaves)
    # Without dropout, which may leave out any layer.
    loss = family.loss(whole, both, settings=settings, draws=None)
    gradients: Sequence[Tensor | None] = [None] * len(leaves)
    if loss.requires_grad:
        gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    dead = [name for name, own in zip(leaves, gradients, strict=True) if own is None or not bool(own.any())]
    if dead:
        raise InputError(
            f"model: {len(dead)} of {len(leaves)} trained tensors do not move, {dead[0]!r} the first: no gradient "
            "reaches them, and with noise they would be noise alone; expected them not to be trained"
        )


def _check_buffers_stay(
    family: Family[Settings, int], settings: Settings, parameters: Parameters, both: Features
) -> None:
    is_merged = settings.kind in MERGED
    corrected = frozenset(name.removesuffix(".lora_a") for name in parameters if name.endswith(".lora_a"))
    called = build_network(settings, frozenset() if is_merged else corrected, training=settings.dropout).module
    before = {name: own.clone() for name, own in called.named_buffers() if own is not None}
    with torch.no_grad():
        family.loss(parameters, both, settings=settings, draws=0)
    for name, own in called.named_buffers():
        if own is not None and not torch.equal(own, before[name]):
            raise InputError(f"model: training changes the buffer {name!r}, which would leave clients unclipped")
