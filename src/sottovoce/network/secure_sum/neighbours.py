"""How few neighbours are enough: Bell et al. (2020) on a ring whose order is a hash of everybody's keys.

Each one shares masks with the k/2 people on either side. A share γ of the people colludes with the server; the hash
puts them at random places. With m = k + 1 in a group, and t of them to open anything:

* Somebody's vector is open only if 2t − m or more of their own group collude (`sum_terms.threshold`). For the same
  reason an honest client that answers, having seen t signatures under lists with itself on them, has no open mask key.
* A *part* of the people has its sum open only if every mask between it and the other honest people is known. So on
  either side of it lie k/2 places or more whose honest people have open mask keys, or have shared nothing: none of them
  answers. The last client before such a gap has t answers in its group, k/2 + 1 of them from its own side at most. So
  t − k/2 − 1 people in those k/2 places collude; and a ring that is split has two gaps.

Both are tails of hypergeometric distributions; the first for each of n people, the second for two of n places.
"""

import math

from sottovoce.base.errors import InputError
from sottovoce.network.secure_sum.terms import FEWEST, share_threshold


def log2_failure(neighbours: int, *, clients: int, colluding: float) -> float:
    """log₂ of a bound on the probability that any vector, or the sum of any part, is open to the server."""
    from scipy.stats import hypergeom

    group, half = neighbours + 1, neighbours // 2
    if group >= clients:
        return -math.inf if colluding * clients < 2 * share_threshold(clients) - clients else 0.0
    bad = math.floor(colluding * clients)
    in_group = hypergeom.logsf(2 * share_threshold(group) - group - 1, clients, bad, group)
    in_gap = hypergeom.logsf(share_threshold(group) - half - 2, clients, bad, half)
    open_one, open_part = math.log(clients) + in_group, 2 * (math.log(clients) + in_gap)
    return min(0.0, float(max(open_one, open_part) / math.log(2)) + 1)


def neighbours_for(clients: int, *, colluding: float, log2_failure_at_most: float = -40.0) -> int:
    """The smallest even number of neighbours for so many clients.

    2⁻⁴⁰ is for a server that looks but does not lie. One that lies can try colluders' keys until the ring pleases it:
    take off as many more bits as it has tries in a round.

    >>> neighbours_for(1000, colluding=0.1), neighbours_for(100_000, colluding=0.1)
    (158, 224)
    """
    if not 0 <= colluding < 1 / 3:
        raise InputError(f"colluding={colluding}: expected a share below a third, or nobody is safe")
    for neighbours in range(FEWEST + 1, clients + 2, 2):
        if log2_failure(neighbours, clients=clients, colluding=colluding) <= log2_failure_at_most:
            return neighbours
    raise InputError(f"clients={clients}, colluding={colluding}: no number of neighbours is enough")
