"""Turns: with correlated noise clients are in groups, and each attempt at a round is the turn of one of them.

    server   row: how many attempts were charged before ─► the group row mod `cycle` ─► a cohort of it
    order    TRAIN: the row and the round's model, under one signature; a secure sum binds the row into its keys
    node     is it the turn of its group, at least `cycle` rows after its last one, within what its user has accepted?

How far one client can move all that is released is bounded for clients whose rows lie at least `cycle` apart, and for
no others (`privacy.strategies.sensitivity`). So a node keeps to that by itself, by its own ledger. It cannot see which
row a server really adds to a sum: a server that gives one node other rows than it uses is bounded by how many of them
there are, `Limits.updates`.
"""

import struct
from dataclasses import dataclass

from sottovoce.base.errors import InputError
from sottovoce.config import Recipe
from sottovoce.network.messages import AnswerCode, Refused
from sottovoce.privacy.mechanism import Correlated

_ROW = struct.Struct(">Q")


@dataclass(frozen=True, kw_only=True)
class Turns:
    """The rows that are the turn of one node: those of its `group`, of `cycle`.

    In a release there are so many `rows`, and each is asked for once. None: a rehearsal, in which a lost round is made
    again with the row that it had.
    """

    cycle: int
    group: int
    rows: int | None

    def check(self, row: int, *, step: int, last: int | None) -> None:
        """Refused unless `row` is a turn of this node, which has answered for the row `last` before (None: for none).

        A row is never before its step: each step has a row of its own at least.
        """
        if row % self.cycle != self.group:
            raise Refused(AnswerCode.OUT_OF_TURN)
        if self.rows is None:
            return
        if row >= self.rows:
            raise Refused(AnswerCode.ABOVE_ACCEPTED)
        if row < step or (last is not None and row < last + self.cycle):
            raise Refused(AnswerCode.OUT_OF_TURN)


def search_noise(recipe: Recipe, *, people: int) -> Correlated | None:
    """What the mechanism of `recipe` comes to for so many people; None where noise is independent."""
    settings = recipe.federated
    mechanism = settings.privacy.mechanism
    if mechanism is None:
        return None
    return mechanism.for_run(settings.steps, population_size=people, cohort_size=settings.cohort_size)


def check_noise(recipe: Recipe, found: Correlated | None, *, people: int) -> None:
    """Refuse numbers of another noise than `recipe` names, and groups with nobody in them."""
    named = recipe.federated.privacy.mechanism
    fits = (named is None) == (found is None)
    if named is not None and found is not None:
        fits = named.kind == found.kind and named.cycle in (None, found.cycle)
    if not fits:
        raise InputError("the invitation's noise is another than its recipe's mechanism: expected the numbers of that")
    if found is not None and found.cycle > people:
        raise InputError(
            f"federation.privacy.mechanism: cycle={found.cycle}, and the roster has {people:,}; expected no more "
            "groups than people"
        )


def write_turn(row: int, model: bytes) -> bytes:
    """The payload of an order to train at `row`.

    >>> read_turn(write_turn(7, b"model"))
    (7, b'model')
    """
    return _ROW.pack(row) + model


def read_turn(payload: bytes) -> tuple[int, bytes]:
    """A row and a round's model; Refused where there are no two."""
    if len(payload) < _ROW.size:
        raise Refused(AnswerCode.UNREADABLE)
    return _ROW.unpack_from(payload)[0], payload[_ROW.size :]
