"""The recogniser of Ramesh et al. (2023): an RNN transducer on an encoder that looks at the past alone."""

from sottovoce.models.transducer.family import FAMILY

__all__ = ["FAMILY"]
