"""A model family: all that engines, loops, evaluation and reports know of a model, as a record of functions.

    recipe ─► Options ─► settings ─► init ─► parameters, a flat dictionary of named tensors
    recordings ─► hear ─► features ─┬─► loss         with what `draw` has decided for the step
                                    └─► recognition  without

A family knows nothing of clients, privacy or loops. What chance decides in a training step is drawn before it, from
generators that are handed in: they come from a client's own name and the step, never from who else was sampled, and a
user's presence must move nobody's update but their own. Buffers that training changes do not exist here: whatever a
client's data may change is a parameter, and so clipped, noised and averaged.

Families register by name in `REGISTERED`, or are found as `module:FAMILY`.
"""

import difflib
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from sottovoce.audio.augment import NarrowBandSettings, SpecAugmentSettings, apply_masks, draw_bands, draw_masks
from sottovoce.errors import InputError
from sottovoce.models import log_mel
from sottovoce.models.attention_search import Found, Search
from sottovoce.models.log_mel import Narrow
from sottovoce.models.utterances import Features, Recordings
from sottovoce.naming import imported

Parameters = Mapping[str, Tensor]
S = TypeVar("S")  # a family's settings: its architecture
D = TypeVar("D")  # what chance decides in one training step

DEFAULT = "ctc_transformer"
# Imported when they are asked for, so that nothing above this room, and no family, needs to know another.
REGISTERED: Mapping[str, str] = {
    DEFAULT: "sottovoce.models.transformer:FAMILY",
    "crdnn": "sottovoce.models.crdnn:FAMILY",
    "transducer": "sottovoce.models.transducer:FAMILY",
    "cpc": "sottovoce.models.cpc:FAMILY",
}


class Place(NamedTuple):
    """Where a tensor belongs: the group in which norms are summed and drawn, and its layer, where it is in one."""

    kind: str
    layer: int | None = None


class Progress(NamedTuple):
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


def never(_settings: Any) -> bool:
    return False


def none(*_settings: Any) -> frozenset[str]:
    return frozenset()


def unknown(_settings: Any) -> Narrow | None:
    return None


def uncounted(_settings: Any) -> int:
    return 0


def no_reason(_settings: Any) -> str | None:
    return None


@dataclass(frozen=True, kw_only=True)
class Recognition(Generic[S]):
    """How a family writes down what was said: by CTC, whose decoding all share (`models.decoding`), or by a search.

    `emit(parameters, features, settings=…)` gives log-probabilities [U, T, V], the blank first, and their lengths [U]
    on the host, for CTC; a frame stands for `samples_per_frame` samples.
    `search(parameters, features, settings=…, how=…)`, where `how` is a `Search`, gives the best texts of each
    utterance, the best first. It is used unless CTC is asked for. `beam` is the search that is meant where only its
    width is named, `options` are what else of it may be chosen. A family has at least one of both.
    `stream(parameters, samples, before, settings=…)`, where a family is causal (streaming), takes the next samples and
    what it gave the last time (None at first): the tokens that follow, each with its frame, and from where to go on.
    """

    samples_per_frame: Callable[[S], int]
    emit: Callable[..., tuple[Tensor, Tensor]] | None = None
    search: Callable[..., list[list[Found]]] | None = None
    beam: Search = field(default_factory=Search)
    stream: Callable[..., tuple[list[tuple[int, int]], Any]] | None = None
    options: frozenset[str] = frozenset({"ctc_weight", "temperature", "end_threshold", "longest_shift"})


@dataclass(frozen=True, kw_only=True)
class Stacked(Generic[S, D]):
    """Many clients at once, their parameters in one tensor with a leading client axis.

    `join` makes one step's draws of those of several clients (None where a client has no batch any more), which
    `losses(parameters, features, rows_U=…, clients=…, settings=…, draws=…)` takes and gives a loss for each client.
    `bytes(settings, seconds=…, steps=…)` is what one client takes on the device besides its weights. `full`: every
    stack is as high as the engine's size, with idle rows, so that few shapes occur. `unfit(settings)` says why models
    of these settings cannot be stacked.

    As `Family.shared` it is the same for clients who share one model: parameters without that axis.
    """

    join: Callable[[Sequence[D | None]], Any]
    losses: Callable[..., Tensor]
    bytes: Callable[..., float]
    full: bool = False
    unfit: Callable[[S], str | None] = no_reason
    faster: Callable[..., "Stacked[S, D]"] | None = None


@dataclass(frozen=True, kw_only=True)
class Family(Generic[S, D]):
    """What each of these does is said where it is used; the transformer's are the ones to learn from.

    `tiny` are options that make any recipe small enough for `--smoke`. `kinds` are what figures call the kinds of
    tensors, in the order of the network. `place_apart` and `kinds_apart` are the same where figures tell more apart
    (both norms and both matrices of a block's MLP, say); None where they do not. `corrected` says which tensors LoRA
    corrects, `of_tokens` which are new under another token set, `unusable` why no loss can be computed for an
    utterance. `loss` without draws (None) is that of evaluation, in which chance decides nothing.
    `at(settings, draws, progress)` are a step's draws where they also depend on how far training is.
    `statistics(settings)` names the tensors that count what was seen (batch-norm's): the gradient that `loss` gives
    them is the way they go back in this step, whatever the learning rate; clients' updates hold them like all others.
    `texts`: whether it learns from texts; a family that does not has no tokens either (`text.tokens.NO_TOKENS`).
    `figures(parameters, features, settings=…)` are what dev speech is measured by, the `loss` among them: means over
    utterances, in which chance decides nothing. None is the loss alone.
    `encode(parameters, features, settings=…)` gives vectors [U, T, D] of what was heard and their lengths [U] on the
    host, for who asks what they tell (`sottovoce probe`).
    `inherited(other, settings)` names the tensors that a model with `settings` may take from one of another family
    with the settings `other`; none by default.
    `shared_chance(settings)`: whether `draw` uses the second generator, which a group of clients shares. `mask` is
    SpecAugment, None where features are not time by frequency. `narrow(settings)` is a function that hears speech of a
    narrower band in features (`log_mel.Narrow`), None where nobody has said how. `faster(family, working, …)` is the
    family again with compiled or recorded functions for training `working`, or a part of a model where that is None.
    `layers(settings)` is how many layers there are with tensors of their own: a saved model that says more than its
    file has tensors is refused before any of them is named.
    """

    name: str
    Options: type[Any]
    Settings: type[S]
    tiny: Mapping[str, Any]
    shapes: Callable[[S], Mapping[str, tuple[int, ...]]]
    init: Callable[..., dict[str, Tensor]]
    place: Callable[[str], Place]
    corrected: Callable[[str], bool]
    of_tokens: frozenset[str]
    unusable: Callable[[S, int, Sequence[int]], str | None]
    draw: Callable[..., list[D]]
    loss: Callable[..., Tensor]
    kinds: Mapping[str, str] = field(default_factory=dict)
    place_apart: Callable[[str], Place] | None = None
    kinds_apart: Mapping[str, str] = field(default_factory=dict)
    texts: bool = True
    figures: Callable[..., dict[str, Tensor]] | None = None
    encode: Callable[..., tuple[Tensor, Tensor]] | None = None
    hear: Callable[..., Features] = log_mel.hear
    mask: Callable[..., Tensor] | None = apply_masks
    narrow: Callable[[S], Narrow | None] = unknown
    layers: Callable[[S], int] = uncounted
    shared_chance: Callable[[S], bool] = never
    at: Callable[[S, D, Progress], D] | None = None
    statistics: Callable[[S], frozenset[str]] = none
    inherited: Callable[[Any, S], frozenset[str]] = none
    recognition: Recognition[S] | None = None
    stacked: Stacked[S, D] | None = None
    shared: Stacked[S, D] | None = None
    faster: Callable[..., "Family[S, D]"] | None = None
    rescaled: Callable[..., dict[str, Tensor]] | None = None


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
    found = imported(name, called=f"model: family={name!r}")
    if not isinstance(found, Family):
        raise InputError(f"model: family={name!r} is {type(found).__name__}, expected a sottovoce.models.family.Family")
    if found.name != name:  # it is written into saved models, and found again by it
        raise InputError(f"model: family={name!r} calls itself {found.name!r}, expected the name that it is found by")
    return found


def sped_up(family: Family[S, D], working: Parameters | None, **training: Any) -> Family[S, D]:
    """`family` as fast as it can be where `training` says how much of it there is; see `Family.faster`."""
    return family if family.faster is None else family.faster(family, working, **training)


def not_stacked(family: Family[S, Any], settings: S) -> str | None:
    """Why models of `family` with these `settings` cannot be stacked; None where they can."""
    if family.stacked is None:
        return f"models of family={family.name} cannot be stacked"
    why = family.stacked.unfit(settings)
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
    shared: torch.Generator | None = None,
    progress: Sequence[Progress] | None = None,
    narrow_band: NarrowBandSettings | None = None,
) -> list[StepDraws]:
    """Draw several steps at once: of so many `utterances` each, padded to so many `samples`, on the host.

    Own chance comes from `generator`; where `shared` is given, what a group of clients has in common comes from there.
    """
    masks: Sequence[Tensor | None] = [None] * len(utterances)
    if spec_augment is not None and family.mask is not None:
        masks = torch.split(draw_masks(sum(utterances), settings=spec_augment, generator=generator), list(utterances))
    models = family.draw(settings, utterances, samples=samples, generator=generator, shared=shared)
    if family.at is not None and progress is not None:
        models = [family.at(settings, model, place) for model, place in zip(models, progress, strict=True)]
    bands: Sequence[Tensor | None] = [None] * len(utterances)
    if narrow_band is not None:  # drawn last: all else is as it would be without
        bands = torch.split(draw_bands(sum(utterances), settings=narrow_band, generator=generator), list(utterances))
    drawn = zip(models, masks, bands, strict=True)
    return [StepDraws(model, own, spec_augment, band) for model, own, band in drawn]


def augmented(family: Family[S, Any], features: Features, draws: StepDraws, *, settings: S) -> Features:
    """`features` through narrower bands, and with SpecAugment's taken out."""
    narrow, mask = family.narrow(settings) if draws.bands is not None else None, family.mask
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
    return Features(features_UTF, features.frames_U, features.tokens_UL, features.token_lengths_U)


def step_loss(
    family: Family[S, Any], parameters: Parameters, features: Features, *, settings: S, draws: StepDraws
) -> Tensor:
    """The mean loss of a training step."""
    heard = augmented(family, features, draws, settings=settings)
    return family.loss(parameters, heard, settings=settings, draws=draws.model)


def recordings_heard(family: Family[S, Any], recordings: Recordings, *, settings: S) -> Features:
    """Features in float32, for what is heard once."""
    with torch.no_grad():
        return family.hear(recordings, settings=settings, dtype=torch.float32)
