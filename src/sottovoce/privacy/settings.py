"""The settings of a plan, and the refusal of each that would break a guarantee."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Lt

from sottovoce.base.errors import InputError
from sottovoce.flat.layout import Groups
from sottovoce.privacy.clipping import AdaptiveClipping, Normalise, Share
from sottovoce.privacy.events import check_sizes
from sottovoce.privacy.mechanism import Correlated
from sottovoce.privacy.noise import NoiseScope, noise_multiplier_of
from sottovoce.privacy.noise_shares import NoiseShares
from sottovoce.privacy.plugins import format_plugin


class Sampling(StrEnum):
    POISSON = "poisson"
    FIXED_SIZE = "fixed_size"


class Mode(StrEnum):
    SEEDED = "seeded"  # a simulation: cohort and noise repeat with the root seed
    SECURE = "secure"  # a release: cohort and noise from the operating system's entropy, never repeated


class Weighting(StrEnum):
    """What a user's weight depends on (`federated.weighting` has the formulas). By loss or WER: only without privacy.

    Those called `released` are what the released code of Gao et al. computes, the others are their equations.
    """

    UNIFORM = "uniform"
    UTTERANCES = "utterances"
    SECONDS = "seconds"
    LOSS = "loss"  # of all local steps
    WER = "wer"  # on the client's own held-out speech, or on speech that all clients share
    LOSS_RELEASED = "loss_released"  # of the last local epoch
    WER_RELEASED = "wer_released"  # on speech that all clients share


BY_DATA = (Weighting.UTTERANCES, Weighting.SECONDS)


@dataclass(frozen=True, kw_only=True)
class PrivacyOptions:
    """What a recipe (`config.Privacy`) and the plan that follows from it (`PrivacySettings`) say alike."""

    clip_bound: Annotated[float, Gt(0)]
    share: Share = Share.GLOBAL
    normalise: Normalise = Normalise.NEVER
    layer_groups: Groups = field(default_factory=dict)
    alpha: Mapping[str, float] = field(default_factory=dict)
    adaptive: AdaptiveClipping | None = None
    noise_multiplier: Annotated[float | None, Ge(0)] = None
    sigma_dp: Annotated[float | None, Ge(0)] = None
    noise_scope: NoiseScope | None = None
    sampling: Sampling = Sampling.POISSON
    weighting: Weighting = Weighting.UNIFORM
    weight_cap: float | None = None
    denominator: float | None = None
    delta: Annotated[float, Gt(0), Lt(1)]
    epsilon_budget: Annotated[float | None, Gt(0)] = None
    mode: Mode = Mode.SEEDED
    clip_rule: Mapping[str, Any] | None = None
    weights: Mapping[str, Any] | None = None
    sampler: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class PrivacySettings(PrivacyOptions):
    """All settings of a plan. Exactly one of `noise_multiplier` and `sigma_dp` is set; zero means no privacy.

    `privacy_unit` is who is protected, as in `sottovoce.base.units` ("speaker", "silo with all its speakers"), or None
    with `no_unit_reason` where a client is nobody in particular. `users_also_in_seed` counts those whose speech the
    parent model, which is trained without privacy, has seen. `time_line`: users use each utterance once, and one with
    nothing left is drawn all the same and sends `zero`, or is not drawn (`skip`). With a `mechanism` noise is
    correlated over rounds, and users take turns in groups. `denominator` is what sums are divided by: public, and
    `cohort_size` unless weights by data suggest another, or unless only so many `expected_answers` are counted on: more
    are drawn than are expected to answer in time, and ε is of those who are drawn. `clip_rule`, `weights` and `sampler`
    are plug-ins (`privacy.plugins`).
    """

    population_size: int
    cohort_size: int
    privacy_unit: str | None
    no_unit_reason: str = "clients of this population are not people"
    users_also_in_seed: int = 0
    time_line: Literal["zero", "skip"] | None = None
    root_seed: int | None = None
    mechanism: Correlated | None = None
    expected_answers: int | None = None

    def __post_init__(self) -> None:
        for name, kind in _KINDS.items():  # plain words are welcome, but everything below compares by identity
            object.__setattr__(self, name, _one_of(kind, name, getattr(self, name)))
        check_sizes(self.population_size, cohort_size=self.cohort_size)
        _check_noise(self)
        _check_weights(self)
        _check_answers(self)
        _check_time_line(self)
        _check_outside(self)
        _check_mechanism(self)
        if not 0 < self.delta < 1:
            raise InputError(f"delta={self.delta}: expected a probability in (0, 1), well below 1/population_size")
        if (self.mode is Mode.SEEDED) != (self.root_seed is not None):
            raise InputError(
                f"mode={self.mode} with root_seed={self.root_seed}: a seeded run has one, a secure run none"
            )
        reason = self.no_guarantee_reason
        if reason is not None and self.epsilon_budget is not None:
            raise InputError(f"epsilon_budget={self.epsilon_budget} cannot be kept: {reason}")
        if reason is not None and self.mode is Mode.SECURE:
            raise InputError(f"mode=secure is for releases with a guarantee, and this one has none: {reason}")

    @property
    def z(self) -> float:
        """The noise multiplier of the whole step, however it was given."""
        if self.noise_multiplier is not None:
            return self.noise_multiplier
        assert self.sigma_dp is not None
        return noise_multiplier_of(self.sigma_dp, cohort_size=self.answers)

    @property
    def answers(self) -> int:
        """How many of a cohort are expected in its sum: public, and never how many are."""
        return self.cohort_size if self.expected_answers is None else self.expected_answers

    @property
    def no_guarantee_reason(self) -> str | None:
        """Why users have no guarantee, or None if they have one."""
        if self.z == 0:
            return "no noise is added (noise_multiplier=0)"
        if self.privacy_unit is None:
            return self.no_unit_reason
        if self.noise_scope is not None:
            return "noise is left out or changed on some parameters, for analysis"
        if self.sampler is not None:
            return (
                f"cohorts are drawn by {format_plugin(self.sampler)}, which is not part of this package, and no "
                "accountant knows what that hides"
            )
        return None


_KINDS: Mapping[str, type[StrEnum]] = {
    "sampling": Sampling,
    "share": Share,
    "normalise": Normalise,
    "weighting": Weighting,
    "mode": Mode,
}


def _one_of(kind: type[StrEnum], name: str, value: str) -> StrEnum:
    try:
        return kind(value)
    except ValueError:
        raise InputError(f"{name}={value!r}: expected one of {', '.join(kind)}") from None


def _check_noise(settings: PrivacySettings) -> None:
    if (settings.noise_multiplier is None) == (settings.sigma_dp is None):
        raise InputError(
            f"noise_multiplier={settings.noise_multiplier}, sigma_dp={settings.sigma_dp}: expected exactly one"
        )
    z = settings.z
    if not (math.isfinite(z) and z >= 0):
        raise InputError(f"noise_multiplier={z}: expected a finite number, at least 0")
    budget = settings.epsilon_budget
    if budget is not None and not 0 < budget < math.inf:
        raise InputError(f"epsilon_budget={budget}: expected a positive number, or none for no budget")
    if budget is not None and z == 0:
        raise InputError(f"epsilon_budget={budget} with noise_multiplier=0: no noise keeps no budget; expected z > 0")
    if z > 0 and math.isinf(settings.clip_bound):
        raise InputError(f"clip_bound=inf with noise_multiplier={z}: noise is in units of the clip bound; set one")
    if z > 0 and settings.privacy_unit is not None and settings.users_also_in_seed > 0:
        raise InputError(
            f"users_also_in_seed={settings.users_also_in_seed}: the seed model has already seen their speech without "
            "privacy; expected disjoint seed and federation parts"
        )


def _check_weights(settings: PrivacySettings) -> None:
    weighting, private = settings.weighting, settings.z > 0
    if private and weighting not in (Weighting.UNIFORM, *BY_DATA):
        raise InputError(
            f"weighting={weighting} with noise_multiplier={settings.z}: such weights leak and one user can move "
            "everybody's; expected uniform, or utterances or seconds with a weight_cap"
        )
    if private and weighting is not Weighting.UNIFORM and settings.weight_cap is None:
        raise InputError(f"weighting={weighting} with privacy: expected a public weight_cap")
    if weighting not in BY_DATA and settings.weight_cap is not None:
        raise InputError(f"weight_cap={settings.weight_cap} with weighting={weighting}: expected utterances or seconds")
    if settings.weight_cap is not None and not (math.isfinite(settings.weight_cap) and settings.weight_cap > 0):
        raise InputError(f"weight_cap={settings.weight_cap}: expected a positive public number")
    if settings.denominator is not None and not (math.isfinite(settings.denominator) and settings.denominator > 0):
        raise InputError(f"denominator={settings.denominator}: expected a positive public number")


def _check_answers(settings: PrivacySettings) -> None:
    expected = settings.expected_answers
    if expected is None:
        return
    if not (expected == int(expected) and 1 <= expected <= settings.cohort_size):
        raise InputError(
            f"expected_answers={expected}: expected a whole number from 1 to cohort_size={settings.cohort_size}, the "
            "number drawn"
        )
    if settings.denominator is not None:
        raise InputError(f"expected_answers={expected} with denominator={settings.denominator}: expected one of them")
    if settings.weighting is not Weighting.UNIFORM and settings.weight_cap is None:
        raise InputError(
            f"expected_answers={expected} with weighting={settings.weighting}: such sums are divided by their own "
            "weights; expected uniform, or a weight_cap"
        )


def _check_time_line(settings: PrivacySettings) -> None:
    """Whether a user has data left must show neither in who is drawn nor in what others have left."""
    if settings.time_line is None or settings.z == 0:
        return
    if settings.time_line == "skip":
        raise InputError(
            f"time_line.dry=skip with noise_multiplier={settings.z}: who is not drawn any more has nothing left, which "
            "nothing hides; expected zero"
        )
    if settings.sampling is Sampling.FIXED_SIZE:
        raise InputError(
            "time_line with sampling=fixed_size and noise: one user in a cohort keeps another out of it, who then has "
            "more left, and no bound is known for that; expected poisson"
        )
    if settings.mode is Mode.SECURE:
        raise InputError(
            "time_line with mode=secure: a run must remember who took part how often, and a release writes that "
            "nowhere; expected seeded, a simulation"
        )


def _check_outside(settings: PrivacySettings) -> None:
    if settings.weights is not None and settings.weighting is not Weighting.UNIFORM:
        raise InputError(f"weights with weighting={settings.weighting}: expected one of them")
    if settings.sampler is not None and settings.sampling is not Sampling.POISSON:
        raise InputError(f"sampler with sampling={settings.sampling}: expected one of them")
    if settings.sampler is not None and settings.time_line == "skip":
        raise InputError("sampler with time_line.dry=skip: it does not know who has nothing left; expected zero")


def _check_mechanism(settings: PrivacySettings) -> None:
    """Its guarantee is of one noise, on all parameters, with one bound, and of cohorts whose turn follows a rule."""
    if settings.mechanism is None:
        return
    if settings.z == 0:
        raise InputError("mechanism with noise_multiplier=0: there is no noise to correlate; expected z > 0")
    if settings.adaptive is not None:
        raise InputError(
            "mechanism with adaptive clipping: noise of one round takes back that of rounds before it, which had "
            "another clip bound; expected one bound"
        )
    if settings.sampling is not Sampling.POISSON or settings.sampler is not None:
        given = f"sampling={settings.sampling}" if settings.sampler is None else "a plug-in sampler"
        raise InputError(f"mechanism with {given}: its users take turns in groups, by coins; expected poisson")
    if settings.noise_scope is not None:
        raise InputError("mechanism with noise_scope: for analysis of independent noise; expected one of them")
    if settings.time_line is not None:
        raise InputError(
            "mechanism with time_line: whose turn it is follows from the round alone; expected one of them"
        )
    settings.mechanism.sampler(population_size=settings.population_size, cohort_size=settings.cohort_size)


def check_sums(
    settings: PrivacySettings, sum_bits: int | None, noise_shares: NoiseShares | None, adapted_clip_bound: float | None
) -> None:
    """How a plan sums must fit its settings."""
    if sum_bits not in (None, 32, 64):
        raise InputError(f"sum_bits={sum_bits}: expected 32 or 64, or none")
    if sum_bits is not None and math.isinf(settings.clip_bound):
        raise InputError(f"sum_bits={sum_bits} with clip_bound=inf: nothing bounds a sum; set a clip bound")
    if adapted_clip_bound is not None and settings.adaptive is None:
        raise InputError(f"clip_bound={adapted_clip_bound}: only adaptive clipping moves the bound of a plan")
    if settings.mechanism is not None and noise_shares is not None:
        raise InputError(
            "mechanism with noise by clients: noise that is correlated over rounds follows from that of rounds before, "
            "which no client may know; expected noise by the server"
        )
    fits = sum_bits is not None and settings.no_guarantee_reason is None and settings.adaptive is None
    if noise_shares is not None and not fits:
        raise InputError(
            f"noise_shares={noise_shares}: expected sum_bits, a plan with a guarantee, and a clip bound that stays"
        )
