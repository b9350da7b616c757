"""Optimisers over parameter lists and learning-rate schedules, with the formulas of optax."""

from sottovoce.optimisers.elementwise import SGD, Adadelta, AdaGrad, Adam
from sottovoce.optimisers.layerwise import LAMB, LARS
from sottovoce.optimisers.optimiser import Optimiser, State, restore_state, state_tensors, tensor_norms
from sottovoce.optimisers.registry import OPTIMISERS, SCHEDULES, build_optimiser, build_schedule
from sottovoce.optimisers.schedules import (
    Annealed,
    Constant,
    ExponentialDecay,
    NewBob,
    Schedule,
    StepDecay,
    WarmupCosine,
    WarmupInverseSqrt,
)

__all__ = [
    "LAMB",
    "LARS",
    "OPTIMISERS",
    "SCHEDULES",
    "SGD",
    "AdaGrad",
    "Adadelta",
    "Adam",
    "Annealed",
    "Constant",
    "ExponentialDecay",
    "NewBob",
    "Optimiser",
    "Schedule",
    "State",
    "StepDecay",
    "WarmupCosine",
    "WarmupInverseSqrt",
    "build_optimiser",
    "build_schedule",
    "restore_state",
    "state_tensors",
    "tensor_norms",
]
