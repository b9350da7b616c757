"""The family of Gao et al. (2022): SpeechBrain's CRDNN encoder and an attention decoder, trained with CTC beside it."""

from sottovoce.models.crdnn.family import FAMILY

__all__ = ["FAMILY"]
