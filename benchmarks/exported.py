"""Exported models as others run them: without Sottovoce, on one thread; ONNX and sherpa-onnx without torch, too.

    python benchmarks/exported.py FOLDER samples.npz

FOLDER is what `sottovoce export --to onnx`, `--to sherpa` or `--to huggingface` wrote, samples.npz has recordings of
16-bit samples at 16 kHz. The base model of an adapter is found in $SOTTOVOCE_MODELS. Prints one JSON object: the texts,
seconds of processor time, and the most memory that was used.
"""

import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Samples = NDArray[np.float32]  # in [-1, 1)
Recognise = Callable[[Samples], str]
FEWEST_SAMPLES = 400
RATE = 16_000
CHUNK_SAMPLES = RATE // 10  # that a streaming recogniser is given at a time


def load_exported(folder: Path, *, chunk_steps: int | None = None) -> Recognise:
    """From samples to text. A streaming model takes all of them at once, or chunks of so many steps."""
    if (folder / "sherpa.json").exists():
        return load_sherpa(folder)
    if (folder / "README.md").exists():
        return load_huggingface(folder)
    about = json.loads((folder / "onnx.json").read_text(encoding="utf-8"))
    sessions = {name: _session(folder / graph["file"]) for name, graph in about["graphs"].items()}
    method = about["decoding"]["method"]
    find: Callable[..., list[int]] = {
        "ctc": find_by_ctc,
        "transducer": find_by_transducer,
        "autoregressive": find_token_by_token,
    }[method]
    options = {"chunk_steps": chunk_steps} if method == "transducer" else {}

    def recognise(samples: Samples) -> str:
        tokens = find(sessions, about, samples, **options)
        return " ".join("".join(about["tokens"][token] for token in tokens).split())

    return recognise


def _session(file: Path) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])


def find_by_ctc(sessions: Mapping[str, Any], about: Mapping[str, Any], samples: Samples) -> list[int]:
    """The best token of every frame, repeats merged and blanks removed."""
    padded = np.pad(samples, (0, max(FEWEST_SAMPLES - len(samples), 0)))
    inputs = {"samples": padded[None], "lengths": np.array([len(samples)])}
    log_probs, lengths = sessions["model"].run(None, inputs)
    best = log_probs[0, : lengths[0]].argmax(axis=1)
    changed = np.concatenate([[True], best[1:] != best[:-1]])[: len(best)]
    return [int(token) for token in best[changed] if token != about["decoding"]["blank"]]


def find_by_transducer(
    sessions: Mapping[str, Any], about: Mapping[str, Any], samples: Samples, *, chunk_steps: int | None = None
) -> list[int]:
    """The best output of every step, asked again as long as it is a token, and as often as the model allows."""
    decoding, blank = about["decoding"], about["decoding"]["blank"]
    step, overlap, lead = (decoding[name] for name in ("samples_per_frame", "overlap_samples", "lead_samples"))
    samples = np.concatenate([samples[:lead][::-1], samples])
    state, write = _nothing(about, "encoder"), _writer(sessions["decoder"], about)
    predicted = write(blank)
    found: list[int] = []
    whole = max((len(samples) - overlap) // step, 0)
    for first in range(0, whole, chunk_steps or max(whole, 1)):
        last = min(first + (chunk_steps or whole), whole)
        chunk = samples[None, first * step : last * step + overlap]
        encoded, *after = sessions["encoder"].run(None, {"samples": chunk, **state})
        state = dict(zip(state, after, strict=True))
        for place in range(encoded.shape[1]):
            for _ in range(decoding["most_tokens_a_frame"]):
                inputs = {"encoded": encoded[:, place], "predicted": predicted}
                token = int(sessions["joiner"].run(None, inputs)[0][0].argmax())
                if token == blank:
                    break
                found.append(token)
                predicted = write(token)
    return found


def _writer(decoder: Any, about: Mapping[str, Any]) -> Callable[[int], Samples]:
    """From one more token to g: of LSTMs with their state, or of the last tokens alone."""
    axes = about["graphs"]["decoder"]["inputs"]
    state = {} if "tokens" in axes else _nothing(about, "decoder")
    last = [about["decoding"]["blank"]] * (axes["tokens"][1] if "tokens" in axes else 1)

    def write(token: int) -> Samples:
        last[:] = [*last[1:], token]
        given = np.array([last])
        predicted, *after = decoder.run(None, {"tokens": given} if "tokens" in axes else {"token": given, **state})
        state.update(zip(state, after, strict=True))
        found: Samples = predicted
        return found

    return write


def _nothing(about: Mapping[str, Any], graph: str) -> dict[str, Samples]:
    axes = about["graphs"][graph]["inputs"]
    return {
        name: np.zeros([1 if axis == "batch" else axis for axis in axes[name]], np.float32)
        for name in ("hidden", "cell")
    }


def find_token_by_token(sessions: Mapping[str, Any], about: Mapping[str, Any], samples: Samples) -> list[int]:
    """The best token behind those before it, until the end of the text or of what can be said in the time."""
    decoding, axes = about["decoding"], about["graphs"]["decoder"]["inputs"]
    (encoded,) = sessions["encoder"].run(None, {"samples": samples[None]})
    past = {
        name: np.zeros((1, own[1], 0, own[3]), np.float32)
        for name, own in axes.items()
        if name.startswith("past_key_values.")
    }
    seconds = encoded.shape[1] * decoding["samples_per_frame"] / about["sample_rate"]
    most = min(
        max(int(np.ceil(seconds * decoding["tokens_a_second"])), decoding["fewest_tokens"]), decoding["most_tokens"]
    )
    given, found = list(decoding["prompt"]), list[int]()
    while len(found) < most:
        for token in given:
            inputs = {"token": np.array([[token]]), "encoded": encoded, **past}
            logits, *after = sessions["decoder"].run(None, inputs)
            past = dict(zip(past, after, strict=True))
        scores = logits[0, -1]
        scores[
            decoding.get("suppress_tokens", []) + ([] if found else decoding.get("begin_suppress_tokens", []))
        ] = -np.inf
        token = int(scores.argmax())
        if token == decoding["end"]:
            break
        found.append(token)
        given = [token]
    return [token + decoding["first_token"] for token in found]


def load_sherpa(folder: Path) -> Recognise:
    """The recogniser that `sherpa.json` names, with its files."""
    import sherpa_onnx

    about = json.loads((folder / "sherpa.json").read_text(encoding="utf-8"))
    kind, _, make = about["recogniser"].partition(".")
    arguments = {name: str(folder / file) for name, file in about["arguments"].items()}
    recogniser = getattr(getattr(sherpa_onnx, kind), make)(**arguments, num_threads=1)
    rate, tail = about["sample_rate"], np.zeros(about.get("tail_samples", 0), np.float32)

    def recognise_stream(samples: Samples) -> str:
        stream, spoken = recogniser.create_stream(), np.concatenate([samples, tail])
        for first in range(0, len(spoken), CHUNK_SAMPLES):
            stream.accept_waveform(rate, spoken[first : first + CHUNK_SAMPLES])
            while recogniser.is_ready(stream):
                recogniser.decode_stream(stream)
        return " ".join(recogniser.get_result(stream).split())

    def recognise(samples: Samples) -> str:
        stream = recogniser.create_stream()
        stream.accept_waveform(rate, samples)
        recogniser.decode_stream(stream)
        return " ".join(stream.result.text.split())

    return recognise_stream if kind == "OnlineRecognizer" else recognise


def load_huggingface(folder: Path) -> Recognise:
    """What the program on the card does, with the silence that it adds."""
    import torch
    import transformers

    padding = re.search(r"numpy\.pad\(samples, (\d+)\)", (folder / "README.md").read_text(encoding="utf-8"))
    silence = 0 if padding is None else int(padding[1])
    adapter, base = folder / "adapter_config.json", folder
    if adapter.exists():
        name = json.loads(adapter.read_text(encoding="utf-8"))["base_model_name_or_path"]
        base = Path(os.environ["SOTTOVOCE_MODELS"]) / name
    is_ctc = "AutoModelForCTC" in (folder / "README.md").read_text(encoding="utf-8")
    auto = transformers.AutoModelForCTC if is_ctc else transformers.AutoModelForSpeechSeq2Seq
    processor = transformers.AutoProcessor.from_pretrained(folder)
    model = auto.from_pretrained(base, dtype=torch.float32)
    if adapter.exists():
        import peft

        model = peft.PeftModel.from_pretrained(model, folder)
    model.eval()

    def recognise(samples: Samples) -> str:
        samples = np.pad(samples, silence)
        inputs = processor(samples, sampling_rate=RATE, return_tensors="pt")
        with torch.no_grad():
            if is_ctc:
                found = model(**inputs).logits.argmax(dim=-1)
            else:
                found = model.generate(**inputs, max_new_tokens=max(10, round(6.5 * len(samples) / RATE)))
        text: str = processor.batch_decode(found, skip_special_tokens=not is_ctc)[0]
        return " ".join(text.split())

    return recognise


def main() -> None:
    folder, recordings = Path(sys.argv[1]), np.load(sys.argv[2])
    recognise = load_exported(folder)
    recordings = [recordings[name].astype(np.float32) / 32_768 for name in sorted(recordings.files)]
    recognise(recordings[0])  # what is made at the first call
    began = time.process_time()
    texts = [recognise(samples) for samples in recordings]
    seconds = time.process_time() - began
    print(json.dumps({"texts": texts, "seconds": seconds, "most_bytes": most_bytes()}))


def most_bytes() -> int:
    """The most memory that this process had, on Linux; `getrusage` would count its parent's at the time of the fork."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))


if __name__ == "__main__":
    main()
