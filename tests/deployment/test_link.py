"""Links: everybody who is there is asked once, and who does not answer is missing."""

from sottovoce.deployment.link import LocalLink


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
