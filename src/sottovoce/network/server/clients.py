"""Clients on other machines: `federated.Clients` over a link.

    before a round   new nodes get the terms and the start model; enough nodes must be here
    a round          model out ─► everybody trains and clips ─► updates on the grid, or a secure sum of them ─► one sum
    client_wer       the same with a pair of numbers in the place of an update

Whoever was sampled and does not answer before the deadline counts as zero, and the sum is divided by the same public
number. What comes later fits no open order. Who was late is drawn and asked like others in the next round, which does
not wait for them. A step has been charged before anybody is asked (`run_round`). Attempts have numbers that only grow,
across restarts too: a node answers an attempt once.
"""

import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from torch import Tensor

from sottovoce.base.errors import check_invariant
from sottovoce.base.files import add_digest, check_digest, read_json, write_json
from sottovoce.federated.cohort import CohortSum
from sottovoce.federated.diagnostics import RoundDiagnostics
from sottovoce.flat.layout import Layout
from sottovoce.network.messages import AnswerCode, OrderKind, Refused
from sottovoce.network.model_transfer import write_round_model
from sottovoce.network.secure_sum.protocol import OpenedSum, SumServer
from sottovoce.network.secure_sum.terms import NoSum, SumAttempt, SumTerms
from sottovoce.network.secure_sum.words import decode_sum, read_update, terms_for_plan, update_bytes
from sottovoce.network.server.accounts import Accounts, may_record_participants
from sottovoce.network.server.availability import LEFT, SENT_ALL, Availability
from sottovoce.network.server.orders import AWAY, Answers, OpenOrders, OrderChannel
from sottovoce.network.server.schedule import Schedule
from sottovoce.network.turns import write_turn
from sottovoce.privacy.clipping import Normalise
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.sampling import Indices
from sottovoce.privacy.settings import Mode

NOT_HERE = "not here when the round began"
ANOTHER_LENGTH = "an update of another length"
CLIPPED_AGAIN = "above its bound: clipped again here"
NOT_OPENED = "their sum could not be opened"
REFUSED = "refused"

_ASK_AGAIN_SECONDS = 5.0  # until somebody who has refused the terms is asked again
_LATE_SECONDS = 20.0  # that a round which cannot begin without those who were late gives them to say that they are free
_POLL_SECONDS = 0.2  # between two looks at who is here
_REPORT_SECONDS = 60.0  # until whoever runs the server is shown again who is missing, where that has changed


@dataclass(frozen=True)
class Offer:
    """What everybody must have before a round: the terms, and the start model, by its digest and as it travels."""

    terms: bytes
    start_digest: bytes
    start: bytes


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Seconds that answers may take: to an order to train, to the end of a run, and to everything else.

    All are fixed before the first round. With `rounds` one begins every so many seconds, however long the last took.
    """

    training: float = 600.0
    other: float = 120.0
    end: float = 20.0
    rounds: float | None = None


@final
class ClientsOverNetwork:
    """Everybody in a roster. With `secure` terms the server gets their sum and nothing else.

    `availability` knows how many must be here before a round begins. `attempts` is a file of this run's. `accounts` are
    of open sums alone. Models are sent with `model_bits` a number (None: 32), which is as many as they have.
    """

    def __init__(
        self,
        channel: OrderChannel,
        offer: Offer,
        *,
        attempts: "AttemptCounter",
        availability: Availability,
        secure: SumTerms | None = None,
        accounts: Accounts | None = None,
        timeouts: Timeouts | None = None,
        model_bits: int | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._channel, self._offer, self._attempts, self._availability = channel, offer, attempts, availability
        self._secure, self._accounts, self._timeouts = secure, accounts, timeouts or Timeouts()
        self._model_bits, self._say = model_bits, say
        self._schedule = Schedule(self._timeouts.rounds)
        self._prepared: set[int] = set()
        self._late: set[int] = set()  # had no answer in time: asked to train like the prepared, and not waited for
        self._refused_at: dict[int, float] = {}
        self._codes: dict[int, AnswerCode] = {}  # why those who refuse the terms do
        self._reported = Counter[str]()  # of the last round, to whoever runs the server
        self._open: dict[int, _OpenRound] = {}  # by step, where rounds overlap: begun, and not summed yet

    # Before a round.

    def ready(self, interrupted: Callable[[], bool], *, row: int | None = None) -> bool:
        """Wait until enough prepared nodes are here; False where the run was interrupted meanwhile.

        Of the group whose turn `row` is, where groups take turns. TooFewClients where so many are out for good that
        there never will be.
        """
        waiting, availability = threading.Event(), self._availability
        availability.draw_from(row)
        reported: tuple[frozenset[int], int] | None = None
        reported_at = time.monotonic()
        while (left := self._schedule.left()) > 0:
            self._prepare(seconds=left)
            if interrupted():
                return False
            waiting.wait(min(left, _POLL_SECONDS))
        while True:
            # A round at a fixed time does not wait for whoever has just come: their speed would move it for all.
            here = frozenset(self._prepared & self._channel.present())
            if not self._schedule.is_fixed or len(here & availability.drawn) < availability.needed:
                here = self._here()
            if self._late and len(here & availability.drawn) < availability.needed:
                here = self._here(even_late=True)
            availability.mark_seen(here)
            availability.check_enough()
            if len(here & availability.drawn) >= availability.needed:
                self._schedule.begin()
                return True
            if interrupted():
                return False
            now, standing = time.monotonic(), (here, availability.needed)
            is_due = reported is None or reported[1] != availability.needed or now - reported_at >= _REPORT_SECONDS
            if is_due and standing != reported:
                self._say(availability.describe_waiting(here, self._codes))
                reported, reported_at = standing, now
            waiting.wait(_POLL_SECONDS)

    def _here(self, *, even_late: bool = False) -> frozenset[int]:
        """Who is prepared for a round, and can be asked."""
        self._prepare(even_late=even_late)
        return frozenset(self._prepared & self._channel.present())

    def _prepare(self, *, even_late: bool = False, seconds: float = math.inf) -> None:
        """Send the terms to new nodes, and the start model unless they have it; either takes `seconds` at most.

        Who was late may be training still and answer nothing else: they are asked only where no round begins without.
        """
        self._availability.mark_out(self._channel.departed(), LEFT)
        present, now = self._channel.present() - self._availability.out.keys(), time.monotonic()
        self._prepared &= present  # who went may come back with an empty memory
        self._late &= present
        if even_late:
            again = self._send(
                OrderKind.TERMS,
                dict.fromkeys(self._late, self._offer.terms),
                limit=32,
                seconds=min(_LATE_SECONDS, seconds),
            )
            self._late -= again.payloads.keys() | again.codes.keys()
        self._codes = {place: code for place, code in self._codes.items() if place in present}
        waited = -_ASK_AGAIN_SECONDS
        # Who trains for an open round answers nothing else until that is done.
        known = self._prepared | self._late | {place for each in self._open.values() for place in each.asked}
        new = [p for p in present - known if now - self._refused_at.get(p, waited) >= _ASK_AGAIN_SECONDS]
        if not new:
            return
        begun = time.monotonic()
        invited = self._send(OrderKind.TERMS, dict.fromkeys(new, self._offer.terms), limit=32, seconds=seconds)
        lacking = [place for place, held in invited.payloads.items() if held != self._offer.start_digest]
        seconds = max(seconds - (time.monotonic() - begun), 0.0)
        given = self._send(OrderKind.START, dict.fromkeys(lacking, self._offer.start), limit=0, seconds=seconds)
        self._prepared |= (invited.payloads.keys() - set(lacking)) | given.payloads.keys()
        self._refused_at |= dict.fromkeys([*invited.missing, *given.missing], now)
        self._codes = {place: code for place, code in self._codes.items() if place not in self._prepared}
        self._codes |= invited.codes | given.codes
        sent_all = [place for place, code in invited.codes.items() if code is AnswerCode.ABOVE_ACCEPTED]
        self._availability.mark_out(sent_all, SENT_ALL)
        self._mark_departed(invited, given)

    def _mark_departed(self, *answers: Answers) -> None:
        """Those who answer that they have left for good."""
        left = [place for each in answers for place, code in each.codes.items() if code is AnswerCode.LEFT]
        self._availability.mark_out(left, LEFT)
        self._prepared -= self._availability.out.keys()
        self._late -= self._availability.out.keys()

    def _send(self, kind: OrderKind, payloads: dict[int, bytes], *, limit: int, seconds: float) -> Answers:
        if not payloads:
            return Answers({}, {})
        seconds = min(seconds, self._timeouts.other)
        return self._channel.ask(kind, payloads, step=0, attempt=0, seconds=seconds, limit=limit)

    # A round.

    def begin(self, server_P: Tensor, cohort: Indices, *, plan: Plan, step: int) -> None:
        """Order a cohort to train, and wait for nothing: `sum` of the same step takes what they answer."""
        check_invariant(self._secure is None, "a secure sum that overlaps with others: its phases need free nodes")
        model = write_round_model(server_P, plan.layout, model_bits=self._model_bits)
        self._open[step] = self._send_round(OrderKind.TRAIN, model, cohort, plan=plan, step=step)

    def sum(
        self,
        server_P: Tensor,
        cohort: Indices,
        *,
        plan: Plan,
        step: int,
        positions: Indices | None = None,
        row: int | None = None,
    ) -> CohortSum:
        assert positions is None, "time lines are refused over a network"
        begun = self._open.pop(step, None)
        if begun is None:
            model = write_round_model(server_P, plan.layout, model_bits=self._model_bits)
            payload = model if row is None else write_turn(row, model)
            begun = self._send_round(OrderKind.TRAIN, payload, cohort, plan=plan, step=step)
        summed = self._gather(OrderKind.TRAIN, begun, plan=plan, step=step, row=row)
        return replace(summed, total=summed.total.to(server_P.device))

    def wer(self, server_P: Tensor, cohort: Indices, *, layout: Layout, plan: Plan, step: int) -> CohortSum:
        model = write_round_model(server_P, layout, model_bits=self._model_bits)
        begun = self._send_round(OrderKind.WER, model, cohort, plan=plan, step=step)
        return self._gather(OrderKind.WER, begun, plan=plan, step=step)

    def _send_round(self, kind: OrderKind, model: bytes, cohort: Indices, *, plan: Plan, step: int) -> "_OpenRound":
        """Order `kind` with `model` of everybody in `cohort`."""
        attempt, sampled = self._attempts.begin(), cohort.tolist()
        asked = [place for place in sampled if place in self._prepared or place in self._late]
        orders = self._channel.send(
            kind,
            dict.fromkeys(asked, model),
            step=step,
            attempt=attempt,
            seconds=self._timeouts.training,
            limit=0 if self._secure is not None else update_bytes(plan),
        )
        return _OpenRound(attempt=attempt, sampled=sampled, asked=asked, orders=orders)

    def _gather(
        self, kind: OrderKind, begun: "_OpenRound", *, plan: Plan, step: int, row: int | None = None
    ) -> CohortSum:
        """The sum, under `plan`, of what those who were ordered `kind` answer.

        Where groups take turns it is that of the group of `row`, which was in the model.
        """
        attempt, sampled, asked = begun.attempt, begun.sampled, begun.asked
        answered = begun.orders.answers()
        # Who is late is not asked for the terms before the next round, whatever else was wrong is.
        self._prepared = (self._prepared - answered.missing.keys()) | answered.payloads.keys()
        self._late = (self._late - {*asked}) | {place for place, why in answered.missing.items() if why == AWAY}
        self._mark_departed(answered)
        self._availability.mark_seen(answered.payloads)
        reasons = answered.reasons
        reasons[NOT_HERE] += len(sampled) - len(asked)
        shares = 0
        if self._secure is None:
            total, odd = _add_up(answered.payloads, plan, step=step)
            reasons.update(odd.values())
            if self._accounts is not None and kind is OrderKind.TRAIN:
                _record_participants(self._accounts, sampled, answered, odd)
        else:
            secure = SumAttempt(
                terms=terms_for_plan(self._secure, plan), run=self._channel.run, step=step, attempt=attempt, row=row
            )
            opened = self._sum_securely(secure, sorted(answered.payloads), reasons)
            total = plan.new_total() if opened is None else decode_sum(opened.total, plan)
            if opened is not None and plan.noise_shares is not None:
                shares = len(opened.survivors)
        self._report(reasons, plan, when=f"round {step + 1:,}" if kind is OrderKind.TRAIN else f"after round {step:,}")
        diagnostics = None
        if plan.settings.mode is not Mode.SECURE:
            diagnostics = RoundDiagnostics(cohort=len(sampled), dropped=+reasons)
        return CohortSum(total, plan.denominator, noise_shares=shares, diagnostics=diagnostics)

    def _report(self, reasons: Counter[str], plan: Plan, *, when: str) -> None:
        """Say why sampled nodes are not in the sum, where that has changed since the last round.

        A release that hides people by sampling says no more than how many have refused: that somebody must look at.
        """
        is_hidden = not may_record_participants(plan)
        shown = Counter({why: n for why, n in reasons.items() if n and (not is_hidden or why.startswith(REFUSED))})
        if shown != self._reported:
            counts = ", ".join(f"{count:,} {why}" for why, count in shown.most_common())
            self._say(f"{when}: {f'of those drawn, {counts}' if counts else 'nobody refused, or was missing'}")
        self._reported = shown

    def _sum_securely(self, attempt: SumAttempt, places: list[int], reasons: Counter[str]) -> OpenedSum | None:
        """The sum of those who stay to the end, phase by phase; None where it cannot be opened."""
        secure = SumServer(attempt)
        try:
            orders = secure.begin(places)
            while orders:
                phase = secure.phase
                answers = self._channel.ask(
                    OrderKind[phase.name],
                    orders,
                    step=attempt.step,
                    attempt=attempt.attempt,
                    seconds=self._timeouts.other,
                    limit=secure.largest_answer,
                )
                reasons.update(f"{reason}, in {phase.name.lower()}" for reason in answers.missing.values())
                self._mark_departed(answers)
                for place, payload in answers.payloads.items():
                    secure.take(place, payload)
                orders = secure.advance()
        except NoSum as none:
            reasons[f"{NOT_OPENED} ({none})"] += len(places)
            return None
        return secure.opened

    # After the last.

    def end(self, rounds: int) -> None:
        """Tell the nodes that are here that the run is over after so many rounds; others go on waiting for a server."""
        for begun in self._open.values():  # a run that ended early: what nobody has begun to train is withdrawn
            begun.orders.sent.close()
        here = dict.fromkeys(self._channel.present(), b"")
        last = self._attempts.last
        self._channel.ask(OrderKind.END, here, step=rounds, attempt=last, seconds=self._timeouts.end, limit=0)

    def close(self) -> None:
        self._channel.link.close()


@dataclass(frozen=True, eq=False, kw_only=True)
class _OpenRound:
    """A round whose nodes were asked: of those `sampled` the ones who could be."""

    attempt: int
    sampled: list[int]
    asked: list[int]
    orders: OpenOrders


def _add_up(payloads: dict[int, bytes], plan: Plan, *, step: int) -> tuple[Tensor, dict[int, str]]:
    """The sum of updates, each clipped once more since nobody but its sender has checked it; and which were odd, how.

    What an honest client sends is clipped and on the grid: for that it changes nothing. Updates are never enlarged:
    one that a client has rescaled may be a cell off after rounding.
    """
    total, odd = plan.new_total(), dict[int, str]()
    clipper = replace(plan.clipper_at(step), normalise=Normalise.NEVER)
    for place, payload in sorted(payloads.items()):
        try:
            update_P = decode_sum(read_update(payload, plan), plan)
        except Refused:
            odd[place] = ANOTHER_LENGTH
            continue
        if bool(clipper.accumulate(total, update_P).clipped):
            odd[place] = CLIPPED_AGAIN
    return total, odd


def _record_participants(accounts: Accounts, sampled: list[int], trained: Answers, odd: Mapping[int, str]) -> None:
    """Who was summed, clipped again or missing; `odd` are the updates that were not taken as they came."""
    bad = {place: reason for place, reason in odd.items() if reason != CLIPPED_AGAIN}
    away = {place: NOT_HERE for place in sampled if place not in trained.payloads and place not in trained.missing}
    accounts.add(
        summed=trained.payloads.keys() - bad.keys(),
        clipped_again=odd.keys() - bad.keys(),
        missing={**away, **trained.missing, **bad},
    )


@final
class AttemptCounter:
    """Which run this is to its nodes, by 16 random bytes, and how many attempts they were asked for; in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        if path.exists():
            known = check_digest(read_json(path), where=path)
            self.run, self.last = bytes.fromhex(known["run"]), int(known["attempts"])
        else:
            self.run, self.last = os.urandom(16), 0
            self._write()

    def begin(self) -> int:
        """The number of a new attempt: on the disk before any node is asked."""
        self.last += 1
        self._write()
        return self.last

    def _write(self) -> None:
        write_json(self._path, add_digest({"run": self.run.hex(), "attempts": self.last}))
