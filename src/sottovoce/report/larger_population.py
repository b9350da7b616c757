"""The population at which a run's recipe would have ε ≤ 8, by one accountant for all runs of a table.

Runs find it by RDP and by PLD (`training.privacy_report`); runs that were kept before they did have RDP alone.
"""

from collections.abc import Sequence

from sottovoce.privacy.calibration import Accountant
from sottovoce.report.records import Record, RunRecord


def accountant_of(runs: Sequence[RunRecord]) -> Accountant:
    """PLD where every run that has such a population has it by PLD, else RDP, by which all of them have it."""
    found = [useful for run in runs if (useful := run.privacy.get("useful"))]
    return "pld" if found and all("pld" in useful for useful in found) else "rdp"


def larger_population(privacy: Record, accountant: Accountant) -> Record | None:
    """`population_size`, `cohort_size` and `epsilon` by this accountant, or `unreachable`; None where none is known."""
    useful: Record | None = privacy.get("useful")
    if useful is None:
        return None
    own: Record = useful["pld"] if accountant == "pld" else useful
    return own if "unreachable" in own else {**own, "epsilon": own[f"epsilon_{accountant}"]}
