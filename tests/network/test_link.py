"""Links: everybody who is there is asked once, and who does not answer is missing."""

from datetime import UTC, datetime, timedelta

from sottovoce.network.keys import DailyReminder
from sottovoce.network.transport.link import LocalLink


def test_who_is_away_silent_or_says_too_much_is_missing() -> None:
    link = LocalLink({"echo": lambda order: order, "silent": lambda _: None, "long": lambda _: b"12345"})
    orders = dict.fromkeys(("echo", "silent", "long", "away"), b"1234")
    assert link.ask(orders, seconds=1, limit=4) == {"echo": b"1234"}
    assert link.present() == {"echo", "silent", "long"}


def test_only_who_has_an_order_is_asked() -> None:
    heard: list[bytes] = []

    def listens(order: bytes) -> bytes:
        heard.append(order)
        return b""

    link = LocalLink({"first": listens, "second": listens})
    assert link.ask({"second": b"for the second"}, seconds=1, limit=0) == {"second": b""}
    assert heard == [b"for the second"]


def test_an_operator_is_reminded_once_a_day_while_orders_go_out() -> None:
    now = [datetime(2031, 5, 1, 23, tzinfo=UTC)]
    said: list[str] = []
    remind = DailyReminder(lambda when: [f"it is {when:%d %H}"], now=lambda: now[0], say=said.append)
    for hours in (0, 2, 1, 24, 24):  # what there was to say on the first day was said at the start
        now[0] += timedelta(hours=hours)
        remind()
    assert said == ["it is 02 01", "it is 03 02", "it is 04 02"]
