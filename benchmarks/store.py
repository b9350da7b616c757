"""The store against what it must do and against lhotse, measured side by side.

    python benchmarks/store.py [--users 1000000] [--rounds 7]

Everything is generated, so it runs anywhere: a crowd of synthetic speech is written out as FLAC, MP3 and Opus files,
prepared, and read back both from the store and, from the same files, through lhotse cuts and soundfile.
"""

import argparse
import io
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import soundfile
from rich.console import Console
from rich.table import Table

from sottovoce.base.seeds import stream
from sottovoce.data.corpora import librilight, synthetic, tsv
from sottovoce.data.corpora.corpus import SAMPLE_RATE, Corpus, ProblemLog, RenderedSpeaker, RenderedUtterance
from sottovoce.data.store import Store, pack_corpus

SEED = 1
CODECS = {"flac": ("FLAC", "PCM_16"), "mp3": ("MP3", "MPEG_LAYER_III"), "opus": ("OGG", "OPUS")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, default=1_000_000, help="users of the store that is opened")
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds of reading")
    arguments = parser.parse_args()
    table = Table("what", "measured", "asked for", title="benchmarks/store.py")
    with tempfile.TemporaryDirectory() as folder:
        for row in (*opening(Path(folder), arguments.users), *reading(Path(folder), arguments.rounds)):
            table.add_row(*row)
    Console(width=120).print(table)


# Opening a very large store


def tiny_user(number: int) -> RenderedSpeaker:
    """One user with two utterances of 5 ms: what is measured is the number of users, not their audio."""
    name = f"user-{number:08}"
    samples = np.full(80, number % 1000, dtype=np.int16)
    spoken = [RenderedUtterance(id=f"{name}-{i}", samples=samples, text="sì", raw_text="Sì!") for i in range(2)]
    return RenderedSpeaker(name=name, split="train", utterances=spoken, metadata={"gender": "female"})


OPEN = """
import json, sys, time
from sottovoce.data.store import Store
def peak_mb():  # not ru_maxrss: a child inherits its parent's
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) / 1024
started = time.perf_counter()
store = Store(sys.argv[1])
opened, open_mb = time.perf_counter() - started, peak_mb()
started = time.perf_counter()
for row in range(0, store.user_count, max(store.user_count // 1000, 1)):
    assert [store.utterance(u).samples[0] for u in store.user(row).utterances] == [row % 1000] * 2
read = time.perf_counter() - started
print(json.dumps({"opened": opened, "open_mb": open_mb, "read": read, "read_mb": peak_mb()}))
"""


def opening(folder: Path, users: int) -> list[Sequence[str]]:
    """Open a store of `users` users in a fresh process and read 1,000 of them."""
    for size in (1000, users):
        corpus = Corpus("tiny", "en", range(size), tiny_user, ProblemLog())
        pack_corpus(corpus, folder / f"tiny-{size}", workers=1)
    found = {
        size: json.loads(subprocess.check_output([sys.executable, "-c", OPEN, str(folder / f"tiny-{size}")], text=True))
        for size in (1000, users)
    }
    large = found[users]
    return [
        (f"open {users:,} users", f"{large['opened'] * 1e3:.1f} ms", "< 1 s"),
        ("open 1,000 users, for comparison", f"{found[1000]['opened'] * 1e3:.1f} ms", ""),
        (f"memory of the process, {users:,} users open", f"{large['open_mb']:.0f} MB", "< 300 MB"),
        (
            "  after reading 1,000 of them all over the files",
            f"{large['read_mb']:.0f} MB, mapped pages included",
            "< 300 MB",
        ),
    ]


# Reading random users, and preparing


def reading(folder: Path, rounds: int) -> list[Sequence[str]]:
    """Random users per second from the store and from lhotse on the same FLAC files; `prepare` by codec."""
    pack_corpus(synthetic.read_synthetic("crowd", users=60, hours=0.75, seed=SEED), folder / "crowd")
    crowd = Store(folder / "crowd")
    rows: list[Sequence[str]] = []
    for codec in CODECS:
        manifest = export(crowd, folder / codec, codec)
        started = time.process_time()
        pack_corpus(tsv.read_tsv([manifest]), folder / f"from-{codec}", workers=1)
        rate = crowd.seconds / (time.process_time() - started)
        rows.append((f"prepare from {codec}", f"{rate:,.0f} audio s per second and core", ""))

    store = Store(folder / "from-flac")
    users = stream(SEED, "users").integers(store.user_count, size=60).tolist()
    by_store, by_lhotse = compare(
        lambda: [read_user(store, row) for row in users], lhotse_reader(folder / "flac", store, users), rounds
    )
    ratios = [slow / fast for fast, slow in zip(by_store, by_lhotse, strict=True)]
    rows += [
        ("random users per second, store", f"{len(users) / statistics.median(by_store):,.0f}", ""),
        ("random users per second, lhotse cuts + soundfile", f"{len(users) / statistics.median(by_lhotse):,.0f}", ""),
        (
            "ratio, median (min to max)",
            f"{statistics.median(ratios):.0f}× ({min(ratios):.0f} to {max(ratios):.0f})",
            "≥ 5×",
        ),
    ]
    return rows + codec_choice(store) + pointing(folder, crowd, rounds)


def export(store: Store, folder: Path, codec: str) -> Path:
    """The store's training users as audio files with a manifest beside them."""
    container, subtype = CODECS[codec]
    folder.mkdir()
    lines = ["client_id\tpath\tsentence"]
    for user in map(store.user, range(store.user_count)):
        for row in user.utterances:
            spoken = store.utterance(row)
            soundfile.write(
                folder / f"{spoken.id}.{codec}", spoken.samples, SAMPLE_RATE, format=container, subtype=subtype
            )
            lines.append(f"{user.name}\t{spoken.id}.{codec}\t{spoken.text}")
    manifest = folder / "train.tsv"
    manifest.write_text("\n".join(lines) + "\n")
    return manifest


def read_user(store: Store, row: int) -> list[tuple[np.ndarray, str | None]]:
    """A user's utterances as floats with their text: what lhotse returns, so that both do the same work."""
    spoken = map(store.utterance, store.user(row).utterances)
    return [(np.multiply(u.samples, 1 / 32768, dtype=np.float32), u.text) for u in spoken]


def lhotse_reader(folder: Path, store: Store, users: list[int]) -> Callable[[], object]:
    """The same users through lhotse: cuts in memory, already grouped by speaker, audio through soundfile."""
    from lhotse import MonoCut, Recording, SupervisionSegment

    cuts: dict[int, list[MonoCut]] = {}
    for row in set(users):
        user = store.user(row)
        cuts[row] = []
        for utterance in map(store.utterance, user.utterances):
            recording = Recording.from_file(folder / f"{utterance.id}.flac")
            said = SupervisionSegment(utterance.id, recording.id, 0, recording.duration, text=utterance.text)
            cuts[row].append(MonoCut(utterance.id, 0, recording.duration, 0, supervisions=[said], recording=recording))
    return lambda: [[(cut.load_audio()[0], cut.supervisions[0].text) for cut in cuts[row]] for row in users]


def compare(
    ours: Callable[[], object],
    theirs: Callable[[], object],
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[list[float], list[float]]:
    """Seconds of each, interleaved so that a busy machine slows both."""
    times: tuple[list[float], list[float]] = ([], [])
    for round_ in range(rounds + 1):
        for work, kept in zip((ours, theirs), times, strict=True):
            started = clock()
            work()
            if round_:  # the first fills the page cache
                kept.append(clock() - started)
    return times


def codec_choice(store: Store) -> list[Sequence[str]]:
    """16-bit samples or FLAC inside the store: what one would save and what it would cost."""
    users = [np.concatenate([store.samples(u) for u in store.user(row).utterances]) for row in range(store.user_count)]
    encoded = []
    for samples in users:
        buffer = io.BytesIO()
        soundfile.write(buffer, samples, SAMPLE_RATE, format="FLAC", subtype="PCM_16")
        encoded.append(buffer.getvalue())
    started = time.perf_counter()
    for content in encoded:
        soundfile.read(io.BytesIO(content), dtype="int16")
    decode = time.perf_counter() - started
    started = time.perf_counter()
    for samples in users:
        samples.copy()
    copy = time.perf_counter() - started
    seconds = sum(map(len, users)) / SAMPLE_RATE
    share = sum(map(len, encoded)) / sum(samples.nbytes for samples in users)
    return [
        ("16-bit inside the store", f"{seconds / copy:,.0f} audio s/s per core", ""),
        ("FLAC inside the store would be", f"{share:.0%} of the size, {seconds / decode:,.0f} audio s/s per core", ""),
    ]


# Pointing into FLAC files instead of copying them


def pointing(folder: Path, crowd: Store, rounds: int) -> list[Sequence[str]]:
    """The same speech as chapters of a quarter of an hour, cut to 20 s: copied, and pointed into."""
    root = folder / "librilight"
    chapters = write_chapters(crowd, root / "large" / "100" / "book")
    seconds = {}
    for kind, point in {"copied": False, "pointed": True}.items():
        started = time.process_time()
        pack_corpus(librilight.read_librilight(root, point=point), folder / kind, workers=1)
        seconds[kind] = time.process_time() - started
    copied, pointed = Store(folder / "copied"), Store(folder / "pointed")
    rows = stream(SEED, "cuts").integers(copied.utterance_count, size=100).tolist()
    by_copy, by_pointing = compare(
        # A view costs nothing until it is read, as whatever trains on it does.
        lambda: [copied.samples(row).copy() for row in rows],
        lambda: [pointed.samples(row) for row in rows],
        rounds,
        time.process_time,
    )
    mean = sum(copied.utterance(row).seconds for row in rows) / len(rows)
    reads = {kind: len(rows) / statistics.median(t) for kind, t in (("copied", by_copy), ("pointed", by_pointing))}
    sizes = {store: sum(path.stat().st_size for path in store.path.rglob("*.*")) for store in (copied, pointed)}
    return [
        *(
            (f"prepare librilight, {kind}", f"{chapters / taken:,.0f} chapters of 15 min per second and core", "")
            for kind, taken in seconds.items()
        ),
        *(
            (
                f"random cuts of {mean:.0f} s, {kind}",
                f"{n:,.0f} reads/s, {n * mean:,.0f} audio s per second and core",
                "",
            )
            for kind, n in reads.items()
        ),
        ("size of the store that points", f"{sizes[pointed] / sizes[copied]:.2%} of the copy", ""),
    ]


def write_chapters(crowd: Store, book: Path) -> int:
    """All that the crowd says as chapters with the JSON of Libri-Light; how many."""
    book.mkdir(parents=True)
    quarter = 15 * 60 * SAMPLE_RATE
    said = np.concatenate([crowd.samples(row) for row in range(crowd.utterance_count)])
    offsets = crowd.audio_offsets
    starts = range(0, len(said), quarter)
    for number, start in enumerate(starts):
        end = min(start + quarter, len(said))
        edges = [start, *offsets[(offsets > start) & (offsets < end)].tolist(), end]
        voice = [[(a - start) / SAMPLE_RATE, (b - start) / SAMPLE_RATE] for a, b in itertools.pairwise(edges)]
        soundfile.write(book / f"{number}.flac", said[start:end], SAMPLE_RATE, subtype="PCM_16")
        (book / f"{number}.json").write_text(json.dumps({"speaker": "100", "voice_activity": voice}))
    return len(starts)


if __name__ == "__main__":
    main()
