"""A prepared corpus on disk, packed by user and memory-mapped."""

from sottovoce.data.store.packing import PackingProgress, find_unfinished, pack_corpus
from sottovoce.data.store.reading import Store, StoreUser, Utterance

__all__ = ["PackingProgress", "Store", "StoreUser", "Utterance", "find_unfinished", "pack_corpus"]
