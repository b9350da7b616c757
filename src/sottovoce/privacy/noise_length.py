"""How long the noise of a round is beside the updates it hides, and what would shorten it: by the model's own size.

Noise of standard deviation z·C/S on each of P numbers is z·C·√P/S long. The mean of clipped updates is at most C long,
and mostly shorter, since people's updates point in different directions. Where noise is much longer, little is learned.
"""

import math
from dataclasses import dataclass

# The recipes that were seen to learn with a guarantee at their own population have about 1 (docs/RESULTS.md).
LEARNABLE = 2.0


@dataclass(frozen=True, kw_only=True)
class NoiseLength:
    """The noise of one round: `noise_multiplier` z, `cohort_size` S, `parameters` P that are trained, `rounds` T."""

    noise_multiplier: float
    cohort_size: int
    parameters: int
    rounds: int

    @property
    def ratio(self) -> float:
        """z·√P/S: the length of the noise on the mean, in units of the clip bound.

        >>> round(NoiseLength(noise_multiplier=2.92, cohort_size=33, parameters=554_718, rounds=20).ratio)
        66
        """
        return self.noise_multiplier * math.sqrt(self.parameters) / self.cohort_size

    @property
    def is_learnable(self) -> bool:
        return self.ratio <= LEARNABLE

    def describe(self) -> str:
        """What binds, in one line."""
        return (
            f"the noise of a round is {self.ratio:.2g} times as long as the mean update can be (z·√P/S: "
            f"z = {self.noise_multiplier:.3g}, P = {self.parameters:,} numbers, S = {self.cohort_size:,} clients)"
        )

    def remedies(self) -> list[str]:
        """What would bring it to about 1, one line each; nothing where it is short enough.

        At the same ε, z grows with √T and does not depend on how many people there are.
        """
        if self.is_learnable:
            return []
        square = self.ratio**2
        rounds, numbers = math.floor(self.rounds / square), math.floor(self.parameters / square)
        fewer = f"{rounds:,} rounds in place of {self.rounds:,} (federation.steps)"
        return [
            f"{math.ceil(self.cohort_size * self.ratio):,} clients a round in place of {self.cohort_size:,}",
            fewer
            if rounds
            else f"fewer rounds (federation.steps; even one of {self.rounds:,} would not be enough alone)",
            f"at most {max(numbers, 1):,} of the {self.parameters:,} numbers trained (federation.trainable)",
            "a better seed model (federation.seed_model), which has less to learn",
        ]
