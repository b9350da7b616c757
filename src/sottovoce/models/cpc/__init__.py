"""The pre-training of Ramesh et al. (2023): an encoder that learns from speech alone, by telling what comes next."""

from sottovoce.models.cpc.family import FAMILY

__all__ = ["FAMILY"]
