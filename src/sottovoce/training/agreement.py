"""What the processes of a run must agree on before they train together.

Each process works out for itself who is a client, how updates are clipped and what training starts from. One that came
to another result would add updates with another bound than the ledger charges for, or train somebody twice. So all
compare their results whenever a run starts or resumes, in memory: nothing of it is written. What depends on people's
data is compared as a digest that is never shown.
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
class HiddenDigest:
    """A digest that is compared but not shown."""

    digest: str


Leaves = dict[str, str | HiddenDigest]


@contextmanager
def require_equal_across_ranks(processes: Processes) -> Iterator[Facts]:
    """Fill the yielded mapping with facts by name; one that differs from rank 0's ends all processes with its name.

    A fact is a `HiddenDigest`, or plain data that may be shown. An InputError raised within stops all processes. None
    leaves before all have arrived.
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
    known = {what: dict(_flatten(fact)) for what, fact in facts.items()}
    found = processes.gather(_RankFacts(known, refused=None if refused is None else str(refused)))
    verdict = processes.broadcast_object(_explain_disagreement(found) if processes.is_first else None)
    if verdict is not None:
        raise InputError(verdict) from refused


@cache
def describe_code() -> Facts:
    """This package, file by file, and the torch that it runs on."""
    root = Path(sottovoce.__file__).parent
    sources = {
        path.relative_to(root).as_posix(): digest_parts(path.read_bytes()) for path in sorted(root.rglob("*.py"))
    }
    return {"sottovoce": sottovoce.__version__, "torch": torch.__version__, **sources}


def digest_parts(*parts: str | bytes) -> HiddenDigest:
    """One digest of all `parts`."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
    return HiddenDigest(digest.hexdigest())


def digest_tensors(tensors: Mapping[str, Tensor]) -> HiddenDigest:
    """One digest of names, shapes and contents."""
    parts: list[str | bytes] = []
    for name, tensor in tensors.items():
        content = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        parts += [f"{name} {tensor.dtype} {tuple(tensor.shape)}", content.tobytes()]
    return digest_parts(*parts)


@dataclass(frozen=True)
class _RankFacts:
    """What one process sends to the first: each fact by its keys (one without keys has the key ""), or why it stops."""

    facts: dict[str, Leaves]
    refused: str | None


def _flatten(fact: object, key: str = "") -> Iterator[tuple[str, str | HiddenDigest]]:
    """The values of nested mappings as text, by their dotted keys."""
    if isinstance(fact, Mapping) and fact:
        for name, value in fact.items():
            yield from _flatten(value, f"{key}.{name}" if key else str(name))
    else:
        yield key, fact if isinstance(fact, HiddenDigest) else json.dumps(fact)


def _explain_disagreement(found: Sequence[_RankFacts]) -> str | None:
    """Why the processes cannot go on together; None where they can."""
    first = found[0]
    for rank, other in enumerate(found):
        # A process that was refused lacks some facts; but where one differs, that is the better reason.
        for what in [what for what in first.facts if what in other.facts]:
            difference = _describe_difference(other.facts[what], first.facts[what])
            if difference is not None:
                return f"rank {rank}'s {what} differs from rank 0's{difference}"
    for rank, each in enumerate(found):
        if each.refused is not None:
            return each.refused if rank == 0 else f"rank {rank}: {each.refused}"
    return None


def _describe_difference(theirs: Leaves, ours: Leaves) -> str | None:
    """The first difference of two facts, to be put behind "differs"; None where they are equal."""
    for key in dict.fromkeys((*theirs, *ours)):
        values = theirs.get(key, "missing"), ours.get(key, "missing")
        if values[0] == values[1]:
            continue
        if not key:
            return ""
        shown = [value for value in values if not isinstance(value, HiddenDigest)]
        return f": {key} is {shown[0]}, not {shown[1]}" if len(shown) == 2 else f": {key} is another"
    return ": its parts are in another order" if list(theirs) != list(ours) else None
