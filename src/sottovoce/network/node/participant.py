"""A participant: orders in, answers out; the speech in between never leaves.

    TERMS ─► accepted? ─► START ─► TRAIN ─► update                     the server sees it
                       │          WER ─► pair, words wrong and right
                       │                 └► KEYS ─► … ─► UNMASK        the server sees a sum
                       └► END: the run is over

Before anything is computed, an order must be signed by the server that the authority has certified, be for this node,
and ask for no more than its user has accepted. Training is what a simulation runs, on the one client that this node is,
with the code that is installed here. What leaves is the clipped update on the public grid, or its masked form. An error
in training gives an update of zeros, as in a release, since errors depend on the speech. Every other error is a code.
"""

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import final

import torch
from cryptography import x509

from sottovoce.base.errors import InputError
from sottovoce.base.files import write_atomically
from sottovoce.base.signatures import PrivateKey, PublicKey
from sottovoce.data.store import Store
from sottovoce.federated.personal import PersonalTraining
from sottovoce.network.certificates import check_valid, order_signing_key, parse_certificate
from sottovoce.network.client_recipe import find_base_files
from sottovoce.network.invitation import Invitation, unpack_invitation
from sottovoce.network.keys import fingerprint
from sottovoce.network.messages import (
    AnswerCode,
    Order,
    OrderAnswer,
    OrderKind,
    Refused,
    check_message_signature,
    departure,
    parse_order,
    unreadable,
)
from sottovoce.network.model_transfer import read_round_model, read_start_model
from sottovoce.network.node.ledger import NodeLedger, Quota
from sottovoce.network.node.personal import EndedRun, keep_received, train_node_part
from sottovoce.network.node.time_limit import TimeLimit
from sottovoce.network.node.training import NodeSecureSum, NodeTraining, prepare_training, zero_update
from sottovoce.network.secure_sum.words import update_bytes
from sottovoce.network.turns import Turns, read_turn

START = "start"
LARGEST_ORDER = 1 << 32  # bytes: the largest model


@final
class Participant:
    """One node. `home` is its own folder, `user` whose speech of `store` it is, `authority` certifies the server.

    `base` is the folder of a base model, where its user has given one; others are known by their digests.

    `say` is for its user: nothing of it goes to the network. `on_answer` gets every order with its answer, as it
    leaves. `invited` is what the user was asked last and has not accepted yet; no answer waits for them. `ended` is
    after how many rounds the server has ended a run. With `personal` a part of its user's own is trained then, which
    stays in the home: answers are the same with and without.
    """

    def __init__(
        self,
        home: Path,
        *,
        key: PrivateKey,
        authority: x509.Certificate,
        store: Store,
        now: Callable[[], datetime],
        user: str | None = None,
        base: Path | None = None,
        device: torch.device | None = None,
        quota: Quota | None = None,
        personal: PersonalTraining | None = None,
        largest_order: int = LARGEST_ORDER,
        say: Callable[[str], None] = lambda _: None,
        on_answer: Callable[[Order, OrderAnswer], None] = lambda order, answer: None,
    ) -> None:
        self._home, self._key, self._authority, self._store, self._user = home, key, authority, store, user
        self._base, self._told = base, ""
        self._device, self._quota, self._now, self._say = device or torch.device("cpu"), quota or Quota(), now, say
        self._node, self._largest, self._on_answer = fingerprint(key.public_key()), largest_order, on_answer
        self._ledger = NodeLedger(home)
        self._service: _Service | None = None
        self._warned_of: x509.Certificate | None = None
        self._answering = threading.Lock()
        self._personal = personal
        self._own_part_of: EndedRun | None = None
        self.invited: Invitation | None = None
        self.ended: int | None = None

    def close(self) -> None:
        self._ledger.close()

    def accept(self, digest: bytes) -> None:
        """Its user accepts the recipe of this digest, whether it has come already or not."""
        self._ledger.accept(digest)
        self.invited = None

    def has_accepted(self, digest: bytes) -> bool:
        return self._ledger.has_accepted(digest)

    @property
    def has_left(self) -> bool:
        return self._ledger.has_left

    def train_own_part(self) -> None:
        """Train the part that is due since a run was ended, if one is."""
        ended, self._own_part_of = self._own_part_of, None
        if ended is None or self._personal is None:
            return
        try:
            train_node_part(ended, self._home, self._personal, say=self._say)
        except InputError as error:
            self._say(f"no personal part was trained: {error}")

    def departure(self) -> bytes | None:
        """The signed message that its user has left for good; None where they have not."""
        return departure(self._node).signed(self._key) if self._ledger.has_left else None

    def is_here(self) -> bool:
        """Whether its user lets it answer now; servers count on nodes that are connected.

        A node does not go in the middle of a sum because today's bytes have just been used up.
        """
        service = self._service
        try:
            self._ledger.check_standing()
            if service is not None and not service.is_summing:
                self._check_bytes(service)
        except Refused:
            return False
        return True

    def answer(self, data: bytes) -> bytes:
        """The answer to any bytes, signed. Never raises, never waits for a person, and has no text in it.

        One order at a time: what was answered is looked up before it is written down.
        """
        try:
            order = parse_order(data, limit=self._largest)
        except Refused:
            return unreadable(self._node).signed(self._key)
        try:
            with self._answering:
                found = self._follow(order, data)
        except Refused as refused:
            found = order.refused(refused.code)
        except Exception as error:
            self._say(f"an order could not be followed ({type(error).__name__}: {error})")
            found = order.refused(AnswerCode.UNABLE)
        # Whomever the order was for, it is this node that answers.
        answer = replace(found, to=replace(found.to, node=self._node))
        self._on_answer(order, answer)
        return answer.signed(self._key)

    def _follow(self, order: Order, data: bytes) -> OrderAnswer:
        if order.node != self._node:
            raise Refused(AnswerCode.MISDIRECTED)
        if order.kind is OrderKind.TERMS:
            return self._read_terms(order, data)
        service = self._service
        if service is None or service.invitation.digest != order.recipe:
            raise Refused(AnswerCode.UNEXPECTED)
        check_message_signature(data, service.server)
        self._ledger.check_standing()
        if order.kind is OrderKind.END:
            return self._end(order, service)
        if order.kind is OrderKind.START:
            service.training = self._start(order, service.invitation)
            return order.answered()
        if order.kind in (OrderKind.TRAIN, OrderKind.WER) and service.training is not None:
            return self._compute(order, service, service.training)
        if service.secure_sum is not None:
            return order.answered(service.secure_sum.answer(order))
        raise Refused(AnswerCode.UNEXPECTED)

    def _read_terms(self, order: Order, data: bytes) -> OrderAnswer:
        """Done where its user has accepted them; with the start model's digest, if that is here."""
        with self._refusing(AnswerCode.UNREADABLE):
            certificate, content = unpack_invitation(order.payload)
        with self._refusing(AnswerCode.UNTRUSTED):
            signer = parse_certificate(certificate, where="the invitation")
            server = order_signing_key(signer, authority=self._authority, now=self._now())
        check_message_signature(data, server)
        self._warn_of_expiry(signer)
        with self._refusing(AnswerCode.UNABLE):
            invitation = Invitation.read(content)
        if invitation.digest != order.recipe:
            raise Refused(AnswerCode.UNREADABLE)
        if self._node not in map(fingerprint, invitation.nodes):
            raise Refused(AnswerCode.MISDIRECTED)
        self._ledger.check_standing()
        is_accepted = self._ledger.has_accepted_for(invitation.digest, order.run)
        # Before anybody is asked. Which models lie here, a server learns from those alone who have accepted.
        with self._refusing(AnswerCode.UNABLE if is_accepted else AnswerCode.NOT_ACCEPTED):
            find_base_files(invitation.recipe, self._base)
        if not is_accepted:
            self.invited = invitation
            raise Refused(AnswerCode.NOT_ACCEPTED)
        if self._service is None or self._service.invitation.digest != invitation.digest:
            limit = TimeLimit(invitation.recipe.federated.training_seconds)
            self._service = _Service(invitation, server, order.run, limit, invitation.turns(self._node))
        limits = invitation.limits
        if limits is not None and self._ledger.has_sent_all(order.run, limits):
            self._say("all that was accepted for this run has been sent: nothing more is answered in it")
            raise Refused(AnswerCode.ABOVE_ACCEPTED)
        service = self._service
        service.server, service.run = server, order.run  # its certificate may have been renewed
        if service.training is None and (kept := self._kept_start(invitation)) is not None:
            service.training = self._prepare(invitation, kept)
        self._check_bytes(service)
        return order.answered(b"" if service.training is None else invitation.start)

    def _warn_of_expiry(self, signer: x509.Certificate) -> None:
        """Tell its user, once for each certificate; that it is valid was seen before."""
        remedy = "after that nothing is answered; whoever runs the server can renew it"
        soon = check_valid(signer, name="the server's certificate", now=self._now(), remedy=remedy)
        if soon is not None and signer != self._warned_of:
            self._warned_of = signer
            self._say(soon)

    def _start(self, order: Order, invitation: Invitation) -> NodeTraining:
        """Take the start model, and keep it for the next time."""
        if hashlib.sha256(order.payload).digest() != invitation.start:
            raise Refused(AnswerCode.UNREADABLE)
        training = self._prepare(invitation, order.payload)
        path = self._start_path(invitation)
        path.parent.mkdir(exist_ok=True)
        with write_atomically(path, private=True) as file:
            file.write(order.payload)
        return training

    def _kept_start(self, invitation: Invitation) -> bytes | None:
        """The start model as it came once; None where it did not, or is not what it was."""
        path = self._start_path(invitation)
        if not path.exists():
            return None
        content = path.read_bytes()
        return content if hashlib.sha256(content).digest() == invitation.start else None

    def _start_path(self, invitation: Invitation) -> Path:
        return self._home / START / invitation.start.hex()

    def _prepare(self, invitation: Invitation, content: bytes) -> NodeTraining:
        with self._refusing(AnswerCode.UNABLE):
            start = read_start_model(content, invitation.recipe.model)
            return prepare_training(invitation, start, self._store, user=self._user, device=self._device)

    def _compute(self, order: Order, service: "_Service", training: NodeTraining) -> OrderAnswer:
        """An update or a word error rate from the order's model, or nothing yet where it will be masked.

        It is written down before it leaves.
        """
        invitation, settings = service.invitation, service.invitation.recipe.federated
        if order.kind is OrderKind.TRAIN:
            plan, compute, is_accepted = training.plan, training.update, order.step < settings.steps
        elif settings.client_wer is not None and training.wer_plan is not None:
            is_accepted = settings.client_wer.is_due(order.step, steps=settings.steps)
            plan, compute = training.wer_plan, training.wer
        else:
            raise Refused(AnswerCode.NOT_ACCEPTED)
        self._ledger.check_attempt(order, is_accepted=is_accepted, limits=invitation.limits)
        row, model = self._check_turn(order, service.turns)
        service.secure_sum = None  # a new attempt: whatever became of the last one
        self._check_bytes(service)
        server_P = read_round_model(model, training.plan.layout, model_bits=settings.model_bits)
        if self._personal is not None:
            keep_received(order.run, model, self._home, say=self._say)
        idle = not self._ledger.may_train(self._quota, now=self._now())
        if idle:
            self._say("today's limit is reached: what is sent is zeros")
        begun = time.perf_counter()
        words = None if idle else service.limit.result(partial(compute, server_P, step=order.step))
        if words is None:
            words = zero_update(plan)
            if not idle:
                self._say(f"not done within {settings.training_seconds:g} s: what is sent is zeros")
            idle = True
        seconds = time.perf_counter() - begun
        if invitation.secure is None:
            self._remember(order, update_bytes(plan), seconds, idle=idle, row=row)
            return order.answered(words.tobytes())
        self._remember(order, 0, seconds, idle=idle, row=row)
        service.secure_sum = NodeSecureSum(
            order, invitation, words, plan=plan, key=self._key, remember=self._remember, say=self._say, row=row
        )
        return order.answered()

    def _check_turn(self, order: Order, turns: Turns | None) -> tuple[int | None, bytes]:
        """The row of an order to train, which must be a turn of this node, and the round's model."""
        if turns is None or order.kind is not OrderKind.TRAIN:
            return None, order.payload
        row, model = read_turn(order.payload)
        try:
            self._ledger.check_turn(order, row, turns)
        except Refused as refused:
            why = refused.code.name.lower().replace("_", " ")
            self._tell_once(
                f"round {order.step + 1:,}: an order to train was refused ({why}: row {row:,} of the noise)"
            )
            raise
        return row, model

    def _end(self, order: Order, service: "_Service") -> OrderAnswer:
        """Take note that the run is over: the one whose terms came last, and no other."""
        if order.run != service.run or order.payload:
            raise Refused(AnswerCode.UNEXPECTED)
        self._ledger.end(order, now=self._now())
        if self._personal is not None and service.training is not None:
            self._own_part_of = EndedRun(order.run, service.invitation.recipe, service.training)
        self._service, self.ended = None, order.step
        return order.answered()

    def _check_bytes(self, service: "_Service") -> None:
        if service.training is not None:
            self._ledger.check_bytes(self._quota, size=update_bytes(service.training.plan), now=self._now())

    def _remember(
        self, order: Order, size: int, seconds: float = 0.0, *, idle: bool = False, row: int | None = None
    ) -> None:
        self._ledger.add(order, size=size, seconds=seconds, now=self._now(), idle=idle, row=row)

    @contextmanager
    def _refusing(self, code: AnswerCode) -> Iterator[None]:
        """A line for this node's user is a code for the server."""
        try:
            yield
        except InputError as error:
            self._tell_once(str(error))
            raise Refused(code) from None

    def _tell_once(self, line: str) -> None:
        """A server may ask the same again every few seconds."""
        if line != self._told:
            self._told = line
            self._say(line)


@dataclass
class _Service:
    """What a node takes part in, and whose orders count; its training once it has the start model, its present sum.

    `turns` are those of its group, where groups take turns.
    """

    invitation: Invitation
    server: PublicKey
    run: bytes
    limit: TimeLimit
    turns: Turns | None = None
    training: NodeTraining | None = None
    secure_sum: NodeSecureSum | None = None

    @property
    def is_summing(self) -> bool:
        return self.secure_sum is not None and not self.secure_sum.is_over
