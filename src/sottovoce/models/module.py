"""Any `torch.nn.Module` as a family, through `torch.func.functional_call`, LoRA included.

    build(settings) ─► module     forward(features_UTF, frames_U) ─► (scores_UTV, lengths_U)

Its parameters become the flat dictionary that everything else works on. Its buffers stay what `build` made them: a
buffer that training changes (batch-norm's statistics) would carry a client's data past clipping and noise, so a module
with one is refused, unless its layer is named as `fixed` and so runs as in evaluation. A module that keeps anything
else between calls is refused too: one client would move another's update. Dropout and first values are seeded from
outside.

Shapes: U utterances, T frames, F features, V tokens with the blank.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from sottovoce.base.errors import InputError
from sottovoce.base.seeds import seeded_kernels
from sottovoce.data.audio.features import HOP_SAMPLES, MEL_COUNT, frame_count
from sottovoce.data.audio.waveforms import Features
from sottovoce.models import ctc
from sottovoce.models.family import Family, FrontEnd, Parameters, Recognition, Transfer
from sottovoce.models.log_mel import Narrow, narrow_by_features
from sottovoce.models.trainable import with_corrections

Build = Callable[[Any], nn.Module]

TRIED_FRAMES = 64


def ctc_family(
    name: str,
    *,
    Options: type[Any],
    Settings: type[Any],
    build: Build,
    stride: int,
    token_tensors: frozenset[str],
    smoke_options: Mapping[str, Any],
    fixed: tuple[str, ...] = (),
) -> Family[Any, int]:
    """A family whose models are what `build` makes of its settings, trained and read by CTC.

    A frame of its output stands for `stride` frames of 10 ms. `token_tensors` are the parameters of the output layer.
    `fixed` names layers (as in `module.get_submodule`) whose buffers stay as they are.
    """
    module = FunctionalModule(build, fixed)
    ctc_module = _CtcModule(module, stride)
    return Family(
        name=name,
        Options=Options,
        Settings=Settings,
        smoke_options=smoke_options,
        shapes=module.shapes,
        init=module.init,
        unusable=ctc_module.unusable,
        draw=draw_seeds,
        loss=ctc_module.loss,
        front_end=FrontEnd(narrow=_narrow),
        recognition=Recognition(emit=ctc_module.emit, samples_per_frame=ctc_module.samples_per_frame),
        transfer=Transfer(token_tensors=token_tensors),
    )


def _narrow(_settings: Any) -> Narrow:
    return narrow_by_features(None)


def draw_seeds(_settings: Any, utterances: Sequence[int], *, generator: torch.Generator, **_: Any) -> list[int]:
    """A seed for the dropout of each step."""
    seeds: list[int] = torch.randint(2**62, (len(utterances),), generator=generator).tolist()
    return seeds


@dataclass(frozen=True)
class FunctionalModule:
    """What `build` makes, as functions of settings and parameters; `fixed` are as for `ctc_family`."""

    build: Build
    fixed: tuple[str, ...] = ()

    def shapes(self, settings: Any) -> dict[str, tuple[int, ...]]:
        """Without memory for the parameters, where the module can be made so: settings may ask for more than there is.

        One that looks at its own values while it is made cannot.
        """
        try:
            with torch.device("meta"):
                module = self.build(settings)
        except (RuntimeError, NotImplementedError):
            module = build_skeleton(self, settings, training=False)
        return {name: tuple(p.shape) for name, p in module.named_parameters()}

    def init(self, settings: Any, *, generator: torch.Generator) -> dict[str, Tensor]:
        build_skeleton(self, settings, training=True)  # what cannot be trained is refused before anything else is done
        with seeded_kernels(int(torch.randint(2**62, (1,), generator=generator)), device=torch.device("cpu")):
            module = self.build(settings)
        return {name: p.detach().clone() for name, p in module.named_parameters()}

    def call(self, parameters: Parameters, *inputs: Tensor, settings: Any, training: bool) -> Any:
        """What `forward` makes of `inputs`, the floating-point ones in the parameters' precision."""
        module, whole = build_skeleton(self, settings, training=training), with_corrections(parameters)
        device, dtype = inputs[0].device, next(iter(whole.values())).dtype
        buffers = {name: _as(buffer, device, dtype) for name, buffer in module.named_buffers()}
        given = tuple(own.to(dtype) if own.is_floating_point() else own for own in inputs)
        return functional_call(module, {**buffers, **whole}, given)


@dataclass(frozen=True)
class _CtcModule:
    """The functions of a family whose module gives scores of tokens; see `ctc_family`."""

    module: FunctionalModule
    stride: int

    def unusable(self, _settings: Any, samples: int, tokens: Sequence[int]) -> str | None:
        return ctc.text_obstacle(tokens, frames=frame_count(samples) // self.stride)

    def samples_per_frame(self, _settings: Any) -> int:
        return self.stride * HOP_SAMPLES

    def emit(
        self, parameters: Parameters, features: Features, *, settings: Any, training: bool = False
    ) -> tuple[Tensor, Tensor]:
        inputs = (features.features_UTF, features.frames_U)
        scores_UTV, lengths_U = self.module.call(parameters, *inputs, settings=settings, training=training)
        return ctc.log_softmax(scores_UTV), lengths_U.cpu()

    def loss(self, parameters: Parameters, features: Features, *, settings: Any, draws: int | None) -> Tensor:
        seeded = nullcontext() if draws is None else seeded_kernels(draws, device=features.features_UTF.device)
        with seeded:
            emitted = self.emit(parameters, features, settings=settings, training=draws is not None)
        return ctc.mean_ctc_loss(*emitted, features.tokens_UL, features.token_lengths_U)


@cache
def build_skeleton(made: FunctionalModule, settings: Any, *, training: bool) -> nn.Module:
    """A module to be called with parameters from outside, in training or not; refused where it keeps count of data."""
    with seeded_kernels(0, device=torch.device("cpu")):
        module = made.build(settings)
        module.train(training)
        for name in made.fixed:
            module.get_submodule(name).eval()
        if training:
            _check_buffers(module)
            _check_memory(module)
    return module


def _check_buffers(module: nn.Module) -> None:
    """Refuse a module whose buffers change when it is trained."""
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    with torch.no_grad():
        module(torch.randn(2, TRIED_FRAMES, MEL_COUNT), torch.tensor([TRIED_FRAMES, TRIED_FRAMES - 8]))
    for name, buffer in module.named_buffers():
        if not torch.equal(buffer, before[name]):
            layer = name.rpartition(".")[0]
            raise InputError(
                f"model: training changes the buffer {name!r}, which would leave clients unclipped and without noise; "
                f"expected a layer without statistics (LayerNorm, GroupNorm), or fixed=({layer!r},)"
            )


def _check_memory(module: nn.Module) -> None:
    """Refuse a module to which other speech in between makes a difference."""

    def scores(frames: int) -> Tensor:
        with seeded_kernels(frames, device=torch.device("cpu")), torch.no_grad():
            scores_UTV: Tensor = module(torch.randn(2, frames, MEL_COUNT), torch.tensor([frames, frames - 8]))[0]
            return scores_UTV

    before = scores(TRIED_FRAMES)
    scores(3 * TRIED_FRAMES)
    if not torch.equal(scores(TRIED_FRAMES), before):
        raise InputError(
            "model: what it makes of an utterance depends on its inputs before, so that one client would move "
            "another's update; expected a module that keeps nothing between calls"
        )


def _as(buffer: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A copy, so that whatever a call does to it is forgotten."""
    return buffer.to(device, dtype if buffer.is_floating_point() else buffer.dtype, copy=True)
