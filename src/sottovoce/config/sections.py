"""The sections of a recipe: every setting of a run, typed and checked, under the name that YAML uses for it.

Settings are defined beside the code that they set, as frozen dataclasses; here they are put together
(docs/decisions/004).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    PlainSerializer,
    PlainValidator,
    SerializerFunctionWrapHandler,
    Tag,
    TypeAdapter,
    ValidationError,
    WrapSerializer,
    create_model,
    model_serializer,
    model_validator,
)

from sottovoce.data.audio.augment import NarrowBandSettings, NoiseSettings, SpecAugmentSettings, check_speeds
from sottovoce.data.audio.time_domain import DroppedChunks, DroppedFrequencies
from sottovoce.data.speakers import SeedPart
from sottovoce.data.text.tokens import DEFAULT_PIECES
from sottovoce.evaluation.converged import UNIMPROVED_SHARE
from sottovoce.evaluation.decoder import DecodingOptions
from sottovoce.evaluation.measures import MeasureName
from sottovoce.models.attention_search import MOST_FRAMES
from sottovoce.models.decoding import MOST_WIDTH
from sottovoce.models.family import DEFAULT, find_family
from sottovoce.optimisers import NewBob, Optimiser, Schedule, build_optimiser, build_schedule


class Section(BaseModel):
    """Settings that belong together. An unknown key is an error.

    A run knows itself by its written recipe, so settings that came later are `unwritten` where they are None: older
    recipes are written as they always were.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")
    unwritten: ClassVar[frozenset[str]] = frozenset()

    @model_serializer(mode="wrap")
    def _written(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in dump(self).items() if value is not None or name not in self.unwritten}


def omit_none(*names: str) -> WrapSerializer:
    """The same for settings that are a dataclass and no section."""

    def written(settings: Any, dump: SerializerFunctionWrapHandler) -> Any:
        found = dump(settings)
        # Where a key may hold nothing at all, there is nothing to leave out.
        return found and {name: value for name, value in found.items() if value is not None or name not in names}

    return WrapSerializer(written)


LONGEST_NAME, LONGEST_PATH = 255, 4_096  # bytes, on all usual file systems


def _check_path(text: str) -> str:
    """What will name a file or folder must be able to."""
    longest = max(len(part.encode(errors="replace")) for part in text.split("/"))
    if longest > LONGEST_NAME or len(text.encode(errors="replace")) > LONGEST_PATH or "\0" in text:
        raise ValueError(f"no file can be called so: expected at most {LONGEST_NAME} bytes between slashes, none zero")
    return text


PathText = Annotated[str, AfterValidator(_check_path)]


class EvaluationSettings(Section):
    """How the test sets are decoded; without it, greedily. Dev speech in training is always decoded greedily.

    Names and meanings are those of `sottovoce evaluate`: what is None is the family's usual value for a beam search.
    """

    beam_width: int = Field(ge=1, le=MOST_WIDTH)
    ctc_weight: float | None = Field(default=None, ge=0, le=1)
    temperature: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    end_threshold: float | None = Field(default=None, ge=1, allow_inf_nan=False)
    longest_shift: int | None = Field(default=None, ge=1, le=MOST_FRAMES)

    def options(self) -> DecodingOptions:
        return DecodingOptions(**self.model_dump())


class SyntheticCorpus(Section):
    """A corpus that a run makes by itself when its store is not there yet (`sottovoce prepare synthetic`)."""

    task: str
    users: int = Field(ge=3)
    hours: float | None = Field(default=None, gt=0)
    seed: int = 1
    language: str = "en"


class ManifestCorpus(Section):
    """A corpus in a table (`sottovoce prepare tsv`); `$SOTTOVOCE_DATA` may stand in the paths."""

    manifests: tuple[PathText, ...]
    language: str = "en"
    hold_out: Mapping[str, int] = Field(default_factory=dict)
    seed: int = 1


class DataSettings(Section):
    """What is trained on, chosen on and tested on. A place is `STORE:split`, or `split` of `store`.

    `people_seed` decides who is in the seed part, and is the seed of the seed model; None: the run's own. Where it is
    given, repeats of a run under other seeds have the same clients and start from the same model.
    """

    unwritten = frozenset({"people_seed"})

    store: PathText
    prepare: SyntheticCorpus | ManifestCorpus | None = None
    train: tuple[str, ...] = ("train",)
    seed_part: Annotated[SeedPart | None, omit_none("most_utterances_share")] = None
    part: Literal["seed", "federation", "all"] = "all"
    people_seed: int | None = None
    dev: PathText = "dev"
    test: tuple[PathText, ...] = ("test",)
    longest_seconds: float = Field(default=36.0, gt=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _check(self) -> "DataSettings":
        if (self.part == "all") != (self.seed_part is None):
            raise ValueError(f"part={self.part!r} and seed_part belong together: give both or neither")
        return self

    def place(self, text: str) -> tuple[str, str]:
        """The store and the split that `text` names."""
        store, _, split = text.rpartition(":")
        return store or self.store, split


class TokenSettings(Section):
    """What a model writes; with `file` or `take_from` the kind and the size are those of the tokens found there."""

    unwritten = frozenset({"take_from"})

    kind: Literal["characters", "sentence_pieces"] = "characters"
    size: int = Field(default=DEFAULT_PIECES, ge=2, le=1_000_000)
    file: PathText | None = None  # made by `sottovoce tokens`
    take_from: PathText | None = None  # a recipe, which is run first, or the folder of a run or model

    @model_validator(mode="after")
    def _check(self) -> "TokenSettings":
        if self.file is not None and self.take_from is not None:
            raise ValueError("expected one of file and take_from")
        return self


def read_model(section: Any) -> Any:
    """The `model` section as its family's options; by default the transformer's."""
    if not isinstance(section, Mapping):
        return section
    return model_section_type(str(section.get("family", DEFAULT))).model_validate({"model": dict(section)}).model  # type: ignore[attr-defined]


def model_section_type(family: str) -> type[Section]:
    """What `model` may hold for that family."""
    return _section_of(find_family(family).Options)  # type: ignore[arg-type]  # types are hashable


@cache
def _section_of(options: type[Any]) -> type[Section]:
    return create_model("Model", __base__=Section, model=(options, ...))


def _checked(options: Any) -> Any:
    """Options of a family, also where a program writes them as a mapping."""
    try:
        options = read_model(options)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    if type(options) is not find_family(options.family).Options:
        raise ValueError(f"expected options of family={options.family}, found {options!r}")
    return options


@cache
def _adapter(options: type) -> TypeAdapter[Any]:
    """What reads and writes `options`; it takes milliseconds to make."""
    return TypeAdapter(options)


def _written(options: Any) -> dict[str, Any]:
    """What is at its default `family`, or None, is not written: older recipes are written as they always were."""
    written = _adapter(type(options)).dump_python(options, mode="json")  # type: ignore[arg-type]  # types are hashable
    return {name: v for name, v in written.items() if v is not None and (name, v) != ("family", DEFAULT)}


# The section `model` of a recipe: options of the family that it names.
ModelSection = Annotated[Any, PlainValidator(_checked), PlainSerializer(_written)]


class Augmentation(Section):
    """What is done to speech in training: to its samples and to its features (SpecAugment, narrow bands)."""

    unwritten = frozenset({"narrow_band", "dropped_frequencies", "dropped_chunks"})

    spec_augment: SpecAugmentSettings | None = SpecAugmentSettings()
    speeds: tuple[float, ...] = ()
    noise: NoiseSettings | None = None
    narrow_band: NarrowBandSettings | None = None
    dropped_frequencies: DroppedFrequencies | None = None
    dropped_chunks: DroppedChunks | None = None

    @model_validator(mode="after")
    def _check(self) -> "Augmentation":
        check_speeds(self.speeds)
        return self


@dataclass(frozen=True, kw_only=True)
class CentralSteps:
    """How many steps central training makes, and after how many of them its model is evaluated and saved.

    `epoch_steps` is how many there are in an epoch; None where nothing follows from that.
    """

    steps: int
    evaluate_every: int
    checkpoint_every: int
    epoch_steps: int | None


EveryEpoch = Literal["epoch"]


class PatienceSettings(Section):
    """A run ends at the first evaluation at which its best dev score is at least a `share` of the steps so far old.

    It has then converged (`evaluation/converged.py`), for which a smaller share would not do. `least_steps` come
    first: many a run stays where it starts for a while before it learns.
    """

    share: float = Field(default=UNIMPROVED_SHARE, ge=UNIMPROVED_SHARE, lt=1)
    least_steps: int = Field(default=1, ge=1)


def _kind_of_patience(given: Any) -> str:
    return "Share" if isinstance(given, Mapping | PatienceSettings) else "Evaluations"


# Evaluations in a row without a better model, or a share of the run. Tags name what a mistake is about.
_Evaluations = Annotated[int, Field(ge=1), Tag("Evaluations")]
_Share = Annotated[PatienceSettings, Tag("Share")]
Patience = Annotated[_Evaluations | _Share, Discriminator(_kind_of_patience)] | None


class CentralSettings(Section):
    """Training on one pile of data: a step is so many `batches` of at most `batch_seconds`, and `batch_utterances`.

    Exactly one of `steps` and `epochs` is set; how many steps an epoch has follows from the data that are there.
    Processes share a step's batches: one takes them in turn, eight take one of eight each, more of them parts of one.
    """

    unwritten = frozenset(
        {"measure", "batches", "repeatable", "batch_utterances", "order", "newbob", "steps", "epochs", "patience"}
    )

    steps: int | None = Field(default=None, ge=1)
    epochs: int | None = Field(default=None, ge=1)
    batch_seconds: float = Field(gt=0, allow_inf_nan=False)
    batches: int | None = Field(default=None, ge=1)
    batch_utterances: int | None = Field(default=None, ge=1)
    order: Literal["ascending"] | None = None
    optimiser: Mapping[str, Any]
    schedule: Mapping[str, Any]
    newbob: NewBob | None = None
    clip_gradients: float = Field(default=1.0, gt=0)
    augment: Augmentation = Augmentation()
    evaluate_every: Annotated[int, Field(ge=1)] | EveryEpoch = 1000
    checkpoint_every: Annotated[int, Field(ge=1)] | EveryEpoch = 1000
    log_every: int = Field(default=50, ge=1)
    measure: MeasureName | None = None
    patience: Patience = None
    precision: Literal["auto", "bfloat16", "float32"] = "auto"
    repeatable: bool | None = None
    start_from: PathText | None = None

    @model_validator(mode="after")
    def _check(self) -> "CentralSettings":
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(f"steps={self.steps}, epochs={self.epochs}: expected exactly one; =null takes one away")
        self.built_optimiser()
        self.built_schedule()
        return self

    @property
    def batches_a_step(self) -> int:
        return self.batches or 1

    @property
    def counts_epochs(self) -> bool:
        """Whether its steps follow from how many there are in an epoch."""
        return self.epochs is not None or "epoch" in (self.evaluate_every, self.checkpoint_every)

    def count_steps(self, epoch_steps: int | None) -> CentralSteps:
        """Its steps where an epoch has so many; None is for settings that do not count epochs."""

        def steps(amount: int | EveryEpoch) -> int:
            if amount != "epoch":
                return amount
            assert epoch_steps is not None
            return epoch_steps

        every = {name: steps(getattr(self, name)) for name in ("evaluate_every", "checkpoint_every")}
        total = steps("epoch") * self.epochs if self.epochs is not None else self.steps
        assert total is not None
        return CentralSteps(steps=total, **every, epoch_steps=epoch_steps)

    def built_optimiser(self) -> Optimiser:
        return build_optimiser(**self.optimiser)

    def built_schedule(self) -> Schedule:
        return build_schedule(**self.schedule)
