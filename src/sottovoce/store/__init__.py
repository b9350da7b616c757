"""A prepared corpus on disk, packed by user and memory-mapped."""

from sottovoce.store.packing import Progress, pack, unfinished
from sottovoce.store.reading import Store, User, Utterance

__all__ = ["Progress", "Store", "User", "Utterance", "pack", "unfinished"]
