"""One client of a pretrained model changes nobody else's update: modules are shared between clients, and keep nothing.

Their norms, dropout, masks and low-rank corrections are other code than that of models made here (`test_neighbours`).
"""

from pathlib import Path

import pytest
import torch
from tests.federated.small import CPU
from tests.pretrained import write_pretrained

from sottovoce.config import load_recipe
from sottovoce.federated.engines import Trained
from sottovoce.training.assemble import assemble
from sottovoce.training.engines import build_engine
from sottovoce.training.run_context import RunContext

pytest.importorskip("transformers", reason="the extra hf is not installed")

CASES = [
    pytest.param("wav2vec2-bert", "lora(r=2, factors=alternate)", None),
    pytest.param("parakeet_ctc", "lora(r=2)", None, marks=pytest.mark.long),
    pytest.param("moonshine", "lora(r=2, factors=project)", None, marks=pytest.mark.long),
    pytest.param("whisper", "norms", None, marks=pytest.mark.long),
    pytest.param("wav2vec2", "all", "ctc", marks=pytest.mark.long),
    pytest.param("wavlm", "lora(r=2)", None, marks=pytest.mark.long),
]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("kind", "train", "head"), CASES)
def test_in_a_release_nobody_changes_anothers_update(kind: str, train: str, head: str | None, tmp_path: Path) -> None:
    """To the bit: whoever leaves, and in whatever order they train."""
    write_pretrained(tmp_path, kind, train=train, head=head)
    random = ["model.dropout=true", "federation.local.local_steps=2", "federation.privacy.mode=secure"]
    recipe = load_recipe(str(tmp_path / "federated.yaml"), random)
    found = assemble(recipe, context=RunContext(runs=tmp_path, stores=tmp_path / "stores", device=CPU))
    start_P = found.plan.layout.flatten(found.part.initial)

    def updates(cohort: list[int]) -> dict[int, torch.Tensor]:
        engine = build_engine("sequential", recipe, found.population, found.start, found.plan, device=CPU)
        made = engine.train(start_P, cohort, step=0)
        return {one.clients[0]: one.update.clone() for one in made if isinstance(one, Trained)}

    people = [0, 1, 2]
    everybody = updates(people)
    assert all(update_P.dtype == torch.float32 and update_P.any() for update_P in everybody.values())
    for cohort in ([2, 1, 0], [1, 2], [0, 2], [0, 1]):
        for client, update_P in updates(cohort).items():
            assert torch.equal(update_P, everybody[client]), f"{client} of {cohort}"
