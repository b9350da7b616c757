"""The folder that `sottovoce serve` itself leaves, after a release with open sums over TLS: nobody is named in it."""

import time
from pathlib import Path

import pytest
from tests.network.test_published_served import stores_of
from tests.network.test_served import Settled, finished, settled
from tests.published import clocks, machine, named, search

from sottovoce.base.seeds import name_key
from sottovoce.network.server.accounts import find_accounts, read_accounts
from sottovoce.privacy.ledger import verify
from sottovoce.training.run_folder import LEDGER

pytest.importorskip("flwr", reason="flwr is not installed (the extra `network`)")
__all__ = ["settled"]  # a fixture


def test_who_took_part_is_in_no_file_that_may_be_published(settled: Settled, tmp_path: Path) -> None:
    stores = stores_of(tmp_path / "stores", [100, 101], utterances=2)
    people = sorted((path.name for path in stores.glob("corpus-*")), key=name_key)
    two = settled(people, stores=stores, steps=2, cohort_size=2, privacy={"mode": "secure"})
    begun = time.time()
    server = two.serve("--sums", "open")
    nodes = [two.join(name, server) for name in people]
    finished(server.process)
    for node in nodes:
        finished(node)
    folder = two.place.folder / "served"
    assert verify(folder / LEDGER).steps == 2
    kept = find_accounts(folder)
    assert kept is not None
    assert {name: one.summed for name, one in read_accounts(kept).items()} == dict.fromkeys(people, 2)
    assert search(folder, named(people) | machine(two.place.folder, stores)) == []
    assert clocks(folder, begun=begun, ended=time.time()) == []
