"""Engines: how the clients of a cohort are trained. They differ in speed, never in what they compute."""

from sottovoce.federated.engines.engine import Dropped, Engine, JointlyTrained, JointSum, Trained
from sottovoce.federated.engines.sequential import SequentialEngine
from sottovoce.federated.engines.shared import SharedEngine
from sottovoce.federated.engines.stacked import StackedEngine
from sottovoce.federated.engines.workers import WorkersEngine

__all__ = [
    "Dropped",
    "Engine",
    "JointSum",
    "JointlyTrained",
    "SequentialEngine",
    "SharedEngine",
    "StackedEngine",
    "Trained",
    "WorkersEngine",
]
