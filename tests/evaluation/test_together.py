"""An evaluation that several processes share is the one that a single process makes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.several import in_processes

from sottovoce.evaluation.evaluate import evaluate, score, select
from sottovoce.evaluation.together import recognise_together
from sottovoce.models.recogniser import Recogniser, load_recogniser, save_recogniser
from sottovoce.processes import process_group
from sottovoce.store import Store


def shared_evaluation(model: Path, place: Path) -> dict[str, Any]:
    store, recogniser = Store(place), load_recogniser(model)
    with process_group(torch.device("cpu")) as processes:
        chosen = select(store)
        hypotheses = recognise_together(recogniser, store, chosen.rows, processes=processes)
    return score(store, chosen, hypotheses).as_json()


@pytest.mark.parametrize("world", [2, 9])
def test_many_hear_what_one_hears(world: int, recogniser: Recogniser, store: Store, tmp_path: Path) -> None:
    """Nine processes are more than there are utterances."""
    assert len(select(store).rows) < 9
    save_recogniser(recogniser, tmp_path)
    alone = evaluate(recogniser, store)
    assert alone.words.substitutions + alone.words.insertions > 0, "it must hear something"
    assert in_processes(world, shared_evaluation, tmp_path, store.path)[0] == alone.as_json()
