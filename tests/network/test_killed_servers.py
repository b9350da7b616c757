"""`serve` killed at named points of a release's round, with nodes that are processes: paid for, and never twice sent.

A release, because there a second attempt at a step has another cohort and another noise, and is charged again. With
correlated noise it has another row, too, and is the turn of another group.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO, Any

import pytest
from tests.network import faulty_node
from tests.network.local_cluster import NAMES
from tests.network.places import Place
from tests.points import CHARGED, SAVED, Point
from tests.training.forked import FORKS, forked

from sottovoce.base.files import read_json
from sottovoce.network.server.accounts import ACCOUNTS
from sottovoce.network.server.setup import ATTEMPTS
from sottovoce.privacy.chain import read_chain
from sottovoce.privacy.ledger import verify
from sottovoce.privacy.sampling import CyclicSampler
from sottovoce.privacy.secret_files import SECRETS
from sottovoce.training.run_folder import LEDGER

pytest.importorskip("flwr", reason="flwr is not installed (the extra `network`)")

THREE, ROUNDS = NAMES[:3], 2
ASKED = Point("sottovoce.network.server.clients:AttemptCounter.begin")
TRAINED = Point("sottovoce.network.server.orders:Answers.reasons")  # asked for of a round, when it is answered
SUMMED = Point("sottovoce.network.server.clients:ClientsOverNetwork.sum")
NOISED = Point("sottovoce.privacy.plan:Plan.add_noise")
DRAWN = Point("sottovoce.privacy.round_noise:CorrelatedNoise._write", at="call")
LONG = pytest.mark.long


@contextmanager
def serving(
    place: Place, *more: str, port: int = 0, point: Point | None = None
) -> Iterator[tuple[BaseProcess, IO[str]]]:
    """`sottovoce serve`, killed at `point`; its lines as it says them."""
    where = ("--roster", place.folder / "roster.yaml", "--keys", place.folder / "keys" / "server")
    out = ("--stores", place.stores, "--runs", place.folder / "runs", "--out", place.folder / "served")
    listen = ("--listen", f"127.0.0.1:{port}", "--device", "cpu")
    arguments = [str(each) for each in ("serve", place.recipe_file, *where, *out, *listen, *more)]
    here, there = FORKS.Pipe(duplex=False)
    with here, forked(faulty_node.command, arguments, there, point) as process:
        there.close()
        with open(here.fileno(), closefd=False) as lines:
            yield process, lines


def until(lines: IO[str], start: str) -> str:
    said = []
    for line in lines:
        said.append(line)
        if line.startswith(start):
            return line
    raise AssertionError(said)


@pytest.mark.parametrize(
    ("point", "charged"),
    [
        pytest.param(CHARGED, ROUNDS + 1, id="charged", marks=LONG),
        pytest.param(ASKED, ROUNDS + 1, id="about to ask", marks=LONG),
        pytest.param(TRAINED, ROUNDS + 1, id="trained", marks=LONG),
        pytest.param(SUMMED, ROUNDS + 1, id="summed"),
        pytest.param(NOISED, ROUNDS + 1, id="noised", marks=LONG),
        pytest.param(SAVED, ROUNDS, id="saved", marks=LONG),
    ],
)
def test_killed_between_charge_and_release(tmp_path: Path, cluster_stores: Path, point: Point, charged: int) -> None:
    """Secure sums of all three, with independent noise."""
    sent = killed_and_resumed(tmp_path, cluster_stores, point, charged)
    assert all(sent.values())


@pytest.mark.long
@pytest.mark.parametrize(
    ("point", "charged"),
    [
        pytest.param(CHARGED, ROUNDS + 1, id="charged"),
        pytest.param(TRAINED, ROUNDS + 1, id="trained"),
        pytest.param(DRAWN, ROUNDS + 1, id="drawn"),
        pytest.param(NOISED, ROUNDS + 1, id="noised"),
        pytest.param(SAVED, ROUNDS, id="saved"),
    ],
)
def test_killed_where_groups_take_turns(tmp_path: Path, cluster_stores: Path, point: Point, charged: int) -> None:
    """Open sums of one of the three at a time, with correlated noise: a round that is lost is the next one's turn."""
    taken = {"cohort_size": 1, "privacy": {"mode": "secure", "mechanism": {"kind": "banded", "bands": 2, "cycle": 3}}}
    killed_and_resumed(tmp_path, cluster_stores, point, charged, "--sums", "open", "--wait-for", "1", **taken)
    rows = []
    for group, places in enumerate(CyclicSampler(cycle=3, sampling_rate=1.0).groups(len(THREE))):
        home = tmp_path / "keys" / THREE[int(places[0])] / "home" / "ledger.jsonl"
        of_own = [line["row"] for line in read_chain(home).records if line.get("answered") == "train"]
        assert all(row % 3 == group for row in of_own)
        rows += of_own
    assert len({*rows}) == len(rows)
    assert {*rows} >= {*range(charged - ROUNDS, charged)} if point is not SAVED else {*rows} == {*range(ROUNDS)}
    assert [path.name for path in (tmp_path / "served" / SECRETS).glob("*")] == [ACCOUNTS]


@pytest.mark.parametrize(
    ("point", "before", "charged"),
    [
        pytest.param(CHARGED, 1, ROUNDS + 1, id="charged", marks=LONG),
        pytest.param(replace(ASKED, nth=2), 2, ROUNDS + 2, id="about to ask", marks=LONG),
        pytest.param(TRAINED, 2, ROUNDS + 2, id="trained", marks=LONG),
        pytest.param(NOISED, 2, ROUNDS + 2, id="noised"),
        pytest.param(SAVED, 2, ROUNDS + 1, id="saved", marks=LONG),
    ],
)
def test_killed_where_rounds_overlap(
    tmp_path: Path, cluster_stores: Path, point: Point, before: int, charged: int
) -> None:
    """Open sums of all three: both rounds have begun before the first is released, and each that is lost is paid for.

    Two spare attempts, by default.
    """
    overlapping: dict[str, Any] = {"staleness": 1, "cohort_size": len(THREE)}
    sent = killed_and_resumed(
        tmp_path, cluster_stores, point, charged, "--sums", "open", before=before, spare=2, **overlapping
    )
    assert all(sent.values())


def killed_and_resumed(
    tmp_path: Path,
    cluster_stores: Path,
    point: Point,
    charged: int,
    *more: str,
    before: int = 1,
    spare: int = 1,
    **federation: Any,
) -> dict[str, Counter[tuple[int, str]]]:
    """What each node has answered, by attempt and kind: nothing of it twice, or unpaid."""
    place, answers = Place(tmp_path, cluster_stores, list(THREE)), {}
    place.write_files(**{"cohort_size": len(THREE), "steps": ROUNDS, "privacy": {"mode": "secure"}} | federation)
    with ExitStack() as held:
        server, lines = held.enter_context(serving(place, *more, point=point))
        listening = until(lines, "listening at ").split()
        port, digest = int(listening[2].split(":")[1]), listening[-1]
        for name in THREE:
            own = place.folder / "keys" / name
            whose = ("--data", place.stores / name, "--key", own, "--ca", place.folder / "keys" / "server" / "ca.pem")
            joining = ("join", f"https://127.0.0.1:{port}", *whose, "--accept", digest, "--device", "cpu")
            arguments = [str(each) for each in joining]
            held.enter_context(forked(faulty_node.run, arguments, own / "said", own / "told"))
        server.join()
        assert server.exitcode == -9
        assert verify(place.folder / "served" / LEDGER).attempts == before
        again, lines = held.enter_context(serving(place, *more, "--resume", port=port))
        said = lines.read()
        again.join()
        assert again.exitcode == 0, said
    ledger = verify(place.folder / "served" / LEDGER)
    assert (ledger.steps, ledger.attempts) == (ROUNDS, charged)
    accepted = ledger.header["accepted"]["attempts"]
    assert accepted == ROUNDS + spare  # one spare attempt, by default
    # No attempt that anybody was asked for is unpaid; nobody has sent more than they accepted, or anything twice.
    assert read_json(place.folder / "served" / ATTEMPTS)["attempts"] <= ledger.attempts
    for name in THREE:
        lines_of_own = read_chain(place.folder / "keys" / name / "home" / "ledger.jsonl").records
        sent = Counter((line["attempt"], line["answered"]) for line in lines_of_own if "answered" in line)
        assert {*sent.values()} <= {1}
        assert sum(kind == "train" for _, kind in sent) <= charged <= accepted
        answers[name] = sent
    return answers
