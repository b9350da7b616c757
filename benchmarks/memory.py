"""Does the memory of a round grow with those who took part, and is it the process's own or the store's mapped pages?

    python benchmarks/memory.py [--users 60000] [--cohort 10000] [--rounds 2] [--seconds 0.2]

Clients of a tiny model, from a store of noise, trained, clipped and summed as in a run. Resident memory at every tenth
of the way: `own` (RssAnon) is what the process keeps; `mapped` (RssFile) are pages of files, the store's above all,
which the kernel takes back when it needs them. docs/scaling.md quotes it.
"""

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sottovoce.base.seeds import stream, torch_stream
from sottovoce.data.corpora.corpus import SAMPLE_RATE, Corpus, ProblemLog, RenderedSpeaker, RenderedUtterance
from sottovoce.data.population import PopulationSettings, build_population
from sottovoce.data.store import Store, pack_corpus
from sottovoce.data.text.tokens import CharacterTokens
from sottovoce.federated.client import ClientContext, LocalTraining
from sottovoce.federated.cohort import LocalClients
from sottovoce.federated.engines import Dropped, SequentialEngine, Trained
from sottovoce.flat.layout import Layout
from sottovoce.models.transformer import FAMILY
from sottovoce.models.transformer.settings import Settings
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.settings import PrivacySettings

SEED = 1
LETTERS = CharacterTokens("abcdefghij")


def noise_user(number: int, *, samples: int) -> RenderedSpeaker:
    name, rng = f"user-{number:08}", stream(SEED, "user", number)
    noise = rng.integers(-3000, 3000, size=samples).astype(np.int16)
    text = "".join(rng.choice(list(LETTERS.characters), size=3))
    spoken = RenderedUtterance(id=f"{name}-0", samples=noise, text=text, raw_text=text)
    return RenderedSpeaker(name=name, split="train", utterances=[spoken])


def make_context(folder: Path, *, users: int, cohort: int, seconds: float) -> ClientContext:
    render = partial(noise_user, samples=int(seconds * SAMPLE_RATE))
    pack_corpus(Corpus("noise", "en", range(users), render, ProblemLog()), folder, workers=1)
    return ClientContext(
        build_population(Store(folder), PopulationSettings(split="train"), seed=SEED),
        LETTERS,
        FAMILY,
        Settings(tokens=LETTERS.size + 1, layers=1, width=8, heads=2, dropout=0.0, layer_drop=0.0),
        LocalTraining(batch_seconds=8.0, lr=0.01, local_steps=1, spec_augment=None),
        seed=SEED,
        cohort_size=cohort,
    )


def resident_mib() -> tuple[float, float]:
    """Own pages, and pages of files."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    own, mapped = (float(lines[name].split()[0]) / 1024 for name in ("RssAnon", "RssFile"))
    return own, mapped


class WatchedEngine(SequentialEngine):
    """Looks at the memory after every `every` clients."""

    every = 0
    seen = 0

    def train(
        self, server_P: Tensor, cohort: Sequence[int], *, step: int, positions: Sequence[int] | None = None
    ) -> Iterator[Trained | Dropped]:
        for trained in super().train(server_P, cohort, step=step):
            yield trained
            self.seen += 1
            if self.seen % self.every == 0:
                own, mapped = resident_mib()
                print(f"{self.seen:>9,} clients: own {own:8.1f} MiB, mapped {mapped:8.1f} MiB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, default=60_000)
    parser.add_argument("--cohort", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.2, help="of audio per user")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        context = make_context(
            Path(name) / "store", users=options.users, cohort=options.cohort, seconds=options.seconds
        )
        parameters = context.family.init(context.model, generator=torch_stream(SEED, "init"))
        layout = Layout.of(parameters)
        settings = PrivacySettings(
            population_size=len(context.population),
            privacy_unit="speaker",
            cohort_size=options.cohort,
            clip_bound=0.1,
            noise_multiplier=1.0,
            delta=1e-6,
            root_seed=SEED,
        )
        plan = Plan(settings, layout)
        engine = WatchedEngine(context, layout, device=torch.device("cpu"))
        engine.every = max(1, options.rounds * options.cohort // 10)
        server_P = layout.flatten(parameters)
        for step in range(options.rounds):
            LocalClients(engine).sum(server_P, plan.sample(step), plan=plan, step=step)


if __name__ == "__main__":
    main()
