"""What a round needs of whoever trains its clients: a sum, after the step is paid for, and nothing else."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tests.federated.small import Small, small
from torch import Tensor

from sottovoce.federated.cohort import Clients, CohortSum, LocalClients
from sottovoce.privacy.clipping import AdaptiveClipping
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.sampling import Indices


@dataclass(frozen=True)
class SumsOnly:
    """Clients behind secure aggregation: of what `inner` knows, the server gets sums."""

    inner: Clients

    def sum(
        self,
        server_P: Tensor,
        cohort: Indices,
        *,
        plan: Plan,
        step: int,
        positions: Indices | None = None,
        row: int | None = None,
    ) -> CohortSum:
        whole = self.inner.sum(server_P, cohort, plan=plan, step=step, positions=positions)
        return CohortSum(whole.total, plan.denominator, whole.within)

    def close(self) -> None:
        self.inner.close()


@pytest.fixture
def two(tones: Path, tmp_path: Path) -> tuple[Small, Small]:
    """The same federation twice, with noise and a clip bound that moves."""
    privacy = {"noise_multiplier": 0.7, "adaptive": AdaptiveClipping(target_quantile=0.3, count_noise_std=2.0)}
    one, other = (small(tones, tmp_path / f"{name}.jsonl", privacy=privacy, cohort_size=6) for name in ("a", "b"))
    return one, other


def test_a_sum_is_all_that_a_round_needs(two: tuple[Small, Small]) -> None:
    looked_at, summed = two
    for step in range(2):
        seen, unseen = looked_at.round(step), summed.round(step, clients=SumsOnly(LocalClients(summed.engine)))
        assert seen.private is not None
        assert unseen.private is None
        assert torch.equal(looked_at.server.parameters_P, summed.server.parameters_P)
        assert summed.next_plan.clip_bound == looked_at.next_plan.clip_bound != looked_at.plan.clip_bound
        looked_at.plan, summed.plan = looked_at.next_plan, summed.next_plan


def test_a_release_keeps_no_diagnostics(tones: Path, tmp_path: Path) -> None:
    privacy = {"mode": "secure", "noise_multiplier": 1.0, "root_seed": None}
    ours = small(tones, tmp_path / "ledger.jsonl", privacy=privacy, cohort_size=6)
    assert ours.round(0).private is None


class Gone(Exception):
    pass


class NobodyThere:
    def sum(
        self,
        server_P: Tensor,
        cohort: Indices,
        *,
        plan: Plan,
        step: int,
        positions: Indices | None = None,
        row: int | None = None,
    ) -> CohortSum:
        raise Gone

    def close(self) -> None:
        pass


def test_a_step_is_charged_before_anybody_is_asked(two: tuple[Small, Small], tmp_path: Path) -> None:
    ours, _ = two
    with pytest.raises(Gone):
        ours.round(0, clients=NobodyThere())
    _, intent = (json.loads(line)["record"] for line in (tmp_path / "a.jsonl").read_text().splitlines())
    assert (intent["kind"], intent["step"]) == ("intent", 0)
