"""An audit: rounds as a run makes them, with canaries among the users, and how well canaries are told apart afterwards.

    plan ─► audited_plan ─► run_round … ─► scores of all canaries ─► estimate · bound · noise check ─► verdict

Rounds, plan, ledger and server are those of a run: what is wrong in them is wrong here. The attacker sees what is
public: every release, or the last model alone. Scores are per tensor, since noise may be missing on one of them.

Shapes: P flat length, N canaries, G groups of them, T rounds, H tensors.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sottovoce.audit.canaries import Canaries, CanaryEngine, Floats, MatchedFilter, canary_scores, others_in
from sottovoce.audit.epsilon import LEVEL, EpsilonFit, GuessBound, bound_epsilon, fit_epsilon
from sottovoce.audit.release_checks import NoiseCheck, NoiseMeter, SamplingCheck, SamplingMeter
from sottovoce.audit.rounds import AuditedRounds, JoinedEngine, audited_plan
from sottovoce.base.errors import InputError
from sottovoce.federated.engines import Engine
from sottovoce.privacy.accounting import Epsilon
from sottovoce.privacy.events import NoGuarantee, Release
from sottovoce.privacy.plan import Plan


class Observer(StrEnum):
    """What the attacker sees."""

    RELEASES = "releases"  # the noised mean of every round
    FINAL = "final"  # the last model alone, and the first


class AuditVerdict(StrEnum):
    CONSISTENT = "consistent"  # nothing speaks against the promise
    ALARM = "alarm"  # the estimate lies above it, interval and all
    BROKEN = "broken"  # it is refuted


# What an interval is worth. Its level is that of exactly Gaussian scores, which chance in who is drawn spoils.
HOLDS_TRUTH = f"the interval holds the true ε in {LEVEL:.0%} of audits"
ACHIEVED = "estimate and interval are what an attack achieved, usually below ε; no share of audits holds the truth"
DRAWN_BY_CHANCE = f"people are drawn by chance, so {ACHIEVED}"
LAST_MODEL_ALONE = f"the attacker sees the last model alone, so {ACHIEVED}"


def describe_interval(release: Release | NoGuarantee, observer: str) -> str:
    """What the interval of an audit is worth: it holds the truth as often as it says only where an attacker sees every
    release and everybody is in every round (or in every round of their group), so that scores are Gaussian."""
    if observer != Observer.RELEASES:
        return LAST_MODEL_ALONE
    everybody = not isinstance(release, NoGuarantee) and release.sampling_rate == 1
    return HOLDS_TRUTH if everybody else DRAWN_BY_CHANCE


@dataclass(frozen=True)
class Audit:
    """What an audit found. `promised` is the ledger's ε of the rounds that were audited, infinite without a guarantee.

    `interval` says what the intervals of its estimates are worth.
    `worst` is the tensor by whose scores alone canaries are told apart best, with its estimate, the interval widened
    for having looked at all of them.
    """

    observer: Observer
    canaries: int
    canaries_in: int
    people: int
    rounds: int
    delta: float
    promised: float
    promised_by: Epsilon
    fit: EpsilonFit
    worst: tuple[str, EpsilonFit]
    bound: GuessBound
    noise: NoiseCheck | None
    drawn: SamplingCheck | None
    interval: str

    @property
    def interval_holds_truth(self) -> bool:
        """As often as its level says."""
        return self.interval == HOLDS_TRUTH

    @property
    def against(self) -> tuple[tuple[AuditVerdict, str], ...]:
        """All that speaks against the promise, in words; proofs first."""
        bound, noise, fit, drawn = self.bound, self.noise, self.fit, self.drawn
        tensor, worst = self.worst
        promised = f"{self.promised:.4g} is promised"
        found: list[tuple[AuditVerdict, str]] = []
        if bound.epsilon > self.promised:
            guessed = f"{bound.right:,} of {bound.made:,} guesses were right"
            found.append((AuditVerdict.BROKEN, f"{guessed}: ε is at least {bound.epsilon:.2f}, and {promised}"))
        if noise is not None and noise.is_missing:
            what = "differences between rounds" if noise.between_rounds else "releases"
            claimed = f"{noise.share:.1%} of the noise that is claimed in {noise.tensor}"
            found.append((AuditVerdict.BROKEN, f"{what} hold {claimed}"))
        if fit.low > self.promised:
            found.append((AuditVerdict.ALARM, f"the estimate's interval begins at ε = {fit.low:.2f}, and {promised}"))
        if worst.low > self.promised:
            found.append((AuditVerdict.ALARM, f"that by {tensor} alone begins at ε = {worst.low:.2f}, and {promised}"))
        if drawn is not None and drawn.stands_out:
            stands = f"who is drawn stands {drawn.effect:.2f} standard deviations out of the noise"
            found.append((AuditVerdict.ALARM, f"{stands}, and {drawn.effect_accounted:.2f} is accounted for"))
        if drawn is not None and drawn.too_often:
            often = f"{drawn.rate:.2%} are drawn in a round, and {drawn.rate_accounted:.2%} is accounted for"
            found.append((AuditVerdict.ALARM, often))
        return tuple(found)

    @property
    def verdict(self) -> AuditVerdict:
        return self.against[0][0] if self.against else AuditVerdict.CONSISTENT

    @property
    def why(self) -> str:
        """The verdict in one line."""
        if self.against:
            return "; ".join(words for _, words in self.against)
        if math.isinf(self.promised):
            return "nothing is promised, so that nothing can be broken"
        return "nothing speaks against what is promised"

    def as_json(self) -> dict[str, Any]:
        tensor, fit = self.worst
        return {
            "verdict": str(self.verdict),
            "why": self.why,
            "observer": str(self.observer),
            "canaries": self.canaries,
            "canaries_in": self.canaries_in,
            "people": self.people,
            "rounds": self.rounds,
            "delta": self.delta,
            "promised": {
                "epsilon_pld": self.promised_by.pld,
                "epsilon_rdp": self.promised_by.rdp if math.isfinite(self.promised) else None,
            },
            "estimate": self.fit.as_json(),
            "interval_holds_truth": self.interval_holds_truth,
            "interval_words": self.interval,
            "worst_tensor": {"name": tensor, **fit.as_json()},
            "lower_bound": self.bound.as_json(),
            "noise": None if self.noise is None else self.noise.as_json(),
            "drawn": None if self.drawn is None else self.drawn.as_json(),
        }


def audit_rounds(
    plan: Plan,
    rounds: AuditedRounds,
    people: Sequence[tuple[Engine, int]] = (),
    *,
    canaries: int,
    seed: int,
    observer: Observer = Observer.RELEASES,
) -> Audit:
    """Make `rounds` of `plan`, which is for the `people`, with canaries added, and judge what they reveal.

    `people` are engines, each with how many clients it has; without any, canaries are all users.
    """
    server, count = rounds.server, sum(number for _, number in people)
    audited = audited_plan(plan, others=canaries + count - plan.settings.population_size)
    added = Canaries(audited, canaries, seed, device=server.parameters_P.device)
    engine = CanaryEngine(added, signs=observer is Observer.RELEASES)
    best = MatchedFilter(audited, first=count, signs_T=np.array([engine.sign(step) for step in range(rounds.count)]))
    is_in = _check_counts(added, best)
    watch = _Watch(added, engine, best)
    begun_P = server.result_P.clone()
    report = rounds.make(audited, JoinedEngine([*people, (engine, canaries)]), on_release=watch)
    if observer is Observer.RELEASES:
        raw_NH = canary_scores(added, watch.total_GP, best.groups_N)
        # The attacker of the guarantee knows all other users: what the other canaries bring is taken off, as far as it
        # is known, which is but for who was drawn. The bound may not know it: that would be to look at the coins.
        clean_NH = raw_NH - others_in(added, best)
    else:
        raw_NH = clean_NH = canary_scores(added, (begun_P - server.result_P)[None], np.zeros_like(best.groups_N))
    raw_NH, clean_NH = raw_NH[best.takes_part_N], clean_NH[best.takes_part_N]
    names, delta = audited.layout.names, audited.settings.delta

    def fit(scores_N: Floats, *, tensor: int | None = None, tests: int = 1) -> EpsilonFit:
        dimension = added.effective_dimension(tensor)
        return fit_epsilon(scores_N[is_in], scores_N[~is_in], delta=delta, dimension=dimension, tests=tests)

    fits = [fit(clean_NH[:, h], tensor=h, tests=len(names)) for h in range(len(names))]
    worst = max(range(len(names)), key=lambda h: (fits[h].low, fits[h].epsilon))
    return Audit(
        observer=observer,
        canaries=canaries,
        canaries_in=int(added.is_in.sum()),
        people=count,
        rounds=rounds.count,
        delta=delta,
        promised=report.epsilon.headline,
        promised_by=report.epsilon,
        fit=fit(clean_NH.sum(1)),
        worst=(names[worst], fits[worst]),
        bound=bound_epsilon(raw_NH.sum(1), is_in, delta=delta),
        noise=None if isinstance(audited.event, NoGuarantee) else watch.noise.found(),
        drawn=watch.sampling(),
        interval=describe_interval(audited.event, observer),
    )


def _check_counts(canaries: Canaries, best: MatchedFilter) -> NDArray[np.bool_]:
    """Which of the canaries that take part are in; InputError where they are too few."""
    is_in: NDArray[np.bool_] = canaries.is_in[best.takes_part_N]
    if min(is_in.sum(), (~is_in).sum()) < 2:
        raise InputError(
            f"canaries={canaries.count}: {len(is_in)} of them have a turn in so few rounds, {is_in.sum()} of these are "
            "in; expected more canaries, or more rounds"
        )
    return is_in


@final
class _Watch:
    """Adds releases up as the best observer of each group would, in units of the clip bound, with canaries' signs."""

    def __init__(self, canaries: Canaries, engine: CanaryEngine, best: MatchedFilter) -> None:
        self._plan, self._engine, self._weights_GT = canaries.plan, engine, best.weights_GT
        self._canaries = canaries
        lead = len(self._weights_GT)
        self.total_GP = canaries.plan.layout.zeros(lead, device=canaries.device, dtype=torch.float64)
        self.noise, self._sampling = NoiseMeter(canaries.plan.layout), SamplingMeter(canaries)

    def __call__(self, released_P: Tensor, step: int, plan: Plan) -> None:
        bound = 1.0 if math.isinf(plan.clip_bound) else plan.clip_bound
        scale = self._engine.sign(step) * plan.denominator / bound
        scaled_P = released_P.double() * scale
        along_P = self._lengthened(scaled_P, step)
        for group in np.flatnonzero(self._weights_GT[:, step]):
            self.total_GP[group].add_(along_P, alpha=float(self._weights_GT[group, step]))
        if not isinstance(plan.event, NoGuarantee):
            # As accounted, not as the plan adds it: that is what is audited.
            std = plan.event.noise_multiplier * plan.clip_bound / plan.denominator
            self.noise.add(released_P, std=std, step=step)
            self._sampling.add(scaled_P, self._engine.drawn, step=step)

    def _lengthened(self, scaled_P: Tensor, step: int) -> Tensor:
        """In each tensor as much longer as directions are in this round, where rounds train some of them."""
        layout = self._plan.layout
        if not layout.held:
            return scaled_P
        scaled_P = scaled_P.clone()
        for part, gain in zip(layout.parts(scaled_P), self._canaries.gains_at(step), strict=True):
            part.mul_(float(gain))
        return scaled_P

    def sampling(self) -> SamplingCheck | None:
        event = self._plan.event
        if isinstance(event, NoGuarantee):
            return None
        return self._sampling.found(multiplier=event.noise_multiplier, rate=self._plan.sampling_rate)
