"""What the processes of a run must find alike before they train together.

Each of them works out for itself who is a client, how updates are clipped and what training starts from. One that found
something else would add updates that are bounded by another C than the ledger charges for, or train a person whom
another has trained already. So all compare what they have found, whenever a run begins or goes on: in memory, nothing
of it is written down. What could tell about people's data is compared as a digest, and no digest is shown.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

import sottovoce
from sottovoce.base.errors import InputError
from sottovoce.base.processes import Processes

Facts = dict[str, object]


@dataclass(frozen=True)
class Sealed:
    """A digest, to be compared and not shown."""

    digest: str


@contextmanager
def agreeing(processes: Processes) -> Iterator[Facts]:
    """Fill it with what has been found, by name: whatever differs from the first process's ends all of them, named.

    A fact is a `Sealed` one, or plain data that may be shown. Whom an InputError stops in here, it stops all the
    others. No process leaves before all have come.
    """
    facts: Facts = {}
    if not processes.is_distributed:
        yield facts
        return
    refused: InputError | None = None
    try:
        yield facts
    except InputError as error:
        refused = error
    known = {what: dict(_leaves(fact)) for what, fact in facts.items()}
    found = processes.gather(_Found(known, refused=None if refused is None else str(refused)))
    verdict = processes.broadcast_object(_verdict(found) if processes.is_first else None)
    if verdict is not None:
        raise InputError(verdict) from refused


@cache
def code_version() -> Facts:
    """This package, file by file, and what it computes with."""
    root = Path(sottovoce.__file__).parent
    sources = {path.relative_to(root).as_posix(): sealed(path.read_bytes()) for path in sorted(root.rglob("*.py"))}
    return {"sottovoce": sottovoce.__version__, "torch": torch.__version__, **sources}


def sealed(*parts: str | bytes) -> Sealed:
    """One digest of all `parts`."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
    return Sealed(digest.hexdigest())


def sealed_tensors(tensors: Mapping[str, Tensor]) -> Sealed:
    """One digest of names, shapes and contents."""
    parts: list[str | bytes] = []
    for name, tensor in tensors.items():
        content = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        parts += [f"{name} {tensor.dtype} {tuple(tensor.shape)}", content.tobytes()]
    return sealed(*parts)


@dataclass(frozen=True)
class _Found:
    """What one process tells the first: each fact by its keys (one without keys has the key ""), or why it stops."""

    facts: dict[str, dict[str, str | Sealed]]
    refused: str | None


def _leaves(fact: object, key: str = "") -> Iterator[tuple[str, str | Sealed]]:
    """The values of nested mappings as words, by their dotted keys."""
    if isinstance(fact, Mapping) and fact:
        for name, value in fact.items():
            yield from _leaves(value, f"{key}.{name}" if key else str(name))
    else:
        yield key, fact if isinstance(fact, Sealed) else json.dumps(fact)


def _verdict(found: Sequence[_Found]) -> str | None:
    """Why they cannot go on together; None where they can."""
    first = found[0]
    for rank, other in enumerate(found):
        # Who was refused has not found everything; but where something differs, that is the better reason.
        for what in [what for what in first.facts if what in other.facts]:
            difference = _difference(other.facts[what], first.facts[what])
            if difference is not None:
                return f"rank {rank}'s {what} differs from rank 0's{difference}"
    for rank, each in enumerate(found):
        if each.refused is not None:
            return each.refused if rank == 0 else f"rank {rank}: {each.refused}"
    return None


def _difference(theirs: Mapping[str, str | Sealed], ours: Mapping[str, str | Sealed]) -> str | None:
    """Where two facts differ first, in words to come behind "differs"; None where they are the same."""
    for key in dict.fromkeys((*theirs, *ours)):
        values = theirs.get(key, "missing"), ours.get(key, "missing")
        if values[0] == values[1]:
            continue
        if not key:
            return ""
        shown = [value for value in values if not isinstance(value, Sealed)]
        return f": {key} is {shown[0]}, not {shown[1]}" if len(shown) == 2 else f": {key} is another"
    return ": its parts are in another order" if list(theirs) != list(ours) else None
