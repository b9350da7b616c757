"""A model family: all that engines, loops, evaluation and reports know of a model, as a record of functions.

    recipe ─► Options ─► Settings ─► init ─► parameters, a flat dictionary of named tensors
    recordings ─► front end ─► features ─┬─► loss         with what `draw` has decided for the step
                                         └─► recognition  without

A family knows nothing of clients, privacy or loops. What chance decides in a training step is drawn before it, from
generators that are handed in: they come from a client's own name and the step, never from who else was sampled, and a
user's presence must move nobody's update but their own. Buffers that training changes do not exist here: whatever a
client's data may change is a parameter, and so clipped, noised and averaged.

Families register by name in `REGISTERED`, or are found as `module:FAMILY`.
"""

import difflib
import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from sottovoce.base.errors import InputError
from sottovoce.base.importing import import_named
from sottovoce.data.audio.augment import NarrowBandSettings, SpecAugmentSettings, apply_masks, draw_bands, draw_masks
from sottovoce.data.audio.waveforms import Features, Waveforms
from sottovoce.models.attention_search import SearchOptions
from sottovoce.models.base_files import BaseFiles
from sottovoce.models.decoding import Hypothesis
from sottovoce.models.log_mel import Narrow, extract_log_mel
from sottovoce.models.onnx_graphs import Export

Parameters = Mapping[str, Tensor]
S = TypeVar("S")  # a family's settings: its architecture
D = TypeVar("D")  # what chance decides in one training step

DEFAULT = "ctc_transformer"
# Imported on request, so that no layer above and no family needs to import another family.
REGISTERED: Mapping[str, str] = {
    DEFAULT: "sottovoce.models.transformer:FAMILY",
    "crdnn": "sottovoce.models.crdnn:FAMILY",
    "transducer": "sottovoce.models.transducer:FAMILY",
    "cpc": "sottovoce.models.cpc:FAMILY",
    "huggingface": "sottovoce.models.huggingface:FAMILY",
}


class ParameterPlace(NamedTuple):
    """Where a tensor belongs: the group in which norms are summed and drawn, and its layer, where it is in one."""

    kind: str
    layer: int | None = None


def place_by_name(name: str) -> ParameterPlace:
    """By the name's words, its first number being the layer.

    >>> place_by_name("encoder.layers.3.linear1.weight")
    ParameterPlace(kind='encoder.layers.linear1', layer=3)
    >>> place_by_name("gru.weight_ih_l0"), place_by_name("output.bias")
    (ParameterPlace(kind='gru', layer=0), ParameterPlace(kind='output', layer=None))
    """
    stem, _, last = name.rpartition(".")
    numbers = re.findall(r"(?<![A-Za-z0-9])\d+(?![A-Za-z0-9])|(?<=_l)\d+", name)
    words = [word for word in (stem or last).split(".") if not word.isdecimal()]
    return ParameterPlace(".".join(words), int(numbers[0]) if numbers else None)


class TrainingProgress(NamedTuple):
    """How far a client's local training is, or central training: steps done, and passes over the data."""

    step: int
    epoch: int


class Options(Protocol):
    """The `model` section of a recipe: a frozen dataclass with a field `family` and what may be chosen besides.

    What is None is not written down.
    """

    @property
    def family(self) -> str: ...

    def settings(self, *, tokens: int) -> Any:
        """The architecture for `tokens` outputs, a blank or the like counted."""


# Optional abilities of a family. Their defaults are those of a family that has none of them.


def _none(*_given: Any) -> None:
    return None


def _nothing(_settings: Any) -> dict[str, str]:
    return {}


def _no_names(*_settings: Any) -> frozenset[str]:
    return frozenset()


def _zero(_settings: Any) -> int:
    return 0


def _no(_settings: Any) -> bool:
    return False


def is_weight(name: str) -> bool:
    """Whether a tensor is called a weight; LoRA corrects those of them that are matrices."""
    return name.endswith(".weight")


@dataclass(frozen=True, kw_only=True)
class FrontEnd(Generic[S]):
    """From samples to features, and what training changes about features.

    `extract_features(recordings, settings=…, dtype=…)` gives `Features`. `mask` is SpecAugment, None where features are
    not time by frequency. `narrow(settings)` is a function from features to those of the same speech in a narrower band
    (`log_mel.Narrow`), None where there is none.
    """

    extract_features: Callable[..., Features] = extract_log_mel
    mask: Callable[..., Tensor] | None = apply_masks
    narrow: Callable[[S], Narrow | None] = _none


@dataclass(frozen=True, kw_only=True)
class Recognition(Generic[S]):
    """How a family writes text: by CTC, whose decoding all families share (`models.decoding`), or by a search.

    `emit(parameters, features, settings=…)` gives log-probabilities [U, T, V], the blank first, and their lengths [U]
    on the host, for CTC; a frame stands for `samples_per_frame` samples.
    `search(parameters, features, settings=…, how=…)`, where `how` are `SearchOptions`, gives the best texts of each
    utterance, the best first. It is used unless CTC is asked for. `beam` is the search that is meant where only its
    width is named, `options` are what else of it may be chosen. A family has at least one of both.
    `stream(parameters, samples, before, settings=…)`, of a causal model, takes the next samples and what it returned
    the last time (None at first), and gives the tokens that follow, each with its frame, and the next state.
    `has_decoder(settings)`, of a family whose models are not all alike: whether these have a decoder, which is
    searched, and no CTC; else it is the other way round.
    Frames are counted from `lead_frames(settings)` before the first sample on. `untimed(settings)` says why the frames
    of a search are not when its tokens were said; None where they are, or are those that
    `align(parameters, features, texts, lengths_U=…, settings=…)` gives, for texts of recordings of so many samples.
    """

    samples_per_frame: Callable[[S], int]
    emit: Callable[..., tuple[Tensor, Tensor]] | None = None
    search: Callable[..., list[list[Hypothesis]]] | None = None
    beam: SearchOptions = field(default_factory=SearchOptions)
    stream: Callable[..., tuple[list[tuple[int, int]], Any]] | None = None
    options: frozenset[str] = frozenset({"ctc_weight", "temperature", "end_threshold", "longest_shift"})
    has_decoder: Callable[[S], bool] | None = None
    lead_frames: Callable[[S], int] = _zero
    untimed: Callable[[S], str | None] = _none
    align: Callable[..., list[Hypothesis]] | None = None


@dataclass(frozen=True, kw_only=True)
class Stacked(Generic[S, D]):
    """The losses of many clients in one pass.

    `join` makes one step's draws of those of several clients (None where a client has no batch any more), which
    `losses(parameters, features, rows_U=…, clients=…, settings=…, draws=…)` takes and gives a loss for each client.
    `bytes(settings, seconds=…, steps=…)` is what one client takes on the device besides its weights. `full`: every
    stack is as high as the engine's size, with idle rows, so that few shapes occur. `unfit(settings)` says why models
    of these settings cannot be stacked. `accelerate(stacked, steps=…, batch_seconds=…, device=…)` is the same with
    compiled or recorded functions.
    """

    join: Callable[[Sequence[D | None]], Any]
    losses: Callable[..., Tensor]
    bytes: Callable[..., float]
    full: bool = False
    unfit: Callable[[S], str | None] = _none
    accelerate: Callable[..., "Stacked[S, D]"] | None = None


@dataclass(frozen=True, kw_only=True)
class Stacking(Generic[S, D]):
    """`stacked`: clients with a model each, every tensor with a leading client axis. `shared`: clients of one model."""

    stacked: Stacked[S, D] | None = None
    shared: Stacked[S, D] | None = None


@dataclass(frozen=True, kw_only=True)
class Presentation:
    """What figures call the kinds of tensors, in the order of the network.

    `fine_place` and `fine_kinds` are the same where figures show more kinds (both norms of a block, say).
    """

    kinds: Mapping[str, str] = field(default_factory=dict)
    fine_place: Callable[[str], ParameterPlace] | None = None
    fine_kinds: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Transfer(Generic[S]):
    """What a model takes from a saved one, and which of its tensors low-rank corrections are for.

    `token_tensors` are new under another token set. `inherited(other, settings)` names the tensors that a model with
    `settings` may take from one of another family with the settings `other`. `is_lora_target(name)`: whether LoRA
    corrects a matrix. `rescale(parameters, factor=…, settings=…)` are other parameters of the same function.
    `layer_count(settings)` counts layers with tensors of their own: a saved model that says more than its file has
    tensors is refused before any of them is named. `part(settings)` is what of a model is trained where its options say
    so (`models.trainable.Part`); None is for a recipe to say. `write_adapter(low_rank, folder, scale=…, settings=…)`
    writes low-rank corrections as others read them, beside an exported part. `write_pretrained(recogniser, folder,
    base=…)` writes a model as another library's `from_pretrained` reads it (`models.hub.HubModel` says what it wrote).
    `origin(settings)` describes the base model that they are made from, outside of this project: its `name`, and what
    identifies it (revision, digests of files); empty where there is none.
    """

    token_tensors: frozenset[str] = frozenset()
    inherited: Callable[[Any, S], frozenset[str]] = _no_names
    is_lora_target: Callable[[str], bool] = is_weight
    rescale: Callable[..., dict[str, Tensor]] | None = None
    layer_count: Callable[[S], int] = _zero
    part: Callable[[S], Any] = _none
    write_adapter: Callable[..., None] | None = None
    write_pretrained: Callable[..., Any] | None = None
    origin: Callable[[S], Mapping[str, str]] = _nothing


@dataclass(frozen=True, kw_only=True)
class Training(Generic[S, D]):
    """What is special about training.

    `needs_text`: a family that does not has no tokens either (`text.tokens.NO_TOKENS`). `own_tokens(options, language)`
    are those that a model of these options brings along; None where a run chooses them. `check(family, settings, part)`
    refuses a part of a model (`models.trainable.Trainable`) that cannot be trained as clients are promised.
    `adjust_draws(settings, draws, progress)` are a step's draws where they also depend on how far training is.
    `statistics(settings)` names the tensors that count what was seen (batch-norm's): the gradient that `loss` gives
    them is the way they go back in this step, whatever the learning rate; clients' updates hold them like all others.
    `accelerate(family, working, …)` is the family again with compiled or recorded functions for training `working`, or
    a part of a model where that is None.
    """

    needs_text: bool = True
    own_tokens: Callable[[Any, str], Any] = _none
    check: Callable[..., None] | None = None
    adjust_draws: Callable[[S, D, TrainingProgress], D] | None = None
    statistics: Callable[[S], frozenset[str]] = _no_names
    accelerate: Callable[..., "Family[S, D]"] | None = None


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """What can be asked of a model besides its texts.

    `measure(parameters, features, settings=…)` are what dev speech is measured by, the `loss` among them: means over
    utterances, in which chance decides nothing. None is the loss alone. `validation` names the one that NewBob goes by;
    the loss where it is not among them.
    `encode(parameters, features, settings=…)` gives vectors [U, T, D] and their lengths [U] on the host, for
    `sottovoce probe`.
    """

    measure: Callable[..., dict[str, Tensor]] | None = None
    validation: str = "loss"
    encode: Callable[..., tuple[Tensor, Tensor]] | None = None


@dataclass(frozen=True, kw_only=True)
class Family(Generic[S, D]):
    """A kind of model. The transformer's family is the one to learn from.

    `smoke_options` make any recipe small enough for `--smoke`. `shapes` are those of the parameters that `init` makes,
    by name; `place` groups them. `unusable(settings, samples, tokens)` says why no loss can be computed for an
    utterance. `draw` decides several training steps at once; `loss` without draws (None) is that of evaluation, in
    which chance decides nothing. `gains_in_bfloat16(settings)`: whether a processor that multiplies bfloat16 computes
    such a model faster in it, as measured (`models.precision`).
    """

    name: str
    Options: type[Any]
    Settings: type[S]
    smoke_options: Mapping[str, Any]
    shapes: Callable[[S], Mapping[str, tuple[int, ...]]]
    init: Callable[..., dict[str, Tensor]]
    unusable: Callable[[S, int, Sequence[int]], str | None]
    draw: Callable[..., list[D]]
    loss: Callable[..., Tensor]
    place: Callable[[str], ParameterPlace] = place_by_name
    front_end: FrontEnd[S] = field(default_factory=FrontEnd)
    recognition: Recognition[S] | None = None
    stacking: Stacking[S, D] = field(default_factory=Stacking)
    presentation: Presentation = field(default_factory=Presentation)
    transfer: Transfer[S] = field(default_factory=Transfer)
    training: Training[S, D] = field(default_factory=Training)
    inspection: Inspection = field(default_factory=Inspection)
    base_files: BaseFiles | None = None
    export: Export | None = None
    gains_in_bfloat16: Callable[[S], bool] = _no


def find_family(name: str) -> Family[Any, Any]:
    """The family called `name`, or written as `module:FAMILY`.

    >>> find_family("ctc_transformer").name
    'ctc_transformer'
    """
    if name in REGISTERED:
        module, _, attribute = REGISTERED[name].partition(":")
        ours: Family[Any, Any] = getattr(importlib.import_module(module), attribute)
        return ours
    if ":" not in name:
        near = difflib.get_close_matches(name, REGISTERED, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(REGISTERED)}"
        raise InputError(f"model: family={name!r}, {hint} (or module:FAMILY for one of your own)")
    found = import_named(name, called=f"model: family={name!r}")
    if not isinstance(found, Family):
        raise InputError(f"model: family={name!r} is {type(found).__name__}, expected a sottovoce.models.family.Family")
    if found.name != name:  # it is written into saved models, and found again by it
        raise InputError(f"model: family={name!r} calls itself {found.name!r}, expected the name that it is found by")
    return found


def accelerate_family(family: Family[S, D], working: Parameters | None, **training: Any) -> Family[S, D]:
    """`family` as fast as it can be where `training` says how much of it there is; see `Training.accelerate`."""
    accelerate = family.training.accelerate
    return family if accelerate is None else accelerate(family, working, **training)


def stacking_obstacle(family: Family[S, Any], settings: S) -> str | None:
    """Why models of `family` with these `settings` cannot be stacked; None where they can."""
    if family.stacking.stacked is None:
        return f"models of family={family.name} cannot be stacked"
    why = family.stacking.stacked.unfit(settings)
    return None if why is None else f"models of family={family.name} cannot be stacked {why}"


# A training step, whatever the family.


@dataclass(frozen=True, slots=True)
class StepDraws:
    """All that chance decides in one training step: SpecAugment's masks, with its settings, bands, the model's own."""

    model: Any
    masks: Tensor | None = None
    spec_augment: SpecAugmentSettings | None = field(default=None, repr=False)
    bands: Tensor | None = None


def draw_steps(
    family: Family[S, D],
    utterances: Sequence[int],
    *,
    samples: Sequence[int],
    settings: S,
    spec_augment: SpecAugmentSettings | None,
    generator: torch.Generator,
    progress: Sequence[TrainingProgress] | None = None,
    narrow_band: NarrowBandSettings | None = None,
) -> list[StepDraws]:
    """Draw several steps at once: of so many `utterances` each, padded to so many `samples`, on the host."""
    masks: Sequence[Tensor | None] = [None] * len(utterances)
    if spec_augment is not None and family.front_end.mask is not None:
        masks = torch.split(draw_masks(sum(utterances), settings=spec_augment, generator=generator), list(utterances))
    models = family.draw(settings, utterances, samples=samples, generator=generator)
    if (adjust := family.training.adjust_draws) is not None and progress is not None:
        models = [adjust(settings, model, place) for model, place in zip(models, progress, strict=True)]
    bands: Sequence[Tensor | None] = [None] * len(utterances)
    if narrow_band is not None:  # drawn last: all else is as it would be without
        bands = torch.split(draw_bands(sum(utterances), settings=narrow_band, generator=generator), list(utterances))
    drawn = zip(models, masks, bands, strict=True)
    return [StepDraws(model, own, spec_augment, band) for model, own, band in drawn]


def augment_features(family: Family[S, Any], features: Features, draws: StepDraws, *, settings: S) -> Features:
    """`features` through narrower bands, and with SpecAugment's taken out."""
    mask = family.front_end.mask
    narrow = family.front_end.narrow(settings) if draws.bands is not None else None
    if narrow is None and (draws.masks is None or mask is None):
        return features
    features_UTF, device = features.features_UTF, features.features_UTF.device
    frames_U = features.frames_U.to(device, non_blocking=True)
    with torch.no_grad():
        if narrow is not None and draws.bands is not None:
            features_UTF = narrow(features_UTF, frames_U, draws.bands.to(device, non_blocking=True))
        if mask is not None and draws.masks is not None:
            masks = draws.masks.to(device, non_blocking=True)
            features_UTF = mask(features_UTF, frames_U, draws=masks, settings=draws.spec_augment)
    return replace(features, features_UTF=features_UTF)


def step_loss(
    family: Family[S, Any], parameters: Parameters, features: Features, *, settings: S, draws: StepDraws
) -> Tensor:
    """The mean loss of a training step."""
    augmented = augment_features(family, features, draws, settings=settings)
    return family.loss(parameters, augmented, settings=settings, draws=draws.model)


def extract_float32_features(family: Family[S, Any], recordings: Waveforms, *, settings: S) -> Features:
    """Features in float32, for utterances that are used once."""
    with torch.no_grad():
        return family.front_end.extract_features(recordings, settings=settings, dtype=torch.float32)
