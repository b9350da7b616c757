"""Eq. 10 of Gao et al. (2022) on speech that all clients share, or that they hold out; and clients who hold out none.

Every engine, and a cohort over two processes, against the equation computed client by client.
"""

import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.federated.small import CPU, Small, as_model, furthest, small
from tests.federated.test_weighting import LAYOUT, plan_for
from tests.ranks import in_processes
from tests.reference_round import Model
from tests.tones import pack_tones

from sottovoce.base.processes import process_group
from sottovoce.data.corpora.corpus import RenderedSpeaker
from sottovoce.evaluation.error_rates import compute_wer
from sottovoce.evaluation.recognise import recognise_utterances
from sottovoce.federated.cohort import LocalClients
from sottovoce.federated.engines import Engine, SequentialEngine, StackedEngine, Trained, WorkersEngine
from sottovoce.federated.ranks import ClientsOverRanks, RoundOrder
from sottovoce.federated.weighting import ClientFigures, WeightedSum
from sottovoce.models.recogniser import Recogniser
from sottovoce.privacy.settings import Weighting

EVERYBODY = range(9)
PLAIN: dict[str, Any] = {"privacy": {"weighting": "wer", "clip_bound": math.inf}, "cohort_size": 9}
PLAIN |= {"dtype": torch.float64, "local": {"local_epochs": 2, "lr": 0.3}}
FAR = 0.05  # by so much two clients' WERs differ at least, where they should


def a_few_words(speaker: RenderedSpeaker) -> RenderedSpeaker:
    """All texts are "a", which an untrained model writes now and then; every second speaker has three utterances."""
    count = 3 if int(speaker.name[1:]) % 2 else 4
    said = [replace(one, text="a", raw_text="a") for one in speaker.utterances[:count]]
    return replace(speaker, utterances=said)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("words") / "tones"
    pack_tones(store, change=a_few_words)
    return store


def on_shared_speech(words: Path, ledger: Path) -> Small:
    """A hold-out as well, for tests of clients, which the weights do not read."""
    return small(words, ledger, shared_dev="dev", people={"holdout": 0.25}, **PLAIN)


def on_held_out_speech(words: Path, ledger: Path) -> Small:
    return small(words, ledger, people={"holdout": 0.25}, **PLAIN)


MEASURES = {"shared": on_shared_speech, "held out": on_held_out_speech}


def by_hand(ours: Small) -> tuple[dict[int, float], Model]:
    """WERs of the clients that have one, and the model after the round: all that Eq. 10 and its exception say."""
    context, start, shared = ours.context, ours.model(), ours.context.shared_dev
    wers: dict[int, float] = {}
    updates: dict[int, Model] = {}
    for index in EVERYBODY:
        (trained,) = ours.engine.train(ours.server.parameters_P, [index], step=0)
        assert isinstance(trained, Trained)
        updates[index] = as_model(ours.layout, trained.update)
        local = dict(ours.layout.views(ours.server.parameters_P - trained.update))
        model = Recogniser(context.family, context.model, context.tokens, local, "en")
        rows = context.population.client(index).held_out if shared is None else shared.rows
        if len(rows):
            texts = [context.store.utterance(row).text or "" for row in rows.tolist()]
            wers[index] = compute_wer(texts, recognise_utterances(model, context.store, rows))
    exponentials = {index: math.exp(1 - wer) for index, wer in wers.items()}
    equal = sum(exponentials.values()) / len(exponentials)
    weights = {index: exponentials.get(index, equal) for index in EVERYBODY}
    shares = {index: weight / sum(weights.values()) for index, weight in weights.items()}
    model = {name: start[name] - sum(shares[i] * updates[i][name] for i in EVERYBODY) for name in start}
    return wers, model


@pytest.mark.parametrize("engine", ["sequential", "stacked", "workers", "two processes"])
@pytest.mark.parametrize("measured_on", MEASURES)
def test_a_round_is_the_equation(measured_on: str, engine: str, words: Path, tmp_path: Path) -> None:
    ours = MEASURES[measured_on](words, tmp_path / "ledger.jsonl")
    start = ours.model()
    wers, expected = by_hand(ours)
    assert len(wers) == (9 if measured_on == "shared" else 5)
    assert max(wers.values()) - min(wers.values()) > FAR
    if engine == "two processes":
        found = in_processes(2, round_over_ranks, words, tmp_path, measured_on)[0]
    else:
        with closing(engine_of(engine, ours)) as other:
            ours.round(0, clients=LocalClients(other))
        found = ours.model()
    assert furthest(found, expected, start) < 1


def engine_of(name: str, ours: Small) -> Engine:
    options: dict[str, Any] = {"dtype": torch.float64}
    if name == "workers":
        return WorkersEngine(ours.context, ours.layout, workers=2, **options)
    if name == "stacked":
        return StackedEngine(ours.context, ours.layout, device=CPU, size=4, **options)
    return SequentialEngine(ours.context, ours.layout, device=CPU, **options)


def round_over_ranks(words: Path, folder: Path, measured_on: str) -> Model:
    with process_group(CPU) as processes:
        ours = MEASURES[measured_on](words, folder / f"{processes.rank}.jsonl")
        clients = ClientsOverRanks(ours.engine, processes, seconds=ours.context.population.seconds)
        if processes.is_first:
            ours.round(0, clients=clients)
        else:
            order: Any = processes.broadcast_object(None)
            assert isinstance(order, RoundOrder)
            clients.take_part(order, ours.server.parameters_P, plan=ours.plan)
        return ours.model()


def test_nobody_is_dropped_for_having_little_speech(words: Path, tmp_path: Path) -> None:
    ours = on_held_out_speech(words, tmp_path / "ledger.jsonl")
    figures = ours.figures(0)
    assert (figures.cohort, dict(figures.dropped)) == (9, {})
    assert ours.context.population.left_out.clients_without_holdout == 4


def test_a_cohort_of_such_clients_alone_is_a_plain_mean(words: Path, tmp_path: Path) -> None:
    ours = on_held_out_speech(words, tmp_path / "ledger.jsonl")
    little = [index for index in EVERYBODY if not len(ours.context.population.client(index).held_out)]
    start = ours.model()
    updates = []
    for trained in ours.engine.train(ours.server.parameters_P, little, step=0):
        assert isinstance(trained, Trained)
        assert trained.figures[0].wer is None
        updates.append(as_model(ours.layout, trained.update))
    summed = LocalClients(ours.engine).sum(ours.server.parameters_P, np.array(little), plan=ours.plan, step=0)
    assert summed.denominator == len(little) == 4
    expected = {name: start[name] - sum(update[name] for update in updates) / 4 for name in start}
    found_P = ours.server.parameters_P - summed.total / summed.denominator
    assert furthest(as_model(ours.layout, found_P), expected, start) < 1


# The running sum.

wer = st.one_of(st.none(), st.floats(0, 3))


def summed(wers: Sequence[float | None], updates: np.ndarray, cuts: Sequence[int] = ()) -> np.ndarray:
    """Σ ω·update in parts that end at `cuts`: as stacks come."""
    total = torch.zeros(LAYOUT.flat_size, dtype=torch.float64)
    weighted = WeightedSum(plan_for(Weighting.WER), total)
    for part in np.split(np.arange(len(wers)), cuts):
        clients = [ClientFigures(1, 1.0, wer=wers[n]) for n in part]
        for n, client, weight in zip(part, clients, weighted.weigh(clients), strict=True):
            assert 0 <= weight <= 1
            if weighted.has_no_wer(client):
                weighted.apart[:3] += torch.from_numpy(updates[n])
            else:
                total[:3] += weight * torch.from_numpy(updates[n])
    weighted.settle()
    return (total[:3] / weighted.denominator).numpy()


@given(wers=st.lists(wer, min_size=1, max_size=8), order=st.randoms(use_true_random=False), cut=st.integers(0, 8))
@settings(max_examples=100, deadline=None)
def test_who_has_no_wer_weighs_one_of_n_and_the_others_share_the_rest(
    wers: list[float | None], order: Any, cut: int
) -> None:
    updates = np.random.default_rng(3).normal(size=(len(wers), 3))
    known = np.array([0.0 if wer is None else math.exp(1 - wer) for wer in wers])
    count = np.count_nonzero(known)
    shares = np.where(known == 0, 1.0, known * count / known.sum() if count else 0.0) / len(wers)
    assert shares.sum() == pytest.approx(1)
    np.testing.assert_allclose(summed(wers, updates), shares @ updates, atol=1e-6)  # apart is float32
    shuffled = list(range(len(wers)))
    order.shuffle(shuffled)
    again = summed([wers[n] for n in shuffled], updates[shuffled], [min(cut, len(wers))])
    np.testing.assert_allclose(again, shares @ updates, atol=1e-6)
