"""Low-rank corrections factored anew after every round (`lora(…, factors=project)`): after the noise, so it is free.

    server's step on b ─► b·a = u·s·v (thin singular value decomposition) ─► a ← v, b ← u·s

b·a stays as it is, up to rounding, and so does what the rows of a span: clients train b alone. What changes is the
basis: its axes are those along which b·a is longest, and an optimiser that treats each number by itself follows them.
"""

from torch import Tensor

from sottovoce.federated.round import AfterStep
from sottovoce.federated.server import Server
from sottovoce.models.low_rank import singular_basis
from sottovoce.models.trainable import Trainable


def build_refactoring(part: Trainable, server: Server) -> AfterStep:
    """What factors the corrections of `part` anew, in `server`."""
    server.check_can_change_basis()

    def refactor(server_P: Tensor, step: int) -> dict[str, float]:
        views = server.layout.views(server_P)
        for a, b in part.projected:
            rows_RI, basis_RR = singular_basis(views[a], views[b])
            server.change_basis(rows=a, columns=b, basis_RR=basis_RR, rows_RI=rows_RI)
        return {}

    return refactor
