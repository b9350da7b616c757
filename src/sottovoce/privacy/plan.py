"""The plan: the only place where sampling, clipping, noise and accounting meet.

    PrivacySettings ──► Plan ──► sample · accumulate · add_noise     what is done
                          └────► event · charge                      what is paid for it

A plan is made of its settings and the model's layout and nothing else; sampler, clip bound, noise and event all
follow from them, so what is done is what is accounted. Noise is added only to what has been charged, once. Settings
that would break that are refused here.

Shapes: P flat length, N clients.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from sottovoce.base.errors import InputError, InvariantError, check_invariant
from sottovoce.flat.layout import Layout, group_layers, tensor_layers
from sottovoce.privacy.clipping import Clipper, ClipStats, next_clip_bound, update_noise_multiplier
from sottovoce.privacy.description import describe_guarantee, describe_plan, ledger_header
from sottovoce.privacy.events import (
    CorrelatedRelease,
    GaussianRelease,
    NoGuarantee,
    Release,
    fixed_size_release,
    poisson_release,
)
from sottovoce.privacy.ledger import Charge, Ledger
from sottovoce.privacy.noise import grid_spacing, sigma_dp_of
from sottovoce.privacy.noise_shares import NoiseShares, fewest_available
from sottovoce.privacy.plan_sampling import build_sampler, draw_cohort, draw_rate
from sottovoce.privacy.plugins import PLUGIN_KEYS, Plugins
from sottovoce.privacy.randomness import RandomSource
from sottovoce.privacy.round_noise import CorrelatedNoise, RoundNoise, widening
from sottovoce.privacy.sampling import (
    CyclicSampler,
    FixedSizeSampler,
    Indices,
    PoissonSampler,
    Sampler,
    bounded_weight,
)
from sottovoce.privacy.settings import Mode, PrivacySettings, Sampling, Weighting, check_sums

# What is done to one user's update [P] before it is clipped: a function of that update and of what is public.
Rule = Callable[[Tensor, "Plan"], Tensor]


@dataclass(frozen=True)
class Plan:
    """One round's privacy, ready to use (Algorithm 1).

    Guarantee: `add_noise` on a total of `accumulate` over the users of `sample` is exactly one `event`. Where the
    event is a `NoGuarantee`, it says why. What a `rule` returns is clipped like any update, so it cannot break this.
    With `sum_bits` (32 or 64) sums are whole multiples of `grid` that fit into so many bits, as clients over a network
    need them, in a simulation too. With `noise_shares` clients add the noise, and `add_noise` what is missing of it.
    What the layout holds in a step is zero in each clipped update, and again in the noised sum: what that does to a
    release depends on the step alone, so it costs nothing.

    >>> settings = PrivacySettings(population_size=1000, privacy_unit="speaker", cohort_size=10, clip_bound=1.0,
    ...                            noise_multiplier=1.0, delta=1e-5, root_seed=7)
    >>> layout = Layout.of({"w": torch.zeros(4)})
    >>> plan = Plan(settings, layout)
    >>> total = plan.new_total()
    >>> for user in plan.sample(0):
    ...     stats = plan.accumulate(total, layout.flatten({"w": torch.full((4,), 5.0)}))
    >>> charge = Charge(plan.event, step=0, clip_bound=1.0)  # a run gets it from `plan.charge(ledger, …)`
    >>> pseudo_gradient = plan.add_noise(total, charge) / plan.denominator
    >>> print(plan.guarantee)
    δ=1e-05 for each speaker against adding or removing one: poisson q=0.01, z=1 (simulated)
    """

    settings: PrivacySettings
    layout: Layout
    adapted_clip_bound: float | None = None
    rule: Rule | None = None
    sum_bits: int | None = None
    noise_shares: NoiseShares | None = None

    def __post_init__(self) -> None:
        check_sums(self.settings, self.sum_bits, self.noise_shares, self.adapted_clip_bound)
        if self.settings.noise_scope is not None:
            self.settings.noise_scope.parameter_factors(self.layout)
        if self.noise_shares is not None:
            rate = self.sampling_rate if self.settings.sampling is Sampling.POISSON else 1.0
            self.noise_shares.check_most(population_size=self._most_users, sampling_rate=rate)
            _ = self.noise.share_variance
        if self.rule is not None and self.settings.clip_rule is not None:
            raise InputError(f"rule={self.rule!r} beside clip_rule={self.settings.clip_rule}: expected one of them")
        if self.layout.held and self.settings.mechanism is not None:
            raise InputError(
                "mechanism with LoRA's factors=alternate or project: correlated noise cancels between rounds that "
                "train the same numbers, and these do not; expected no mechanism, or factors=both or b"
            )
        # Everything is built once now, so that what is wrong is refused here and not in the first round.
        _ = self.clipper, self._clippers, self.sampler, self.event, self.plugins
        check_invariant(self.noise_std_sum >= 0, f"noise_std_sum={self.noise_std_sum}: expected at least 0")

    @cached_property
    def event(self) -> Release | NoGuarantee:
        """What one round spends; with correlated noise, as one row of all of them."""
        settings, reason = self.settings, self.settings.no_guarantee_reason
        if reason is not None:
            return NoGuarantee(reason)
        match self.sampler:
            case PoissonSampler(sampling_rate=rate):
                return poisson_release(settings.z, sampling_rate=rate)
            case FixedSizeSampler(cohort_size=size):
                return fixed_size_release(settings.z, cohort_size=size, population_size=settings.population_size)
            case CyclicSampler(sampling_rate=rate, cycle=cycle):
                assert settings.mechanism is not None
                return CorrelatedRelease(settings.z, rate, cycle, settings.mechanism.strategy)

    @property
    def guarantee(self) -> str:
        """The guarantee in one line, without its ε (which grows with the steps), or why there is none."""
        return describe_guarantee(self)

    @property
    def server_event(self) -> GaussianRelease | None:
        """What a round releases to the server itself; None where it sees sums without noise.

        It draws the cohort, so that sampling hides nobody from it: a rate of 1.
        """
        if self.noise_shares is None:
            return None
        return poisson_release(self.noise_shares.multiplier_for_server(self.settings.z), sampling_rate=1.0)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is allowed but should be read."""
        delta, limit = self.settings.delta, 1 / self.settings.population_size
        leak = f"delta={delta:g} is not below 1/population_size={limit:.3g}: it allows one user's leak"
        return (leak,) if delta >= limit else ()

    @property
    def sampling_rate(self) -> float:
        """q = S/K."""
        return self.settings.cohort_size / self.settings.population_size

    @property
    def cohort_size(self) -> int:
        """S: the public, expected cohort size; never the realised one."""
        return self.settings.cohort_size

    @property
    def _most_users(self) -> int:
        """In any one cohort."""
        return self.settings.population_size if self.settings.sampling is Sampling.POISSON else self.cohort_size

    @property
    def denominator(self) -> float:
        """What a noised sum is divided by; public."""
        return self.settings.denominator or float(self.settings.answers)

    @property
    def clip_bound(self) -> float:
        """C of this round."""
        return self.settings.clip_bound if self.adapted_clip_bound is None else self.adapted_clip_bound

    @cached_property
    def update_noise_multiplier(self) -> float:
        """z, or the larger z_Δ that makes up for what adaptive clipping's count spends."""
        settings = self.settings
        if settings.adaptive is None or settings.z == 0:
            return settings.z
        return update_noise_multiplier(settings.z, count_noise_std=settings.adaptive.count_noise(settings.cohort_size))

    @property
    def noise_std_sum(self) -> float:
        """z·C: the standard deviation of the noise on the sum."""
        return self.update_noise_multiplier * self.clip_bound if self.settings.z > 0 else 0.0

    @cached_property
    def released_std_sum(self) -> float:
        """z·C, or more: where some clients may know, or keep, their shares of the noise; or where it is correlated."""
        if self.settings.mechanism is not None:
            return self.noise_std_sum * widening(self.settings.mechanism.strategy)
        return self.noise_std_sum * (1.0 if self.noise_shares is None else self.noise_shares.widening)

    @property
    def noise_std_mean(self) -> float:
        """C·σ_DP: what is released, after division by the denominator."""
        return self.released_std_sum / self.denominator

    @property
    def sigma_dp(self) -> float:
        """σ_DP = z/S, the paper's unit."""
        return sigma_dp_of(self.update_noise_multiplier, cohort_size=self.settings.answers)

    def fewest_available(self, least: int) -> int:
        """How many must be available before a round, where sums of fewer than `least` are not opened.

        Of all users; of the group whose turn it is, where groups take turns (`plan_sampling.drawn_from`). Guarantee:
        then whether a sum is opened depends on nobody's being drawn, but once in 10¹⁵ rounds. Else a release would show
        who was: the event is of sums that differ by one update, and not by all of them. With `expected_answers` that
        holds also where the others of a cohort are late, each by a coin of their own.
        """
        answers, people = self.settings.answers, self.settings.population_size
        if self.settings.sampling is Sampling.POISSON:
            return fewest_available(least, sampling_rate=draw_rate(self) * answers / self.cohort_size)
        return people - (answers - least)

    @cached_property
    def sampler(self) -> Sampler:
        people, mechanism = self.settings.population_size, self.settings.mechanism
        if mechanism is not None:
            return mechanism.sampler(population_size=people, cohort_size=self.cohort_size)
        return build_sampler(self.settings.sampling, population_size=people, cohort_size=self.cohort_size)

    @cached_property
    def plugins(self) -> Plugins:
        parts = {name: getattr(self.settings, name) for name in PLUGIN_KEYS}
        return Plugins.build(parts, is_release=self.settings.mode is Mode.SECURE)

    @property
    def _clip_rule(self) -> Rule | None:
        return self.plugins.clip_rule if self.rule is None else self.rule

    @cached_property
    def clipper(self) -> Clipper:
        return self._clipper()

    @cached_property
    def _clippers(self) -> dict[tuple[str, ...], Clipper]:
        return {held: self._clipper(held) for held in self.layout.held}

    def clipper_at(self, step: int) -> Clipper:
        """That of `step`: the bound is shared among the layers that the step trains."""
        return self._clippers[self.layout.held_at(step)] if self.layout.held else self.clipper

    def _clipper(self, held: tuple[str, ...] = ()) -> Clipper:
        groups = self.settings.layer_groups
        return Clipper(
            layers=group_layers(self.layout, groups, held=held) if groups else tensor_layers(self.layout, held=held),
            clip_bound=self.clip_bound,
            share=self.settings.share,
            normalise=self.settings.normalise,
            alpha=tuple(self.settings.alpha.items()),
            grid=self.grid,
        )

    @cached_property
    def grid(self) -> float | None:
        """The grid that keeps sums exact (see `noise`): a secure run's, or one's over a network; public."""
        if self.settings.mode is Mode.SEEDED and self.sum_bits is None:
            return None
        return grid_spacing(
            clip_bound=self.clip_bound, most_users=self._most_users, std=self.released_std_sum, bits=self.word_bits
        )

    @property
    def word_bits(self) -> int:
        """Sums on the grid are signed integers of so many bits: of words of 64 what float64 holds exactly."""
        return 32 if self.sum_bits == 32 else 53

    @cached_property
    def noise(self) -> RoundNoise:
        return RoundNoise(
            layout=self.layout,
            random=RandomSource(self.settings.root_seed),
            std_sum=self.noise_std_sum,
            grid=self.grid,
            word_bits=None if self.sum_bits is None else self.word_bits,
            scope=self.settings.noise_scope,
            shares=self.noise_shares,
            strategy=None if self.settings.mechanism is None else self.settings.mechanism.strategy,
        )

    def sample(self, step: int, *, attempt: int = 1, row: int | None = None, among: Indices | None = None) -> Indices:
        """The cohort of `step`: indices of users, ascending. Private. A later attempt at the step has another one.

        With correlated noise it is drawn from the group of that `row` of noise (the step's, if not given). `among`
        fewer users than all, as many as ever (or all of these): only where there is no guarantee.
        """
        return draw_cohort(self, step, attempt=attempt, row=row, among=among)

    def new_total(self, *, device: torch.device | str = "cpu") -> Tensor:
        """A zero sum [P]: float32, or float64 on a grid."""
        dtype = torch.float32 if self.grid is None else torch.float64
        return self.layout.zeros(device=device, dtype=dtype)

    def weight(self, amount: float) -> float:
        """ω of a user with `amount` of data (utterances or seconds, as the weighting says)."""
        if self.settings.weighting is Weighting.UNIFORM:
            return 1.0
        cap = self.settings.weight_cap
        if cap is None:
            raise InvariantError(f"weighting={self.settings.weighting} without a weight_cap: expected a cap")
        return bounded_weight(amount, cap=cap)

    def weigh(self, figures: object) -> float:
        """ω of a user by the plug-in `weights`, from that user's figures alone; 1 where there are none.

        Guarantee: in [0, 1] whatever they return, a NaN as 0. In a release weights that fail on one user are 0, too.
        """
        return self.plugins.weight(figures)

    def clip(self, update: Tensor, *, weight: Tensor | float = 1.0, step: int = 0) -> Tensor:
        """ω·clip(update), [P] or [N, P], as a new tensor; `accumulate` is the fast way to sum them."""
        self._check_weight(weight)
        return self.clipper_at(step).clip(self._ruled(update), weight=weight)[0]

    def accumulate(self, total: Tensor, update: Tensor, *, weight: Tensor | float = 1.0, step: int = 0) -> ClipStats:
        """total += ω·clip(update), summed over stacked users. A user's ω is their own `weight`, nobody else's data."""
        self._check_weight(weight)
        return self.clipper_at(step).accumulate(total, self._ruled(update), weight=weight)

    @property
    def bounds_updates(self) -> bool:
        """Whether anything is done to a single user's update."""
        return not math.isinf(self.clip_bound) or self.settings.z > 0 or self._clip_rule is not None

    def add_unclipped(self, total: Tensor, summed: Tensor) -> None:
        """total += Σ ω·update of several users: only where single ones are not changed, and without a guarantee."""
        check_invariant(not self.bounds_updates, "a sum of updates that nobody has clipped")
        total.add_(summed)

    def _ruled(self, update: Tensor) -> Tensor:
        """The rule on each user's update by itself: it never sees two users at once."""
        rule = self._clip_rule
        if rule is None or not update.numel():
            return update
        rows = [self.plugins.apply_rule(rule, row, self) for row in update.reshape(-1, self.layout.flat_size)]
        ruled = torch.stack(rows).view_as(update)
        self.layout.clear_padding(ruled)
        return ruled

    def _check_weight(self, weight: Tensor | float) -> None:
        uniform = isinstance(weight, float | int) and weight == 1
        weighted = self.settings.weighting is not Weighting.UNIFORM or self.settings.weights is not None
        check_invariant(uniform or weighted, "weights in a plan with weighting=uniform")

    def charge(self, ledger: Ledger, *, step: int, parameters: str, cohort: str) -> Charge:
        """Pays for `step`: on the disk when this returns. BudgetSpent if the budget does not allow it.

        `parameters` is a digest of the model before the step, `cohort` the commitment to who takes part.
        """
        return ledger.intend(self.event, step=step, clip_bound=self.clip_bound, parameters=parameters, cohort=cohort)

    def _release(self, charge: Charge, what: Literal["sum", "count"]) -> int:
        paid, due = (charge.event, charge.clip_bound), (self.event, self.clip_bound)
        check_invariant(paid == due, f"step {charge.step} was charged as {paid}: this plan releases {due}")
        return charge.release(what)

    def add_noise(
        self, total: Tensor, charge: Charge, *, shares: int = 0, correlated: CorrelatedNoise | None = None
    ) -> Tensor:
        """total += N(0, (z·C)²), in place or in float32; returns the noised sum in float32. Once per charge.

        As many `shares` of the noise are in it already, added by clients; what is missing is added. Where no sum was
        opened that is all of it, from the same source: nothing shows whether one was. With a mechanism it is the
        charge's row of the run's `correlated` noise.
        """
        at = {"step": self._release(charge, "sum"), "attempt": charge.attempt, "row": charge.row}
        noised = self.noise.add(total, **at, shares=shares, correlated=correlated)
        self.layout.clear(noised, self.layout.held_at(charge.step))
        return noised

    def correlated_noise(
        self, *, device: torch.device | str = "cpu", secret_folder: Path | None = None
    ) -> CorrelatedNoise | None:
        """The noise of a whole run, from its first row on; a release keeps its memory in `secret_folder`."""
        return self.noise.correlated(device=device, secret_folder=secret_folder)

    def adapt(self, centred_count: float, charge: Charge) -> "Plan":
        """The plan of the next step, its clip bound moved by the noised count (see `adaptive.centred_count`).

        Guarantee: together with `add_noise` for the same charge one `event`; the count's noise is in it.
        """
        adaptive = self.settings.adaptive
        if adaptive is None:
            raise InvariantError("only a plan with adaptive clipping adapts")
        step = self._release(charge, "count")
        std = adaptive.count_noise(self.cohort_size)
        noise = self.noise.count(std=std, most_users=self.settings.population_size, step=step, attempt=charge.attempt)
        bound = next_clip_bound(self.clip_bound, centred_count + noise, cohort_size=self.cohort_size, settings=adaptive)
        return self.with_clip_bound(bound)

    def with_clip_bound(self, clip_bound: float) -> "Plan":
        """The same plan further on in an adaptive run, for resuming."""
        return dataclasses.replace(self, adapted_clip_bound=clip_bound)

    def cohort_nonce(self, step: int) -> bytes:
        """What hides the cohort in the ledger's commitment; keep it to open the commitment later."""
        return self.noise.random.cohort_nonce(step)

    def describe(self) -> dict[str, object]:
        """All settings that decide what is released, as JSON takes them; the layout by its shapes."""
        return describe_plan(self)

    ledger_header = ledger_header
