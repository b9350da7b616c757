"""From a plan and a start model to clients over a network: the invitation, and a conversation about it."""

from bisect import bisect_right
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from sottovoce.config import Recipe
from sottovoce.deployment.accounts import Accounts, may_be_kept
from sottovoce.deployment.attendance import Attendance, Departures, Needed
from sottovoce.deployment.conversation import Conversation
from sottovoce.deployment.invitation import Invitation, SecureSums, sealed_letter
from sottovoce.deployment.keys import ORDERS, ORDERS_KEY, load_certificate, load_private_key
from sottovoce.deployment.link import Link
from sottovoce.deployment.network import Attempts, ClientsOverNetwork, Offer, Patience
from sottovoce.deployment.payloads import write_start
from sottovoce.deployment.roster import Roster
from sottovoce.deployment.sum_terms import FEWEST
from sottovoce.errors import InputError, promise
from sottovoce.models.saved import Recogniser
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.secret_files import SECRETS
from sottovoce.privacy.settings import Mode
from sottovoce.training.remote_clients import DEPARTURES
from sottovoce.training.run_folder import RunFolder

ATTEMPTS = "attempts.json"

# Starts to listen, once all else is in order; given the digest of what people will be asked.
Listen = Callable[[bytes], Link]


def usual_least(plan: Plan) -> int:
    """The fewest people of a sum where nobody says otherwise: half a cohort, which in a release may be too many.

    There no cohort may be smaller, whoever is drawn; it is as many as that holds for with a quarter of all people away.
    """
    half, people = max(FEWEST, plan.settings.cohort_size // 2), plan.settings.population_size
    if plan.settings.mode is Mode.SEEDED:
        return half
    return max(FEWEST, bisect_right(range(half + 1), people * 3 // 4, lo=FEWEST, key=plan.fewest_here) - 1)


def needed_here(plan: Plan, wanted: int, *, least: int | None, is_secure: bool) -> Needed:
    """How many nodes a round waits for: `wanted` of those who are still in, and no fewer than `least`.

    In a release with secure sums no fewer than it takes for every cohort of them to be opened.
    """
    if is_secure and least is not None and plan.settings.mode is Mode.SECURE:
        return Needed(wanted=wanted, fewest=plan.fewest_here(least))
    return Needed(wanted=wanted, fewest=min(wanted, 1 if least is None else least))


def reach(
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
    patience: Patience,
    spare_attempts: int = 0,
    say: Callable[[str], None] = lambda _: None,
) -> ClientsOverNetwork:
    """The people of `roster`, by the terms of `recipe` under `plan`. `keys` is the server's folder of them.

    Sums are secure, of `least_in_sum` people or more, unless that is None. Rounds wait for `wait_for` nodes, or all
    that are still in if they are fewer; those of a release for as many as it takes for every cohort of them to be
    summed. A run ends where fewer than `least` (secure: `least_in_sum`) are still in.
    """
    promise(plan.sum_bits in (32, 64), f"sum_bits={plan.sum_bits}: sums over a network are of words")
    travelling = write_start(start)
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
    letter = sealed_letter(invitation, (keys / ORDERS).read_bytes())
    signer = load_private_key(keys / ORDERS_KEY)
    link = listen(invitation.digest)
    attempts = Attempts(run.path / ATTEMPTS)  # the first that is written down: from here on the run has begun
    conversation = Conversation(link=link, roster=roster, key=signer, run=attempts.run, recipe=invitation.digest)
    return ClientsOverNetwork(
        conversation,
        Offer(terms=letter, start_digest=invitation.start, start=travelling),
        attempts=attempts,
        attendance=Attendance(
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
    return Accounts(run.path, names) if may_be_kept(plan) else None
