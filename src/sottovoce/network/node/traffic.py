"""What a node sends in a round, in lines for its user: all messages of a secure sum together."""

from typing import final

from sottovoce.network.messages import OVERHEAD, AnswerCode, Order, OrderAnswer, OrderKind


@final
class RoundTraffic:
    """Counts the bytes of answers that the server has taken, signatures included."""

    def __init__(self) -> None:
        self._round = ""
        self._attempt: tuple[bytes, int] | None = None  # of the secure sum that is not over: run and number
        self._bytes = self._messages = 0

    def lines(self, order: Order, answer: OrderAnswer, *, is_taken: bool = True) -> list[str]:
        """What there is to say when `answer` to `order` was sent, or the server did not take it."""
        if order.kind in (OrderKind.TRAIN, OrderKind.WER):
            return [*self._unfinished(), self._begun(order, answer, is_taken=is_taken)]
        if order.kind is OrderKind.END:
            return self._unfinished()
        if (order.run, order.attempt) != self._attempt or not is_taken:
            return []
        self._bytes, self._messages = self._bytes + OVERHEAD + len(answer.payload), self._messages + 1
        return [self._finished()] if order.kind is OrderKind.UNMASK and answer.code is AnswerCode.DONE else []

    def _begun(self, order: Order, answer: OrderAnswer, *, is_taken: bool) -> str:
        is_round = order.kind is OrderKind.TRAIN
        self._round = f"round {order.step + 1:,}" if is_round else f"after round {order.step:,}"
        asked = f"{self._round}: asked {'to train' if is_round else 'how well you are understood'}"
        if answer.code is not AnswerCode.DONE:
            return f"{asked}, refused ({answer.code.name.lower()})"
        if not is_taken:
            return f"{asked}; the server did not take the answer: it had stopped waiting, or cannot be reached"
        size = OVERHEAD + len(answer.payload)
        if answer.payload:
            return f"{asked}, sent {format_size(size)}"
        self._attempt = (order.run, order.attempt)
        self._bytes, self._messages = size, 1
        return f"{asked}; the answer goes into a secure sum"

    def _finished(self) -> str:
        self._attempt = None
        return f"{self._round}: sent {format_size(self._bytes)} in {self._messages:,} messages of the secure sum"

    def _unfinished(self) -> list[str]:
        return [] if self._attempt is None else [f"{self._finished()}, which was not finished with this node"]


def format_size(count: int) -> str:
    """So many bytes, for people.

    >>> format_size(216), format_size(12_345), format_size(2_219_088), format_size(3_210_000_000)
    ('216 bytes', '12.3 kB', '2.22 MB', '3.21 GB')
    """
    if count < 1000:
        return f"{count} bytes"
    for unit, size in (("kB", 1e3), ("MB", 1e6)):
        if count < 999.5 * size:
            return f"{count / size:.3g} {unit}"
    return f"{count / 1e9:,.3g} GB"
