"""A node's part in a secure sum: it holds words (of an update, or of a pair) in memory until they have left, masked, or
never.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import final

from sottovoce.base.signatures import PrivateKey, sign
from sottovoce.deployment.client_noise import add_share
from sottovoce.deployment.invitation import Invitation
from sottovoce.deployment.masks import Words
from sottovoce.deployment.messages import Code, Kind, Order, Refused
from sottovoce.deployment.payloads import terms_of
from sottovoce.deployment.secure_sum import Client
from sottovoce.deployment.sum_terms import Attempt, Phase, Unsafe
from sottovoce.privacy.plan import Plan


@final
class OwnSum:
    """One attempt, with this node's share of the noise where clients add it.

    `remember` writes an order down as answered, before its answer leaves; Refused where it was answered before. `say`
    is for the node's user: a server that asks for what is not safe is told of to them, and to nobody else why.
    """

    def __init__(
        self,
        order: Order,
        invitation: Invitation,
        words: Words,
        *,
        plan: Plan,
        key: PrivateKey,
        remember: Callable[[Order, int], None],
        say: Callable[[str], None],
    ) -> None:
        self._order, self._words, self._remember, self._say = order, words, remember, say
        self.is_over = self._told = False
        terms = terms_of(invitation.sum_terms, plan)
        attempt = Attempt(terms=terms, run=order.run, step=order.step, attempt=order.attempt)
        if plan.noise_shares is not None:
            add_share(words, plan=plan, terms=terms)
        place = terms.roster.index(key.public_key())
        self._client = Client(attempt, place=place, sign=partial(sign, key), remember=self._left)

    def answer(self, order: Order) -> bytes:
        """The answer to one phase of this attempt; Refused, and over, where it would not be safe."""
        if (order.run, order.step, order.attempt) != (self._order.run, self._order.step, self._order.attempt):
            raise Refused(Code.UNEXPECTED)
        client, payload = self._client, order.payload
        try:
            match order.kind:
                case Kind.KEYS:
                    return client.keys()
                case Kind.SHARES:
                    return client.shares(payload)
                case Kind.MASKED:
                    masked = client.masked(payload, self._words)
                    self._words = self._words[:0].copy()  # bare they are needed no more
                    return masked
                case Kind.SURVIVORS:
                    return client.survivors(payload)
                case Kind.UNMASK:
                    self.is_over = True
                    return client.unmask(payload)
        except Unsafe as unsafe:
            if not self._told:  # once, however often it asks
                self._say(
                    f"round {order.step + 1:,}: the server's order to {order.kind.name} was not followed, as it would "
                    f"not be safe ({unsafe}): nothing more leaves this node in this attempt"
                )
            self.is_over = self._told = True
        raise Refused(Code.UNEXPECTED)

    def _left(self, phase: Phase) -> None:
        size = self._words.nbytes if phase is Phase.MASKED else 0
        self._remember(replace(self._order, kind=Kind[phase.name]), size)
