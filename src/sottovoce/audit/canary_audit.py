"""An audit: some rounds as they are, with canaries among the users, and what can be told of the canaries afterwards.

    plan ─► audited_plan ─► run_round … ─► scores of all canaries ─► estimate · bound · noise found ─► verdict

Rounds, plan, ledger and server are those of a run: what is wrong in them is wrong here. What is looked at is public:
every release, or the last model alone. Scores are taken tensor by tensor, since noise may be missing on one of them.

Shapes: P flat length, N canaries, G groups of them that take turns, T rounds, H tensors.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sottovoce.audit.canaries import (
    Canaries,
    CanaryEngine,
    Floats,
    JoinedEngine,
    MatchedFilter,
    canary_scores,
    others_in,
)
from sottovoce.audit.epsilon import LEVEL, EpsilonFit, GuessBound, bound_epsilon, fit_epsilon
from sottovoce.audit.release_checks import NoiseCheck, NoiseMeter, SamplingCheck, SamplingMeter
from sottovoce.audit.rounds import audited_plan, make_rounds
from sottovoce.base.errors import InputError
from sottovoce.federated.engines import Engine
from sottovoce.federated.round import AfterStep
from sottovoce.federated.server import Server
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
    *,
    server: Server,
    people: Sequence[tuple[Engine, int]],
    rounds: int,
    canaries: int,
    seed: int,
    observer: Observer = Observer.RELEASES,
    has_turns: bool = False,
    after_step: Sequence[AfterStep] = (),
    model_bits: int | None = None,
    on_round: Callable[[int], None] = lambda _: None,
) -> Audit:
    """Make `rounds` rounds of `plan`, which is for the `people`, with canaries added, and say what they tell.

    `people` are engines, each with how many clients it has; there may be none, and canaries are all users.
    """
    count = sum(number for _, number in people)
    audited = audited_plan(plan, others=canaries + count - plan.settings.population_size)
    birds = Canaries(audited, canaries, seed, device=server.parameters_P.device)
    engine = CanaryEngine(birds, signs=observer is Observer.RELEASES)
    best = MatchedFilter(audited, first=count, signs_T=np.array([engine.sign(step) for step in range(rounds)]))
    _check_turns(birds, best)
    watch = _Watch(birds, engine, best)
    begun_P = server.result_P.clone()
    report = make_rounds(
        audited,
        server=server,
        engine=JoinedEngine([*people, (engine, canaries)]),
        rounds=rounds,
        has_turns=has_turns,
        after_step=after_step,
        model_bits=model_bits,
        on_release=watch,
        on_round=on_round,
    )
    if observer is Observer.RELEASES:
        raw_NH = canary_scores(birds, watch.total_GP, best.groups_N)
        # Whoever the promise is made against knows all other users: what the other canaries bring is taken off, as far
        # as it is known, which is but for who was drawn. The bound may not know it: that would be to look at the coins.
        clean_NH = raw_NH - others_in(birds, best)
    else:
        raw_NH = clean_NH = canary_scores(birds, (begun_P - server.result_P)[None], np.zeros_like(best.groups_N))
    return _judged(
        birds,
        raw_NH[best.has_turn_N],
        clean_NH[best.has_turn_N],
        is_in=birds.is_in[best.has_turn_N],
        observer=observer,
        people=count,
        rounds=rounds,
        promised=report.epsilon,
        interval=describe_interval(audited.event, observer),
        noise=None if isinstance(audited.event, NoGuarantee) else watch.noise.found(),
        drawn=watch.drawn_found(),
    )


def _check_turns(canaries: Canaries, best: MatchedFilter) -> None:
    is_in = canaries.is_in[best.has_turn_N]
    if min(is_in.sum(), (~is_in).sum()) < 2:
        raise InputError(
            f"canaries={canaries.count}: {len(is_in)} of them have a turn in so few rounds, {is_in.sum()} of these are "
            "in; expected more canaries, or more rounds"
        )


@final
class _Watch:
    """Adds releases up as the best observer of each group would, in units of the clip bound and turned as canaries."""

    def __init__(self, canaries: Canaries, engine: CanaryEngine, best: MatchedFilter) -> None:
        self._plan, self._engine, self._weights_GT = canaries.plan, engine, best.weights_GT
        lead = len(self._weights_GT)
        self.total_GP = canaries.plan.layout.zeros(lead, device=canaries.device, dtype=torch.float64)
        self.noise, self._drawn = NoiseMeter(canaries.plan.layout), SamplingMeter(canaries)

    def __call__(self, released_P: Tensor, step: int, plan: Plan) -> None:
        bound = 1.0 if math.isinf(plan.clip_bound) else plan.clip_bound
        scale = self._engine.sign(step) * plan.denominator / bound
        scaled_P = released_P.double() * scale
        for group in np.flatnonzero(self._weights_GT[:, step]):
            self.total_GP[group].add_(scaled_P, alpha=float(self._weights_GT[group, step]))
        if not isinstance(plan.event, NoGuarantee):
            # As accounted, not as the plan adds it: that is what is audited.
            self.noise.add(released_P, std=plan.event.noise_multiplier * plan.clip_bound / plan.denominator)
            self._drawn.add(scaled_P, self._engine.drawn, step=step)

    def drawn_found(self) -> SamplingCheck | None:
        event = self._plan.event
        if isinstance(event, NoGuarantee):
            return None
        return self._drawn.found(multiplier=event.noise_multiplier, rate=self._plan.sampling_rate)


def _judged(
    canaries: Canaries,
    raw_NH: Floats,
    clean_NH: Floats,
    *,
    is_in: NDArray[np.bool_],
    observer: Observer,
    people: int,
    rounds: int,
    promised: Epsilon,
    interval: str,
    noise: NoiseCheck | None,
    drawn: SamplingCheck | None,
) -> Audit:
    """What the scores of canaries that have a turn say."""
    names, delta = canaries.plan.layout.names, canaries.plan.settings.delta

    def fitted(scores_N: Floats, *, tensor: int | None = None, tests: int = 1) -> EpsilonFit:
        dimension = canaries.effective_dimension(tensor)
        return fit_epsilon(scores_N[is_in], scores_N[~is_in], delta=delta, dimension=dimension, tests=tests)

    fits = [fitted(clean_NH[:, h], tensor=h, tests=len(names)) for h in range(len(names))]
    worst = max(range(len(names)), key=lambda h: (fits[h].low, fits[h].epsilon))
    return Audit(
        observer=observer,
        canaries=canaries.count,
        canaries_in=int(canaries.is_in.sum()),
        people=people,
        rounds=rounds,
        delta=delta,
        promised=promised.headline,
        promised_by=promised,
        fit=fitted(clean_NH.sum(1)),
        worst=(names[worst], fits[worst]),
        bound=bound_epsilon(raw_NH.sum(1), is_in, delta=delta),
        noise=noise,
        drawn=drawn,
        interval=interval,
    )
