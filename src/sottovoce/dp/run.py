"""A private run in a loop of one's own, around any model whose parameters are arrays by name.

    run = start_run(planned, parameters, folder="runs/mine")      plan and ledger
    while (turn := run.next_round(parameters)) is not None:       draws and charges, or stops
        for user in turn.cohort:
            turn.add(user, update)                                clips and sums
        mean = turn.release()                                     adds noise; from here on all is public

The plan is a run's own (`privacy.plan`), and so are ledger, cohorts and noise: with the same seed they are the same.
Nothing here reads speech, or knows what a model is.

Shapes: P flat length.
"""

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

from torch import Tensor

from sottovoce.base.errors import InputError
from sottovoce.base.signatures import SigningKey
from sottovoce.dp.arrays import ArrayForm, Arrays
from sottovoce.privacy.chain import Mark, read_chain
from sottovoce.privacy.fingerprint import fingerprint_tensor
from sottovoce.privacy.guarantee import Guarantee, guarantee_of
from sottovoce.privacy.ledger import BudgetSpent, Charge, Ledger, cohort_commitment, verify
from sottovoce.privacy.mechanism import MechanismSettings
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.planner import PlannedRun
from sottovoce.privacy.round_noise import MEMORY, CorrelatedNoise
from sottovoce.privacy.secret_files import SECRETS, delete_secrets
from sottovoce.privacy.settings import Mode, PrivacySettings

LEDGER = "ledger.jsonl"
ALL_MADE = "all planned rounds are made"
_REFUSED = ("sigma_dp", "adaptive", "time_line", "weighting", "weights")
_FROM_PLAN = ("population_size", "cohort_size", "expected_answers", "clip_bound", "noise_multiplier", "delta")


@final
class PrivateRound:
    """One round: who takes part, and the sum of their updates. `cohort` is private, and so is everything added.

    Guarantee: what `release` returns is one event of the plan, whatever was added. Nobody counts twice. Who was drawn
    and is never added counts as zero, and the sum is divided by the *expected* size of a cohort all the same. Release
    every round, also one whose cohort is empty: a round left out would say who was in it.
    """

    def __init__(
        self,
        plan: Plan,
        charge: Charge,
        *,
        cohort: tuple[int, ...],
        form: ArrayForm,
        parameters_P: Tensor,
        correlated: CorrelatedNoise | None = None,
    ) -> None:
        self.cohort, self.is_released = cohort, False
        self._plan, self._charge, self._correlated = plan, charge, correlated
        self._form, self._parameters_P = form, parameters_P
        self._total_P = plan.new_total(device=form.device)
        self._waiting, self._non_finite = set(cohort), list[Tensor]()

    @property
    def step(self) -> int:
        """Counted from 0."""
        return self._charge.step

    @property
    def epsilon(self) -> float | None:
        """ε of all rounds so far with this one, by Rényi accounting: public. None without a guarantee."""
        return self._charge.epsilon

    @property
    def clip_bound(self) -> float:
        """C, which `add` clips to: public, so that users can clip before they send."""
        return self._plan.clip_bound

    def add(self, user: int, update: Arrays) -> None:
        """Add the update θ_server − θ_local (or a gradient) of one user of the cohort, clipped.

        An update with a NaN or an infinity counts as zero. InputError for somebody who was not drawn, or was added
        before, and for arrays of another form than the parameters'.
        """
        self._add(user, self._form.flatten(update))

    def add_trained(self, user: int, parameters: Arrays) -> None:
        """The same, given what local training has made of the round's parameters."""
        trained_P = self._form.flatten(parameters)
        self._add(user, self._parameters_P.to(trained_P.dtype) - trained_P)

    def _add(self, user: int, update_P: Tensor) -> None:
        if self.is_released:
            raise InputError(f"user {user} in step {self.step}: it is released already")
        if user not in self._waiting:
            raise InputError(f"user {user} in step {self.step}: not drawn, or added before; each counts once at most")
        self._waiting.discard(user)
        stats = self._plan.accumulate(self._total_P, update_P, step=self.step)
        self._non_finite.append(stats.non_finite)

    def release(self) -> dict[str, Any]:
        """The noised mean of the updates: subtract it from the parameters, or give it to an optimiser as a gradient.

        Once. Each array is of the library and type that the parameters are of.
        """
        if self.is_released:
            raise InputError(f"step {self.step}: it is released already; each round is charged for one release")
        noised_P = self._plan.add_noise(self._total_P, self._charge, correlated=self._correlated)
        self.is_released = True
        return self._form.restore(noised_P.div_(self._plan.denominator))

    def counts(self) -> dict[str, int]:
        """Who was drawn, was missing, or sent something that is not finite. Private, and so in simulations only."""
        if self._plan.settings.mode is Mode.SECURE:
            raise InputError("counts of a release: how many were drawn or missing is private, and no ε covers it")
        non_finite = sum(int(flag) for flag in self._non_finite)
        return {"drawn": len(self.cohort), "missing": len(self._waiting), "non_finite": non_finite}


@final
class PrivateRun:
    """A run whose loop is somebody else's; `start_run` makes it. `step` is the next one, `stopped` why there is none.

    Guarantee: what all rounds release together is (ε, δ)-private for each user, with the ε of `guarantee`, which is
    computed from the ledger; as long as all that is published of the users comes from `PrivateRound.release`.
    """

    def __init__(
        self, plan: Plan, parameters: Arrays, *, central_steps: int, folder: Path, key: SigningKey | None = None
    ) -> None:
        self.plan, self.folder, self.central_steps = plan, folder, central_steps
        self.stopped: str | None = None
        self._form = form = ArrayForm.of(parameters)
        self._round: PrivateRound | None = None
        folder.mkdir(parents=True, exist_ok=True)
        path, digest = folder / LEDGER, fingerprint_tensor(form.flatten(parameters))
        self.step, checkpoint = _find_step(path, digest)
        repeatable = form.device.type == "cpu"
        header = plan.ledger_header(run=folder.resolve().name, repeatable=repeatable, central_steps=central_steps)
        self._ledger = Ledger(path, header=header, checkpoint=checkpoint, key=key)
        try:
            is_secure = plan.settings.mode is Mode.SECURE
            secret_folder = folder / SECRETS if is_secure and plan.settings.mechanism is not None else None
            self._correlated = plan.correlated_noise(device=form.device, secret_folder=secret_folder)
        except BaseException:
            self.close()
            raise

    @property
    def guarantee(self) -> Guarantee:
        """ε of all rounds that are planned, those made and charged included; a budget leaves out what it forbids."""
        return guarantee_of(verify(self.folder / LEDGER))

    def next_round(self, parameters: Arrays) -> PrivateRound | None:
        """Draw and charge the next round, which begins with these parameters; None where the run stops.

        It stops when all planned rounds are made, or before one that the budget does not allow: `stopped` says which.
        What the round before has made of the parameters is committed first. When this returns, the round is charged on
        the disk, whether anything comes of it or not.
        """
        self.commit(parameters)
        parameters_P = self._form.flatten(parameters)
        digest = fingerprint_tensor(parameters_P)
        if self.step >= self.central_steps:
            self._stop(ALL_MADE)
            return None
        plan, ledger, step = self.plan, self._ledger, self.step
        if self._correlated is not None:
            self._correlated.advance_to(ledger.next_row(step))
        drawn = plan.sample(step, attempt=ledger.next_attempt(step), row=ledger.next_row(step))
        commitment = cohort_commitment(drawn, nonce=plan.cohort_nonce(step))
        try:
            charge = plan.charge(ledger, step=step, parameters=digest, cohort=commitment)
        except BudgetSpent as spent:
            self._stop(str(spent))
            return None
        self._round = PrivateRound(
            plan,
            charge,
            cohort=tuple(drawn.tolist()),
            form=self._form,
            parameters_P=parameters_P,
            correlated=self._correlated,
        )
        self.step += 1
        return self._round

    def commit(self, parameters: Arrays) -> None:
        """Commit what the last round has made of the parameters to the ledger: from there a run can go on.

        `next_round` does so itself. Call it before you save the parameters, or where no further round is asked for.
        """
        if self._round is None:
            return
        if not self._round.is_released:
            raise InputError(
                f"step {self._round.step} is charged and not released: whether it is must not depend on it"
            )
        self._ledger.commit(step=self._round.step, result=fingerprint_tensor(self._form.flatten(parameters)))
        self._round = None

    def _stop(self, why: str) -> None:
        self.stopped = why
        delete_secrets(self.folder / SECRETS, MEMORY)

    def close(self) -> None:
        """Let go of the ledger, for another process to go on with it; of noise's memory after the last round."""
        if self.step >= self.central_steps and self._round is None:  # no later row needs it
            delete_secrets(self.folder / SECRETS, MEMORY)
        self._ledger.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def start_run(
    planned: PlannedRun,
    parameters: Arrays,
    *,
    folder: Path | str,
    privacy_unit: str = "user",
    key: SigningKey | None = None,
    **options: Any,
) -> PrivateRun:
    """Start the run that `plan_run` has planned, or go on with the one in `folder`.

    `privacy_unit` is who is protected: all that one of the `population_size` indices holds. `options` are further
    settings of `PrivacySettings`: a `root_seed` makes it a simulation, which protects nobody; without one, cohorts and
    noise come from the operating system. `epsilon_budget` stops it. `share`, `sampling`, `mechanism` (as recipes have
    it: `{"kind": "banded", "bands": 8}`) and others change the chain, and the ledger's ε with it. The `key` signs the
    ledger.

    To go on, give the parameters with which a round began or ended: the ledger knows them by their digest.
    """
    plan = build_plan(planned, ArrayForm.of(parameters), privacy_unit=privacy_unit, **options)
    return PrivateRun(plan, parameters, central_steps=planned.central_steps, folder=Path(folder), key=key)


def build_plan(planned: PlannedRun, form: ArrayForm, *, privacy_unit: str = "user", **options: Any) -> Plan:
    """The plan of a run for parameters of this form."""
    if planned.measured is not None:
        raise InputError("a plan with client_wers: nothing here measures any; expected one without")
    for name in (*_FROM_PLAN, *_REFUSED):
        if options.get(name) is not None:
            why = "the plan has it" if name in _FROM_PLAN else "nothing in a loop of one's own does that"
            raise InputError(f"{name}={options[name]}: {why}; expected none")
    if isinstance(options.get("mechanism"), Mapping):
        sizes = {"population_size": planned.population_size, "cohort_size": planned.cohort_size}
        options["mechanism"] = MechanismSettings(**options["mechanism"]).for_run(planned.central_steps, **sizes)
    options.setdefault("mode", Mode.SECURE if options.get("root_seed") is None else Mode.SEEDED)
    fixed = {name: getattr(planned, name) for name in _FROM_PLAN}
    try:
        settings = PrivacySettings(**fixed, privacy_unit=privacy_unit, **options)
    except TypeError as unknown:
        raise InputError(f"options={', '.join(options)}: {unknown}; expected settings of PrivacySettings") from None
    return Plan(settings, form.layout)


def _find_step(path: Path, digest: str) -> tuple[int, Mark | None]:
    """Which step begins with the parameters of this digest, and how far the ledger was then."""
    chain = read_chain(path) if path.exists() else None
    intents = [] if chain is None else [record for record in chain.records if record.get("kind") == "intent"]
    if chain is None or not intents:
        return 0, None
    for place in reversed(range(len(chain.records))):
        record = chain.records[place]
        if record.get("kind") == "commit" and record["result"] == digest:
            return record["step"] + 1, Mark(place + 1, chain.hashes[place])
    if intents[0]["parameters"] == digest:
        return 0, None
    raise InputError(
        f"{path} is of a run with other parameters: expected those with which one of its rounds began or ended, or "
        "another folder"
    )
