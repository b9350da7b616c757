"""What a recipe says of federated training: its clients, what they do, what the server does, and what is private."""

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import (
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    WrapSerializer,
    field_validator,
    model_validator,
)
from pydantic.dataclasses import dataclass

from sottovoce.config.sections import Augmentation, DataSettings, PathText, Patience, Section, omit_none
from sottovoce.data.population import ClientRule, PopulationSettings
from sottovoce.evaluation.measures import MeasureName
from sottovoce.federated.bound_estimates import BoundEstimation
from sottovoce.federated.client import LocalTraining
from sottovoce.federated.personal import PersonalTraining
from sottovoce.federated.server import ServerSettings
from sottovoce.models.trainable import parse_part
from sottovoce.optimisers import Optimiser, build_optimiser
from sottovoce.privacy.calibration import Accountant, calibrate_run_noise
from sottovoce.privacy.client_wer import ClientWer
from sottovoce.privacy.description import describe_run_guarantee
from sottovoce.privacy.events import Measured
from sottovoce.privacy.guarantee import WholeRun, whole_run
from sottovoce.privacy.mechanism import Correlated, MechanismSettings
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.plugins import PLUGIN_KEYS, build_plugin
from sottovoce.privacy.settings import Mode, PrivacyOptions, PrivacySettings, Weighting


class ClientSettings(Section):
    """Who is a client, of the speakers that `data` gives to the federation (see `PopulationSettings`)."""

    unwritten = frozenset({"balance"})

    rule: ClientRule = "speaker"
    speakers_per_device: int | None = None
    silos: int | None = None
    balance: Literal["seconds"] | None = None
    min_seconds: float | None = None
    max_seconds: float | None = None
    holdout: float | None = None

    def population(self, data: DataSettings) -> PopulationSettings:
        settings = self.model_dump(exclude={"rule"})
        part: Literal["seed", "federation"] = "seed" if data.part == "seed" else "federation"
        return PopulationSettings(split=data.train, clients=self.rule, seed_part=data.seed_part, part=part, **settings)


class Extrapolation(Section):
    """A larger population for which the report also gives ε: the same σ_DP and steps, its own cohort (Theorem 1)."""

    population_size: int = Field(ge=1)
    cohort_size: int = Field(ge=1)
    steps: int | None = Field(default=None, ge=1)
    paper_epsilon: float | None = None


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid", ser_json_inf_nan="constants"))
class PrivacySection(PrivacyOptions):
    """Clipping and noise: `PrivacyOptions` with defaults, and what a plan follows from.

    Noise is given by `noise_multiplier`, by `sigma_dp`, or by the `target_epsilon` of the whole run by the `accountant`
    (PLD unless given). Without any of them there is no noise.
    """

    clip_bound: Annotated[float, Field(gt=0)] = math.inf
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-9
    target_epsilon: Annotated[float | None, Field(gt=0, allow_inf_nan=False)] = None
    accountant: Accountant | None = None
    mechanism: Annotated[MechanismSettings | None, omit_none("bands", "buffers", "cycle")] = None
    population_size: Annotated[int | None, Field(ge=1)] = None  # what the plan assumes; checked against the clients
    extrapolate: tuple[Extrapolation, ...] = ()

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in ("noise_multiplier", "sigma_dp", "target_epsilon")}
        chosen = [f"{name}={value:g}" for name, value in given.items() if value is not None]
        if len(chosen) > 1:
            raise ValueError(f"{' and '.join(chosen)}: expected one of {', '.join(given)}; =null takes one away")
        if self.accountant is not None and self.target_epsilon is None:
            raise ValueError(f"accountant={self.accountant} without target_epsilon: it says which ε a target means")
        for what in PLUGIN_KEYS:
            if (part := getattr(self, what)) is not None:
                build_plugin(what, part)
        if self.sampler is not None and self.target_epsilon is not None:
            raise ValueError(f"target_epsilon={self.target_epsilon:g} with a sampler from outside: nobody knows its ε")
        if self.mechanism is not None and self.extrapolate:
            raise ValueError("extrapolate with a mechanism: other populations have other groups; expected none")

    @property
    def adds_noise(self) -> bool:
        return bool(self.noise_multiplier or self.sigma_dp or self.target_epsilon)

    def settings(
        self,
        *,
        population_size: int,
        cohort_size: int,
        central_steps: int,
        privacy_unit: str | None,
        no_unit_reason: str | None,
        users_also_in_seed: int,
        root_seed: int,
        time_line: Literal["zero", "skip"] | None = None,
        measured: Measured | None = None,
        expected_answers: int | None = None,
        correlated: Correlated | None = None,
    ) -> PrivacySettings:
        """The plan's settings for a population that is there; a target (for all releases) is noise now.

        `correlated` is what the mechanism was found to be elsewhere: nothing is searched for then.
        """
        own = {option.name: getattr(self, option.name) for option in fields(PrivacyOptions)}
        own["mechanism"] = correlated
        if self.mechanism is not None and correlated is None:
            own["mechanism"] = self.mechanism.for_run(
                central_steps, population_size=population_size, cohort_size=cohort_size
            )
        if self.target_epsilon is not None:
            own["noise_multiplier"] = calibrate_run_noise(
                self.target_epsilon,
                population_size=population_size,
                cohort_size=cohort_size,
                central_steps=central_steps,
                delta=self.delta,
                sampling=self.sampling.value,
                accountant=self.accountant or "pld",
                measured=measured,
                mechanism=own["mechanism"],
            )
        elif self.noise_multiplier is None and self.sigma_dp is None:
            own["noise_multiplier"] = 0.0
        if no_unit_reason is not None:
            own["no_unit_reason"] = no_unit_reason
        return PrivacySettings(
            population_size=population_size,
            cohort_size=cohort_size,
            privacy_unit=privacy_unit,
            users_also_in_seed=users_also_in_seed,
            time_line=time_line,
            expected_answers=expected_answers,
            root_seed=root_seed if self.mode is Mode.SEEDED else None,
            **own,
        )


def _write_privacy(settings: PrivacySection, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
    """In the order that recipes were always written in: a target behind the noise, plug-ins at the end, if given."""
    target = ("target_epsilon", "accountant", "mechanism")
    found = dump(settings)
    names = [name for name in found if name not in (*target, *PLUGIN_KEYS)]
    behind = names.index("sigma_dp") + 1
    given = {name for name in found if found[name] is not None or name in names}
    return {name: found[name] for name in (*names[:behind], *target, *names[behind:], *PLUGIN_KEYS) if name in given}


_AS_LOCAL: Any = None  # stands in a setting until `completed` has put that of local training in its place


class ServerPassSettings(Section):
    """Training on public speech after every round (Gao et al. 2022), for so many `steps` or `epochs`.

    `data` is a split, `STORE:split`, or `seed`: the speakers of `data.seed_part`, whom the seed model was trained on.
    What is not given is as in the family's local training. In a recipe that was read nothing is missing any more.
    """

    data: PathText
    batch_seconds: float = Field(default=_AS_LOCAL, gt=0, allow_inf_nan=False)
    batch_utterances: int | None = Field(default=None, ge=1)
    order: Literal["ascending"] | None = None
    lr: float = Field(gt=0, allow_inf_nan=False)
    steps: int | None = Field(default=None, ge=1)
    epochs: int | None = Field(default=None, ge=1)
    optimiser: Mapping[str, Any] = Field(default=_AS_LOCAL)
    clip_gradients: float = Field(default=_AS_LOCAL, gt=0)
    augment: Augmentation = Field(default=_AS_LOCAL)

    @model_validator(mode="after")
    def _check(self) -> "ServerPassSettings":
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(f"steps={self.steps}, epochs={self.epochs}: expected exactly one")
        if self.order == "ascending" and self.epochs is None:
            raise ValueError(
                f"order=ascending with steps={self.steps}: the longest utterances would never have their turn; "
                "expected epochs"
            )
        if self.optimiser is not None:
            self.built_optimiser()
        return self

    def completed(self, local: LocalTraining) -> "ServerPassSettings":
        """With all that is not given as in `local`: the released code changes the learning rate and nothing else.

        Masks are the local ones also where something else of `augment` is given. A pass of so many steps is shuffled.
        """
        names = {"batch_seconds", "batch_utterances", "optimiser", "clip_gradients"}
        names |= set() if self.epochs is None else {"order"}
        found = {name: getattr(local, name) for name in names - self.model_fields_set}
        augment: Augmentation | None = self.augment
        if augment is None:
            names_of_both = Augmentation.model_fields.keys() & {option.name for option in fields(local)}
            shared = {name: getattr(local, name) for name in names_of_both}
            augment = Augmentation(**{**shared, "speeds": local.speeds or ()})
        elif "spec_augment" not in augment.model_fields_set:
            augment = augment.model_copy(update={"spec_augment": local.spec_augment})
        return self.model_copy(update={**found, "augment": augment})

    @property
    def is_of_seed_part(self) -> bool:
        return self.data == "seed"

    def built_optimiser(self) -> Optimiser:
        return build_optimiser(**self.optimiser)


class SharedDevSettings(Section):
    """The speech on which every client's model is scored where `privacy.weighting` is `wer_released` or `wer`.

    Without it, `wer` (Eq. 10 of Gao et al. 2022) is measured on clients' held-out speech. `data` None is `data.dev`.
    Each client of each round recognises `utterances` of it, drawn once and the same for all; None takes the whole, as
    the released code does, which takes longer than training on little speech.
    """

    data: PathText | None = None
    utterances: int | None = Field(default=100, ge=1)


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class PersonalSettings(PersonalTraining):
    """Personal parts in a simulation: of so many `people`, who are tested on what they hold out.

    `amounts` are numbers of utterances with which it is done as well, by those who have more.
    """

    people: Annotated[int, Field(ge=1)] | Literal["all"] = "all"
    amounts: tuple[Annotated[int, Field(ge=1)], ...] = ()


class FederationSettings(Section):
    """Federated training: `steps` rounds (T), each with `cohort_size` clients (S) in expectation.

    Sums are divided by `expected_answers` where it is given: more clients are drawn than are expected to be in time.

    `keys.yaml` says what each setting means. Settings that came later are not written where they are None.
    """

    unwritten = frozenset(
        {
            *("rescale_norms", "server_pass", "shared_dev", "test_clients", "test_along", "client_wer", "staleness"),
            *("model_bits", "measure", "estimate_bound", "expected_answers", "training_seconds", "personal"),
        }
    )

    steps: int = Field(ge=1)
    cohort_size: int = Field(ge=1)
    expected_answers: int | None = Field(default=None, ge=1)
    seed_model: PathText | None = None
    trainable: str | None = None
    rescale_norms: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    clients: ClientSettings = ClientSettings()
    local: Annotated[
        LocalTraining,
        omit_none(
            *("batch_utterances", "order", "time_line", "narrow_band"),
            *("speeds", "dropped_frequencies", "dropped_chunks"),
        ),
    ]
    server: ServerSettings
    server_pass: ServerPassSettings | None = None
    shared_dev: SharedDevSettings | None = None
    privacy: Annotated[PrivacySection, WrapSerializer(_write_privacy)] = PrivacySection()
    engine: Literal["auto", "sequential", "stacked", "workers", "shared"] = "auto"
    stack_size: int | None = Field(default=None, ge=1)  # clients at once; None: what fits into the device's memory
    workers: int | None = Field(default=None, ge=1, le=1_024)  # processes of the engine `workers`; None: one a core
    evaluate_every: int = Field(default=50, ge=1)
    checkpoint_every: int = Field(default=50, ge=1)
    test_clients: Annotated[int, Field(ge=1)] | Literal["all"] | None = None
    test_along: Literal[True] | None = None
    client_wer: ClientWer | None = None
    estimate_bound: BoundEstimation | None = None
    personal: PersonalSettings | None = None
    model_bits: Literal[16] | None = None
    training_seconds: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    staleness: int | None = Field(default=None, ge=1, le=100)
    measure: MeasureName | None = None
    patience: Patience = None
    precision: Literal["auto", "bfloat16", "float32"] = "auto"

    @field_validator("trainable")
    @classmethod
    def _check_trainable(cls, text: str | None) -> str | None:
        if text is not None:
            parse_part(text)
        return text

    @model_validator(mode="after")
    def _check(self) -> "FederationSettings":
        if self.server_pass is not None:
            object.__setattr__(self, "server_pass", self.server_pass.completed(self.local))
        if self.privacy.adds_noise and math.isinf(self.privacy.clip_bound):
            raise ValueError("privacy adds noise but clip_bound is infinite: noise is in units of the clip bound")
        if self.engine in ("stacked", "shared") and self.privacy.mode is Mode.SECURE:
            raise ValueError(
                f"engine={self.engine} with privacy.mode=secure: in a stack the rounding of one client's numbers hangs "
                "on who else is there, which no clipping bounds; expected auto, sequential or workers"
            )
        self._check_weighting()
        if self.expected_answers is not None and self.privacy.extrapolate:
            raise ValueError(
                "expected_answers with privacy.extrapolate: those are of whole cohorts; expected one of them"
            )
        if self.clients.balance is not None and (self.privacy.adds_noise or self.privacy.mode is Mode.SECURE):
            raise ValueError(
                f"clients.balance={self.clients.balance} with noise or privacy.mode=secure: who is in which silo would "
                "depend on how much each speaker has said, which no ε covers; expected null"
            )
        if self.local.time_line is not None and self.clients.rule != "speaker":
            raise ValueError(
                f"local.time_line with clients.rule={self.clients.rule}: a time line is one speaker's; expected speaker"
            )
        if self.test_clients is not None and self.clients.holdout is None:
            raise ValueError(f"test_clients={self.test_clients} without held-out speech: expected clients.holdout")
        if self.client_wer is not None and self.clients.holdout is None:
            raise ValueError("client_wer without held-out speech to measure on: expected clients.holdout")
        if self.client_wer is not None and self.privacy.sampler is not None:
            raise ValueError("client_wer with privacy.sampler: its cohorts must be accounted for; expected one of them")
        if self.test_clients is not None and self.privacy.mode is Mode.SECURE:
            raise ValueError(
                f"test_clients={self.test_clients} with privacy.mode=secure: what a model does for single clients is "
                "private, and no ε covers it; expected null"
            )
        if self.estimate_bound is not None:
            self._check_bound()
        if self.personal is not None:
            self._check_personal()
        return self

    def _check_personal(self) -> None:
        """Parts are tested on held-out speech, by whoever has the speech: in a release that is nobody but its owner."""
        if self.privacy.mode is Mode.SECURE:
            raise ValueError(
                "personal with privacy.mode=secure: what a part does for one person is private, and no ε covers it; "
                "expected null, and `sottovoce personalise` or `join --personal` where the speech is"
            )
        if self.clients.holdout is None:
            raise ValueError("personal without held-out speech to test on: expected clients.holdout")

    def _check_bound(self) -> None:
        """The theorems want SGD steps, as many for every client, and LAMB; estimates want every client's gradients."""
        local = self.local
        if self.privacy.mode is Mode.SECURE:
            raise ValueError(
                "estimate_bound with privacy.mode=secure: it is made of single clients' gradients, which no ε covers; "
                "expected null"
            )
        if local.time_line is not None or local.local_steps is None or local.local_steps < 2:
            raise ValueError("estimate_bound: expected local.local_steps of at least 2, and no local.time_line")
        names = (local.optimiser["name"], self.server.optimiser["name"])
        if names != ("sgd", "lamb"):
            raise ValueError(
                f"estimate_bound with local.optimiser={names[0]}, server.optimiser={names[1]}: "
                "the bound is about sgd and lamb"
            )

    def _check_weighting(self) -> None:
        """Every client must have what its weight is measured by."""
        weighting = self.privacy.weighting
        if weighting is Weighting.WER and self.clients.holdout is None and self.shared_dev is None:
            raise ValueError(
                "privacy.weighting=wer is measured on clients' held-out speech, or on speech that all share: expected "
                "clients.holdout or shared_dev"
            )
        if weighting is Weighting.LOSS_RELEASED and self.local.local_epochs is None:
            raise ValueError(
                "privacy.weighting=loss_released is the loss of the last local epoch: expected local.local_epochs"
            )
        if weighting not in (Weighting.WER, Weighting.WER_RELEASED) and self.shared_dev is not None:
            raise ValueError(f"shared_dev with privacy.weighting={weighting}: only wer and wer_released read it")

    @property
    def measured(self) -> Measured | None:
        """What is measured besides the rounds."""
        return None if self.client_wer is None else self.client_wer.measured(self.steps)

    def whole_run(self, plan: Plan) -> WholeRun:
        """All that a run with `plan` sets out to release; every ε that is reported follows from it."""
        return whole_run(plan, central_steps=self.steps, client_wer=self.client_wer)

    def guarantee(self, plan: Plan) -> str:
        """The guarantee of such a run in one line, without its ε."""
        promised = self.whole_run(plan).guarantee()
        wer_plan = None if self.client_wer is None else self.client_wer.plan(plan)
        return describe_run_guarantee(plan, rounds=promised.steps, wer_plan=wer_plan, measured=promised.measured)

    @property
    def weighed_on(self) -> SharedDevSettings | None:
        """The shared speech that clients are weighted by; None where they are not."""
        is_released = self.privacy.weighting is Weighting.WER_RELEASED
        return SharedDevSettings() if is_released and self.shared_dev is None else self.shared_dev
