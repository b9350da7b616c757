"""Loaded once by the server that test runs are forked from: what accounting works out for their kind of step."""

from sottovoce.privacy.accounting import RunningEpsilon
from sottovoce.privacy.events import poisson_release
from sottovoce.privacy.planner import plan_run, smallest_population
from sottovoce.privacy.pld import QUICK

RunningEpsilon(delta=1e-3).peek(poisson_release(8.0, sampling_rate=2 / 9))
_planned = plan_run(9, cohort_size=2, central_steps=12, delta=1e-3, noise_multiplier=8.0, cap=QUICK)
smallest_population(_planned, target_epsilon=8.0, accountant="rdp", cap=QUICK)
