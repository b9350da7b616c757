"""Clients on other machines: `federated.Clients` over a link.

    before a round   who is new is told the terms, and given the start model; enough must be here
    a round          model out ─► everybody trains and clips ─► updates on the grid, or a secure sum of them ─► one sum
    client_wer       the same with a pair of numbers in the place of an update

Whoever was drawn and does not answer counts as zero, and the sum is divided by S all the same. A step has been charged
before anybody is asked (`run_round`). Attempts have numbers of their own, which only grow, whatever becomes of this
process: a node answers an attempt once.
"""

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from torch import Tensor

from sottovoce.federated.cohort import CohortSum
from sottovoce.federated.private import Private
from sottovoce.files import read_json, sealed, unsealed, write_json
from sottovoce.flat.layout import Layout
from sottovoce.network.messages import AnswerCode, OrderKind, Refused
from sottovoce.network.model_transfer import write_round_model
from sottovoce.network.secure_sum.protocol import OpenedSum
from sottovoce.network.secure_sum.protocol import SumServer as SecureSum
from sottovoce.network.secure_sum.terms import NoSum, SumAttempt, SumTerms
from sottovoce.network.secure_sum.words import decode_sum, read_update, terms_for_plan, update_bytes
from sottovoce.network.server.accounts import Accounts, may_record_participants
from sottovoce.network.server.availability import LEFT, SENT_ALL, Availability
from sottovoce.network.server.orders import Answers, OrderChannel
from sottovoce.privacy.clipping import Clipper, Normalise
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.sampling import Indices
from sottovoce.privacy.settings import Mode

NOT_HERE = "not here when the round began"
ANOTHER_LENGTH = "an update of another length"
CLIPPED_AGAIN = "above its bound: clipped again here"
NOT_OPENED = "their sum could not be opened"
REFUSED = "refused"

_ASK_AGAIN = 5.0  # seconds until somebody who has refused the terms is asked again
_LOOK_AGAIN = 0.2  # seconds between two looks at who is here
_TELL_AGAIN = 60.0  # seconds until whoever runs the server is told again who is missing, where that has changed


@dataclass(frozen=True)
class Offer:
    """What everybody must have before a round: the terms, and the start model, by its digest and as it travels."""

    terms: bytes
    start_digest: bytes
    start: bytes


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Seconds that are waited for answers: to be trained, to a goodbye, and for everything else."""

    training: float = 600.0
    talking: float = 120.0
    parting: float = 20.0


@final
class ClientsOverNetwork:
    """Everybody in a roster. With `secure` terms the server gets their sum and nothing else.

    `attendance` knows how many must be here before a round begins. `attempts` is a file of this run's. `accounts`, of
    open sums alone, are everybody's own. Models are sent with `model_bits` a number (None: 32), which is as many as
    they have.
    """

    def __init__(
        self,
        conversation: OrderChannel,
        offer: Offer,
        *,
        attempts: "AttemptCounter",
        attendance: Availability,
        secure: SumTerms | None = None,
        accounts: Accounts | None = None,
        patience: Timeouts | None = None,
        model_bits: int | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._accounts = accounts
        self._conversation, self._offer, self._attempts = conversation, offer, attempts
        self._attendance, self._secure, self._patience, self._say = attendance, secure, patience or Timeouts(), say
        self._model_bits = model_bits
        self._prepared: set[int] = set()
        self._refused: dict[int, float] = {}
        self._codes: dict[int, AnswerCode] = {}  # why those who refuse the terms do
        self._told = Counter[str]()  # of the last round, to whoever runs the server

    # Before a round.

    def ready(self, interrupted: Callable[[], bool]) -> bool:
        """Wait until enough people are here who know what it is about; False where we were told to stop meanwhile.

        TooFewClients where so many are out for good that there never will be.
        """
        waiting, attendance = threading.Event(), self._attendance
        told: tuple[frozenset[int], int] | None = None
        told_at = time.monotonic()
        while True:
            self._prepare()
            here = frozenset(self._prepared & self._conversation.present())
            attendance.saw(here)
            attendance.check_enough()
            if len(here) >= attendance.needed:
                return True
            if interrupted():
                return False
            now, standing = time.monotonic(), (here, attendance.needed)
            is_due = told is None or told[1] != attendance.needed or now - told_at >= _TELL_AGAIN
            if is_due and standing != told:
                self._say(attendance.waiting(here, self._codes))
                told, told_at = standing, now
            waiting.wait(_LOOK_AGAIN)

    def _prepare(self) -> None:
        """Tell whoever is new the terms, and give them the start model unless they have it."""
        self._attendance.mark_out(self._conversation.departed(), LEFT)
        present, now = self._conversation.present() - self._attendance.out.keys(), time.monotonic()
        self._prepared &= present  # who went may come back as somebody who has forgotten everything
        self._codes = {place: code for place, code in self._codes.items() if place in present}
        new = [p for p in present - self._prepared if now - self._refused.get(p, -_ASK_AGAIN) >= _ASK_AGAIN]
        if not new:
            return
        invited = self._talk(OrderKind.TERMS, dict.fromkeys(new, self._offer.terms), limit=32)
        lacking = [place for place, held in invited.payloads.items() if held != self._offer.start_digest]
        given = self._talk(OrderKind.START, dict.fromkeys(lacking, self._offer.start), limit=0)
        self._prepared |= (invited.payloads.keys() - set(lacking)) | given.payloads.keys()
        self._refused |= dict.fromkeys([*invited.missing, *given.missing], now)
        self._codes = {place: code for place, code in self._codes.items() if place not in self._prepared}
        self._codes |= invited.codes | given.codes
        self._attendance.mark_out(
            [p for p, code in invited.codes.items() if code is AnswerCode.ABOVE_ACCEPTED], SENT_ALL
        )
        self._notice_departed(invited, given)

    def _notice_departed(self, *answers: Answers) -> None:
        """Those who say so when they are asked."""
        left = [place for each in answers for place, code in each.codes.items() if code is AnswerCode.LEFT]
        self._attendance.mark_out(left, LEFT)
        self._prepared -= self._attendance.out.keys()

    def _talk(self, kind: OrderKind, payloads: dict[int, bytes], *, limit: int) -> Answers:
        if not payloads:
            return Answers({}, {})
        return self._conversation.ask(kind, payloads, step=0, attempt=0, seconds=self._patience.talking, limit=limit)

    # A round.

    def sum(
        self, server_P: Tensor, cohort: Indices, *, plan: Plan, step: int, turns: Indices | None = None
    ) -> CohortSum:
        assert turns is None, "time lines are refused over a network"
        summed = self._gather(OrderKind.TRAIN, self._sent(server_P, plan.layout), cohort, plan=plan, step=step)
        return replace(summed, total=summed.total.to(server_P.device))

    def wer(self, server_P: Tensor, cohort: Indices, *, layout: Layout, plan: Plan, step: int) -> CohortSum:
        return self._gather(OrderKind.WER, self._sent(server_P, layout), cohort, plan=plan, step=step)

    def _sent(self, server_P: Tensor, layout: Layout) -> bytes:
        return write_round_model(server_P, layout, model_bits=self._model_bits)

    def _gather(self, kind: OrderKind, model: bytes, cohort: Indices, *, plan: Plan, step: int) -> CohortSum:
        """Have everybody in `cohort` do with `model` what `kind` says; the sum, under `plan`, of what comes of it."""
        attempt = self._attempts.begin()
        drawn = cohort.tolist()
        asked = [place for place in drawn if place in self._prepared]
        limit = 0 if self._secure is not None else update_bytes(plan)
        answered = self._conversation.ask(
            kind,
            dict.fromkeys(asked, model),
            step=step,
            attempt=attempt,
            seconds=self._patience.training,
            limit=limit,
        )
        self._prepared -= answered.missing.keys()  # whatever it was, they are asked anew before the next round
        self._notice_departed(answered)
        self._attendance.saw(answered.payloads)
        reasons = answered.reasons
        reasons[NOT_HERE] += len(drawn) - len(asked)
        shares = 0
        if self._secure is None:
            total, odd = _add_up(answered.payloads, plan)
            reasons.update(odd.values())
            if self._accounts is not None and kind is OrderKind.TRAIN:
                self._settle(self._accounts, drawn, answered, odd)
        else:
            terms = terms_for_plan(self._secure, plan)
            opened = self._sum_securely(sorted(answered.payloads), terms, reasons, step=step, attempt=attempt)
            total = plan.new_total() if opened is None else decode_sum(opened.total, plan)
            if opened is not None and plan.noise_shares is not None:
                shares = len(opened.survivors)
        self._tell(reasons, plan, when=f"round {step + 1:,}" if kind is OrderKind.TRAIN else f"after round {step:,}")
        diagnostics = None
        if plan.settings.mode is not Mode.SECURE:
            diagnostics = Private(cohort=len(drawn), dropped=+reasons)
        return CohortSum(total, plan.denominator, noise_shares=shares, diagnostics=diagnostics)

    def _tell(self, reasons: Counter[str], plan: Plan, *, when: str) -> None:
        """Say what became of those who were drawn and are not in the sum, where that is not as it was the last time.

        A release that hides people by drawing them says no more than how many have refused: that somebody must look at.
        """
        is_hidden = not may_record_participants(plan)
        told = Counter({why: n for why, n in reasons.items() if n and (not is_hidden or why.startswith(REFUSED))})
        if told != self._told:
            counts = ", ".join(f"{count:,} {why}" for why, count in told.most_common())
            self._say(f"{when}: {f'of those drawn, {counts}' if counts else 'nobody refused, or was missing'}")
        self._told = told

    def _settle(self, accounts: Accounts, drawn: list[int], trained: Answers, odd: Mapping[int, str]) -> None:
        """What became of everybody who was drawn; `odd` are the updates that were not taken as they came."""
        bad = {place: reason for place, reason in odd.items() if reason != CLIPPED_AGAIN}
        away = {place: NOT_HERE for place in drawn if place not in trained.payloads and place not in trained.missing}
        accounts.add(
            summed=trained.payloads.keys() - bad.keys(),
            clipped_again=odd.keys() - bad.keys(),
            missing={**away, **trained.missing, **bad},
        )

    def _sum_securely(
        self, places: list[int], terms: SumTerms, reasons: Counter[str], *, step: int, attempt: int
    ) -> OpenedSum | None:
        """The sum of those who stay to the end, phase by phase; None where it cannot be opened."""
        run = self._conversation.run
        secure = SecureSum(SumAttempt(terms=terms, run=run, step=step, attempt=attempt))
        try:
            orders = secure.begin(places)
            while orders:
                phase = secure.phase
                answers = self._conversation.ask(
                    OrderKind[phase.name],
                    orders,
                    step=step,
                    attempt=attempt,
                    seconds=self._patience.talking,
                    limit=secure.largest_answer,
                )
                reasons.update(f"{reason}, in {phase.name.lower()}" for reason in answers.missing.values())
                self._notice_departed(answers)
                for place, payload in answers.payloads.items():
                    secure.take(place, payload)
                orders = secure.advance()
        except NoSum as none:
            reasons[f"{NOT_OPENED} ({none})"] += len(places)
            return None
        return secure.opened

    # After the last.

    def end(self, rounds: int) -> None:
        """Tell whoever is here that the run is over after so many rounds; who is not goes on waiting for a server."""
        here = dict.fromkeys(self._conversation.present(), b"")
        last = self._attempts.last
        self._conversation.ask(OrderKind.END, here, step=rounds, attempt=last, seconds=self._patience.parting, limit=0)

    def close(self) -> None:
        self._conversation.link.close()


def _add_up(payloads: dict[int, bytes], plan: Plan) -> tuple[Tensor, dict[int, str]]:
    """The sum of updates that nobody has vouched for but their senders, each clipped once more; and who was odd, how.

    For what an honest client sends, which is clipped and on the grid, that changes nothing.
    """
    total, guard, odd = plan.new_total(), _guard(plan), dict[int, str]()
    for place, payload in sorted(payloads.items()):
        try:
            update_P = decode_sum(read_update(payload, plan), plan)
        except Refused:
            odd[place] = ANOTHER_LENGTH
            continue
        if bool(guard.accumulate(total, update_P).clipped):
            odd[place] = CLIPPED_AGAIN
    return total, odd


def _guard(plan: Plan) -> Clipper:
    """The plan's clipping, but never enlarging: what a client has rescaled may be a cell off after rounding."""
    return replace(plan.clipper, normalise=Normalise.NEVER)


@final
class AttemptCounter:
    """Which run this is to its nodes, by 16 random bytes, and how many attempts they were asked for; in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        if path.exists():
            known = unsealed(read_json(path), where=path)
            self.run, self.last = bytes.fromhex(known["run"]), int(known["attempts"])
        else:
            self.run, self.last = os.urandom(16), 0
            self._write()

    def begin(self) -> int:
        """The number of a new attempt: on the disk before anybody hears of it."""
        self.last += 1
        self._write()
        return self.last

    def _write(self) -> None:
        write_json(self._path, sealed({"run": self.run.hex(), "attempts": self.last}))
