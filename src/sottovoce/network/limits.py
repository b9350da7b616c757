"""How often a node may be asked in a release: what one acceptance covers.

    server   charges no more attempts than the recipe's rounds and the spare attempts (`privacy.ledger`)
    node     answers no more often than honest sampling would ask of it in so many attempts

A round that is lost, because a server was killed, is made again with another cohort and other noise, and is charged
again. So ε is of attempts, and includes the spare ones that people accept beforehand. A node sees only the attempts
that it is asked in. Against a server that asks more often it has its own count: how often somebody is asked in n
attempts with probability q is binomial, and above a quantile of that a node refuses. Where groups take turns, n are the
attempts that may be the turn of one group.
"""

from dataclasses import dataclass

RARE = 1e-9  # an honest server, with all spare attempts used, asks a node more often than its limit once in 10⁹ runs


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The most that one acceptance covers for one node; `attempts` is the highest number of an attempt at either."""

    updates: int
    measurements: int
    attempts: int


def default_spare_attempts(rounds: int) -> int:
    """One for every twenty rounds, and at least one.

    >>> default_spare_attempts(4), default_spare_attempts(2006)
    (1, 101)
    """
    return -(-rounds // 20)


def accepted_limits(
    *,
    rounds: int,
    measurements: int,
    spare_attempts: int,
    sampling_rate: float,
    cycle: int = 1,
    draw_rate: float | None = None,
) -> Limits:
    """What accepting so many rounds and measurements covers, with as many spare attempts at each.

    Anybody is asked with `sampling_rate`; but where `cycle` groups take turns at rounds, its members with `draw_rate`.
    """
    attempts = rounds + spare_attempts
    measured = measurements + spare_attempts if measurements else 0
    return Limits(
        updates=max_times_asked(-(-attempts // cycle), sampling_rate=sampling_rate if draw_rate is None else draw_rate),
        measurements=max_times_asked(measured, sampling_rate=sampling_rate),
        attempts=attempts + measured,
    )


def max_times_asked(attempts: int, *, sampling_rate: float) -> int:
    """How often somebody is asked in so many attempts, exceeded with probability `RARE` at most.

    >>> max_times_asked(105, sampling_rate=0.1), max_times_asked(105, sampling_rate=1.0)
    (33, 105)
    """
    from scipy.stats import binom  # here: nobody else on a node needs it

    return int(binom.isf(RARE, attempts, sampling_rate))
