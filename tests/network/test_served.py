"""`serve` and `join` as people run them: a process for the server, and one for each node, over TLS.

Nothing here waits for a time to pass: each step follows from what a process has said.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.network.local_cluster import NAMES, NUMBERS
from tests.network.places import ROUNDS, Place, check_same
from tests.tones import speaker, write_recordings

from sottovoce.network import keys
from sottovoce.network.node.home import claim_home, leave_federation, pause_node, resume_node
from sottovoce.privacy.chain import read_chain
from sottovoce.privacy.ledger import verify
from sottovoce.training.run_folder import LEDGER, RESULTS

pytest.importorskip("flwr", reason="flwr is not installed (the extra `network`)")

THREE = NAMES[:3]


@dataclass
class Processes:
    """Those of one place; all are ended with the test."""

    place: Place
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def sottovoce(self, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "sottovoce", *arguments],
            cwd=self.place.folder,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.started.append(process)
        return process

    def begin_serving(self, *more: str, port: int = 0) -> subprocess.Popen[str]:
        where = ("--keys", "keys/server", "--stores", str(self.place.stores), "--out", "served", "--device", "cpu")
        return self.sottovoce("serve", str(self.place.recipe_file), "--listen", f"127.0.0.1:{port}", *where, *more)

    def serve(self, *more: str, port: int = 0) -> "Server":
        process = self.begin_serving(*more, port=port)
        words = until(process, "listening at ").split()
        threading.Thread(target=self._end_with, args=(process,), daemon=True).start()
        return Server(process, int(words[2].split(":")[1]), words[-1])

    def join(
        self, name: str, server: "Server", *more: str, data: str | None = None, accept: str | None = None
    ) -> subprocess.Popen[str]:
        speech = data or str(self.place.stores / name)
        own = ("--data", speech, "--key", f"keys/{name}", "--ca", "keys/server/ca.pem")
        url = f"https://127.0.0.1:{server.port}"
        return self.sottovoce("join", url, *own, "--accept", accept or server.digest, "--device", "cpu", *more)

    def home(self, name: str) -> Path:
        return self.place.folder / "keys" / name / "home"

    def _end_with(self, server: subprocess.Popen[str]) -> None:
        """Nodes wait for a server as long as it takes; tests do not wait for nodes of one that has failed."""
        if server.wait() not in (0, 130, -signal.SIGKILL):  # done, told to stop, or killed to be started again
            for process in self.started:
                process.kill()

    def close(self) -> None:
        for process in self.started:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


@dataclass(frozen=True)
class Server:
    process: subprocess.Popen[str]
    port: int
    digest: str


def lines_of(process: subprocess.Popen[str]) -> Iterator[str]:
    assert process.stdout is not None
    return (line.rstrip() for line in process.stdout)


def until(process: subprocess.Popen[str], start: str) -> str:
    """The next line of a process that begins with `start`; waits for it."""
    said = []
    for line in lines_of(process):
        said.append(line)
        if line.startswith(start):
            return line
    raise AssertionError(f"it ended with {process.wait()} and never said {start!r}: {said}")


def finished(process: subprocess.Popen[str], *, code: int = 0) -> str:
    """Everything that a process says until it ends well, or as it should."""
    said = "\n".join(lines_of(process))
    assert process.wait() == code, said
    return said


def refused(process: subprocess.Popen[str]) -> str:
    """The one line of a process that ends as after a user's mistake."""
    said = [line for line in lines_of(process) if line]
    assert process.wait() == 2, said
    assert "Traceback" not in "\n".join(said)
    return said[-1]


Settled = Callable[..., Processes]


@pytest.fixture
def settled(tmp_path: Path, cluster_stores: Path) -> Iterator[Settled]:
    made: list[Processes] = []

    def make_cluster(people: list[str], *, stores: Path = cluster_stores, **federation: Any) -> Processes:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        place = Place(folder, stores, people)
        place.write_files(**federation)
        made.append(Processes(place))
        return made[-1]

    yield make_cluster
    for processes in made:
        processes.close()


OVER = f"this run is over after {ROUNDS} rounds: nothing more is asked of you"


@pytest.mark.long
def test_nine_processes_with_secure_sums_make_the_model_of_a_simulation(settled: Settled) -> None:
    """One of the nine has recordings in a folder, and no store. All end by themselves when the run is over."""
    nine = settled(NAMES)
    server = nine.serve("--sums", "secure", "--wait-for", "9")
    (number,) = [number for number in NUMBERS if speaker(number).name == NAMES[4]]
    write_recordings(nine.place.folder / "recorded", speaker(number, letters=(2, 3), utterances=3))
    own = {NAMES[4]: "recorded"}
    nodes = [nine.join(name, server, "--user", name, data=own.get(name)) for name in NAMES]
    prepared = until(nodes[4], f"keys/{NAMES[4]}/home/speech/store: 1 users, 3 utterances")
    assert prepared.endswith("your recordings, prepared; they stay here")
    said = finished(server.process)
    assert "waiting until at least 9 of 9 nodes are here" in said
    assert "ε spent" in said
    check_same(nine.place.folder / "served", nine.place.simulate("simulated"))
    for node in nodes:
        assert OVER in finished(node).splitlines()
    assert read_chain(nine.home(NAMES[0]) / LEDGER).records[-1]["rounds"] == ROUNDS


@pytest.mark.long
def test_people_say_how_well_they_are_understood_and_get_models_of_16_bits(settled: Settled, four_each: Path) -> None:
    """Killed when somebody has been asked for a pair, the server asks again, and it is charged once."""
    asked = {"words": 2, "noise_multiplier": 2.0}
    given: dict[str, Any] = {"stores": four_each, "cohort_size": 3, "steps": 2, "model_bits": 16}
    given |= {"clients": {"holdout": 0.5}, "client_wer": asked}
    three = settled(THREE, **given)
    server = three.serve("--sums", "secure")
    nodes = [three.join(name, server) for name in THREE]
    until(nodes[0], "after round 2: asked how well you are understood")
    server.process.kill()
    server.process.wait()
    finished(three.serve("--sums", "secure", "--resume", port=server.port).process)
    served, twin = three.place.folder / "served", settled(THREE, **given).place.run_here("here", secure=True).folder
    check_same(served, twin)
    found = [json.loads((folder / RESULTS).read_text())["client_wer"] for folder in (served, twin)]
    assert found[0] == found[1]
    assert [each["step"] for each in found[0]] == [2]
    ledger = verify(served / LEDGER)
    assert (ledger.steps, ledger.attempts, ledger.measured, ledger.measured_attempts) == (2, 2, 1, 1)


@pytest.mark.long
def test_a_server_that_is_killed_in_a_round_goes_on_with_the_same_nodes(settled: Settled) -> None:
    """Nothing is lost, nothing charged twice, and nobody else gets at its ledger meanwhile."""
    three = settled(THREE, cohort_size=3)
    server = three.serve("--sums", "open")
    assert "is in use by another process" in refused(three.begin_serving("--sums", "open", "--resume"))
    nodes = [three.join(name, server) for name in THREE]
    until(nodes[0], "round 2: ")  # said before its answer has left
    server.process.kill()
    server.process.wait()
    again = three.serve("--sums", "open", "--resume", port=server.port)
    assert again.digest == server.digest
    finished(again.process)
    for node in nodes:  # a server that was killed has not ended them; one that is done has
        assert OVER in finished(node).splitlines()
    ledger = verify(three.place.folder / "served" / LEDGER)
    assert (ledger.steps, ledger.attempts) == (ROUNDS, ROUNDS)
    twin = settled(THREE, cohort_size=3).place
    check_same(three.place.folder / "served", twin.run_here("here", secure=False).folder)


@pytest.mark.long
def test_a_node_that_is_killed_comes_back_and_a_server_stops_and_goes_on_when_told(settled: Settled) -> None:
    """The round that the node was in goes on without it; the next ones wait for it."""
    three = settled(THREE, cohort_size=3, steps=4)
    server = three.serve("--sums", "secure")
    nodes = [three.join(name, server) for name in THREE]
    until(nodes[0], "round 1: ")
    nodes[0].kill()
    nodes[0].wait()
    back = three.join(THREE[0], server)
    until(back, "round 2: ")
    server.process.send_signal(signal.SIGINT)
    assert "and saved: the same command with --resume goes on" in finished(server.process, code=130)
    finished(three.serve("--sums", "secure", "--resume", port=server.port).process)
    for node in (back, *nodes[1:]):  # nor has one that was told to stop
        assert "this run is over after 4 rounds: nothing more is asked of you" in finished(node).splitlines()
    ledger = verify(three.place.folder / "served" / LEDGER)
    assert (ledger.steps, ledger.attempts) == (4, 4)


@pytest.mark.long
def test_who_is_paused_is_not_connected_and_who_stays_needs_another_yes_for_another_run(settled: Settled) -> None:
    three = settled(THREE, cohort_size=3)
    server = three.serve("--sums", "open", "--wait-for", "2")
    claim_home(three.home(THREE[0]))
    pause_node(three.home(THREE[0]))
    paused = three.join(THREE[0], server)
    staying, going = three.join(THREE[1], server, "--stay"), three.join(THREE[2], server)
    assert OVER in finished(going).splitlines()
    until(staying, OVER)
    finished(server.process)
    resume_node(three.home(THREE[0]))
    assert next(lines_of(paused)).endswith("cannot be reached: trying again until it can")  # its first word
    leave_federation(three.home(THREE[0]))
    assert finished(paused).splitlines() == [
        "left for good: nothing is answered any more",
        f"127.0.0.1:{server.port} could not be told: the same command tries again, or tell whoever runs it",
    ]
    three.serve("--sums", "open", "--out", "served again", port=server.port)
    assert refused(staying) == (
        "error: nobody here can be asked: this was accepted for another run, and each needs a yes of its own"
    )


@pytest.mark.long
def test_who_accepted_something_else_or_is_revoked_is_refused_in_one_line(settled: Settled) -> None:
    three = settled(THREE, cohort_size=3)
    server = three.serve("--sums", "open")
    wrong = three.join(THREE[0], server, accept="ab" * 32)
    assert refused(wrong) == f"error: nobody here can be asked: --accept {server.digest} says yes to this"
    server.process.kill()
    server.process.wait()
    node = three.place.folder / "keys" / THREE[1] / keys.NODE
    keys.revoke_node(str(node), authority=three.place.folder / "keys" / "authority")
    listed = three.place.folder / "keys" / "authority" / keys.REVOKED
    (three.place.folder / "keys" / "server" / keys.REVOKED).write_bytes(listed.read_bytes())
    assert f"{THREE[1]}'s key was revoked" in refused(three.begin_serving("--sums", "open", "--resume"))
    roster = three.place.folder / "roster.yaml"
    lines = roster.read_text().splitlines()
    changed = [line.replace("}", ", revoked: true}") if THREE[1] in line else line for line in lines]
    roster.write_text("\n".join(changed))
    again = three.serve("--sums", "open", "--resume")
    revoked = refused(three.join(THREE[1], again))
    assert revoked.endswith("does not take this node: its key is not in the server's roster, or was revoked")
