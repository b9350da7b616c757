"""A family that hears and learns but writes no text, as a self-supervised one."""

from dataclasses import replace

from sottovoce.models.family import find_family

FAMILY = replace(find_family("ctc_transformer"), name="tests.training.mute:FAMILY", recognition=None)
