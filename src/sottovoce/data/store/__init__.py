"""A prepared corpus on disk, packed by user and memory-mapped."""

from sottovoce.data.store.packing import Progress, pack, unfinished
from sottovoce.data.store.reading import Store, User, Utterance

__all__ = ["Progress", "Store", "User", "Utterance", "pack", "unfinished"]
