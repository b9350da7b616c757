"""`sottovoce join`, and `sottovoce node` for whoever has joined."""

import math
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sottovoce.base.errors import InputError
from sottovoce.base.interrupts import exit_cleanly_on_signals
from sottovoce.cli.console import exit_interrupted, print_line, progress_bar, stderr, stdout
from sottovoce.cli.serve import NEEDS

if TYPE_CHECKING:
    from sottovoce.data.store import PackingProgress, Store
    from sottovoce.network.invitation import Invitation
    from sottovoce.network.node.participant import Participant

node = typer.Typer(no_args_is_help=True, help="See, pause, resume or end what a node that has joined does.")

LARGEST_PORT = 65_535
POLL_SECONDS = 0.2  # between two looks at whether the user has to be asked something


def join(
    server: Annotated[str, typer.Argument(metavar="URL", help="Where the server is: https://HOST:PORT.")],
    data: Annotated[
        Path,
        typer.Option(
            metavar="STORE_OR_FOLDER",
            help="Your speech: a store, or a folder of recordings (lights.wav) with their texts (lights.txt).",
        ),
    ],
    key: Annotated[Path, typer.Option(help="Your node's key (`sottovoce keys node`): its folder, or node.key.")],
    ca: Annotated[Path, typer.Option(help="The authority's certificate, ca.pem, from whoever invited you.")],
    user: Annotated[
        str | None, typer.Option(help="Whose speech it is, where several people's is there; your name in the roster.")
    ] = None,
    base: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Of a pretrained model: where its files lie; looked for in $SOTTOVOCE_MODELS by default.",
        ),
    ] = None,
    language: Annotated[str, typer.Option(help="Of a folder of recordings: decides how text is normalised.")] = "en",
    accept: Annotated[
        str | None, typer.Option(metavar="DIGEST", help="Say yes beforehand to the invitation with this digest.")
    ] = None,
    home: Annotated[
        Path | None, typer.Option(help="Where the node remembers what it has sent; beside its key by default.")
    ] = None,
    rounds_a_day: Annotated[int | None, typer.Option(help="Train in at most so many rounds a day.")] = None,
    seconds_a_day: Annotated[float | None, typer.Option(help="Train for at most so many seconds a day.")] = None,
    megabytes_a_day: Annotated[float | None, typer.Option(help="Send at most so much a day.")] = None,
    personal: Annotated[
        str | None,
        typer.Option(
            metavar="PART",
            help="When the run is over, also train a part of your own, which stays in the home: lora(r=4), biases.",
        ),
    ] = None,
    stay: Annotated[
        bool, typer.Option("--stay", help="Wait for another run when this one is over; it needs another yes.")
    ] = False,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N.")] = None,
) -> None:
    """Take part in a federation: train on your own speech on this machine, and send clipped updates.

    Example: sottovoce join https://voices.example.org:9443 --data my-recordings --key keys/mine --ca ca.pem

    Only code that is installed here is run. The first time you are shown what you are asked, and nothing is computed
    before you say yes. Ctrl-C ends it after the present order; the same command goes on. When the server says that the
    run is over, it ends by itself.
    """
    from sottovoce.evaluation.recognise import choose_device
    from sottovoce.federated.personal import PersonalTraining
    from sottovoce.network.certificates import check_valid
    from sottovoce.network.keys import NODE_KEY, load_certificate, load_private_key
    from sottovoce.network.messages import Order, OrderAnswer
    from sottovoce.network.node.home import claim_home
    from sottovoce.network.node.ledger import Quota
    from sottovoce.network.node.participant import LARGEST_ORDER, Participant
    from sottovoce.network.node.traffic import RoundTraffic

    address = _address(server)
    if base is not None and not base.is_dir():
        raise InputError(f"--base {base}: no such folder; expected that of the base model that you were told of")
    quota = Quota(
        rounds=rounds_a_day,
        seconds=seconds_a_day,
        bytes=None if megabytes_a_day is None else _bytes(megabytes_a_day),
    )
    try:
        from sottovoce.network.node.worker import Worker
    except ModuleNotFoundError:
        raise InputError(NEEDS) from None

    own = load_private_key(key / NODE_KEY if key.is_dir() else key)
    authority = load_certificate(ca)
    remedy = "ask whoever invited you for the new one"
    if (soon := check_valid(authority, name=str(ca), now=datetime.now(UTC), remedy=remedy)) is not None:
        print_line(soon)
    home = home or (key if key.is_dir() else key.parent) / "home"
    claim_home(home)  # before recordings are prepared, which may take long: its owner can leave meanwhile
    stop, traffic = threading.Event(), RoundTraffic()
    leaving: list[tuple[Order, OrderAnswer]] = []

    def report_sent(is_taken: bool) -> None:
        """Lines about each round, and the end when there are no more."""
        while leaving:
            for line in traffic.lines(*leaving.pop(0), is_taken=is_taken):
                print_line(line)
        if (rounds := participant.ended) is not None:
            participant.ended = None
            print_line(f"this run is over after {rounds:,} rounds: nothing more is asked of you")
            if not stay:
                stop.set()

    participant = Participant(
        home,
        key=own,
        authority=authority,
        store=_open_store(data, home=home, user=user, language=language),
        now=lambda: datetime.now(UTC),
        user=user,
        base=base,
        device=choose_device(device),
        quota=quota,
        personal=None if personal is None else PersonalTraining(part=personal),
        say=print_line,
        on_answer=lambda order, answer: leaving.append((order, answer)),
    )
    if accept is not None and not participant.has_accepted(digest := _digest(accept)):
        participant.accept(digest)
    worker = Worker(
        address,
        key=own,
        authority=ca.read_bytes(),
        answer=participant.answer,
        limit=LARGEST_ORDER,
        stop=stop,
        is_here=participant.is_here,
        departure=participant.departure,
        on_sent=report_sent,
        say=print_line,
    )
    try:
        _answer_until_stopped(participant, worker.run, stop)
    finally:
        participant.close()


def _bytes(megabytes: float) -> int:
    if not (megabytes > 0 and math.isfinite(1e6 * megabytes)):
        raise InputError(f"--megabytes-a-day {megabytes:g}: expected a positive number; pausing is for zero")
    return math.ceil(megabytes * 1e6)


def _open_store(data: Path, *, home: Path, user: str | None, language: str) -> "Store":
    """The node's speech, with a progress bar while a folder of recordings is prepared."""
    from sottovoce.network.node.speech import open_node_store

    with progress_bar("preparing your recordings") as bar:

        def show(progress: "PackingProgress") -> None:
            note = f"pieces of work, {progress.audio_seconds / 3600:.1f} h"
            bar.update(bar.task_ids[0], completed=progress.tasks_done, total=progress.tasks, note=note)

        try:
            return open_node_store(data, home=home, user=user, language=language, say=print_line, on_progress=show)
        except KeyboardInterrupt:
            exit_interrupted("interrupted: the same command goes on")


def _answer_until_stopped(participant: "Participant", answer_orders: Callable[[], None], stop: threading.Event) -> None:
    """Answer orders in another thread; in this one, ask the user whenever that waits for them."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            answer_orders()
        except BaseException as error:
            failed.append(error)

    working = threading.Thread(target=run, name="orders", daemon=True)
    with exit_cleanly_on_signals():
        working.start()
        try:
            while working.is_alive():
                if (invited := participant.invited) is not None:
                    _ask(participant, invited)
                if participant.has_left:
                    print_line("left for good: nothing is answered any more")
                    break
                participant.train_own_part()
                working.join(POLL_SECONDS)
        except KeyboardInterrupt:
            print_line("ending after the present order; the same command goes on")
        finally:
            stop.set()
            working.join()
    if failed:
        raise failed[0]
    participant.train_own_part()


def _ask(participant: "Participant", invitation: "Invitation") -> None:
    """Show what somebody is invited to, and take down what they say."""
    from sottovoce.network.node.consent import describe_invitation

    print_line("You are invited to take part in this:")
    for line in describe_invitation(invitation):
        print_line(f"  {line}")
    print_line(f"  digest {invitation.digest.hex()}")
    if not sys.stdin.isatty() and participant.has_accepted(invitation.digest):
        raise InputError("nobody here can be asked: this was accepted for another run, and each needs a yes of its own")
    if not sys.stdin.isatty():
        raise InputError(f"nobody here can be asked: --accept {invitation.digest.hex()} says yes to this")
    if not typer.confirm("Do you want to take part?", default=False, err=True):
        raise InputError("not accepted: nothing was computed, and nothing sent")
    participant.accept(invitation.digest)


def _digest(text: str) -> bytes:
    try:
        found = bytes.fromhex(text)
    except ValueError:
        found = b""
    if len(found) != 32:
        raise InputError(f"--accept {text}: expected 64 hexadecimal digits, as the server's people tell them")
    return found


def _address(url: str) -> str:
    address = url.removeprefix("https://").rstrip("/")
    host, _, port = address.rpartition(":")
    is_port = port.isascii() and port.isdigit() and len(port) <= 5 and 1 <= int(port) <= LARGEST_PORT
    if url.startswith("http://") or not host or "/" in address or any(map(str.isspace, host)):
        raise InputError(f"{url}: expected https://HOST:PORT")
    if not is_port:
        raise InputError(f"{url}: port {port or 'is missing'}, expected a number from 1 to {LARGEST_PORT:,}")
    return address


Home = Annotated[Path, typer.Argument(help="Where the node remembers what it has sent: KEY/home unless it was moved.")]


@node.command("show")
def show_node_command(home: Home) -> None:
    """Show what a node has accepted, and what it has sent, day by day.

    Example: sottovoce node show keys/mine/home
    """
    from sottovoce.network.node.ledger import describe_node

    for line in describe_node(home):
        print_line(line, to=stdout)


@node.command("pause")
def pause_command(home: Home) -> None:
    """Answer nothing until `resume`.

    Example: sottovoce node pause keys/mine/home
    """
    from sottovoce.network.node.home import pause_node

    pause_node(home)
    stderr.print("paused: `sottovoce node resume` goes on", highlight=False)


@node.command("resume")
def resume_command(home: Home) -> None:
    """Answer again.

    Example: sottovoce node resume keys/mine/home
    """
    from sottovoce.network.node.home import resume_node

    resume_node(home)
    stderr.print("taking part again", highlight=False)


@node.command("leave")
def leave_command(home: Home) -> None:
    """Answer nothing any more, for good: there is no way back with this key.

    Example: sottovoce node leave keys/mine/home
    """
    from sottovoce.network.node.home import leave_federation

    leave_federation(home)
    stderr.print("left for good; what was sent before cannot be taken back", highlight=False)
