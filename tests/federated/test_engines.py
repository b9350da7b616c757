"""What an engine does with clients: it trains those who can be trained, and says why it could not train the others."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.federated.small import CPU, Small, as_model, furthest, small
from torch import Tensor

from sottovoce.base.errors import InputError
from sottovoce.data.audio.waveforms import Features, Waveforms
from sottovoce.data.store import Store
from sottovoce.federated.client import ClientContext
from sottovoce.federated.engines import Dropped, SequentialEngine, Trained

BAD = 2
EVERYBODY = {"cohort_size": 9}


def unreadable(rooms: Small, patch: pytest.MonkeyPatch) -> None:
    """The bad client's audio cannot be read."""
    rows, whole = set(rooms.context.population.client(BAD).utterances.tolist()), Store.samples

    def samples(self: Store, row: int) -> Any:
        if row in rows:
            raise InputError(f"utterance {row}: its audio is damaged")
        return whole(self, row)

    patch.setattr(Store, "samples", samples)


def gone(rooms: Small, patch: pytest.MonkeyPatch) -> None:
    """The disk fails under the bad client."""
    rows, whole = set(rooms.context.population.client(BAD).utterances.tolist()), Store.samples

    def samples(self: Store, row: int) -> Any:
        if row in rows:
            raise OSError(5, "Input/output error")
        return whole(self, row)

    patch.setattr(Store, "samples", samples)


def hearing(context: ClientContext, client: int, instead: Callable[[Features, Tensor], Features]) -> ClientContext:
    """A context whose family hears `instead` where there are utterances of `client`; of which [U] tells which are."""
    rows = context.population.client(client).utterances.tolist()
    starts = {tuple(context.store.samples(row)[:50].tolist()) for row in rows}

    def hear(recordings: Waveforms, **options: Any) -> Features:
        heard = context.family.front_end.extract_features(recordings, **options)
        own_U = [tuple(recordings.samples_N[start : start + 50].tolist()) in starts for start in recordings.starts_U]
        return instead(heard, torch.tensor(own_U)) if any(own_U) else heard

    return replace(
        context, family=replace(context.family, front_end=replace(context.family.front_end, extract_features=hear))
    )


def not_finite(heard: Features, of_U: Tensor) -> Features:
    return replace(heard, features_UTF=heard.features_UTF.masked_fill(of_U[:, None, None], torch.nan))


def too_large(heard: Features, of_U: Tensor) -> Features:
    raise torch.OutOfMemoryError("CUDA out of memory")


def out_of_memory(rooms: Small, _: pytest.MonkeyPatch) -> None:
    _train_in(hearing(rooms.context, BAD, too_large), rooms)


def diverging(rooms: Small, _: pytest.MonkeyPatch) -> None:
    _train_in(hearing(rooms.context, BAD, not_finite), rooms)


def _train_in(context: ClientContext, rooms: Small) -> None:
    rooms.engine = SequentialEngine(context, rooms.layout, device=CPU)


@pytest.mark.parametrize(
    ("accident", "dropped", "non_finite"),
    [
        (unreadable, "audio is damaged", 0),
        (gone, "Input/output error", 0),
        (out_of_memory, "out of memory", 0),
        (diverging, None, 1),
    ],
)
@pytest.mark.parametrize("weighting", ["uniform", "utterances"])
def test_a_client_that_fails_counts_as_zero_and_changes_nobody_else(
    accident: Any,
    dropped: str | None,
    non_finite: int,
    weighting: str,
    tones: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the round comes to is what the other eight alone come to, still divided by nine (or by what all weigh)."""
    ours = small(tones, tmp_path / "ledger.jsonl", privacy={"weighting": weighting}, **EVERYBODY)
    start, clip = ours.model(), ours.plan.clip
    updates = [clip(trained.update) for trained in _trained(ours) if trained.clients != (BAD,)]
    counted = len(updates) + (weighting == "uniform" or dropped is None)
    expected = as_model(ours.layout, ours.server.parameters_P - torch.stack(updates).sum(0) / counted)

    accident(ours, monkeypatch)
    figures = ours.figures(0).as_json(ours.plan)

    assert furthest(ours.model(), expected, start) < 1
    assert figures["cohort"] == 9
    assert figures["non_finite"] == non_finite
    reasons = figures["dropped"]
    assert isinstance(reasons, dict)
    assert [(dropped in reason, count) for reason, count in reasons.items()] == ([(True, 1)] if dropped else [])


def _trained(ours: Small) -> Iterator[Trained]:
    """By an engine of its own, so that the round's has heard nobody yet."""
    engine = SequentialEngine(ours.context, ours.layout, device=CPU)
    for trained in engine.train(ours.server.parameters_P, range(9), step=0):
        assert isinstance(trained, Trained)
        yield trained


def test_a_client_without_usable_speech_is_dropped_with_the_reason(tones: Path, tmp_path: Path) -> None:
    ours = small(tones, tmp_path / "ledger.jsonl", local={"batch_seconds": 0.1})
    (result,) = ours.engine.train(ours.server.parameters_P, [0], step=0)
    assert isinstance(result, Dropped)
    assert "no utterance to train on (4 too long)" in result.reason


def test_nothing_survives_on_a_client_between_rounds(tones: Path, tmp_path: Path) -> None:
    """The third round's update is the same for a client who was in the first two and for one who was not."""
    local = {"optimiser": {"name": "adam"}, "lr": 0.01}
    ours = small(tones, tmp_path / "ledger.jsonl", local=local, **EVERYBODY)
    seen: dict[str, torch.Tensor] = {}
    for name, steps in (("in all", (0, 1, 2)), ("in the last", (2,))):
        for step in steps:
            for trained in ours.engine.train(ours.server.parameters_P, [4], step=step):
                assert isinstance(trained, Trained)
                seen[name] = trained.update.clone()
    assert torch.equal(seen["in all"], seen["in the last"])


def test_an_update_is_the_clients_own_whoever_else_is_in_the_cohort(tones: Path, tmp_path: Path) -> None:
    """Bit for bit, with everything random switched on: sensitivity is counted for one user's update alone."""
    model = {"dropout": 0.3, "layer_drop": 0.5}
    ours = small(tones, tmp_path / "ledger.jsonl", model=model, cohort_size=6)
    found = []
    for cohort in ([5], [0, 5, 7], [8, 7, 6, 5, 4]):
        for trained in ours.engine.train(ours.server.parameters_P, cohort, step=1):
            assert isinstance(trained, Trained)
            if trained.clients == (5,):
                found.append(trained.update.clone())
    assert len(found) == 3
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
