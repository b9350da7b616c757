"""Sottovoce: speech recognition trained on speech that never leaves its speaker."""

__version__ = "0.1.0"
