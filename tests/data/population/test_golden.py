"""Whole populations, client by client, from a slow twin in plain Python: dictionaries, lists, integers of any size.

`GOLDEN` is what the twin prints. The package must print the same, today and on every machine, because runs are
continued and compared by it.
"""

import hashlib
import os
import subprocess
import sys
from collections import defaultdict
from itertools import pairwise

from sottovoce.base.seeds import derive, name_key

SEED = 2024
# Nine speakers in split a, of whom one is in split b too; lengths in samples.
CROWD = {("a", f"speaker-{i}"): [1000 * (i + 1) + j for j in range(i % 5 + 1)] for i in range(9)}
CROWD |= {("b", "speaker-3"): [9000, 7000]}
RECIPES = {
    "speaker": "",
    "device": "clients='device', speakers_per_device=2",
    "silo": "clients='silo', silos=3",
    "balanced": "clients='silo', silos=3, balance='seconds'",
    "iid": "clients='iid'",
    "iid_uniform": "clients='iid_uniform'",
    "federation": "seed_part=SeedPart(fraction=0.3)",
    "capped": "min_seconds=0.2, max_seconds=1.875, holdout=0.25",
}
MASK = 2**64 - 1


def mix(x):
    """SplitMix64's finaliser."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def queue(keys, purpose):
    return sorted(keys, key=lambda thing: mix(keys[thing] ^ derive(SEED, "users", purpose)))


def utterances():
    """(row, key, length) of each speaker's utterances, speakers in the order of their keys."""
    found, row = defaultdict(list), 0
    for (split, name), lengths in sorted(CROWD.items()):
        for place, length in enumerate(lengths):
            found[name].append((row, (name_key(name) + name_key(split) + place * 0xD1342543DE82EF95) & MASK, length))
            row += 1
    return {name: found[name] for name in sorted(found, key=name_key)}


def twin_speaker():
    return utterances()


def twin_device():
    own, names = utterances(), queue({name: name_key(name) for name in utterances()}, "device")
    cuts = [*range(0, len(names), 2), len(names)]
    return {
        "+".join(sorted(names[a:b])): [utterance for name in names[a:b] for utterance in own[name]]
        for a, b in pairwise(cuts)
    }


def twin_silo():
    silos = [[], [], []]
    for name, own in utterances().items():
        silos[mix(name_key(name) ^ derive(SEED, "users", "silo")) % 3] += own
    return {f"silo-{number}": members for number, members in enumerate(silos)}


def twin_balanced():
    own, silos = utterances(), [[], [], []]
    for name in queue({name: name_key(name) for name in own}, "balanced silo"):
        min(silos, key=lambda silo: sum(length for _, _, length in silo)).extend(own[name])
    return {f"silo-{number}": members for number, members in enumerate(silos)}


def twin_iid():
    own = utterances()
    everything = {utterance: utterance[1] for name in own for utterance in own[name]}
    deal = iter(queue(everything, "iid"))
    return {f"iid-{number}": [next(deal) for _ in own[name]] for number, name in enumerate(own)}


def twin_iid_uniform():
    own = utterances()
    clients = [[] for _ in own]
    for name in own:
        for utterance in own[name]:
            clients[mix(utterance[1] ^ derive(SEED, "users", "iid uniform")) % len(own)].append(utterance)
    return {f"iid_uniform-{number}": members for number, members in enumerate(filter(None, clients))}


def twin_federation():
    own = utterances()
    seed_part = queue({name: name_key(name) for name in own}, "seed part")[: 9 * 3 // 10]
    return {name: own[name] for name in own if name not in seed_part}


def twin_capped():
    clients = {}
    for name, own in utterances().items():
        if sum(length for _, _, length in own) < 0.2 * 16_000:
            continue
        left, kept = 30_000, []
        if sum(length for _, _, length in own) <= left:
            kept = own
        else:
            for utterance in queue({u: u[1] for u in own if u[2] <= 30_000}, "cap"):
                left -= utterance[2]
                if left < 0:
                    break
                kept.append(utterance)
        held_out = queue({u: u[1] for u in kept}, "hold-out")[: max(2, len(kept) // 4) if len(kept) >= 4 else 0]
        clients[name] = [u for u in kept if u not in held_out], held_out
    return clients


def twin(recipe):
    """The clients as text: id=training rows/held-out rows."""
    clients = globals()[f"twin_{recipe}"]()
    lines = []
    for name, members in clients.items():
        training, held_out = members if isinstance(members, tuple) else (members, [])
        lines.append(f"{name}={sorted(row for row, *_ in training)}/{sorted(row for row, *_ in held_out)}")
    return lines


def twin_digest():
    """The seed, no cap and no hold-out; then the keys of the devices' speakers; then where each device starts."""
    names = queue({name: name_key(name) for name in utterances()}, "device")
    # Speaker-3 has two rows, one per split, and both go with them.
    keys = [name_key(name) for name in names for _ in range(1 + (name == "speaker-3"))]
    offsets = [0, 2, 4, 6, 8, 10]
    content = b"".join(number.to_bytes(8, "little") for number in keys + offsets)
    return hashlib.blake2b(f"{SEED} None None".encode() + content, digest_size=16).hexdigest()


PRINT_CLIENTS = """
import sys
from sottovoce.data.store import Store
from sottovoce.data.population import build_population
from sottovoce.data.population import PopulationSettings
from sottovoce.data.speakers import SeedPart
store = Store(sys.argv[1])
for name, recipe in eval(sys.argv[2]).items():
    settings = eval(f"PopulationSettings(split=('a', 'b'), {recipe})")
    population = build_population(store, settings, seed=int(sys.argv[3]))
    rows = (f"{c.id}={c.utterances.tolist()}/{c.held_out.tolist()}" for c in population)
    print(name, population.digest, *rows, sep="|")
"""
GOLDEN = {
    "speaker": [
        "speaker-1=[1, 2]/[]",
        "speaker-7=[18, 19, 20]/[]",
        "speaker-0=[0]/[]",
        "speaker-6=[16, 17]/[]",
        "speaker-3=[6, 7, 8, 9, 25, 26]/[]",
        "speaker-2=[3, 4, 5]/[]",
        "speaker-8=[21, 22, 23, 24]/[]",
        "speaker-5=[15]/[]",
        "speaker-4=[10, 11, 12, 13, 14]/[]",
    ],
    "device": [
        "speaker-0+speaker-5=[0, 15]/[]",
        "speaker-4+speaker-8=[10, 11, 12, 13, 14, 21, 22, 23, 24]/[]",
        "speaker-1+speaker-2=[1, 2, 3, 4, 5]/[]",
        "speaker-6+speaker-7=[16, 17, 18, 19, 20]/[]",
        "speaker-3=[6, 7, 8, 9, 25, 26]/[]",
    ],
    "silo": [
        "silo-0=[3, 4, 5, 6, 7, 8, 9, 25, 26]/[]",
        "silo-1=[0, 1, 2, 10, 11, 12, 13, 14, 18, 19, 20]/[]",
        "silo-2=[15, 16, 17, 21, 22, 23, 24]/[]",
    ],
    "balanced": [
        "silo-0=[0, 1, 2, 6, 7, 8, 9, 16, 17, 25, 26]/[]",
        "silo-1=[10, 11, 12, 13, 14, 18, 19, 20]/[]",
        "silo-2=[3, 4, 5, 15, 21, 22, 23, 24]/[]",
    ],
    "iid": [
        "iid-0=[18, 21]/[]",
        "iid-1=[13, 20, 23]/[]",
        "iid-2=[10]/[]",
        "iid-3=[16, 24]/[]",
        "iid-4=[1, 4, 5, 7, 8, 17]/[]",
        "iid-5=[11, 19, 25]/[]",
        "iid-6=[2, 3, 6, 14]/[]",
        "iid-7=[22]/[]",
        "iid-8=[0, 9, 12, 15, 26]/[]",
    ],
    "iid_uniform": [
        "iid_uniform-0=[4, 6, 10]/[]",
        "iid_uniform-1=[0, 26]/[]",
        "iid_uniform-2=[9, 15, 21, 25]/[]",
        "iid_uniform-3=[5, 8, 17, 23]/[]",
        "iid_uniform-4=[11, 12, 19, 24]/[]",
        "iid_uniform-5=[13]/[]",
        "iid_uniform-6=[7, 14]/[]",
        "iid_uniform-7=[18, 20]/[]",
        "iid_uniform-8=[1, 2, 3, 16, 22]/[]",
    ],
    "federation": [
        "speaker-1=[1, 2]/[]",
        "speaker-7=[18, 19, 20]/[]",
        "speaker-0=[0]/[]",
        "speaker-6=[16, 17]/[]",
        "speaker-2=[3, 4, 5]/[]",
        "speaker-5=[15]/[]",
        "speaker-4=[10, 11, 12, 13, 14]/[]",
    ],
    "capped": [
        "speaker-1=[1, 2]/[]",
        "speaker-7=[18, 19, 20]/[]",
        "speaker-6=[16, 17]/[]",
        "speaker-3=[6, 25, 26]/[7, 9]",
        "speaker-2=[3, 4, 5]/[]",
        "speaker-8=[22, 23, 24]/[]",
        "speaker-5=[15]/[]",
        "speaker-4=[11, 12, 13]/[10, 14]",
    ],
}
DEVICE_DIGEST = "27abc635d7b8c91a522f7b39bd399e4d"


def test_the_twin_still_says_what_it_said():
    assert {recipe: twin(recipe) for recipe in RECIPES} == GOLDEN
    assert twin_digest() == DEVICE_DIGEST


def test_a_fresh_process_builds_the_golden_populations(packed):
    store = packed(CROWD)
    for hash_seed in ("0", "4242"):
        printed = subprocess.run(
            [sys.executable, "-c", PRINT_CLIENTS, str(store.path), repr(RECIPES), str(SEED)],
            env=os.environ | {"PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        clients = {name: rows for name, *rows in (line.split("|") for line in printed.splitlines())}
        assert clients["device"][0] == DEVICE_DIGEST
        assert {name: rows for name, (_, *rows) in clients.items()} == GOLDEN
