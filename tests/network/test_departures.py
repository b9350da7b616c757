"""People who leave, pause, die, are revoked or late in one run, as processes over TLS: it ends, its ledger is right.

Nothing waits for a time: each step follows from what a process has said, from one that has ended, or from one that is
held (`tests.points`). One node is held whenever it is asked to train, so that a round lasts as long as the test wants.
"""

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO

import pytest
from tests.network import faulty_node
from tests.network.local_cluster import NAMES
from tests.network.places import Place
from tests.points import Gate
from tests.training.forked import FORKS, forked

from sottovoce.network import keys
from sottovoce.network.node.home import leave_federation, pause_node, resume_node
from sottovoce.privacy.accounting import rdp_epsilon
from sottovoce.privacy.chain import read_chain
from sottovoce.privacy.events import poisson_release, repeated
from sottovoce.privacy.ledger import verify
from sottovoce.training.run_folder import INPUTS, LEDGER

pytest.importorskip("flwr", reason="flwr is not installed (the extra `network`)")

LATE = "20"  # seconds until nobody is waited for who will not answer
EVER = "600"


@dataclass
class Process:
    """One of them, and what it says, read up to what was waited for."""

    process: BaseProcess
    lines: IO[str]
    said: list[str] = field(default_factory=list)

    def until(self, start: str) -> str:
        """Its next line that begins with `start`; waits for it."""
        for line in self.lines:
            self.said.append(line.rstrip())
            if line.startswith(start):
                return line.rstrip()
        self.process.join()
        raise AssertionError(f"it ended with {self.process.exitcode} and never said {start!r}: {self.said}")

    def ended(self) -> int | None:
        """With which code, once it has, and has been heard to its end."""
        self.said += [line.rstrip() for line in self.lines]
        self.process.join()
        return self.process.exitcode


@contextmanager
def spoken(arguments: tuple[object, ...], told: Path) -> Iterator[Process]:
    here, there = FORKS.Pipe(duplex=False)
    with here, forked(faulty_node.faulty_command, [str(each) for each in arguments], there, told) as process:
        there.close()
        with open(here.fileno(), closefd=False) as lines:
            yield Process(process, lines)


class Federation:
    """A release of `people`, all of whom are in every round."""

    def __init__(self, folder: Path, stores: Path, held: ExitStack, *, people: list[str], rounds: int) -> None:
        self._held, self.place, self.port, self.digest = held, Place(folder, stores, people), 0, ""
        self.place.write_files(cohort_size=len(people), steps=rounds, privacy={"mode": "secure"})

    def serve(self, *more: str) -> Process:
        folder = self.place.folder
        where = ("--roster", folder / "roster.yaml", "--keys", folder / "keys" / "server", "--least", 3)
        out = ("--stores", self.place.stores, "--runs", folder / "runs", "--out", folder / "served", "--device", "cpu")
        arguments = ("serve", self.place.recipe_file, *where, *out, "--listen", f"127.0.0.1:{self.port}", *more)
        server = self._held.enter_context(spoken(arguments, folder / "server told"))
        listening = server.until("listening at ").split()
        self.port, self.digest = int(listening[2].split(":")[1]), listening[-1]
        return server

    def join(self, name: str) -> Process:
        own = self.place.folder / "keys" / name
        ca = self.place.folder / "keys" / "server" / keys.AUTHORITY
        whose = ("--data", self.place.stores / name, "--key", own, "--ca", ca, "--accept", self.digest)
        arguments = ("join", f"https://127.0.0.1:{self.port}", *whose, "--device", "cpu")
        return self._held.enter_context(spoken(arguments, own / "told"))

    def tell(self, name: str, word: str) -> None:
        told = self.place.folder / "keys" / name / "told"
        if word:
            told.write_text(word)
        else:
            told.unlink(missing_ok=True)

    def home(self, name: str) -> Path:
        return self.place.folder / "keys" / name / "home"

    def revoke(self, name: str) -> None:
        """As whoever keeps the keys and the roster does it."""
        folder = self.place.folder / "keys"
        keys.revoke_node(str(folder / name / keys.NODE), authority=folder / "authority")
        (folder / "server" / keys.REVOKED).write_bytes((folder / "authority" / keys.REVOKED).read_bytes())
        roster = self.place.folder / "roster.yaml"
        lines = roster.read_text().splitlines()
        roster.write_text("\n".join(line.replace("}", ", revoked: true}") if name in line else line for line in lines))

    def shorten(self, seconds: str) -> None:
        """As if the release had begun with that deadline, which it may not change: until here no round hangs on it."""
        file = self.place.folder / "served" / INPUTS
        file.write_text(json.dumps(json.loads(file.read_text()) | {"--seconds": seconds}))

    def check(self, *, rounds: int) -> None:
        """The ledger is sound and charges every round once; nobody has answered anything twice."""
        found = verify(self.place.folder / "served" / LEDGER)
        assert (found.steps, found.attempts, found.committed_step) == (rounds, rounds, rounds - 1)
        assert found.header["accepted"] == {"attempts": rounds + 1, "client_wers": 0}
        spent = rdp_epsilon(repeated(poisson_release(8.0, sampling_rate=1.0), rounds), 1e-3)
        assert found.epsilon.rdp == pytest.approx(spent)
        for name in self.place.people:
            records = read_chain(self.home(name) / LEDGER).records
            sent = Counter((line["attempt"], line["answered"]) for line in records if "answered" in line)
            assert set(sent.values()) <= {1}


def test_the_others_go_on_when_one_of_four_leaves(tmp_path: Path, cluster_stores: Path) -> None:
    """As whoever runs the server asked for, rounds wait for all; not for one who has left."""
    slow, leaver, *others = NAMES[:4]
    with ExitStack() as held, Gate() as gate:
        four = Federation(tmp_path, cluster_stores, held, people=NAMES[:4], rounds=2)
        four.tell(slow, f"slow {gate.address}")
        server = four.serve("--wait-for", "4")
        nodes = {name: four.join(name) for name in NAMES[:4]}
        first = gate.reached(server.process)
        nodes[leaver].until("round 1: ")
        leave_federation(four.home(leaver))
        assert nodes[leaver].ended() == 0
        assert "left for good: nothing is answered any more" in nodes[leaver].said
        four.tell(slow, "")
        first.go()
        assert server.ended() == 0, server.said
        assert f"{leaver}: left for good; 3 of 4 nodes can still take part, and a round needs 3" in server.said
        for name in (slow, *others):
            assert nodes[name].ended() == 0, nodes[name].said
        four.check(rounds=2)


@pytest.mark.long
def test_a_server_that_too_few_can_answer_ends_in_order(tmp_path: Path, cluster_stores: Path) -> None:
    """Two of four leave in the first round: no second one is charged, the others are told, and the exit code is 2."""
    slow, *leavers = NAMES[:3]
    with ExitStack() as held, Gate() as gate:
        four = Federation(tmp_path, cluster_stores, held, people=NAMES[:4], rounds=3)
        four.tell(slow, f"slow {gate.address}")
        server = four.serve("--wait-for", "4")
        nodes = {name: four.join(name) for name in NAMES[:4]}
        first = gate.reached(server.process)
        for name in leavers:
            nodes[name].until("round 1: ")
            leave_federation(four.home(name))
            assert nodes[name].ended() == 0
        first.go()
        assert server.ended() == 2, server.said
        assert any(line.startswith("only 2 of 4 nodes can still take part, and a round") for line in server.said)
        for name in (slow, NAMES[3]):
            assert nodes[name].ended() == 0, nodes[name].said
            assert nodes[name].said[-1] == "this run is over after 1 rounds: nothing more is asked of you"
        assert verify(tmp_path / "served" / LEDGER).attempts == 1


@pytest.mark.long
def test_one_leaves_one_pauses_one_dies_one_is_revoked_and_one_is_late(
    tmp_path: Path, cluster_stores: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    people, rounds = NAMES[:6], 5
    late, leaver, pauser, dead, revoked, _steady = people
    with ExitStack() as held, Gate() as gate:
        six = Federation(tmp_path, cluster_stores, held, people=people, rounds=rounds)
        six.tell(late, f"slow {gate.address}")
        server = six.serve("--wait-for", "6", "--seconds", EVER)
        nodes = {name: six.join(name) for name in people}

        held_one = gate.reached(server.process)  # in round 1: one leaves
        nodes[leaver].until("round 1: ")
        leave_federation(six.home(leaver))
        assert nodes[leaver].ended() == 0
        held_one.go()

        held_one = gate.reached(server.process)  # in round 2: one pauses
        server.until(f"{leaver}: left for good; 5 of 6 nodes can still take part, and a round needs 5")
        nodes[pauser].until("round 2: ")
        pause_node(six.home(pauser))
        nodes[pauser].until("not connected to ")
        nodes[dead].until("round 2: ")
        six.tell(dead, "die before TRAIN")
        held_one.go()
        waiting = server.until("waiting until at least 5 of 5 nodes are here: 4 are; ")
        assert f"away: {pauser} (last seen " in waiting
        assert waiting.endswith(f"; out: {leaver} (left for good)")
        resume_node(six.home(pauser))

        held_one = gate.reached(server.process)  # in round 3: one dies
        assert nodes[dead].ended() == -9
        held_one.go()
        waiting = server.until("waiting until at least 5 of 5 nodes are here: 4 are; ")
        assert f"away: {dead} (last seen " in waiting
        assert server.process.pid is not None
        os.kill(server.process.pid, signal.SIGINT)
        assert server.ended() == 130, server.said

        six.revoke(revoked)
        six.shorten(LATE)
        six.tell(dead, "")
        again = six.serve("--wait-for", "4", "--seconds", LATE, "--resume")
        assert nodes[revoked].ended() == 2
        assert nodes[revoked].said[-1].endswith("its key is not in the server's roster, or was revoked")
        nodes[dead] = six.join(dead)

        held_one = gate.reached(again.process)  # in round 4: one is late
        assert "1 away, too late, or with too large an answer" in again.until("round 4: of those drawn, ")
        six.tell(late, "")
        held_one.go()
        assert again.ended() == 0, again.said
        for name in (late, pauser, dead, _steady):
            assert nodes[name].ended() == 0, nodes[name].said
            assert nodes[name].said[-1] == f"this run is over after {rounds} rounds: nothing more is asked of you"
        six.check(rounds=rounds)
    with capsys.disabled():
        print("\n" + "\n".join([*server.said, "--resume", *again.said]))
