"""Named random streams. Nothing in this package draws from a global generator.

A stream is named by a root seed and a path of words and numbers, `stream(root, "cohort", step)`, so adding a
new consumer never shifts the numbers of an old one. Names are hashed with BLAKE2b, and everything that decides
*who is in which group* goes through `keyed_order`, which uses integer arithmetic only: the same on every
machine and with every version of NumPy or torch.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sottovoce.base.errors import check_invariant

if TYPE_CHECKING:
    import torch

Name = str | int

# Of torch's CPU generator: seed, counters and position come before, the cache of normal draws behind.
_TWISTER_WORDS = slice(3, 3 + 624)


def derive(root: int, *names: Name) -> int:
    """A 63-bit seed for the stream `names` under `root`.

    >>> derive(1, "cohort", 7) == derive(1, "cohort", 7)
    True
    >>> derive(1, "cohort", 7) == derive(1, "cohort", 8)
    False
    """
    digest = hashlib.blake2b(digest_size=8, person=b"sottovoce")
    for name in (root, *names):
        # NumPy's integers would print the same and yet name another stream.
        check_invariant(
            type(name) in (str, int), f"name={name!r} of a stream: expected a str or an int, not {type(name)}"
        )
        # The type is part of the name ("7" is not 7), the length keeps ("ab", "c") apart from ("a", "bc").
        part = f"{type(name).__name__}:{name}".encode()
        digest.update(len(part).to_bytes(4, "little") + part)
    return int.from_bytes(digest.digest(), "little") >> 1


def stream(root: int, *names: Name) -> np.random.Generator:
    """A NumPy generator for the stream `names` under `root`."""
    return np.random.Generator(np.random.Philox(key=derive(root, *names)))


def torch_stream(root: int, *names: Name, device: "torch.device | str" = "cpu") -> "torch.Generator":
    """A torch generator on `device` for the stream `names` under `root`."""
    import torch  # late: listing a corpus or reading its statistics should not wait for torch to load

    seed = derive(root, *names)
    generator = torch.Generator(device=device).manual_seed(seed)
    if generator.device.type == "cpu":
        generator.set_state(_with_whole_seed(generator.get_state(), seed))
    return generator


@contextmanager
def seeded_kernels(seed: int, *, device: "torch.device") -> Iterator[None]:
    """Within this scope the device's own kernels draw from `seed`; afterwards its generator is as before.

    torch's fused dropout takes no generator, and masks drawn by hand would cost a pass over memory each.
    """
    import torch

    own = torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index]
    before = own.get_state()
    own.manual_seed(seed)
    try:
        yield
    finally:
        own.set_state(before)


def _with_whole_seed(state: "torch.Tensor", seed: int) -> "torch.Tensor":
    """The state of torch's CPU generator with all of `seed` in it.

    Its own seeding keeps 32 bits, so that two of 77,000 streams would coincide as likely as not. It is a Mersenne
    twister, like NumPy's, which spreads a seed of any length over the 624 words.
    """
    import torch

    words = state.view(torch.int64)[_TWISTER_WORDS]
    # A twister's first word is its seed: if torch ever lays its state out differently, this is where we learn of it.
    check_invariant(int(words[0]) == seed % 2**32, "torch's CPU generator has another layout than this release knows")
    words.copy_(torch.from_numpy(np.random.MT19937(seed).state["state"]["key"].astype(np.int64)))
    return state


def name_key(name: str) -> int:
    """A stable 64-bit key for a name (of a user, say)."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def keyed_order(keys: NDArray[np.uint64], root: int, *names: Name) -> NDArray[np.int64]:
    """A seeded shuffle of `keys` that gives every key its place by its own value.

    Removing one key leaves the relative order of all others as it was, so a user who drops out of a corpus
    does not send everybody else to another cohort.

    >>> keyed_order(np.array([3, 1, 2, 9], dtype=np.uint64), 6, "split").tolist()
    [3, 2, 0, 1]
    """
    # Ties only happen between equal keys; they keep the order they came in.
    return np.argsort(_mixed(keys, root, *names), kind="stable").astype(np.int64)


def keyed_group(keys: NDArray[np.uint64], root: int, *names: Name, count: int) -> NDArray[np.int64]:
    """One of `count` groups for every key, by its own value alone: no other key can move it.

    >>> keyed_group(np.array([3, 1, 2, 9], dtype=np.uint64), 6, "split", count=2).tolist()
    [1, 0, 0, 1]
    """
    return (_mixed(keys, root, *names) % np.uint64(count)).astype(np.int64)


def _mixed(keys: NDArray[np.uint64], root: int, *names: Name) -> NDArray[np.uint64]:
    return _mix64(keys ^ np.uint64(derive(root, *names)))


def _mix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser: a bijection on 64-bit integers that scatters neighbouring values."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
