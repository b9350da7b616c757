"""`sottovoce serve` that cannot begin: one line, and nothing that is in the way of the corrected command."""

import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.network.local_cluster import NAMES
from tests.network.places import Place

flower = pytest.importorskip(
    "sottovoce.network.transport.flower", reason="flwr is not installed (the extra `network`)", exc_type=ImportError
)

from sottovoce.cli import main  # noqa: E402
from sottovoce.network import keys  # noqa: E402

THREE = NAMES[:3]
KEYS = Path("keys/server")


class Listening(Exception):
    """All is in order: it would listen now."""


@pytest.fixture
def place(tmp_path: Path, cluster_stores: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    found = Place(tmp_path, cluster_stores, THREE)
    found.write_files(cohort_size=3)
    monkeypatch.chdir(tmp_path)
    return found


Serve = Callable[..., str]


@pytest.fixture
def serve(place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Serve:
    """The command in this process, up to where it would listen: the line that it is refused with."""

    def called(*more: str, listens: bool = False) -> str:
        where = ("--stores", str(place.stores), "--out", "served", "--device", "cpu", "--sums", "open")
        with monkeypatch.context() as patched:
            if not listens:
                patched.setattr(flower, "FlowerLink", stopped)
            words = ["sottovoce", "serve", "recipe.yaml", "--listen", "127.0.0.1:0", *where, *more]
            patched.setattr(sys, "argv", words)
            patched.setenv("OMP_WAIT_POLICY", "PASSIVE")  # as `main` has it, and not beyond this test
            capsys.readouterr()
            with pytest.raises(SystemExit) as ended:
                main()
            assert ended.value.code == 2
            return capsys.readouterr().err.strip().splitlines()[-1]

    def stopped(*_: Any, **__: Any) -> None:
        raise Listening

    return called


def without(name: str) -> Callable[[], None]:
    return lambda: (KEYS / name).unlink()


def without_any() -> None:
    shutil.rmtree(KEYS)


def with_another_key() -> None:
    shutil.copy(KEYS / keys.ORDERS_KEY, KEYS / keys.SERVER_KEY)


def with_another_orders_key() -> None:
    shutil.copy(KEYS / keys.SERVER_KEY, KEYS / keys.ORDERS_KEY)


def with_an_open_key() -> None:
    (KEYS / keys.SERVER_KEY).chmod(0o644)


def of_another_authority() -> None:
    keys.make_authority(Path("other"), now=datetime.now(UTC))
    shutil.copy(Path("other") / keys.AUTHORITY, KEYS / keys.AUTHORITY)


def made(*, days_ago: int, days: int) -> None:
    shutil.rmtree("keys/server")
    shutil.rmtree("keys/authority")
    begun = datetime.now(UTC) - timedelta(days=days_ago)
    keys.make_authority(Path("keys/authority"), now=begun)
    keys.make_server(KEYS, authority=Path("keys/authority"), hosts=["127.0.0.1"], now=begun, days=days)


def expired() -> None:
    made(days_ago=10, days=9)


def not_valid_yet() -> None:
    made(days_ago=-2, days=9)


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (without_any, "keys/server: no keys there"),
        (without(keys.SERVER), "server.pem cannot be read"),
        (without(keys.SERVER_KEY), "server.key cannot be read"),
        (without(keys.ORDERS), "orders.pem cannot be read"),
        (without(keys.ORDERS_KEY), "orders.key cannot be read"),
        (without(keys.AUTHORITY), "ca.pem cannot be read"),
        (with_another_key, "server.key is not the key of server.pem"),
        (with_another_orders_key, "orders.key is not the key of orders.pem"),
        (with_an_open_key, "is open to others"),
        (of_another_authority, "server.pem is not signed by the authority of ca.pem"),
        (expired, "server.pem has expired"),
        (not_valid_yet, "is not valid before"),
    ],
)
def test_keys_that_do_not_serve_are_refused_before_anything_is_made(
    serve: Serve, tmp_path: Path, spoil: Callable[[], None], problem: str
) -> None:
    kept = tmp_path / "kept"
    shutil.copytree("keys", kept)
    spoil()
    assert problem in serve()
    assert not Path("served").exists()
    shutil.rmtree("keys")
    kept.rename("keys")
    with pytest.raises(Listening):
        serve()


@pytest.fixture
def taken() -> Iterator[int]:
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        yield listening.getsockname()[1]


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (("--listen", "127.0.0.1:{taken}"), "Address already in use"),
        (("--wait-for", "9"), "rounds would wait for 9 nodes, and the roster has 3"),
        (("--sums", "secure", "--least", "2"), "least"),
        (("federation.privacy.mechanism={kind: blt, buffers: 1}", "--wait-for", "4"), "and one of the groups has 3"),
        (("federation.privacy.mechanism={kind: blt, buffers: 1, cycle: 4}", "federation.cohort_size=1"), "more groups"),
        (
            (
                "federation.privacy.mechanism={kind: blt, buffers: 1, cycle: 3}",
                "federation.cohort_size=1",
                "--sums",
                "secure",
            ),
            "sums of 3 people or more are opened, and one of the groups has 1",
        ),
        (("federation.privacy.adaptive_clipping={target_quantile: 0.5}",), "clip"),
    ],
)
def test_what_fails_before_the_first_round_is_not_in_the_way_of_the_corrected_command(
    serve: Serve, taken: int, wrong: tuple[str, ...], problem: str
) -> None:
    said = serve(*(word.format(taken=taken) if "taken" in word else word for word in wrong), listens=True)
    assert problem in said
    for corrected in ((), ("federation.steps=2",), ("federation.steps=2", "--resume")):
        with pytest.raises(Listening):
            serve(*corrected)
    assert "steps: 2" in Path("served/config.yaml").read_text()


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (("--over-select", "0.9"), "over-selection by 0.9: expected a factor of at least 1"),
        (("--over-select", "2"), "federation.cohort_size=6: the population has only 3 clients"),
        (
            ("federation.expected_answers=2", "--over-select", "1.3"),
            "--over-select 1.3: the recipe has expected_answers=2; expected one of them",
        ),
        (("federation.expected_answers=4",), "expected_answers=4: expected a whole number from 1 to cohort_size=3"),
        (
            ("federation.training_seconds=30", "--seconds", "30"),
            "--seconds 30 with federation.training_seconds=30: expected more, to answer",
        ),
        (("--seconds", "0"), "--seconds 0: expected a positive number"),
        (("--round-seconds", "600"), "--round-seconds 600: expected more than the --seconds 600 of training"),
    ],
)
def test_what_is_wrong_with_a_deadline_is_one_line(serve: Serve, more: tuple[str, ...], problem: str) -> None:
    assert problem in serve(*more)
    assert not Path("served").exists()


def test_a_release_that_was_begun_keeps_its_deadlines(serve: Serve) -> None:
    """Another one would follow from who was late. A rehearsal may have another."""
    begun = ("--seconds", "30", "--round-seconds", "60")
    secure = ("federation.privacy.mode=secure", "--out", "release")
    for more in (secure, ("--out", "rehearsal")):
        with pytest.raises(Listening):
            serve(*more, *begun)
    for other, problem in (
        (("--seconds", "40", "--round-seconds", "60"), "--seconds was 30 when the run began and is 40 now"),
        (("--seconds", "30"), "--round-seconds was 60 when the run began and is none now"),
    ):
        assert problem in serve(*secure, *other, "--resume")
        with pytest.raises(Listening):
            serve("--out", "rehearsal", *other, "--resume")
    with pytest.raises(Listening):
        serve(*secure, *begun, "--resume")


def test_so_many_more_are_drawn_and_the_divisor_stays(place: Place) -> None:
    from sottovoce.cli.serve import _load_federated

    settings = _load_federated("recipe.yaml", ["federation.cohort_size=2"], 1.5).federated
    assert (settings.cohort_size, settings.expected_answers) == (3, 2)


def test_noise_by_clients_is_independent_or_refused_in_one_line(serve: Serve) -> None:
    """Their roster, keys and recipe are in order: it is the two together that cannot be."""
    mechanism = "federation.privacy.mechanism={kind: banded, bands: 1, cycle: 1}"
    said = serve("--sums", "secure", "--noise", "clients", mechanism)
    assert said == (
        "error: --noise clients with federation.privacy.mechanism: noise that is correlated over rounds follows from "
        "that of rounds before, which no client may know; expected --noise server, or no mechanism"
    )
    assert not Path("served").exists()
    with pytest.raises(Listening):
        serve("--sums", "secure", mechanism)
