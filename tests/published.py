"""The search of a release's folder: every byte of what may be published, for what nobody may learn from it.

people       names, utterance ids, texts and rare facts, in every spelling that programs use
clocks       the times at which the run was made, written out or in binary; modification times
machine      host, folders
counts       two releases that differ in the clients' data alone, and get the same noised sums, write the same
             bytes (`differences`): so nothing is in them that has not passed through `Plan.add_noise`
"""

import base64
import codecs
import dataclasses
import hashlib
import json
import os
import platform
import re
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.tones import identity, speaker

from sottovoce.base.seeds import name_key
from sottovoce.data.corpora.corpus import Corpus, ProblemLog, RenderedSpeaker
from sottovoce.data.store import Store, pack_corpus
from sottovoce.federated import client_wer, round
from sottovoce.network.server import clients as network
from sottovoce.privacy.plan import Plan

CLOCK = 4_102_444_800.125  # stands still in 2100
HOST = "a-host-with-a-name"
RARE = "an accent of one"
UNITS = (1, 1_000, 1_000_000, 1_000_000_000)  # of time, in a second
SHORTEST = 6  # bytes: shorter words stand somewhere by chance
SECRETS = "secrets"  # not from the package: what is published is what the docs say
OF_RUNS = {"results.json", "report.html", "report.txt", "metrics.jsonl", "ledger.jsonl", "model"}
OF_EXPORTS = {"privacy.json", "ledger.jsonl", "recipe.yaml"}
PACKED = (b"PK\x03\x04", b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")  # whose bytes show nothing


@dataclasses.dataclass(frozen=True)
class Found:
    """What was found where."""

    file: str
    what: str


def published(folder: Path) -> dict[str, bytes]:
    """Everything in the folder of a run, or in an export, that may be published, by its path; each content once."""
    found, seen, files = dict[str, bytes](), set[bytes](), dict(every(folder))
    assert files.keys() >= OF_RUNS or files.keys() >= OF_EXPORTS
    for file, content in sorted(files.items()):
        assert not content.startswith(PACKED), f"{file} is packed: the search would not see into it"
        if (digest := hashlib.sha256(content).digest()) not in seen:
            seen.add(digest)
            found[file] = content
    return found


def search(folder: Path, words: Mapping[bytes, str]) -> list[Found]:
    """Where any of `words` stands in the name or the content of what is published, and what each means."""
    by_start = dict[bytes, list[bytes]]()
    for word in words:
        by_start.setdefault(word[:SHORTEST], []).append(word)
    begins = np.zeros(1 << 24, dtype=bool)  # of all words by their first three bytes: most places need no second look
    for start in by_start:
        begins[int.from_bytes(start[:3])] = True
    found = []
    for file, content in published(folder).items():
        looked_at = file.encode() + b"\n" + content
        letters = np.frombuffer(looked_at, dtype=np.uint8).astype(np.int32)
        places = np.flatnonzero(begins[(letters[:-2] << 16) | (letters[1:-1] << 8) | letters[2:]]).tolist()
        for place in places:
            for word in by_start.get(looked_at[place : place + SHORTEST], ()):
                if looked_at.startswith(word, place):
                    found.append(Found(file, words[word]))
    return sorted({*found}, key=lambda one: (one.file, one.what))


# People.


def person(number: int, *, utterances: int = 2, of: int | None = None) -> RenderedSpeaker:
    """One of 45 people, nine of whom are tested on; their names and utterances occur nowhere by chance.

    With `of` they are in the split of that number.
    """
    found = speaker(number, letters=(12, 14), utterances=utterances)
    split = found.split if of is None else speaker(of).split
    spoken = [dataclasses.replace(one, id=f"utterance-{one.id}-of-them") for one in found.utterances]
    facts = {"gender": ("female", "male")[number % 2], "accent": RARE if number == 4 else "a common accent"}
    return dataclasses.replace(found, name=f"corpus-voice-{number:04}", split=split, utterances=spoken, metadata=facts)


def packed(place: Path, people: Iterable[RenderedSpeaker]) -> Path:
    rendered = sorted(people, key=lambda one: (one.split, one.name))
    pack_corpus(Corpus("tones", "en", rendered, identity, ProblemLog()), place / "tones", workers=1)
    return place


def spellings(word: str) -> Iterator[bytes]:
    """The forms in which programs write a word down: plain, escaped, encoded, and hashed with no key."""
    plain = word.encode()
    yield from (plain, word.encode("utf-16-le"), json.dumps(word)[1:-1].encode(), plain.hex().encode())
    yield codecs.encode(word, "rot13").encode()
    for shift in range(3):  # wherever in a longer text it begins, some letters of its base64 are its own
        whole = base64.b64encode(bytes(shift) + plain)
        yield whole[(shift * 8 + 5) // 6 : (shift + len(plain)) * 8 // 6]
    for name in ("md5", "sha1", "sha256", "sha512", "blake2b", "blake2s"):
        yield from _written(hashlib.new(name, plain).digest())
    for size in (8, 16, 32):
        yield from _written(hashlib.blake2b(plain, digest_size=size).digest())
    key = name_key(word)
    yield from (str(key).encode(), f"{key:016x}"[:10].encode(), f"{key:016X}"[:10].encode())


def _written(digest: bytes) -> Iterator[bytes]:
    """The beginning of a digest, as bytes (eight of them never stand somewhere by chance), hex and base64."""
    yield from (digest[:8], digest[7::-1], digest.hex()[:10].encode(), base64.b64encode(digest)[:10])


def people_of(store: Store, *, more: Iterable[str] = ()) -> dict[bytes, str]:
    """All by which somebody of `store` can be looked up."""
    users = [store.user(row) for row in range(store.user_count)]
    utterances = [store.utterance(row) for row in range(int(store.user_utterances[-1]))]
    told = [user.name for user in users] + [one.id for one in utterances] + [one.text or "" for one in utterances]
    return named(word for word in (*told, *more) if word)


def named(words: Iterable[str]) -> dict[bytes, str]:
    return {spelt: word for word in words for spelt in spellings(word) if len(spelt) >= SHORTEST}


# Clocks.


def clocks(folder: Path, *, begun: float, ended: float) -> list[Found]:
    """Times from `begun` to `ended` in what is published, and files whose own time is not that of all."""
    found = []
    for file, content in published(folder).items():
        found += [Found(file, what) for what in _times(file.encode() + b"\n" + content, begun, ended)]
    for path in (folder, *folder.rglob("*")):
        if time.gmtime(path.lstat().st_mtime)[:6] != (1980, 1, 1, 0, 0, 0):
            found.append(Found(path.relative_to(folder).as_posix(), "its time of modification"))
    return found


def _times(content: bytes, begun: float, ended: float) -> Iterator[str]:
    for moment in (begun, ended):
        for written in ("%Y-%m-%d", "%d/%m/%Y", "%Y%m%d", "%d %b %Y", "%b %d"):
            if (date := time.strftime(written, time.gmtime(moment))).encode() in content:
                yield f"the date {date}"
    for unit in UNITS:
        first, last = int(begun * unit), int(ended * unit) + 1
        digits = len(str(first))
        for number in re.findall(rb"(?<!\d)\d{%d}(?!\d)" % digits, content):
            if first <= int(number) <= last:
                yield f"the time {number.decode()}"
    for start in range(8):  # at any place: four bytes would be there by chance
        cut = content[start : start + (len(content) - start) // 8 * 8]
        for kind in ("<f8", ">f8", "<i8", ">i8"):
            numbers = np.frombuffer(cut, dtype=kind)
            likely = numbers[(numbers >= int(begun)) & (numbers <= ended * UNITS[-1] + 1)].tolist()
            if any(int(begun * unit) <= number <= int(ended * unit) + 1 for number in likely for unit in UNITS):
                yield f"a time in binary ({kind})"


@contextmanager
def still_clock() -> Iterator[None]:
    """Within, it is always `CLOCK`, and the machine is called `HOST`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: CLOCK)
        patch.setattr(time, "time_ns", lambda: int(CLOCK * 1e9))
        patch.setattr(socket, "gethostname", lambda: HOST)
        yield


# The machine.


def machine(*folders: Path) -> dict[bytes, str]:
    """What a machine is called, and where on it things lie."""
    return {word.encode(): word for word in (HOST, platform.node(), str(Path.home() / "x")[:-1], *map(str, folders))}


# Counts, and whatever else is no function of the noised sums.


@contextmanager
def same_sums() -> Iterator[None]:
    """Within, every noised sum is the same whatever clients have sent; so is all that hides them by chance."""
    with pytest.MonkeyPatch.context() as patch:
        noised = Plan.add_noise

        def constant(plan: Plan, total: torch.Tensor, charge: Any, **given: Any) -> torch.Tensor:
            sum_P = noised(plan, total, charge, **given)  # charged, and its row of noise used, as ever
            return torch.linspace(-1, 1, sum_P.numel()).mul_(1e-3 * (charge.step + 1)).to(sum_P)

        patch.setattr(Plan, "add_noise", constant)
        patch.setattr(Plan, "adapt", lambda plan, within, charge: plan)  # by a noised count
        for module in (round, client_wer):
            patch.setattr(module, "cohort_commitment", lambda cohort, *, nonce: hashlib.sha256(b"").hexdigest())
        patch.setattr("random.SystemRandom.shuffle", lambda self, numbers: None)  # of test speakers' pseudonyms
        patch.setattr(network, "os", SimpleNamespace(urandom=bytes))  # what a run is called to its nodes
        yield


def differences(one: Path, other: Path) -> list[Found]:
    """Files of what is published that are not the same in both folders."""
    first, second = dict(every(one)), dict(every(other))
    return [
        Found(path, "differs with the clients' data")
        for path in sorted(first.keys() | second.keys())
        if first.get(path) != second.get(path)
    ]


def every(folder: Path) -> Iterator[tuple[str, bytes]]:
    """What is published, file by file; of a link where it leads."""
    for path in folder.rglob("*"):
        place = path.relative_to(folder)
        if place.parts[0] == SECRETS:
            continue
        if path.is_symlink():
            yield place.as_posix(), os.readlink(path).encode()
        elif path.is_file():
            yield place.as_posix(), path.read_bytes()
