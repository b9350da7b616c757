"""What a YAML file describes: one run, or several to be compared."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from sottovoce.config.federation import FederationSettings
from sottovoce.config.sections import (
    Augmentation,
    CentralSettings,
    DataSettings,
    EvaluationSettings,
    ModelSection,
    PathText,
    Section,
    TokenSettings,
)
from sottovoce.evaluation.decoder import USUAL, DecodingOptions
from sottovoce.evaluation.measures import MeasureName
from sottovoce.federated.client import LocalTraining
from sottovoce.models.family import find_family


class Paper(Section):
    """Which published numbers a recipe reproduces, so that a report can put ours beside them. WERs are in per cent.

    `werr` is the relative improvement in WER, in per cent of the WER of the run whose `place` is `against`: ours is
    computed from the runs that a report has. `unverified` says why nobody has been able to check these WERs against the
    paper. `population_size` is how many clients the paper had: a run takes those that there are, and says how far from
    these they are.
    """

    unwritten = frozenset({"werr", "against", "unverified", "population_size"})

    source: str
    place: str
    wer: Mapping[str, float] = Field(default_factory=dict)
    werr: Mapping[str, float] | None = None
    against: str | None = None
    unverified: str | None = None
    population_size: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _check(self) -> "Paper":
        if (self.werr is None) != (self.against is None):
            raise ValueError(f"werr={self.werr} and against={self.against} belong together: give both or neither")
        return self


class Recipe(Section):
    """One run: central or federated training of one model.

    `parent_overrides` change the recipes that it starts from or takes its tokens from, and theirs. `threads` are those
    of one process on a CPU: sums are split among them, so their number decides the last bits.
    """

    unwritten = frozenset({"threads", "parent_overrides", "evaluation"})

    about: str
    paper: Paper | None = None
    seed: int = 1
    threads: int | None = Field(default=None, ge=1, le=1024)
    parent_overrides: tuple[str, ...] | None = None
    data: DataSettings
    tokens: TokenSettings = TokenSettings()
    model: ModelSection = Field(default_factory=dict, validate_default=True)
    central: CentralSettings | None = None
    federation: FederationSettings | None = None
    evaluation: EvaluationSettings | None = None

    @model_validator(mode="after")
    def _check(self) -> "Recipe":
        if (self.central is None) == (self.federation is None):
            raise ValueError("expected exactly one of the sections central and federation")
        if not self.reads_texts and self.tokens != TokenSettings():
            raise ValueError(f"tokens: models of family={self.model.family} learn from speech alone; expected none")
        self._check_narrow_band()
        if self.federation is not None:
            judged = {"data.dev": (self.data.dev,), "data.test": self.data.test}
            if (asked := self.federation.server_pass) is not None:
                self._check_public("federation.server_pass.data", asked.data, judged)
                if asked.is_of_seed_part and self.data.part != "federation":
                    raise ValueError(
                        "federation.server_pass.data=seed: expected data.seed_part, which says who that is, and "
                        "data.part=federation; a split of that name is STORE:seed"
                    )
        if self.federation is not None and self.federation.shared_dev is not None:
            shared = self.federation.shared_dev.data
            if (
                shared is not None
            ):  # clients may be weighted by what models are chosen by, not by what they are tested on
                self._check_public("federation.shared_dev.data", shared, {"data.test": self.data.test})
        return self

    @model_serializer(mode="wrap")
    def _written(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """As any section; recipes for speech alone name no tokens."""
        found = {name: value for name, value in dump(self).items() if value is not None or name not in self.unwritten}
        if not self.reads_texts:
            del found["tokens"]
        return found

    @property
    def reads_texts(self) -> bool:
        return find_family(self.model.family).training.needs_text

    def _check_narrow_band(self) -> None:
        """Not every model knows the frequencies of its features."""
        wishes: dict[str, Augmentation | LocalTraining] = {}
        if self.central is not None:
            wishes["central.augment"] = self.central.augment
        if self.federation is not None:
            wishes["federation.local"] = self.federation.local
            if self.federation.server_pass is not None:
                wishes["federation.server_pass.augment"] = self.federation.server_pass.augment
        asked = [place for place, wish in wishes.items() if wish.narrow_band is not None]
        if asked and find_family(self.model.family).front_end.narrow(self.model.settings(tokens=2)) is None:
            raise ValueError(
                f"{asked[0]}.narrow_band: this model of family={self.model.family} does not say which of its features "
                "is of which frequency (none does as released); expected null"
            )

    def _check_public(self, key: str, data: str, judged: Mapping[str, tuple[str, ...]]) -> None:
        """Speech that is public is neither the clients' nor what models are `judged` by."""
        for what, places in {"data.train": self.data.train, **judged}.items():
            if self.data.place(data) in map(self.data.place, places):
                whose = "the clients' speech" if what == "data.train" else "what the model is judged by"
                raise ValueError(f"{key}={data} is in {what}, {whose}: expected other people's")

    @property
    def decoding(self) -> DecodingOptions:
        """How the test sets are decoded."""
        return USUAL if self.evaluation is None else self.evaluation.options()

    @property
    def people_seed(self) -> int:
        """What decides who is a client, and what a seed model is trained with."""
        return self.seed if self.data.people_seed is None else self.data.people_seed

    @property
    def measure(self) -> MeasureName | None:
        """What the best checkpoint is chosen by, where the recipe says so."""
        return self.training.measure if self.federation is None else self.federated.measure

    @property
    def training(self) -> CentralSettings:
        """The central training that this recipe describes."""
        assert self.central is not None, "a recipe for federated training"
        return self.central

    @property
    def federated(self) -> FederationSettings:
        """The federated training that this recipe describes."""
        assert self.federation is not None, "a recipe for central training"
        return self.federation


def _check_label(text: str) -> str:
    if "/" in text or text.strip() in ("", ".", ".."):
        raise ValueError("a run's label names its folder: expected a word without slashes")
    return text


Label = Annotated[PathText, AfterValidator(_check_label)]


class SuiteRun(Section):
    """One run of a suite: a recipe and what is different here."""

    recipe: PathText
    overrides: tuple[str, ...] = ()


class Suite(Section):
    """Several runs, one after another, and a table that compares them."""

    about: str
    paper: Paper | None = None
    runs: Mapping[Label, SuiteRun] = Field(min_length=1)


Experiment = Recipe | Suite


def is_suite(content: Mapping[str, Any]) -> bool:
    """Whether plain data describes a suite rather than one run."""
    return "runs" in content
