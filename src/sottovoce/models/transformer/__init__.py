"""The flagship's family: a CTC transformer (Pelikan et al., 2025), and all that makes it fast."""

from sottovoce.models.transformer.family import FAMILY

__all__ = ["FAMILY"]
