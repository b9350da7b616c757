"""From a plan and a start model to clients over a network: the invitation, the link, and the run's own files."""

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from sottovoce.base.errors import InputError, check_invariant
from sottovoce.config import Recipe
from sottovoce.models.recogniser import Recogniser
from sottovoce.network.invitation import Invitation, SecureSums, pack_invitation
from sottovoce.network.keys import ORDERS, ORDERS_KEY, load_certificate, load_private_key
from sottovoce.network.model_transfer import write_start_model
from sottovoce.network.roster import Roster
from sottovoce.network.secure_sum.terms import FEWEST
from sottovoce.network.server.accounts import Accounts, may_record_participants
from sottovoce.network.server.availability import Availability, Departures, GroupsInTurn, NodesNeeded
from sottovoce.network.server.clients import AttemptCounter, ClientsOverNetwork, Offer, Timeouts
from sottovoce.network.server.orders import OrderChannel
from sottovoce.network.transport.link import Link
from sottovoce.privacy.noise_shares import NoiseShares, largest_cohort
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.plan_sampling import drawn_from, groups_of
from sottovoce.privacy.secret_files import SECRETS
from sottovoce.privacy.settings import Mode
from sottovoce.training.remote_clients import DEPARTURES
from sottovoce.training.run_folder import RunFolder
from sottovoce.training.start_model import split_trained_part

ATTEMPTS = "attempts.json"

# Starts to listen, once all else is in order; given the digest of what people will be asked.
Listen = Callable[[bytes], Link]


def with_word_sums(plan: Plan) -> Plan:
    """`plan` with sums in words of 32 bits where that is fine enough, as it is for all but huge rosters; else of 64.

    Fine enough: rounding moves no update by a thousandth of its bound, or no number by a thousandth of its noise.
    """
    narrow = replace(plan, sum_bits=32)
    assert narrow.grid is not None
    moved = narrow.grid * math.sqrt(plan.layout.dimension)
    is_fine = moved <= 1e-3 * plan.clip_bound or narrow.grid <= 1e-3 * plan.noise_std_sum
    return narrow if is_fine else replace(plan, sum_bits=64)


def with_client_noise(plan: Plan, *, least: int, colluding: int) -> Plan:
    """`with_word_sums`, and with noise by clients, in sums of `least` of them of whom `colluding` may collude."""
    most = largest_cohort(plan.settings.population_size, sampling_rate=plan.sampling_rate)
    shares = NoiseShares(most=most, least=least, colluding=colluding)
    with_words = with_word_sums(plan)
    try:
        return replace(with_words, noise_shares=shares)
    except InputError:
        if with_words.sum_bits == 64:
            raise
        return replace(plan, sum_bits=64, noise_shares=shares)  # where a share would be too few cells wide


def default_least(plan: Plan) -> int:
    """The fewest people of a sum unless given: half of those expected in it, which in a release may be too many.

    There no cohort may be smaller, whoever is sampled; it is as many as that holds for with a quarter of all away, or
    of each group where groups take turns.
    """
    half, people = max(FEWEST, plan.settings.answers // 2), drawn_from(plan)
    if plan.settings.mode is Mode.SEEDED:
        return half
    return max(FEWEST, bisect_right(range(half + 1), people * 3 // 4, lo=FEWEST, key=plan.fewest_available) - 1)


def nodes_needed(plan: Plan, wanted: int, *, least: int | None, is_secure: bool) -> NodesNeeded:
    """How many nodes a round waits for: `wanted` of those who are still in, and no fewer than `least`.

    In a release with secure sums no fewer than it takes for every cohort of them to be opened. Where groups take turns
    they are members of the group whose turn it is.
    """
    if is_secure and least is not None and plan.settings.mode is Mode.SECURE:
        return NodesNeeded(wanted=wanted, fewest=plan.fewest_available(least))
    return NodesNeeded(wanted=wanted, fewest=min(wanted, 1 if least is None else least))


@dataclass(frozen=True, eq=False, kw_only=True)
class ServeOptions:
    """How a run is served. `keys` is the server's folder of keys; `say` is for whoever runs the server.

    Secure sums are of `least` people or more (None: `default_least`), and a run ends where fewer are still in. Rounds
    wait for `wait_for` nodes, or all that are still in if they are fewer; those of a release for as many as it takes
    for every cohort of them to be summed. Where groups take turns that is of the group whose turn it is.
    """

    keys: Path
    listen: Listen
    wait_for: int
    is_secure: bool = True
    least: int | None = None
    spare_attempts: int = 0
    before_ask: Callable[[], None] = lambda: None
    timeouts: Timeouts = field(default_factory=Timeouts)
    say: Callable[[str], None] = lambda _: None

    def least_in_sum(self, plan: Plan) -> int:
        return self.least or default_least(plan)


def _whom_to_wait_for(
    options: ServeOptions, roster: Roster, invitation: Invitation, *, plan: Plan, least: int | None
) -> tuple[NodesNeeded, GroupsInTurn | None]:
    """How many nodes are waited for where anybody may be drawn, and of a group where groups take turns at rounds."""
    of_round = nodes_needed(plan, options.wait_for, least=least, is_secure=options.is_secure)
    places = groups_of(plan)
    for drawn in places or (frozenset(range(len(roster))),):
        whose = "one of the groups" if places else "the roster"
        largest = max(len(drawn), plan.cohort_size) if places else len(drawn)  # groups may differ by one
        if options.wait_for > largest:
            raise InputError(f"rounds would wait for {options.wait_for:,} nodes, and {whose} has {len(drawn):,}")
        if options.is_secure and least is not None and least > len(drawn):
            raise InputError(f"sums of {least:,} people or more are opened, and {whose} has {len(drawn):,}")
        able = sum(not roster.users[place].revoked for place in drawn)
        if of_round.fewest > able:
            raise InputError(f"rounds would wait for {of_round.fewest:,} nodes, and {able:,} of {whose} may take part")
    if not places:
        return of_round, None
    of_wer = nodes_needed(invitation.wer_plan or plan, options.wait_for, least=least, is_secure=options.is_secure)
    return of_wer, GroupsInTurn(places=places, needed=of_round)


def check_overlap(staleness: int | None, *, is_secure: bool, timeouts: Timeouts) -> None:
    """Refuse rounds that overlap, or take longer, so that answers would be waited for at no known time."""
    rounds, seconds = timeouts.rounds, timeouts.training
    if staleness is not None and is_secure:
        raise InputError(
            f"federation.staleness={staleness} with secure sums: their phases ask nodes that train for later rounds "
            "already; expected --sums open, or staleness=null"
        )
    if rounds is not None and not seconds < rounds * (1 + (staleness or 0)) < math.inf:
        often = "" if staleness is None else f" times staleness + 1, which is {rounds * (1 + staleness):g} s"
        raise InputError(f"--round-seconds {rounds:g}{often}: expected more than the --seconds {seconds:g} of training")


def connect_clients(
    options: ServeOptions, recipe: Recipe, roster: Roster, *, run: RunFolder, plan: Plan, start: Recogniser
) -> ClientsOverNetwork:
    """The people of `roster` by the terms of `recipe` under `plan`. Everything is checked before anybody is asked."""
    check_invariant(plan.sum_bits in (32, 64), f"sum_bits={plan.sum_bits}: sums over a network are of words")
    check_overlap(recipe.federated.staleness, is_secure=options.is_secure, timeouts=options.timeouts)
    start_bytes = write_start_model(start, recipe.model)
    least = options.least_in_sum(plan) if options.is_secure else options.least
    invitation = Invitation.of(
        recipe,
        [user.key for user in roster.users],
        start=start_bytes,
        layout=plan.layout,
        frozen=split_trained_part(recipe, start).frozen,
        sum_bits=32 if plan.sum_bits == 32 else 64,
        secure=SecureSums(least=options.least_in_sum(plan)) if options.is_secure else None,
        noise_shares=plan.noise_shares,
        spare_attempts=options.spare_attempts,
    )
    check_invariant(invitation.correlated == plan.settings.mechanism, "people are asked for other noise than is added")
    needed, groups = _whom_to_wait_for(options, roster, invitation, plan=plan, least=least)
    load_certificate(options.keys / ORDERS)
    terms = pack_invitation(invitation, (options.keys / ORDERS).read_bytes())
    signer = load_private_key(options.keys / ORDERS_KEY)
    link = options.listen(invitation.digest)
    attempts = AttemptCounter(run.path / ATTEMPTS)  # the first that is written down: from here on the run has begun
    departures = Departures(run.path / SECRETS / DEPARTURES)
    accounts = None
    if not options.is_secure and may_record_participants(plan):
        accounts = Accounts(run.path, [user.name for user in roster.users])
    channel = OrderChannel(
        link=link,
        roster=roster,
        key=signer,
        run=attempts.run,
        recipe=invitation.digest,
        before_ask=options.before_ask,
    )
    return ClientsOverNetwork(
        channel,
        Offer(terms=terms, start_digest=invitation.start, start=start_bytes),
        attempts=attempts,
        availability=Availability(
            roster, needed=needed, departures=departures, now=datetime.now, say=options.say, groups=groups
        ),
        secure=invitation.sum_terms if options.is_secure else None,
        accounts=accounts,
        timeouts=options.timeouts,
        model_bits=recipe.federated.model_bits,
        say=options.say,
    )
