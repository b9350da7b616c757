"""The unit of privacy: who is protected by ε, with all that one client holds."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PrivacyUnit:
    """`name` is what plans and ledgers call it; `short` and `several` are its singular and plural.

    `inside` is who shares one with others, and so is protected less than the whole; None where it is one person.
    A unit that is not `is_known` was named by a user: whether it is one person, this package does not know.
    """

    name: str
    short: str
    several: str
    inside: str | None = None
    is_known: bool = True

    @property
    def one(self) -> str:
        return f"one {self.short}"

    @property
    def holds(self) -> str:
        """What ε covers of one of them."""
        if not self.is_known:
            return "with everything that it holds"
        return "with everything it holds" if self.inside else "with everything they said in the run"


SPEAKER = PrivacyUnit("speaker", "speaker", "people")
SILO = PrivacyUnit("silo with all its speakers", "silo", "silos", inside="speaker")
UNITS = (SPEAKER, SILO)
USER = PrivacyUnit("user", "user", "users", is_known=False)  # of a run in somebody else's loop


def unit_named(name: str) -> PrivacyUnit:
    """The unit that a plan or a ledger names.

    >>> unit_named("silo with all its speakers").inside, unit_named("speaker").inside
    ('speaker', None)
    >>> unit_named("household").one, unit_named("household").is_known
    ('one household', False)
    """
    known = {unit.name: unit for unit in (*UNITS, USER)} | {unit.short: unit for unit in UNITS}
    return known.get(name) or PrivacyUnit(name, name, f"units ({name})", is_known=False)
