"""What each part of hearing a narrow band gains: digits as recorded, at 8 kHz, over a telephone, and from elsewhere.

    python benchmarks/narrow_band.py --folder /data/narrow --seeds 1 2 \\
        --digits 'allison, GSM=sounds/digits/{digit}.gsm' 'captcha=captcha/data/{digit}/default.wav'
    python benchmarks/narrow_band.py --table          # what is kept, once more

Trains `real/audiomnist-central` in every way of `WAYS` and tests each model on the same unseen people: as they are; in
copies at 8 kHz; and in copies as a telephone would have them (8 kHz, 300 to 3,400 Hz, a level of -26 dB, noise 30 dB
below it, 8 bits by the μ-law). `--digits` names voices from elsewhere, ten files each, and the same of all of them as
`elsewhere`. The docs' came from two packages, which are not part of this repository:

    apt-get download asterisk-core-sounds-en-gsm asterisk-core-sounds-en-wav      (Allison Smith, CC BY-SA 3.0)
    pip download --no-deps captcha                                                (its spoken digits, 8 kHz, 8 bits)

What is there is not made again. Figures go to benchmarks/narrow_band.json; `--table` prints them as they stand in
docs/recogniser.md: differences are paired by speaker, over all seeds.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import soxr
from numpy.typing import NDArray
from scipy.signal import butter, sosfiltfilt

from sottovoce.base.files import write_json
from sottovoce.config import load_recipe
from sottovoce.data.store import Store
from sottovoce.evaluation.compare import compute_difference
from sottovoce.evaluation.score import evaluate_recogniser, select_utterances
from sottovoce.models.recogniser import load_recogniser
from sottovoce.training.run_data import ensure_store

KEPT = Path(__file__).with_suffix(".json")
RECIPE = "real/audiomnist-central"
FILTERS, FLOOR = ("model.features.normalise=filter",), ("model.features.floor_db=40",)
BANDS = ("central.augment.narrow_band.share=0.5",)
WAYS: Mapping[str, Sequence[str]] = {
    "before": (),
    "filters": FILTERS,
    "floor": FLOOR,
    "bands": BANDS,
    "filters and bands": (*FILTERS, *BANDS),
    "all three": (*FILTERS, *FLOOR, *BANDS),
}
TELEPHONE_HZ, LEVEL_DB, NOISE_DB = (300, 3_400), -26, 30
TESTS = {"as recorded": "audiomnist", "8 kHz": "8-khz", "telephone": "telephone", "elsewhere": "elsewhere"}
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
REMEMBERED = ("store", "splits", "speech", "normalisation", "utterances", "wer", "wer_interval", "per_speaker")

Sound = NDArray[np.float64]
Row = tuple[str, str, str]  # who, in which file, said what
Record = Mapping[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where stores and runs go")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--digits", nargs="+", default=[], metavar="VOICE=FILES", help="{digit} stands for 0 to 9")
    parser.add_argument("--table", action="store_true", help="print what is kept")
    arguments = parser.parse_args()
    if not arguments.table:
        if arguments.folder is None:
            parser.error("expected --folder or --table")
        make_copies(arguments.folder, dict(voice.split("=", 1) for voice in arguments.digits))
        for seed in arguments.seeds:
            for way in arguments.ways:
                keep(way, seed, tested(trained(way, seed, arguments.folder), arguments.folder))
    print(table(json.loads(KEPT.read_text())))


# Speech.


def make_copies(folder: Path, voices: Mapping[str, str]) -> None:
    """The stores that are not there yet."""
    ensure_store(load_recipe(RECIPE), folder / "stores", lambda _: None)
    people = Store(folder / "stores" / TESTS["as recorded"])
    for place, made in (("8-khz", at_8_khz), ("telephone", by_telephone)):
        if not (folder / "stores" / place).exists():
            prepare(folder, place, list(copied(people, folder / place, made)))
    if voices and not (folder / "stores" / "elsewhere").exists():
        prepare(folder, "elsewhere", list(spoken_elsewhere(voices, folder / "elsewhere")))


def copied(people: Store, folder: Path, made: Any) -> Iterator[Row]:
    """Everything that the test speakers said, at 8 kHz."""
    folder.mkdir(parents=True, exist_ok=True)
    whose = np.searchsorted(people.user_utterances, np.arange(people.utterance_count), side="right") - 1
    for row in select_utterances(people, split="test").rows.tolist():
        utterance, name = people.utterance(row), f"{row}.wav"
        sound = soxr.resample(np.asarray(people.samples(row)) / 32_768, 16_000, 8_000, quality="VHQ")
        soundfile.write(folder / name, made(sound, np.random.default_rng(row)), 8_000, subtype="PCM_16")
        yield people.user(int(whose[row])).name, name, utterance.text or ""


def at_8_khz(sound: Sound, _: np.random.Generator) -> Sound:
    return sound


def by_telephone(sound: Sound, chance: np.random.Generator) -> Sound:
    """Through its band, at its level, with some noise, in 8 bits by the μ-law (G.711's continuous form)."""
    band = sosfiltfilt(butter(6, TELEPHONE_HZ, btype="band", fs=8_000, output="sos"), sound)
    level = 10 ** (LEVEL_DB / 20)
    band *= level / np.sqrt(np.square(band).mean())
    band += level * 10 ** (-NOISE_DB / 20) * chance.normal(size=len(band))
    pressed = np.sign(band) * np.log1p(255 * np.abs(band.clip(-1, 1))) / np.log(256)
    rounded = np.rint((pressed + 1) / 2 * 255) / 255 * 2 - 1
    decoded: Sound = np.sign(rounded) * (256 ** np.abs(rounded) - 1) / 255
    return decoded


def spoken_elsewhere(voices: Mapping[str, str], folder: Path) -> Iterator[Row]:
    folder.mkdir(parents=True, exist_ok=True)
    for voice, files in voices.items():
        for digit, word in enumerate(DIGITS):
            file, name = files.format(digit=digit), f"{voice}-{digit}.wav".replace("/", "-")
            raw = {"samplerate": 8_000, "channels": 1, "format": "RAW", "subtype": "GSM610"}
            sound, rate = soundfile.read(file, **(raw if file.endswith(".gsm") else {}))
            soundfile.write(folder / name, sound, rate, subtype="PCM_16")
            yield voice, name, word


def prepare(folder: Path, place: str, rows: Sequence[Row]) -> None:
    lines = ["client_id\tpath\tsentence", *("\t".join(row) for row in rows)]
    (folder / place / "test.tsv").write_text("\n".join(lines) + "\n")
    command("prepare", "tsv", folder / place / "test.tsv", "--out", folder / "stores" / place)


# Models.


def trained(way: str, seed: int, folder: Path) -> Path:
    run = folder / "runs" / f"{way.replace(' ', '-')}-{seed}"
    places = ("--stores", folder / "stores", "--out", run)
    command("run", RECIPE, f"seed={seed}", *WAYS[way], *places, "--yes", *(["--resume"] if run.exists() else []))
    return run


def tested(run: Path, folder: Path) -> dict[str, Record]:
    recogniser, found = load_recogniser(run), dict[str, Record]()
    for name, place in TESTS.items():
        if (folder / "stores" / place).exists():
            result = evaluate_recogniser(recogniser, Store(folder / "stores" / place), split="test").as_json()
            found[name] = {key: result[key] for key in REMEMBERED}
    return found


def keep(way: str, seed: int, found: Mapping[str, Record]) -> None:
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    kept.setdefault(way, {})[str(seed)] = found
    write_json(KEPT, {own: dict(sorted(kept[own].items())) for own in WAYS if own in kept})


def command(*words: object) -> None:
    subprocess.run([sys.executable, "-m", "sottovoce", *map(str, words)], check=True)


# What came of it.


def table(kept: Mapping[str, Mapping[str, Mapping[str, Record]]]) -> str:
    """WER of every way on every test, and how far it is from before; as many seeds of both as both have."""
    lines = ["| | seeds | " + " | ".join(TESTS) + " |", "|---|---|" + "---|" * len(TESTS)]
    for way, seeds in kept.items():
        shared = [seed for seed in seeds if seed in kept["before"]]
        cells = [_cell([seeds[seed][test] for seed in shared], way, kept, test, shared) for test in TESTS]
        lines.append(f"| {way} | {len(shared)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(own: Sequence[Record], way: str, kept: Mapping[str, Any], test: str, seeds: Sequence[str]) -> str:
    ours, before = pooled(own), pooled([kept["before"][seed][test] for seed in seeds])
    found = compute_difference(ours, before)
    assert found.first is not None
    assert found.difference is not None
    rate = f"{found.first:.1%}".replace("%", " %")
    if way == "before":
        return rate
    if found.interval is None:  # too few people for one
        return f"{rate} ({100 * found.difference:+.1f})"
    low, high = found.interval
    return f"{rate} ({100 * found.difference:+.1f}, {100 * low:+.1f} to {100 * high:+.1f})"


def pooled(tests: Sequence[Record]) -> Record:
    """Tests of several seeds on the same speech as one: every speaker with all errors of all of them."""
    people = {person["speaker"]: person["words"] * len(tests) for person in tests[0]["per_speaker"]}
    rates = {
        name: sum(p["wer"] for test in tests for p in test["per_speaker"] if p["speaker"] == name) / len(tests)
        for name in people
    }
    whole = [{"speaker": name, "words": words, "wer": rates[name]} for name, words in people.items()]
    return {**tests[0], "per_speaker": whole}


if __name__ == "__main__":
    main()
