"""From a plan and a start model to clients over a network: the invitation, and a conversation about it."""

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from sottovoce.config import Recipe
from sottovoce.errors import InputError, promise
from sottovoce.models.saved import Recogniser
from sottovoce.network.invitation import Invitation, SecureSums, pack_invitation
from sottovoce.network.keys import ORDERS, ORDERS_KEY, load_certificate, load_private_key
from sottovoce.network.model_transfer import write_start_model
from sottovoce.network.roster import Roster
from sottovoce.network.secure_sum.terms import FEWEST
from sottovoce.network.server.accounts import Accounts, may_record_participants
from sottovoce.network.server.availability import Availability, Departures, NodesNeeded
from sottovoce.network.server.clients import AttemptCounter, ClientsOverNetwork, Offer, Timeouts
from sottovoce.network.server.orders import OrderChannel
from sottovoce.network.transport.link import Link
from sottovoce.privacy.noise_shares import NoiseShares, largest_cohort
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.secret_files import SECRETS
from sottovoce.privacy.settings import Mode
from sottovoce.training.elsewhere import DEPARTURES
from sottovoce.training.run_folder import RunFolder

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
    """`in_words`, with the noise added by clients, in sums of `least` of them of whom `colluding` may tell theirs."""
    most = largest_cohort(plan.settings.population_size, sampling_rate=plan.sampling_rate)
    shares = NoiseShares(most=most, least=least, colluding=colluding)
    worded = with_word_sums(plan)
    try:
        return replace(worded, noise_shares=shares)
    except InputError:
        if worded.sum_bits == 64:
            raise
        return replace(plan, sum_bits=64, noise_shares=shares)  # where a share would be too few cells wide


def default_least(plan: Plan) -> int:
    """The fewest people of a sum where nobody says otherwise: half a cohort, which in a release may be too many.

    There no cohort may be smaller, whoever is drawn; it is as many as that holds for with a quarter of all people away.
    """
    half, people = max(FEWEST, plan.settings.cohort_size // 2), plan.settings.population_size
    if plan.settings.mode is Mode.SEEDED:
        return half
    return max(FEWEST, bisect_right(range(half + 1), people * 3 // 4, lo=FEWEST, key=plan.fewest_here) - 1)


def needed_here(plan: Plan, wanted: int, *, least: int | None, is_secure: bool) -> NodesNeeded:
    """How many nodes a round waits for: `wanted` of those who are still in, and no fewer than `least`.

    In a release with secure sums no fewer than it takes for every cohort of them to be opened.
    """
    if is_secure and least is not None and plan.settings.mode is Mode.SECURE:
        return NodesNeeded(wanted=wanted, fewest=plan.fewest_here(least))
    return NodesNeeded(wanted=wanted, fewest=min(wanted, 1 if least is None else least))


def connect_clients(
    recipe: Recipe,
    roster: Roster,
    run: RunFolder,
    plan: Plan,
    start: Recogniser,
    *,
    keys: Path,
    listen: Listen,
    least_in_sum: int | None,
    wait_for: int,
    least: int | None = None,
    patience: Timeouts,
    spare_attempts: int = 0,
    say: Callable[[str], None] = lambda _: None,
) -> ClientsOverNetwork:
    """The people of `roster`, by the terms of `recipe` under `plan`. `keys` is the server's folder of them.

    Sums are secure, of `least_in_sum` people or more, unless that is None. Rounds wait for `wait_for` nodes, or all
    that are still in if they are fewer; those of a release for as many as it takes for every cohort of them to be
    summed. A run ends where fewer than `least` (secure: `least_in_sum`) are still in.
    """
    promise(plan.sum_bits in (32, 64), f"sum_bits={plan.sum_bits}: sums over a network are of words")
    travelling = write_start_model(start)
    invitation = Invitation.of(
        recipe,
        [user.key for user in roster.users],
        start=travelling,
        layout=plan.layout,
        sum_bits=32 if plan.sum_bits == 32 else 64,
        secure=None if least_in_sum is None else SecureSums(least=least_in_sum),
        noise_shares=plan.noise_shares,
        spare_attempts=spare_attempts,
    )
    is_secure, able = least_in_sum is not None, sum(not user.revoked for user in roster.users)
    needed = needed_here(plan, wait_for, least=least_in_sum if is_secure else least, is_secure=is_secure)
    if wait_for > len(roster):
        raise InputError(f"rounds would wait for {wait_for:,} nodes, and the roster has {len(roster):,}")
    if needed.fewest > able:
        raise InputError(f"rounds would wait for {needed.fewest:,} nodes, and {able:,} of the roster's may take part")
    load_certificate(keys / ORDERS)
    letter = pack_invitation(invitation, (keys / ORDERS).read_bytes())
    signer = load_private_key(keys / ORDERS_KEY)
    link = listen(invitation.digest)
    attempts = AttemptCounter(run.path / ATTEMPTS)  # the first that is written down: from here on the run has begun
    conversation = OrderChannel(link=link, roster=roster, key=signer, run=attempts.run, recipe=invitation.digest)
    return ClientsOverNetwork(
        conversation,
        Offer(terms=letter, start_digest=invitation.start, start=travelling),
        attempts=attempts,
        attendance=Availability(
            roster,
            needed=needed,
            departures=Departures(run.path / SECRETS / DEPARTURES),
            now=datetime.now,
            say=say,
        ),
        secure=None if least_in_sum is None else invitation.sum_terms,
        accounts=_accounts(roster, run, plan) if least_in_sum is None else None,
        patience=patience,
        model_bits=recipe.federated.model_bits,
        say=say,
    )


def _accounts(roster: Roster, run: RunFolder, plan: Plan) -> Accounts | None:
    """Everybody's own, of open sums whose cohorts are no secret."""
    names = [user.name for user in roster.users]
    return Accounts(run.path, names) if may_record_participants(plan) else None
