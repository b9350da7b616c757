"""Whatever ends `prepare` ends all of its processes, and the store is the old one or the new."""

import os
import signal
import sys
from pathlib import Path

import pytest
from tests.process_tree import started
from tests.tones import pack_tones

from sottovoce.data.store import Store

STUCK = Path(__file__).with_name("stuck.py")


@pytest.mark.parametrize("old", [True, False], ids=["over an old store", "a new store"])
@pytest.mark.parametrize(
    ("sent", "code"),
    [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130), (signal.SIGKILL, -9)],
    ids=lambda value: value.name if isinstance(value, signal.Signals) else "",
)
def test_a_signal_to_prepare_alone_ends_all_of_it(tmp_path: Path, sent: signal.Signals, code: int, old: bool) -> None:
    out, pipe = tmp_path / "store", tmp_path / "pipe"
    os.mkfifo(pipe)
    if old:
        pack_tones(out)
        before = Store(out).digest
    command = [sys.executable, STUCK, pipe, "prepare", "tsv", "none.tsv", "--out", out, "--workers", 2]
    with started(command, said=tmp_path / "said") as family:
        with pipe.open("rb") as working:
            assert len(working.read(1) + working.read(1)) == 2, "two speakers have been begun"
        family.send(sent)
        assert family.end() == code
    if sent is not signal.SIGKILL:
        assert family.said.read_text() == f"interrupted: nothing half-written is left in {out}\n"
        assert out.exists() == old
    if old:
        assert Store(out).digest == before
    pack_tones(out, people=range(5))
    assert len([*out.iterdir()]) == 3, "its lock, its header and its one generation"
