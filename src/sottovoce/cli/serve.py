"""`sottovoce serve`."""

import math
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sottovoce.base.errors import InputError
from sottovoce.cli.console import exit_interrupted, print_json, print_line
from sottovoce.cli.finished import print_finished
from sottovoce.cli.options import Json, Track, TrackDiagnostics
from sottovoce.cli.run import label_run, open_context

if TYPE_CHECKING:
    from sottovoce.config import Recipe
    from sottovoce.models.recogniser import Recogniser
    from sottovoce.network.server.clients import ClientsOverNetwork
    from sottovoce.network.transport.link import Link
    from sottovoce.privacy.plan import Plan
    from sottovoce.training.run_folder import RunFolder

NEEDS = "clients over a network need the extra `network`: pip install 'sottovoce[network]'"


def serve(
    recipe: Annotated[str, typer.Argument(help="A federated recipe, as `sottovoce run` takes it.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, such as federation.steps=100.")] = None,
    roster: Annotated[Path, typer.Option(help="Who may take part: names and public keys.")] = Path("roster.yaml"),
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where nodes reach us.")] = "127.0.0.1:9443",
    keys: Annotated[Path, typer.Option(help="The server's keys (`sottovoce keys server`).")] = Path("keys/server"),
    sums: Annotated[
        str, typer.Option(metavar="secure|open", help="secure: we see sums alone. open: every single update.")
    ] = "secure",
    least: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="The fewest people whose sum may be opened, and who must be here for a round; the run ends where "
            "fewer are still in. Up to half a cohort by default.",
        ),
    ] = None,
    noise: Annotated[
        str, typer.Option(metavar="server|clients", help="Who adds it. clients: we see no sum without noise.")
    ] = "server",
    colluding: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="With noise by clients: number of colluding clients tolerated; a third of --least by default.",
        ),
    ] = None,
    model_bits: Annotated[
        int | None,
        typer.Option(metavar="16", help="Send models with 16 bits a number: as federation.model_bits=16."),
    ] = None,
    wait_for: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Rounds begin when so many nodes are here, or all that are still in, or more where a release needs "
            "them; --least by default, or a cohort. Of the group whose turn it is, where groups take turns.",
        ),
    ] = None,
    spare_attempts: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="In a release, so many rounds may be made again where they are lost; people accept them beforehand. "
            "One for every twenty rounds by default, and no fewer than may have begun at once.",
        ),
    ] = None,
    seconds: Annotated[
        float,
        typer.Option(
            help="How long nodes have to train in a round; who is later counts as zero in it. A release keeps it."
        ),
    ] = 600.0,
    round_seconds: Annotated[
        float | None,
        typer.Option(
            metavar="N", help="Rounds begin every N seconds, however long they take; at once after the last by default."
        ),
    ] = None,
    over_select: Annotated[
        float | None,
        typer.Option(
            metavar="FACTOR",
            help="Draw so many times cohort_size, and divide sums by cohort_size still: others may be late. ε is of "
            "all who are drawn. As federation.cohort_size with federation.expected_answers.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder; RUNS/RECIPE-served by default.")] = None,
    runs: Annotated[Path, typer.Option(help="Where runs lie: seed models are looked for and made here.")] = Path(
        "runs"
    ),
    stores: Annotated[Path, typer.Option(help="Where the stores lie that the model is judged on.")] = Path("stores"),
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint in the run's folder.")
    ] = False,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N, to evaluate on.")] = None,
    track: Track = None,
    track_diagnostics: TrackDiagnostics = False,
    json: Json = False,
) -> None:
    """Run a federated recipe with the speech on other people's machines (`sottovoce join`).

    Example: sottovoce serve demo-clipping/global --roster roster.yaml --listen 0.0.0.0:9443 --keys keys/server

    Plan, ledger and guarantee are those of `sottovoce run`; the clients are those of the roster, and K is their number.
    The ledger's head is signed at every commit with the key that signs orders.
    """
    from sottovoce.network.keys import ORDERS_KEY, REVOKED, SERVER, SERVER_KEY, DailyReminder, check_server, revoked_in
    from sottovoce.network.limits import default_spare_attempts
    from sottovoce.network.roster import load_roster
    from sottovoce.network.server.clients import Timeouts
    from sottovoce.network.server.population import roster_population
    from sottovoce.network.server.setup import (
        ServeOptions,
        check_overlap,
        connect_clients,
        default_least,
        with_client_noise,
        with_word_sums,
    )
    from sottovoce.privacy.settings import Mode
    from sottovoce.training.federation import TOO_FEW
    from sottovoce.training.parent_model import default_run_folder
    from sottovoce.training.remote_clients import RemoteClients
    from sottovoce.training.run import run_recipe
    from sottovoce.training.tracking import choose_trackers

    try:
        from sottovoce.network.transport.flower import FlowerLink
    except ModuleNotFoundError:
        raise InputError(NEEDS) from None

    if model_bits not in (None, 16):
        raise InputError(f"--model-bits {model_bits}: expected 16, or nothing for the 32 that models have")
    sent = [] if model_bits is None else [f"federation.model_bits={model_bits}"]
    experiment = _load_federated(recipe, [*(overrides or []), *sent], over_select)
    tracking = choose_trackers(track, diagnostics=track_diagnostics, root=runs)
    if not 0 < seconds < math.inf:
        raise InputError(f"--seconds {seconds:g}: expected a positive number")
    longest = experiment.federated.training_seconds
    if longest is not None and longest >= seconds:
        raise InputError(
            f"--seconds {seconds:g} with federation.training_seconds={longest:g}: expected more, to answer"
        )
    if sums not in ("secure", "open"):
        raise InputError(f"--sums {sums}: expected secure or open")
    staleness, timeouts = experiment.federated.staleness, Timeouts(training=seconds, rounds=round_seconds)
    check_overlap(staleness, is_secure=sums == "secure", timeouts=timeouts)
    if noise not in ("server", "clients") or (noise == "clients" and sums == "open"):
        raise InputError(f"--noise {noise} with --sums {sums}: expected server, or clients with secure sums")
    if noise == "clients" and experiment.federated.privacy.mechanism is not None:
        raise InputError(
            "--noise clients with federation.privacy.mechanism: noise that is correlated over rounds follows from that "
            "of rounds before, which no client may know; expected --noise server, or no mechanism"
        )
    if spare_attempts is not None and spare_attempts < 0:
        raise InputError(f"--spare-attempts {spare_attempts}: expected a whole number, at least 0")
    is_release = experiment.federated.privacy.mode is Mode.SECURE
    if spare_attempts and not is_release:
        raise InputError("--spare-attempts: a rehearsal makes lost rounds again as they were; expected a release")
    if spare_attempts is None:
        spare_attempts = max(default_spare_attempts(experiment.federated.steps), 1 + (staleness or 0))
    spare = spare_attempts if is_release else None
    host, port = _address(listen)
    certificates = check_server(keys)
    for line in certificates.check_valid(_now()):
        print_line(line)
    people = load_roster(roster, revoked=revoked_in(keys / REVOKED))
    able = {user.node.hex(): user.key for user in people.users if not user.revoked}
    usual = least or min(experiment.federated.expected_answers or experiment.federated.cohort_size, len(able))
    waited_for = wait_for if wait_for is not None else usual

    def planned(plan: "Plan") -> "Plan":
        if noise == "server":
            return with_word_sums(plan)
        least_in_sum = least or default_least(plan)
        some = colluding if colluding is not None else least_in_sum // 3
        return with_client_noise(plan, least=least_in_sum, colluding=some)

    served = default_run_folder(recipe, runs)
    folder = out or served.with_name(f"{served.name}-served")
    with open_context(recipe, runs=runs, stores=stores, device=device) as around:

        def start_listening(digest: bytes) -> "Link":
            link = FlowerLink(host, port, certificate=str(keys / SERVER), key=str(keys / SERVER_KEY), nodes=able)
            around.say(f"listening at {host}:{link.port} for {len(people):,} people; they are asked {digest.hex()}")
            return link

        options = ServeOptions(
            keys=keys,
            listen=start_listening,
            wait_for=waited_for,
            is_secure=sums == "secure",
            least=least,
            spare_attempts=spare or 0,
            before_ask=DailyReminder(certificates.reminders, now=_now, say=around.say),
            timeouts=timeouts,
            say=around.say,
        )

        def clients(run: "RunFolder", plan: "Plan", start: "Recogniser") -> "ClientsOverNetwork":
            return connect_clients(options, experiment, people, run=run, plan=plan, start=start)

        identities = tuple(user.node for user in people.users)
        deadlines = {
            "--seconds": f"{seconds:g}",
            "--round-seconds": "none" if round_seconds is None else f"{round_seconds:g}",
        }
        population = roster_population(people, experiment)
        elsewhere = RemoteClients(population, planned, clients, spare, identities, deadlines)
        # What nodes are asked with, they can check the ledger by.
        around = replace(around, sign=keys / ORDERS_KEY, tracking=tracking)
        outcome = run_recipe(experiment, out=folder, resume=resume, context=around, remote=elsewhere)
    if outcome.stopped_at is None:
        print_finished({label_run(recipe, out): outcome}, folder, title=experiment.about, quietly=json)
    if json:
        print_json(outcome.as_json())
    if outcome.results is not None and outcome.results["ended"]["reason"] == TOO_FEW:
        raise typer.Exit(2)  # the run has ended in order, and has said why; somebody should look at it
    if outcome.stopped_at is not None:
        exit_interrupted(f"stopped after step {outcome.stopped_at:,} and saved: the same command with --resume goes on")


def _load_federated(recipe: str, overrides: list[str], over_select: float | None) -> "Recipe":
    """The recipe; with `over_select` so many times its cohorts are drawn, and sums are divided by what those were."""
    from sottovoce.config import Suite, load_experiment
    from sottovoce.privacy.plan_sampling import over_selected

    experiment = load_experiment(recipe, overrides)
    if isinstance(experiment, Suite) or experiment.federation is None:
        raise InputError(f"{recipe}: expected one federated run, such as demo-clipping/global")
    if over_select is None:
        return experiment
    answers, expected = experiment.federation.cohort_size, experiment.federation.expected_answers
    if expected is not None:
        raise InputError(
            f"--over-select {over_select:g}: the recipe has expected_answers={expected}; expected one of them"
        )
    drawn = over_selected(answers, factor=over_select)
    more = [f"federation.cohort_size={drawn}", f"federation.expected_answers={answers}"]
    return _load_federated(recipe, [*overrides, *more], None)


def _now() -> datetime:
    return datetime.now(UTC)


def _address(listen: str) -> tuple[str, int]:
    host, _, port = listen.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise InputError(f"--listen {listen}: expected HOST:PORT, such as 127.0.0.1:9443")
    return host.strip("[]"), int(port)
