"""Pretrained recognisers in Hugging Face's layout."""

from sottovoce.models.huggingface.family import FAMILY as FAMILY
