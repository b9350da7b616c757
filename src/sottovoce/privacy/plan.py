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
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from sottovoce.errors import BrokenPromise, InputError, promise
from sottovoce.flat.layout import Layout, group_layers, tensor_layers
from sottovoce.privacy import telling
from sottovoce.privacy.adaptive import next_clip_bound, update_noise_multiplier
from sottovoce.privacy.clipping import Clipper, ClipStats
from sottovoce.privacy.correlated_noise import CorrelatedNoise, widening
from sottovoce.privacy.events import (
    CorrelatedRelease,
    GaussianRelease,
    NoGuarantee,
    Release,
    fixed_size_release,
    poisson_release,
)
from sottovoce.privacy.ledger import Charge, Header, Ledger
from sottovoce.privacy.noise import (
    add_discrete_gaussian,
    add_gaussian,
    add_on_grid,
    add_secure_gaussian,
    grid_gaussian,
    grid_spacing,
    secure_normal,
    sigma_dp_of,
)
from sottovoce.privacy.noise_shares import NoiseShares, fewest_here
from sottovoce.privacy.outside import OutsideSampler, build_outside, checked_cohort, within_one
from sottovoce.privacy.sampling import (
    CyclicSampler,
    FixedSizeSampler,
    Indices,
    PoissonSampler,
    Sampler,
    Words,
    bounded_weight,
)
from sottovoce.privacy.secure_random import SecureRandom
from sottovoce.privacy.settings import Mode, PrivacySettings, Sampling, Weighting
from sottovoce.seeds import derive, stream

# What is done to one user's update [P] before it is clipped: a function of that update and of what is public.
Rule = Callable[[Tensor, "Plan"], Tensor]


@dataclass(frozen=True)
class Plan:
    """One round's privacy, ready to use (Algorithm 1).

    Guarantee: `add_noise` on a total of `accumulate` over the users of `sample` is exactly one `event`. Where the
    event is a `NoGuarantee`, it says why. What a `rule` returns is clipped like any update, so it cannot break this.
    With `sum_bits` (32 or 64) sums are whole multiples of `grid` that fit into so many bits, as clients over a network
    need them, in a simulation too. With `noise_shares` clients add the noise, and `add_noise` what is missing of it.

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
        if self.sum_bits not in (None, 32, 64):
            raise InputError(f"sum_bits={self.sum_bits}: expected 32 or 64, or none")
        if self.sum_bits is not None and math.isinf(self.settings.clip_bound):
            raise InputError(f"sum_bits={self.sum_bits} with clip_bound=inf: nothing bounds a sum; set a clip bound")
        if self.adapted_clip_bound is not None and self.settings.adaptive is None:
            raise InputError(f"clip_bound={self.adapted_clip_bound}: only adaptive clipping moves the bound of a plan")
        if self.settings.noise_scope is not None:
            self.settings.noise_scope.parameter_factors(self.layout)
        if self.settings.mechanism is not None and (self.sum_bits is not None or self.noise_shares is not None):
            raise InputError("mechanism over a network, where clients' sums are words: expected independent noise")
        if self.noise_shares is not None:
            self._check_shares(self.noise_shares)
        if self.rule is not None and self.settings.clip_rule is not None:
            raise InputError(f"rule={self.rule!r} beside clip_rule={self.settings.clip_rule}: expected one of them")
        # Everything is built once now, so that what is wrong is refused here and not in the first round.
        _ = self.clipper, self.sampler, self.event, self._clip_rule, self._weights, self._outside_sampler
        promise(self.noise_std_sum >= 0, f"noise_std_sum={self.noise_std_sum}: expected at least 0")

    def _check_shares(self, shares: NoiseShares) -> None:
        if self.sum_bits is None or self.settings.no_guarantee_reason is not None or self.settings.adaptive is not None:
            raise InputError(
                f"noise_shares={shares}: expected sum_bits, a plan with a guarantee, and a clip bound that stays"
            )
        most = self.settings.population_size if self.settings.sampling is Sampling.POISSON else self.cohort_size
        rate = self.sampling_rate if self.settings.sampling is Sampling.POISSON else 1.0
        shares.check_most(population_size=most, sampling_rate=rate)
        _ = self.share_variance

    # What is charged.

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
        """The promise in one line, without its ε (which grows with the steps), or why there is none."""
        return telling.guarantee(self)

    @property
    def server_event(self) -> GaussianRelease | None:
        """What a round tells the server itself of somebody who takes part; None where it sees sums without noise.

        It draws the cohort, so that sampling hides nobody from it: a rate of 1, for each round with them in it.
        """
        if self.noise_shares is None:
            return None
        return poisson_release(self.noise_shares.multiplier_for_server(self.settings.z), sampling_rate=1.0)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is allowed but should be read."""
        limit = 1 / self.settings.population_size
        if self.settings.delta >= limit:
            return (
                f"delta={self.settings.delta:g} is not below 1/population_size={limit:.3g}: it allows one user's leak",
            )
        return ()

    # What is done.

    @property
    def sampling_rate(self) -> float:
        """q = S/K."""
        return self.settings.cohort_size / self.settings.population_size

    @property
    def cohort_size(self) -> int:
        """S: the public, expected cohort size; never the realised one."""
        return self.settings.cohort_size

    @property
    def denominator(self) -> float:
        """What a noised sum is divided by; public."""
        return self.settings.denominator or float(self.settings.cohort_size)

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
        """z·C, or more: where clients add the noise and some of them may know, or keep, their shares of it; or where it
        is correlated, on any one round."""
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
        return sigma_dp_of(self.update_noise_multiplier, cohort_size=self.settings.cohort_size)

    def fewest_here(self, least: int) -> int:
        """How many of all users must be here before a round, where sums of fewer than `least` are not opened.

        Guarantee: whether a sum is opened then hangs on nobody's being drawn, but once in 10¹⁵ rounds. Else a release
        would tell who was: the event is of sums that differ by one update, and not by all of them.
        """
        if self.settings.sampling is Sampling.POISSON:
            return fewest_here(least, sampling_rate=self.sampling_rate)
        return self.settings.population_size - (self.cohort_size - least)

    @cached_property
    def sampler(self) -> Sampler:
        settings, sizes = self.settings, (self.settings.population_size, self.settings.cohort_size)
        if settings.mechanism is not None:
            return settings.mechanism.sampler(population_size=sizes[0], cohort_size=sizes[1])
        return _sampler(settings.sampling, population_size=sizes[0], cohort_size=sizes[1])

    # What comes from outside (see `outside`).

    @cached_property
    def _clip_rule(self) -> Rule | None:
        part = self.settings.clip_rule
        found: Rule | None = self.rule if part is None else build_outside("clip_rule", part)
        return found

    @cached_property
    def _weights(self) -> Callable[[object], float] | None:
        part = self.settings.weights
        found: Callable[[object], float] | None = None if part is None else build_outside("weights", part)
        return found

    @cached_property
    def _outside_sampler(self) -> OutsideSampler | None:
        part = self.settings.sampler
        found: OutsideSampler | None = None if part is None else build_outside("sampler", part)
        return found

    @cached_property
    def clipper(self) -> Clipper:
        groups = self.settings.layer_groups
        return Clipper(
            layers=group_layers(self.layout, groups) if groups else tensor_layers(self.layout),
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
        most = self.settings.population_size if self.settings.sampling is Sampling.POISSON else self.cohort_size
        return grid_spacing(clip_bound=self.clip_bound, most_users=most, std=self.released_std_sum, bits=self.word_bits)

    @property
    def word_bits(self) -> int:
        """Sums on the grid are signed integers of so many bits: of words of 64 what float64 holds exactly."""
        return 32 if self.sum_bits == 32 else 53

    @property
    def share_variance(self) -> float:
        """Of the noise that one client adds, in cells² of the grid: a discrete Gaussian's (`noise_shares`)."""
        promise(self.noise_shares is not None and self.grid is not None, "a share of noise in a plan without shares")
        assert self.noise_shares is not None
        assert self.grid is not None
        return self.noise_shares.variance(noise_std_cells=self.noise_std_sum / self.grid)

    def sample(self, step: int, *, attempt: int = 1, row: int | None = None, among: Indices | None = None) -> Indices:
        """The cohort of `step`: indices of users, ascending. Private. A later attempt at the step has another one.

        With correlated noise it is drawn from those whose turn it is at that `row` of noise (the step's, if not given).
        `among` fewer users than all, as many of them as ever (or all): only where nothing is promised to them.
        """
        if self._outside_sampler is not None:
            promise(among is None, "a sampler from outside among some of all users")
            return self._drawn_outside(self._outside_sampler, step, attempt)
        words: Words = SecureRandom().words if self.settings.root_seed is None else self._seeded_words(step, attempt)
        if isinstance(self.sampler, CyclicSampler):
            promise(among is None, "a cohort of some, where groups take turns")
            return self.sampler.sample(self.settings.population_size, row=step if row is None else row, words=words)
        if among is None:
            return self.sampler.sample(self.settings.population_size, words=words)
        promise(isinstance(self.event, NoGuarantee) and self.settings.z == 0, "a cohort of some, accounted as of all")
        if not len(among):
            return among
        size = min(self.cohort_size, len(among))
        some = _sampler(self.settings.sampling, cohort_size=size, population_size=len(among))
        return among[some.sample(len(among), words=words)]

    def _drawn_outside(self, sampler: OutsideSampler, step: int, attempt: int) -> Indices:
        seed = self.settings.root_seed
        if seed is None:
            raise BrokenPromise("a release whose cohorts nobody can account for")
        generator = stream(seed, "outside cohort", step, *_again(attempt))
        return checked_cohort(sampler(step, self, generator=generator), population_size=self.settings.population_size)

    def _seeded_words(self, step: int, attempt: int) -> Words:
        assert self.settings.root_seed is not None
        raw = stream(self.settings.root_seed, "cohort", step, *_again(attempt)).bit_generator.random_raw
        return lambda count: raw(count)

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
            raise BrokenPromise(f"weighting={self.settings.weighting} without a weight_cap is no business of the plan")
        return bounded_weight(amount, cap=cap)

    def weigh(self, figures: object) -> float:
        """ω of a user by the `weights` from outside, by that user's figures alone; 1 where there are none.

        Guarantee: in [0, 1] whatever they return, a NaN as 0. In a release weights that fail on one user are 0, too.
        """
        if self._weights is None:
            return 1.0
        try:
            return within_one(self._weights(figures))
        except Exception:
            if self.settings.mode is Mode.SEEDED:
                raise
            return 0.0

    def clip(self, update: Tensor, *, weight: Tensor | float = 1.0) -> Tensor:
        """ω·clip(update), [P] or [N, P], as a new tensor; `accumulate` is the fast way to sum them."""
        self._check_weight(weight)
        return self.clipper.clip(self._ruled(update), weight=weight)[0]

    def accumulate(self, total: Tensor, update: Tensor, *, weight: Tensor | float = 1.0) -> ClipStats:
        """total += ω·clip(update), summed over stacked users. A user's ω is their own `weight`, nobody else's data."""
        self._check_weight(weight)
        return self.clipper.accumulate(total, self._ruled(update), weight=weight)

    @property
    def bounds_updates(self) -> bool:
        """Whether anything is done to a single user's update."""
        return not math.isinf(self.clip_bound) or self.settings.z > 0 or self._clip_rule is not None

    def add_unclipped(self, total: Tensor, summed: Tensor) -> None:
        """total += Σ ω·update of several users: only where nothing is done to single ones, and nothing is promised."""
        promise(not self.bounds_updates, "a sum of updates that nobody has clipped")
        total.add_(summed)

    def _ruled(self, update: Tensor) -> Tensor:
        """The rule on each user's update by itself: it never sees two users at once."""
        if self._clip_rule is None or not update.numel():
            return update
        rows = [self._ruled_one(self._clip_rule, row) for row in update.reshape(-1, self.layout.flat_size)]
        ruled = torch.stack(rows).view_as(update)
        self.layout.clear_padding(ruled)
        return ruled

    def _ruled_one(self, rule: Rule, update_P: Tensor) -> Tensor:
        """In a release a rule that fails on one user's update gives NaN, which counts as zero: the others go on."""
        try:
            ruled_P = rule(update_P, self)
            if ruled_P.shape != update_P.shape:
                raise InputError(f"{rule!r}: expected an update of the shape it was given")
        except Exception:
            if self.settings.mode is Mode.SEEDED:
                raise
            return torch.full_like(update_P, torch.nan)
        return ruled_P

    def _check_weight(self, weight: Tensor | float) -> None:
        uniform = isinstance(weight, float | int) and weight == 1
        weighted = self.settings.weighting is not Weighting.UNIFORM or self.settings.weights is not None
        promise(uniform or weighted, "weights in a plan with weighting=uniform")

    def charge(self, ledger: Ledger, *, step: int, parameters: str, cohort: str) -> Charge:
        """Pays for `step`: on the disk when this returns. BudgetSpent if the budget does not allow it.

        `parameters` is a digest of the model before the step, `cohort` the commitment to who takes part.
        """
        return ledger.intend(self.event, step=step, clip_bound=self.clip_bound, parameters=parameters, cohort=cohort)

    def _release(self, charge: Charge, what: Literal["sum", "count"]) -> int:
        paid, due = (charge.event, charge.clip_bound), (self.event, self.clip_bound)
        promise(paid == due, f"step {charge.step} was charged as {paid}: this plan releases {due}")
        return charge.release(what)

    def add_noise(
        self, total: Tensor, charge: Charge, *, shares: int = 0, correlated: CorrelatedNoise | None = None
    ) -> Tensor:
        """total += N(0, (z·C)²), in place or in float32; returns the noised sum in float32. Once per charge.

        `shares` of the noise are in it already, added by as many clients: what is missing comes on top. All of it is
        missing where no sum was opened, and comes from the same source: nothing shows whether one was. With a mechanism
        it is the charge's row of the run's `correlated` noise.
        """
        settings, step = self.settings, self._release(charge, "sum")
        promise((settings.mechanism is None) == (correlated is None), "noise of another kind than the plan's")
        if correlated is not None:
            return self._add_row(total, correlated.row(charge.row)).float()
        if shares or self.noise_shares is not None:
            return self._wrapped(self._top_up(total, shares)).float()
        if settings.root_seed is None:
            assert self.grid is not None
            add_secure_gaussian(
                total, std=self.noise_std_sum, grid=self.grid, random=SecureRandom(), layout=self.layout
            )
            return self._wrapped(total).float()
        total = total.float()  # on a grid too: a simulation's noise is the same wherever its clients are
        factors = settings.noise_scope.parameter_factors(self.layout) if settings.noise_scope else None
        generator = torch.Generator(device=total.device).manual_seed(self._noise_seed(step, charge.attempt))
        add_gaussian(total, std=self.noise_std_sum, generator=generator, layout=self.layout, factors=factors)
        return total.float()

    def correlated_noise(
        self, *, device: torch.device | str = "cpu", vault: Path | None = None
    ) -> CorrelatedNoise | None:
        """The noise of a whole run, from its first row on; None where rounds have noise of their own.

        A release keeps what it needs of earlier rows in `vault`, a folder for its owner's eyes alone.
        """
        if self.settings.mechanism is None:
            return None
        secure = self.settings.root_seed is None
        promise(secure == (vault is not None), "a release's noise without a vault, or a simulation's with one")
        return CorrelatedNoise(
            self.settings.mechanism.strategy,
            layout=self.layout,
            draw=lambda row: self._independent(row, device),
            device=device,
            dtype=torch.float64 if secure else torch.float32,
            vault=vault,
        )

    def _independent(self, row: int, device: torch.device | str) -> Tensor:
        """N(0, 1) [P] for one row; a simulation's are those that independent noise of as many steps would have."""
        if self.settings.root_seed is None:
            return secure_normal(self.layout, random=SecureRandom(), device=device)
        generator = torch.Generator(device=device).manual_seed(self._noise_seed(row, 1))
        return add_gaussian(self.layout.zeros(device=device), std=1.0, generator=generator, layout=self.layout)

    def _add_row(self, total: Tensor, noise_P: Tensor) -> Tensor:
        if self.grid is None:
            return total.add_(noise_P, alpha=self.noise_std_sum)
        return add_on_grid(total, noise_P, std=self.noise_std_sum, grid=self.grid, layout=self.layout)

    def _top_up(self, total: Tensor, shares: int) -> Tensor:
        """From the system's entropy in a simulation too: so are the clients' own shares."""
        agreed = self.noise_shares
        if agreed is None or 0 < shares < agreed.least:
            raise BrokenPromise(f"a sum with {shares} shares of noise: {agreed} was promised")
        assert self.grid is not None
        return add_discrete_gaussian(
            total,
            variance_cells=agreed.missing(shares) * self.share_variance,
            grid=self.grid,
            random=SecureRandom(),
            layout=self.layout,
        )

    def _wrapped(self, noised: Tensor) -> Tensor:
        """Sums of words are modulo 2^`word_bits`, and so is the noise on them: as if it had been there before.

        Over a network nobody sees what a client adds. A vector that brings the sum to where words wrap around would
        else show, whatever the noise, on which side of it somebody's update has left it. Sums of clipped updates, and
        16 standard deviations of noise, stay as they are.
        """
        if self.sum_bits is None:
            return noised
        assert self.grid is not None
        half = math.ldexp(self.grid, self.word_bits - 1)
        noised[noised >= half] -= 2 * half
        noised[noised < -half] += 2 * half
        return noised

    def _noise_seed(self, step: int, attempt: int) -> int:
        """Counted up: torch's CPU generator keeps 32 bits of a seed, where hashed ones of two steps may meet."""
        assert self.settings.root_seed is not None
        return (derive(self.settings.root_seed, "noise", *_again(attempt)) + step) % 2**63

    def adapt(self, centred_count: float, charge: Charge) -> "Plan":
        """The plan of the next step, its clip bound moved by the noised count (see `adaptive.centred_count`).

        Guarantee: together with `add_noise` for the same charge one `event`; the count's noise is in it.
        """
        adaptive = self.settings.adaptive
        if adaptive is None:
            raise BrokenPromise("only a plan with adaptive clipping adapts")
        step = self._release(charge, "count")
        std = adaptive.count_noise(self.cohort_size)
        if self.settings.root_seed is None:
            # Half counts lie on the grid and sums are exact, so the argument of `noise` holds here too.
            grid = min(grid_spacing(clip_bound=1.0, most_users=self.settings.population_size, std=std), 0.5)
            noise = float(grid_gaussian(1, std=std, grid=grid, random=SecureRandom()))
        else:
            noise = float(self._count_stream(step, charge.attempt).normal(0.0, std))
        bound = next_clip_bound(self.clip_bound, centred_count + noise, cohort_size=self.cohort_size, settings=adaptive)
        return self.with_clip_bound(bound)

    def _count_stream(self, step: int, attempt: int) -> np.random.Generator:
        assert self.settings.root_seed is not None
        return stream(self.settings.root_seed, "clip count noise", step, *_again(attempt))

    def with_clip_bound(self, clip_bound: float) -> "Plan":
        """The same plan further on in an adaptive run, for resuming."""
        return dataclasses.replace(self, adapted_clip_bound=clip_bound)

    def cohort_nonce(self, step: int) -> bytes:
        """What hides the cohort in the ledger's commitment; keep it to open the commitment later."""
        if self.settings.root_seed is None:
            return os.urandom(32)
        return derive(self.settings.root_seed, "cohort nonce", step).to_bytes(8, "little")

    def describe(self) -> dict[str, object]:
        """All settings that decide what is released, as JSON takes them; the layout by its shapes."""
        return telling.description(self)

    def ledger_header(
        self,
        *,
        run: str,
        inputs: str = "",
        repeatable: bool = True,
        central_steps: int | None = None,
        client_wer: Mapping[str, Any] | None = None,
        accepted: Mapping[str, int] | None = None,
        recipe: str | None = None,
    ) -> Header:
        """The header of the run's ledger; `inputs` is a digest of what the run reads, and kept by simulations only.

        `repeatable`: whether the run's arithmetic repeats itself to the bit, so that lost steps can be done again.
        `central_steps`: how many are promised. `client_wer`: what is measured besides (`ClientWer.in_ledger`).
        `accepted`: how many attempts the people of a release over a network have accepted.
        `recipe`: SHA-256 of it, as the run's folder has it.
        """
        seeded = self.settings.mode is Mode.SEEDED
        return Header(
            run=run,
            mode="secure" if not seeded else "seeded" if repeatable else "unrepeated",
            plan=self.describe(),
            event=self.event,
            delta=self.settings.delta,
            epsilon_budget=self.settings.epsilon_budget,
            inputs=inputs if seeded else "",
            central_steps=central_steps,
            client_wer=client_wer,
            accepted=accepted,
            recipe=recipe,
        )


def _sampler(sampling: Sampling, *, cohort_size: int, population_size: int) -> PoissonSampler | FixedSizeSampler:
    if sampling is Sampling.POISSON:
        return PoissonSampler(sampling_rate=cohort_size / population_size)
    return FixedSizeSampler(cohort_size=cohort_size)


def _again(attempt: int) -> tuple[str | int, ...]:
    """What a later attempt adds to the name of a random stream: its draws must be new ones."""
    return () if attempt == 1 else ("attempt", attempt)
