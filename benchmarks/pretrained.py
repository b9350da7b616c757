"""Pretrained models in local training, one client after another and stacked, beside a plain transformers + peft loop.

    python benchmarks/pretrained.py --models moonshine-tiny-en wav2vec2-bert-300m --json out.json
    python benchmarks/pretrained.py --models wav2vec2-bert-600m --trains 'lora(r=8)' --stacks 16
    python benchmarks/pretrained.py --quick --device cpu --models tiny-encoder

Every row does the same steps: from the server's part of the model, local steps of SGD on utterances of equal length,
and the difference as the client's update. `moonshine-tiny-en` is found through $SOTTOVOCE_MODELS; the others have
random weights. All ways of a model are made first, then measured in turns, each turn beginning with another one. A row
has the median and quartiles of its turns, and of its ratio to the plain loop in the same turn. `peak_gib` is what a way
took of the device's memory while it was made and tried, the model's own weights included.

`short` rows have clients with three clips of one second each, as spoken words are.
"""

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sottovoce.data.audio.waveforms import Features
from sottovoce.flat.layout import Layout
from sottovoce.models.family import accelerate_family
from sottovoce.models.huggingface import family as hf
from sottovoce.models.huggingface.folder import CLASSES, find_folder
from sottovoce.models.huggingface.graphs import network_scores
from sottovoce.models.huggingface.inputs import network_inputs
from sottovoce.models.huggingface.settings import Options, Settings
from sottovoce.models.trainable import Trainable, split_parameters
from sottovoce.optimisers import build_optimiser
from sottovoce.optimisers.weights import Weights

TOKENS, LOCAL_STEPS, LR = 12, 2, 0.01
MANY_STEPS = 1_000_000  # as in a long run, where recording pays
LETTERS = ["<pad>", "<s>", "</s>", "<unk>", "|", *"abcdefghijklmnopqrstuvwxyz'"]
_TINY = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "output_hidden_size": 32}
ENCODERS: Mapping[str, Mapping[str, Any]] = {  # Wav2Vec2-BERT, by layers
    "wav2vec2-bert-300m": {"num_hidden_layers": 12},
    "wav2vec2-bert-600m": {"num_hidden_layers": 24},
    "tiny-encoder": {"num_hidden_layers": 2, **_TINY},
}
PLAIN = "plain transformers + peft"
Step = Callable[[], None]


@dataclass(frozen=True)
class Clips:
    """What every client has in a step."""

    seconds: int
    count: int

    @property
    def audio_seconds(self) -> int:
        return self.seconds * self.count * LOCAL_STEPS


USUAL, SHORT = Clips(seconds=4, count=10), Clips(seconds=1, count=3)


def write_random_encoder(name: str, folder: Path) -> Path:
    """A Wav2Vec2-BERT with random weights and a tokenizer of letters."""
    import transformers

    config = transformers.Wav2Vec2BertConfig(vocab_size=len(LETTERS), pad_token_id=0, **ENCODERS[name])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.Wav2Vec2BertForCTC(config).save_pretrained(folder)
    extractor = {"feature_extractor_type": "SeamlessM4TFeatureExtractor", "sampling_rate": 16000, "stride": 2}
    (folder / "preprocessor_config.json").write_text(json.dumps({**extractor, "num_mel_bins": 80}))
    (folder / "vocab.json").write_text(json.dumps({letter: i for i, letter in enumerate(LETTERS)}))
    return folder


@dataclass(frozen=True, eq=False)
class Bench:
    """A model, the part of it that is trained, and where."""

    folder: Path
    settings: Settings
    part: Trainable
    device: torch.device

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def features(self, clips: Clips, clients: int) -> Features:
        generator = torch.Generator().manual_seed(1)
        raw, utterances = self.settings.kind == "moonshine", clips.count * clients
        frames, width = (16_000 * clips.seconds, 1) if raw else (50 * clips.seconds, 160)
        features = torch.randn(utterances, frames, width, generator=generator) * (0.1 if raw else 1.0)
        tokens = torch.randint(6, 30, (utterances, TOKENS), generator=generator)
        lengths = torch.full((utterances,), TOKENS)
        return Features(features.to(self.device, self.dtype), torch.full((utterances,), frames), tokens, lengths)


def make_bench(folder: Path, train: str, device: torch.device) -> Bench:
    settings = Options(source=str(folder), train=train).settings(tokens=2)
    generator = torch.Generator().manual_seed(2)
    parameters = hf.init(settings, generator=generator)
    part = split_parameters(hf.choose_part(settings), parameters, is_lora_target=hf.is_lora_target, generator=generator)
    return Bench(folder, settings, part, device)


def ours(bench: Bench, clips: Clips, clients: int, *, steps: int = MANY_STEPS, recompute: bool = False) -> Step:
    """`clients` at once, as engines train them in a run of so many `steps`; 1 is one after another.

    `recompute`: layers are computed again on the way back, as they are where memory is short.
    """
    settings, device = bench.settings, bench.device
    layout, frozen = Layout.of(bench.part.initial), bench.part.frozen.to(device, bench.dtype)
    rows = None if clients == 1 else clients
    weights = Weights(layout, build_optimiser("sgd"), device=device, dtype=bench.dtype, rows=rows)
    server_P = layout.flatten(bench.part.initial).to(device)
    features = bench.features(clips, clients)
    rows_U = [client for client in range(clients) for _ in range(clips.count)]
    training: dict[str, Any] = {"steps": steps, "batch_seconds": clips.seconds * clips.count, "device": device}
    family = accelerate_family(hf.FAMILY, weights.working, settings=settings, **training)
    stacked = hf.FAMILY.stacking.stacked
    assert stacked is not None
    assert stacked.accelerate is not None
    losses = stacked.accelerate(stacked, **training).losses
    if recompute:
        losses = partial(hf.stacked_losses, scores=partial(network_scores, recompute=True))

    def step() -> None:
        weights.reset(server_P)
        for _ in range(LOCAL_STEPS):
            whole = frozen.with_trained(weights.working)
            if clients == 1:
                loss = family.loss(whole, features, settings=settings, draws=0)
            else:
                loss = losses(whole, features, rows_U=rows_U, clients=clients, settings=settings, draws=None).sum()
            weights.set_gradients(torch.autograd.grad(loss, list(weights.working.values()), allow_unused=True))
            weights.step(lr=LR, max_norm=1.0)
        weights.master.neg_().add_(server_P)

    return step


def plain(bench: Bench, clips: Clips) -> Step:
    """The same by transformers and peft, as their users write it."""
    import peft
    import transformers

    settings, device = bench.settings, bench.device
    model = getattr(transformers, CLASSES[settings.kind]).from_pretrained(bench.folder, dtype=bench.dtype)
    if settings.train != "all":
        targets = [name for name in hf.LORA_TARGETS if any(name in n for n, _ in model.named_modules())]
        model = peft.get_peft_model(model, peft.LoraConfig(r=8, lora_alpha=8, target_modules=targets))
    model.to(device).train()
    for config in (model.config, getattr(model.config, "encoder_config", None)):
        for name in ("layerdrop", "hidden_dropout", "attention_dropout", "activation_dropout", "apply_spec_augment"):
            if config is not None and hasattr(config, name):
                setattr(config, name, type(getattr(config, name))(0))
    trained = [p for p in model.parameters() if p.requires_grad]
    server = [p.detach().clone() for p in trained]
    optimiser = torch.optim.SGD(trained, lr=LR)
    features = bench.features(clips, 1)
    inputs, _, _ = network_inputs(features.features_UTF, features.frames_U, settings)
    labels = (features.tokens_UL - (0 if settings.is_ctc else 1)).to(device)

    def step() -> None:
        with torch.no_grad():
            for p, before in zip(trained, server, strict=True):
                p.copy_(before)
        for _ in range(LOCAL_STEPS):
            optimiser.zero_grad()
            model(**inputs, labels=labels).loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimiser.step()
        with torch.no_grad():
            _updates = [before - p for p, before in zip(trained, server, strict=True)]

    return step


@dataclass(eq=False)
class Way:
    """How local training is done, and what was measured of it, in seconds of audio a second."""

    name: str
    audio_seconds: float
    make: Callable[[], Step]
    step: Step | None = None
    peak_gib: float | None = None
    obstacle: str | None = None
    rates: list[float] = field(default_factory=list)

    def try_out(self, device: torch.device) -> None:
        """Make it, and do three steps: the first ones set libraries up, and record."""
        cuda = device.type == "cuda"
        _forget_memory(device)
        before = torch.cuda.memory_reserved(device) if cuda else 0
        try:
            self.step = self.make()
            for _ in range(3):
                self.step()
        except torch.OutOfMemoryError:
            self.step, self.obstacle = None, "out of memory"
        if cuda:
            torch.cuda.synchronize(device)
            self.peak_gib = round((torch.cuda.max_memory_reserved(device) - before) / 2**30, 2)

    def measure(self, device: torch.device, *, seconds: float) -> None:
        assert self.step is not None
        _wait(device)
        begun, count = time.perf_counter(), 0
        while time.perf_counter() - begun < seconds:
            self.step()
            _wait(device)
            count += 1
        self.rates.append(count * self.audio_seconds / (time.perf_counter() - begun))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _forget_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.zeros(1, device=device)  # or there are no statistics yet
        torch.cuda.reset_peak_memory_stats(device)


def list_ways(bench: Bench, clips: Clips, stacks: Sequence[int]) -> list[Way]:
    ways = [
        Way(PLAIN, clips.audio_seconds, partial(plain, bench, clips)),
        Way("one after another", clips.audio_seconds, partial(ours, bench, clips, 1)),
        Way("one after another, not recorded", clips.audio_seconds, partial(ours, bench, clips, 1, steps=1)),
    ]
    if hf.stack_obstacle(bench.settings) is None:
        ways += [Way(f"stacks of {n}", n * clips.audio_seconds, partial(ours, bench, clips, n)) for n in stacks]
        name = f"stacks of {max(stacks)}, layers computed again"
        again = partial(ours, bench, clips, max(stacks), recompute=True)
        ways.append(Way(name, max(stacks) * clips.audio_seconds, again))
    return ways


def run_turns(ways: Sequence[Way], device: torch.device, *, turns: int, seconds: float) -> None:
    for way in ways:
        way.try_out(device)
    able = [way for way in ways if way.step is not None]
    for turn in range(turns):
        for place in range(len(able)):
            way = able[(turn + place) % len(able)]
            try:
                way.measure(device, seconds=seconds)
            except torch.OutOfMemoryError:
                way.step, way.obstacle = None, "out of memory beside the others"
                _forget_memory(device)
        able = [way for way in able if way.step is not None]


def summarise(way: Way, reference: Way) -> dict[str, Any]:
    if way.obstacle is not None or not way.rates:
        return {"obstacle": way.obstacle, "peak_gib": way.peak_gib}
    found: dict[str, Any] = {
        "audio_seconds_per_second": round(statistics.median(way.rates)),
        "quartiles": [round(own) for own in _quartiles(way.rates)],
        "peak_gib": way.peak_gib,
    }
    if len(reference.rates) == len(way.rates):
        ratios = [own / other for own, other in zip(way.rates, reference.rates, strict=True)]
        found["times_plain"] = round(statistics.median(ratios), 2)
        found["times_plain_quartiles"] = [round(own, 2) for own in _quartiles(ratios)]
        found["ahead_in_turns"] = f"{sum(ratio > 1 for ratio in ratios)} of {len(ratios)}"
    return found


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, third


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["moonshine-tiny-en", "wav2vec2-bert-300m"])
    parser.add_argument("--trains", nargs="+", default=["lora(r=8)", "all"])
    parser.add_argument("--stacks", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--short", action="store_true", help="also clients with three clips of a second")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each way in each turn")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--quick", action="store_true", help="two turns of a step or two, with stacks of 3")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.turns, arguments.seconds, arguments.stacks = 2, 0.05, [3]
    device, found = torch.device(arguments.device), []
    with tempfile.TemporaryDirectory() as temporary:
        for name in arguments.models:
            folder = write_random_encoder(name, Path(temporary) / name) if name in ENCODERS else find_folder(name)
            for train in arguments.trains:
                bench = make_bench(folder, train, device)
                for clips in (USUAL, SHORT) if arguments.short else (USUAL,):
                    ways = list_ways(bench, clips, arguments.stacks)
                    run_turns(ways, device, turns=arguments.turns, seconds=arguments.seconds)
                    said = f"{clips.count} clips of {clips.seconds} s"
                    for way in ways:
                        row = {"model": name, "train": train, "clips": said, "way": way.name}
                        found.append(row | summarise(way, ways[0]))
                        print(json.dumps(found[-1]), flush=True)
                    del ways, way
                    _forget_memory(device)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
