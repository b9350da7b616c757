"""Exported models beside ours: texts, WER, size, real-time factor and memory on one thread, float32 and int8.

    sottovoce run benchmark/exported
    python benchmarks/export.py measure --model transducer=runs/benchmark-exported/transducer:benchmark-audiomnist
    python benchmarks/export.py base
    python benchmarks/export.py table

Each replaces its own rows of benchmarks/export.json and keeps the others. Every row is exported by the command line and
run in processes of their own, without Sottovoce (`exported.py`). Memory is the most that the process had; the real-time
factor is processor time per second of speech. `base` is a model of the paper's size with random weights, for what
exporting takes.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jiwer import wer

from sottovoce.base.files import write_json
from sottovoce.base.seeds import torch_stream
from sottovoce.data.audio.waveforms import pad_waveforms
from sottovoce.data.store import Store
from sottovoce.data.text.normalisation import alphabet, normalise_text
from sottovoce.data.text.tokens import CharacterTokens
from sottovoce.evaluation.recognise import recognise_utterances
from sottovoce.models.attention_search import SearchOptions
from sottovoce.models.decoding import decode_greedily
from sottovoce.models.family import extract_float32_features, find_family
from sottovoce.models.recogniser import Recogniser, create_recogniser, export_recogniser, load_recogniser

HERE = Path(__file__).parent
KEPT, PAGE = HERE / "export.json", HERE.parent / "docs/guides/on-a-phone.md"
FIGURES = ("<!-- figures: benchmarks/export.py table -->", "<!-- end of figures -->")
BASE_FIGURES = ("<!-- base: benchmarks/export.py table -->", "<!-- end of base -->")
TARGETS = {"ONNX": ["onnx"], "ONNX int8": ["onnx", "--int8"], "sherpa": ["sherpa"], "sherpa int8": ["sherpa", "--int8"]}
HUB_TARGETS = {"Hugging Face": ["huggingface", "--merged"], "adapter": ["huggingface"]}  # of pretrained families


def measure(models: Sequence[str], *, utterances: int, stores: Path) -> list[dict[str, Any]]:
    rows = []
    for given in models:
        label, _, places = given.partition("=")
        model, _, store = places.rpartition(":")
        with tempfile.TemporaryDirectory() as temporary:
            place = Path(temporary)
            rows += measure_model(label, Path(model), Store(stores / store), utterances=utterances, place=place)
    return rows


def measure_base() -> dict[str, Any]:
    """What each target takes to be written, one after the other."""
    taken = {}
    with tempfile.TemporaryDirectory() as temporary:
        export_recogniser(make_base(), Path(temporary) / "base")
        for target, arguments in TARGETS.items():
            out = Path(temporary) / "out"
            taken[target] = run_export(Path(temporary) / "base", out, arguments)
            shutil.rmtree(out)
    return taken


def replaced_rows(rows: Sequence[dict[str, Any]], measured: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """`measured` in the place of older rows of the same models, and behind the others."""
    models = list(dict.fromkeys(row["model"] for row in (*rows, *measured)))
    new = {row["model"] for row in measured}
    return [row for model in models for row in (measured if model in new else rows) if row["model"] == model]


def make_base() -> Recogniser:
    family, tokens = find_family("ctc_transformer"), CharacterTokens.seen_in([alphabet("en") or ""])
    settings = family.Options(size="base").settings(tokens=tokens.size + 1)
    return create_recogniser(family, settings, tokens, language="en", generator=torch_stream(0, "base"))


def measure_model(label: str, model: Path, store: Store, *, utterances: int, place: Path) -> list[dict[str, Any]]:
    """What every target makes of `utterances` of the test speakers."""
    users = store.splits.get("test") or range(store.user_count)
    spoken = np.array([row for user in users for row in store.user(user).utterances])
    chosen = spoken[np.linspace(0, len(spoken) - 1, min(utterances, len(spoken))).astype(int)]
    references = [store.utterance(row).text or "" for row in chosen.tolist()]
    seconds = sum(store.utterance(row).seconds for row in chosen.tolist())
    recordings: dict[str, Any] = {f"{i:05}": store.samples(row) for i, row in enumerate(chosen.tolist())}
    np.savez(place / "samples.npz", **recordings)
    recogniser = load_recogniser(model)
    emit = None if recogniser.family.recognition is None else recogniser.family.recognition.emit
    by_ctc = emit is not None and recogniser.tokens.as_json()["kind"] != "pretrained"
    decode: Any = decode_greedily if by_ctc else SearchOptions(width=1)
    ours = recognise_utterances(recogniser, store, chosen, decode=decode)
    common = {"model": label, "family": recogniser.family.name, "parameters": _count(recogniser)}
    rows: list[dict[str, Any]] = [{**common, "target": "torch", "wer": wer(references, ours)}]
    on_hub = {} if recogniser.family.transfer.write_pretrained is None else HUB_TARGETS
    for target, arguments in (TARGETS | on_hub).items():
        out = place / target.replace(" ", "-")
        taken = run_export(model, out, arguments)
        if "refused" in taken:
            rows.append({**common, "target": target, **taken})
            continue
        found = run_exported(out, place / "samples.npz")
        if target == "ONNX" and by_ctc:
            taken["log_probs_differ"] = compare_log_probs(recogniser, out, [store.samples(row) for row in chosen])
        texts = [normalise_text(text, recogniser.language) for text in found["texts"]]
        rows.append(
            {
                **common,
                "target": target,
                **taken,
                "wer": wer(references, texts),
                "texts": len(texts),
                "texts_differ": sum(a != b for a, b in zip(ours, texts, strict=True)),
                "real_time_factor": found["seconds"] / seconds,
                "most_bytes": found["most_bytes"],
            }
        )
        print(json.dumps(rows[-1]), file=sys.stderr)
    return rows


def compare_log_probs(recogniser: Recogniser, folder: Path, recordings: Sequence[Any]) -> float:
    """The largest difference between our log-probabilities and the graph's, one recording at a time."""
    import onnxruntime

    session, most = onnxruntime.InferenceSession(folder / "model.onnx"), 0.0
    recognition = recogniser.family.recognition
    assert recognition is not None
    assert recognition.emit is not None
    for samples in recordings:
        features = extract_float32_features(recogniser.family, pad_waveforms([samples]), settings=recogniser.settings)
        with torch.no_grad():
            ours, _ = recognition.emit(recogniser.parameters, features, settings=recogniser.settings)
        inputs = {"samples": samples[None].astype(np.float32) / 32_768, "lengths": np.array([len(samples)])}
        theirs = session.run(None, inputs)[0]
        most = max(most, float(np.abs(ours.numpy() - theirs[:, : ours.shape[1]]).max()))
    return most


def _count(recogniser: Recogniser) -> int:
    return sum(p.numel() for p in recogniser.parameters.values())


def run_export(model: Path, out: Path, arguments: Sequence[str]) -> dict[str, Any]:
    """`sottovoce export` in a process of its own: bytes written, seconds and memory; or why it is refused."""
    command = [sys.executable, "-m", "sottovoce", "export", str(model), "--out", str(out), "--json", "--to", *arguments]
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        said, complaint = process.stdout.read(), process.stderr.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode == 2:
        return {"refused": " ".join(complaint.split()).removeprefix("error: ")}
    if process.returncode:
        raise RuntimeError(complaint)
    written = json.loads(said)
    taken = {
        "export_seconds": time.perf_counter() - began,
        "export_processor_seconds": usage.ru_utime + usage.ru_stime,
        "export_most_bytes": usage.ru_maxrss * 1024,
    }
    return {"bytes": written["bytes"], **taken}


def run_exported(folder: Path, samples: Path) -> dict[str, Any]:
    command = [sys.executable, str(HERE / "exported.py"), str(folder), str(samples)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    found = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, env=environment)
    result: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    return result


def table(kept: Mapping[str, Any]) -> str:
    """The rows of the page."""
    lines = [
        "| model | target | log-probabilities differ by | texts as ours | WER | MB | real-time factor | memory, MB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in kept["rows"]:
        name = f"{row['model']} ({row['parameters'] / 1e6:.1f}M)"
        if "refused" in row:
            lines.append(f"| {name} | {row['target']} | refused | | | | | |")
            continue
        share = f"{row['wer'] * 100:.1f} %"
        if row["target"] == "torch":
            lines.append(f"| {name} | torch | | | {share} | {row['parameters'] * 4 / 1e6:.1f} | | |")
            continue
        alike = f"{row['texts'] - row['texts_differ']} of {row['texts']}"
        memory = row["most_bytes"] / 1e6
        differ = f"{row['log_probs_differ']:.0e}" if "log_probs_differ" in row else ""
        lines.append(
            f"| {name} | {row['target']} | {differ} | {alike} | {share} | {row['bytes'] / 1e6:.1f} "
            f"| {row['real_time_factor']:.3f} | {memory:.0f} |"
        )
    return "\n".join(lines)


def base_table(kept: Mapping[str, Any]) -> str:
    """What exporting the paper's base model takes."""
    lines = ["| target | MB | processor time, s | memory, GB |", "|---|---|---|---|"]
    for target, taken in kept["base"].items():
        size, memory = taken["bytes"] / 1e6, taken["export_most_bytes"] / 1e9
        lines.append(f"| {target} | {size:.0f} | {taken['export_processor_seconds']:.0f} | {memory:.1f} |")
    return "\n".join(lines)


def write_page(kept: Mapping[str, Any]) -> None:
    page = PAGE.read_text(encoding="utf-8")
    for (begin, end), own in ((FIGURES, table(kept)), (BASE_FIGURES, base_table(kept))):
        before, _, rest = page.partition(begin)
        _, _, after = rest.partition(end)
        page = f"{before}{begin}\n{own}\n{end}{after}"
    PAGE.write_text(page, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("--model", action="append", required=True, metavar="LABEL=RUN:STORE")
    measuring.add_argument("--utterances", type=int, default=200)
    measuring.add_argument("--stores", type=Path, default=Path("stores"))
    commands.add_parser("base")
    commands.add_parser("table")
    given = parser.parse_args()
    kept = json.loads(KEPT.read_text(encoding="utf-8"))
    if given.command == "measure":
        rows = measure(given.model, utterances=given.utterances, stores=given.stores)
        write_json(KEPT, kept | {"utterances": given.utterances, "rows": replaced_rows(kept["rows"], rows)})
    elif given.command == "base":
        write_json(KEPT, kept | {"base": measure_base()})
    else:
        write_page(kept)


if __name__ == "__main__":
    main()
