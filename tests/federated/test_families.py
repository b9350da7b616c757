"""What every model family must keep, in one process or several: the registered ones, and the guide's, from outside.

No test knows a family: each says what it needs of one, and asks the record whether it has it. A family whose options
make another model of it (another loss, another norm) is tested as that, too.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tests.federated import test_ranks, test_round
from tests.federated.small import (
    CPU,
    EXACT,
    MADE_FROM_NOTHING,
    Small,
    furthest,
    small,
    small_settings,
    start_stream,
    tokens_of,
)
from tests.federated.test_stacked import relative, updates_of
from tests.guides import DOCS, blocks
from tests.ranks import in_processes
from tests.reference_round import SGD

from sottovoce.base.errors import InputError
from sottovoce.base.processes import process_group
from sottovoce.base.seeds import stream, torch_stream
from sottovoce.data.audio.augment import NarrowBandSettings, SpecAugmentSettings
from sottovoce.data.audio.features import FeatureSettings
from sottovoce.data.audio.time_domain import DroppedChunks, DroppedFrequencies
from sottovoce.data.audio.waveforms import pad_waveforms
from sottovoce.federated.engines import SequentialEngine, StackedEngine
from sottovoce.federated.engines.workers import WorkersEngine
from sottovoce.flat.layout import Layout
from sottovoce.models.attention_search import GREEDY, SearchOptions
from sottovoce.models.family import (
    DEFAULT,
    Family,
    extract_float32_features,
    find_family,
    stacking_obstacle,
)
from sottovoce.models.recogniser import Recogniser, load_recogniser, save_recogniser
from sottovoce.models.trainable import parse_part, split_parameters

FROM_THE_GUIDE = "gru_ctc:FAMILY"
RANDOM: dict[str, Any] = {  # everything that chance decides, and clients of unequal size
    "local": {
        "local_epochs": 2,
        "spec_augment": SpecAugmentSettings(),
        "narrow_band": NarrowBandSettings(),
        "speeds": (0.95, 1.05),
        "dropped_frequencies": DroppedFrequencies(),
        "dropped_chunks": DroppedChunks(shortest_seconds=0.005, longest_seconds=0.01),
    },
    "people": {"max_seconds": 3.0},
    "privacy": {"noise_multiplier": 0.7, "share": "dim"},
    "cohort_size": 9,
}


class Kind(NamedTuple):
    """A family, and what its model is like besides being small.

    `hears_padding`: what lies behind an utterance is part of it, because others' code has it so.
    """

    family: str
    model: Mapping[str, Any] = {}
    hears_padding: bool = False


FAMILIES = {name: Kind(name) for name in (*MADE_FROM_NOTHING, FROM_THE_GUIDE)}
EARS = FeatureSettings(normalise="filter", floor_db=40.0)
KINDS = {
    **FAMILIES,
    "transformer, other ears": Kind(DEFAULT, {"ears": EARS}),
    "crdnn, other ears": Kind("crdnn", {"ears": EARS}),
    "crdnn, batch-norm": Kind("crdnn", {"norm": "batch"}),
    "crdnn, as released": Kind("crdnn", {"norm": "batch", "as_released": True}, hears_padding=True),
    "crdnn, CTC alone": Kind("crdnn", {"mu": 0.0}),
    "crdnn, attention alone": Kind("crdnn", {"mu": 1.0}),
    "crdnn, CTC at first": Kind("crdnn", {"ctc_epochs": 1}),
}


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The guide's module is put where Python finds it, also in other processes."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("outside")
        for block in blocks(DOCS / "guides" / "your-own-model.md", "python"):
            (folder / block.file).write_text(block.content, encoding="utf-8")
        patch.syspath_prepend(str(folder))
        yield
        sys.modules.pop(FROM_THE_GUIDE.partition(":")[0], None)


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS)
def kind(request: pytest.FixtureRequest, outside: None) -> Any:
    return request.param


@pytest.fixture(scope="module", params=FAMILIES.values(), ids=FAMILIES)
def family(request: pytest.FixtureRequest, outside: None) -> Any:
    """One kind of each: other processes do with any kind what they do with this."""
    return request.param


def federation(kind: Kind, store: Path, ledger: Path, **options: Any) -> Small:
    return small(store, ledger, family=kind.family, model=dict(kind.model), **RANDOM, **options)


@pytest.fixture
def ours(kind: Kind, tones: Path, tmp_path: Path) -> Small:
    return federation(kind, tones, tmp_path / "ledger.jsonl")


def test_rounds_are_those_of_the_twin(kind: Kind, tones: Path, tmp_path: Path) -> None:
    ours = federation(kind, tones, tmp_path / "ledger.jsonl", dtype=torch.float64)
    for step in range(2):
        start, twin = ours.model(), test_round.twin_of(ours, step, opt=SGD(), lr=1.0)
        ours.round(step)
        assert furthest(ours.model(), twin, start) < 1


@pytest.mark.usefixtures("one_thread")  # as in a worker
def test_worker_processes_have_the_sequential_engines_bits(family: Kind, tones: Path, tmp_path: Path) -> None:
    ours = federation(family, tones, tmp_path / "ledger.jsonl")
    expected = updates_of(ours.engine, ours)
    with closing(WorkersEngine(ours.context, ours.layout, workers=2)) as engine:
        found = updates_of(engine, ours)
    assert found.keys() == expected.keys() == set(range(9))
    assert all(torch.equal(found[client], expected[client]) for client in expected)


def rounds_of(kind: Kind, store: Path, folder: Path) -> dict[str, Any]:
    with process_group(CPU) as processes:
        ours = federation(kind, store, folder / f"{processes.world}-{processes.rank}.jsonl")
        return test_ranks.rounds(ours, processes, stacked=False, steps=2)


def test_ranks_come_to_the_same(family: Kind, tones: Path, tmp_path: Path) -> None:
    one, two = (in_processes(world, rounds_of, family, tones, tmp_path)[0] for world in (1, 2))
    for end, expected in zip(two["ends"], one["ends"], strict=True):
        assert furthest(end, expected, one["start"]) < 1
        assert any(np.any(end[layer] != one["start"][layer]) for layer in end)


def test_stacked_clients_move_as_they_do_one_by_one_or_are_refused(kind: Kind, tones: Path, tmp_path: Path) -> None:
    ours = federation(kind, tones, tmp_path / "ledger.jsonl", dtype=torch.float64)
    options: dict[str, Any] = {"device": CPU, "dtype": torch.float64, "size": 4}
    if stacking_obstacle(ours.context.family, ours.context.model) is not None:
        with pytest.raises(InputError, match=f"engine=stacked: models of family={kind.family} cannot be stacked"):
            StackedEngine(ours.context, ours.layout, **options)
    else:
        found = updates_of(StackedEngine(ours.context, ours.layout, **options), ours)
        assert max(relative(found, updates_of(ours.engine, ours)).values()) < EXACT


def test_an_update_is_the_clients_own_whoever_else_is_in_the_cohort(ours: Small) -> None:
    """Bit for bit: sensitivity is counted for one user's update alone."""
    found = [updates_of(ours.engine, ours, clients=cohort, step=1)[5] for cohort in ([5], [0, 5, 7], [8, 7, 6, 5, 4])]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_training_leaves_torchs_own_generator_as_it_was(ours: Small) -> None:
    before = torch.get_rng_state()
    updates_of(ours.engine, ours)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.fixture
def untrained(kind: Kind) -> tuple[Family[Any, Any], Any, dict[str, torch.Tensor]]:
    found = find_family(kind.family)
    settings = small_settings(found, **kind.model)
    return found, settings, found.init(settings, generator=start_stream())


def test_a_model_has_the_shapes_that_its_family_says(untrained: Any) -> None:
    found, settings, parameters = untrained
    assert {name: tuple(p.shape) for name, p in parameters.items()} == dict(found.shapes(settings))
    assert found.transfer.token_tensors <= parameters.keys()
    assert all(found.place(name).kind for name in parameters)
    again = found.init(settings, generator=start_stream())
    assert all(torch.equal(again[name], parameters[name]) for name in parameters)


def test_its_smallest_recipe_is_small(kind: Kind) -> None:
    """`--smoke` takes seconds anywhere."""
    found = find_family(kind.family)
    shapes = found.shapes(found.Options(**found.smoke_options).settings(tokens=30))
    assert sum(int(np.prod(shape)) for shape in shapes.values()) < 3e6


def test_padding_changes_nothing(kind: Kind, untrained: Any) -> None:
    """An utterance is emitted alone as it is beside a longer one, up to the rounding of one operation in a hundred."""
    found, settings, parameters = untrained
    if found.recognition is None or found.recognition.emit is None or kind.hears_padding:
        return
    parameters = {name: p.double() for name, p in parameters.items()}
    noise = stream(1, "noise").integers(-3000, 3000, size=12_000).astype(np.int16)
    short, long = noise[:5_000], noise
    emitted = []
    for utterances in ([short], [short, long]):
        heard = found.front_end.extract_features(pad_waveforms(utterances), settings=settings, dtype=torch.float64)
        log_probs_UTV, lengths_U = found.recognition.emit(parameters, heard, settings=settings)
        emitted.append(log_probs_UTV[0, : lengths_U[0]])
    torch.testing.assert_close(emitted[0], emitted[1], rtol=1e-9, atol=1e-9)


def test_padding_changes_no_vector(untrained: Any) -> None:
    """What an encoder makes of an utterance is the same alone and beside a longer one."""
    found, settings, parameters = untrained
    if found.inspection.encode is None:
        return
    parameters = {name: p.double() for name, p in parameters.items()}
    noise = stream(1, "noise").integers(-3000, 3000, size=12_000).astype(np.int16)
    vectors = []
    for utterances in ([noise[:5_000]], [noise[:5_000], noise]):
        heard = found.front_end.extract_features(pad_waveforms(utterances), settings=settings, dtype=torch.float64)
        vectors_UTD, lengths_U = found.inspection.encode(parameters, heard, settings=settings)
        vectors.append(vectors_UTD[0, : lengths_U[0]])
    torch.testing.assert_close(vectors[0], vectors[1], rtol=1e-9, atol=1e-9)


def test_who_writes_nothing_loses_the_same_beside_a_longer_utterance(untrained: Any) -> None:
    found, settings, parameters = untrained
    if found.training.needs_text:
        return
    parameters = {name: p.double() for name, p in parameters.items()}
    noise = stream(1, "noise").integers(-3000, 3000, size=12_000).astype(np.int16)
    one, other, both = (
        found.loss(
            parameters,
            found.front_end.extract_features(pad_waveforms(utterances), settings=settings, dtype=torch.float64),
            settings=settings,
            draws=None,
        )
        for utterances in ([noise[:8_000]], [noise], [noise[:8_000], noise])
    )
    torch.testing.assert_close(both, (one + other) / 2, rtol=1e-9, atol=1e-9)


def test_padding_changes_no_search(kind: Kind, untrained: Any) -> None:
    """The best text scores alone what it does beside a longer utterance; scores are sums of a few tens in float32."""
    found, settings, parameters = untrained
    if found.recognition is None or found.recognition.search is None or kind.hears_padding:
        return
    noise = stream(1, "noise").integers(-3000, 3000, size=12_000).astype(np.int16)
    for how in (GREEDY, SearchOptions(width=4, ctc_weight=0.3)):
        scores = []
        for utterances in ([noise[:5_000]], [noise[:5_000], noise]):
            heard = extract_float32_features(found, pad_waveforms(utterances), settings=settings)
            scores.append(found.recognition.search(parameters, heard, settings=settings, how=how)[0][0].score)
        assert scores[0] == pytest.approx(scores[1], abs=1e-4)


def test_without_draws_the_loss_is_that_of_evaluation(untrained: Any) -> None:
    """Chance decides nothing, whatever state it is in."""
    found, settings, parameters = untrained
    noise = stream(1, "noise").integers(-3000, 3000, size=12_000).astype(np.int16)
    heard = extract_float32_features(found, pad_waveforms([noise, noise[:9_000]], [[1, 2], [3]]), settings=settings)
    losses = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        losses.append(found.loss(parameters, heard, settings=settings, draws=None))
    assert torch.equal(*losses)
    assert float(losses[0].detach()) > 0


def test_low_rank_corrections_begin_at_nothing_and_are_trained(ours: Small) -> None:
    parameters, context = ours.layout.views(ours.server.parameters_P), ours.context
    options: dict[str, Any] = {
        "is_lora_target": context.family.transfer.is_lora_target,
        "generator": torch_stream(3, "low rank"),
    }
    part = split_parameters(parse_part("lora(r=2)"), dict(parameters), **options)
    merged = part.frozen.merged(part.initial)
    assert all(torch.equal(merged[name], tensor) for name, tensor in parameters.items())
    layout = Layout.of(part.initial)
    engine = SequentialEngine(replace(context, frozen=part.frozen), layout, device=CPU)
    (trained,) = engine.train(layout.flatten(part.initial), [4], step=0)
    assert trained.update.any()  # type: ignore[union-attr]


def test_a_saved_model_is_the_same_model(untrained: Any, tmp_path: Path) -> None:
    found, settings, parameters = untrained
    tokens = tokens_of(found)
    save_recogniser(Recogniser(found, settings, tokens, parameters, "en"), tmp_path)
    loaded = load_recogniser(tmp_path, family=found.name)
    assert (loaded.family, loaded.settings, loaded.tokens) == (found, settings, tokens)
    assert all(torch.equal(loaded.parameters[name], tensor) for name, tensor in parameters.items())
