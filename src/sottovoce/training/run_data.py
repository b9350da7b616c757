"""The stores of a run: prepared where they can be, opened, and divided into the speakers that it trains on."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sottovoce.base.errors import InputError
from sottovoce.base.seeds import derive
from sottovoce.config import CentralSettings, CentralSteps, ManifestCorpus, Recipe, SyntheticCorpus
from sottovoce.data.client_utterances import HOLDOUT_NEEDS
from sottovoce.data.corpora import synthetic, tsv
from sottovoce.data.corpora.listing import choose_split_for_hold_out, hold_out_speakers
from sottovoce.data.loading import Rows, Speech, count_epoch_steps, load_speech
from sottovoce.data.population import Population, PopulationSettings, build_population
from sottovoce.data.store import PackingProgress, Store, pack_corpus
from sottovoce.models.recogniser import Recogniser
from sottovoce.privacy.settings import Weighting
from sottovoce.training.agreement import Facts, HiddenDigest

SERVER_PASS = "federation.server_pass.data"
SHARED_DEV = "federation.shared_dev"

Split = tuple[Store, str]
Keys = NDArray[np.uint64]


@dataclass(frozen=True, eq=False)
class People:
    """Speakers of a store who are no clients: their keys, and the rows of their utterances."""

    store: Store
    keys: Keys
    rows: Rows


@dataclass(frozen=True)
class RunData:
    """What a run trains on, chooses its model by, and tests on.

    `of_server` is the public speech of the server pass, `shared_dev` the speech that clients are weighted by.
    """

    store: Store
    dev: Split
    tests: dict[str, Split]
    of_server: People | None
    shared_dev: Split | None = None

    @classmethod
    def of(cls, recipe: Recipe, stores: Path) -> "RunData":
        tests = {name: open_split(name, recipe, stores) for name in recipe.data.test}
        shared = None if recipe.federation is None else recipe.federation.weighed_on
        return cls(
            open_named_store(recipe.data.store, stores),
            open_split(recipe.data.dev, recipe, stores),
            tests,
            find_server_people(recipe, stores),
            None if shared is None else open_split(shared.data or recipe.data.dev, recipe, stores),
        )

    @property
    def evaluated(self) -> dict[str, Split]:
        """The splits that models are chosen, weighted and tested by."""
        shared = {} if self.shared_dev is None else {SHARED_DEV: self.shared_dev}
        return {"data.dev": self.dev} | {f"data.test {name}": split for name, split in self.tests.items()} | shared

    @property
    def all(self) -> dict[str, Store]:
        own = {} if self.of_server is None else {SERVER_PASS: self.of_server.store}
        return {"data.store": self.store} | {what: store for what, (store, _) in self.evaluated.items()} | own

    def digests(self) -> dict[str, str]:
        return {f"{what} digest": store.digest for what, store in self.all.items()}

    def facts(self) -> Facts:
        return {what: HiddenDigest(store.digest) for what, store in self.all.items()}


# Stores.


def ensure_store(recipe: Recipe, stores: Path, on_progress: Callable[[PackingProgress], None]) -> None:
    """Make the recipe's store if it is missing and the recipe says how."""
    place, how = stores / recipe.data.store, recipe.data.prepare
    if how is None or (place / "store.json").exists():
        return
    if isinstance(how, SyntheticCorpus):
        made = synthetic.read_synthetic(
            how.task, users=how.users, hours=how.hours, seed=how.seed, language=how.language, out=place
        )
        pack_corpus(made, place, on_progress=on_progress)
        return
    assert isinstance(how, ManifestCorpus)
    manifests = resolve_manifests(how)
    split = choose_split_for_hold_out(manifests) if how.hold_out else None
    corpus = tsv.read_tsv(manifests, language=how.language, split=split)
    if how.hold_out:
        corpus = hold_out_speakers(corpus, how.hold_out, seed=how.seed)
    pack_corpus(corpus, place, on_progress=on_progress)


def resolve_manifests(corpus: ManifestCorpus) -> list[Path]:
    """The paths of its tables, with environment variables filled in."""
    found = []
    for path in corpus.manifests:
        expanded = os.path.expandvars(path)
        if "$" in expanded:
            raise InputError(f"recipe: {path} names an environment variable that is not set")
        found.append(Path(expanded))
    return found


def open_named_store(name: str, stores: Path) -> Store:
    """The store called `name` under `stores`, or at that path."""
    store = Store(stores / name if (stores / name).exists() or not Path(name).exists() else Path(name))
    store.check()
    return store


def open_split(place: str, recipe: Recipe, stores: Path) -> Split:
    """`split` of the recipe's store, or `STORE:split`."""
    name, split = recipe.data.place(place)
    store = open_named_store(name, stores)
    if split not in store.splits:
        raise InputError(f"data: no split={split!r} in store {store.path}, expected one of {', '.join(store.splits)}")
    return store, split


def list_split_rows(store: Store, split: str) -> Rows:
    """All utterances of one split of a store."""
    users = store.splits[split]
    return np.arange(store.user_utterances[users.start], store.user_utterances[users.stop])


# Speakers.


def find_split_people(store: Store, split: str) -> People:
    """Everybody in one split of a store."""
    users = store.splits[split]
    return People(store, np.asarray(store.user_keys[users.start : users.stop]), list_split_rows(store, split))


def find_server_people(recipe: Recipe, stores: Path) -> People | None:
    """Those whose speech the server itself trains on after every round; None where it does not."""
    settings = None if recipe.federation is None else recipe.federation.server_pass
    if settings is None:
        return None
    if not settings.is_of_seed_part:
        return find_split_people(*open_split(settings.data, recipe, stores))
    store = open_named_store(recipe.data.store, stores)
    part = PopulationSettings(split=recipe.data.train, seed_part=recipe.data.seed_part, part="seed")
    people = build_recipe_population(recipe, store, part)
    return People(store, np.asarray(store.user_keys[people.user_rows()]), np.sort(people.utterance_rows()))


def list_training_rows(recipe: Recipe, store: Store) -> Rows:
    """The utterances of central training: of all speakers of its splits, or of one part of them."""
    population = build_training_population(recipe, store)
    return np.sort(np.concatenate([client.utterances for client in population]))


def load_training_speech(recipe: Recipe, store: Store, start: Recogniser) -> Speech:
    """What a recipe for central training trains `start` on."""
    return load_speech(
        store,
        list_training_rows(recipe, store),
        start.tokens,
        family=start.family,
        settings=start.settings,
        longest_seconds=min(recipe.data.longest_seconds, recipe.training.batch_seconds),
    )


def count_central_steps(settings: CentralSettings, speech: Speech) -> CentralSteps:
    """The steps of training on `speech`."""
    if not settings.counts_epochs:
        return settings.count_steps(None)
    return settings.count_steps(
        count_epoch_steps(
            speech.lengths,
            batches=settings.batches_a_step,
            max_seconds=settings.batch_seconds,
            max_utterances=settings.batch_utterances,
            ascending=settings.order == "ascending",
        )
    )


def build_training_population(recipe: Recipe, store: Store) -> Population:
    """The people whose speech a recipe trains on, one client each."""
    part: Literal["seed", "federation"] = "seed" if recipe.data.part == "seed" else "federation"
    settings = PopulationSettings(split=recipe.data.train, seed_part=recipe.data.seed_part, part=part)
    return build_recipe_population(recipe, store, settings)


def build_recipe_population(recipe: Recipe, store: Store, settings: PopulationSettings) -> Population:
    """The clients of a recipe; two recipes with one `people_seed` divide the same people alike."""
    population = build_population(store, settings, seed=derive(recipe.people_seed, "seed part"))
    if not len(population):
        raise InputError(f"store {store.path}: nobody to train on in data.train={', '.join(recipe.data.train)}")
    return population


def require_local_store(people: Population) -> Store:
    """The store of people whose speech is on this machine."""
    assert isinstance(people.store, Store)
    return people.store


def check_silos(recipe: Recipe, population: Population) -> None:
    """Refuse more silos than there are people to fill them.

    Not with privacy: the number of people is not public, and an empty silo is a client like the others.
    """
    silos, people = population.settings.silos, len(population.user_rows())
    if silos is not None and silos > people and not recipe.federated.privacy.adds_noise:
        raise InputError(f"federation.clients.silos={silos}: there are only {people} speakers to fill them")


def compare_with_paper(recipe: Recipe, *, clients: int) -> str | None:
    """How the number of clients differs from the paper's; None where the recipe does not say the paper's.

    >>> from sottovoce.config import load_recipe
    >>> print(compare_with_paper(load_recipe("pelikan2025/table01/sigma-3e-6-dim"), clients=34_000))
    34,000 clients, 753 fewer than in the paper (34,753; −2.2 %): q = S/K and ε are worked out for those there are
    """
    theirs = None if recipe.paper is None else recipe.paper.population_size
    if theirs is None:
        return None
    if clients == theirs:
        return f"{clients:,} clients, as many as in the paper"
    more = f"{abs(clients - theirs):,} {'more' if clients > theirs else 'fewer'}"
    share = f"{100 * (clients - theirs) / theirs:+.2g}".replace("-", "\N{MINUS SIGN}")
    counted = ": q = S/K and ε are worked out for those there are" if recipe.federated.privacy.adds_noise else ""
    return f"{clients:,} clients, {more} than in the paper ({theirs:,}; {share} %){counted}"


def describe_clients_without_holdout(recipe: Recipe, population: Population) -> str | None:
    """How many clients have too few utterances to hold some out, and what becomes of them; None where all have enough.

    Not for a release: the number is private.
    """
    count, settings = population.left_out.clients_without_holdout, recipe.federated
    if not count:
        return None
    of_all = f"{count:,} of {len(population):,} clients have fewer than {HOLDOUT_NEEDS} utterances"
    parts = ["hold out nothing", "train on all that they have"]
    if settings.privacy.weighting is Weighting.WER and settings.shared_dev is None:
        parts.append("weigh the mean of those of their cohort that do")
    if settings.test_clients is not None:
        parts.append("are not tested")
    return f"{of_all}: they {', '.join(parts[:-1])} and {parts[-1]}"


def describe_unknown_order(population: Population) -> str | None:
    """How many speakers' utterances have no known order in time; None where all have one."""
    store = require_local_store(population)
    rows = population.user_rows()
    unknown = int((~store.users_in_time[rows]).sum())
    if not unknown:
        return None
    return (
        f"local.time_line: of {unknown:,} of {len(rows):,} speakers nobody knows in which order they spoke; theirs is "
        "that of their utterances' names"
    )
