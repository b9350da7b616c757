"""The tables of docs/late-nodes.md are those that the script computes, and its counterexample is one."""

import late_nodes
import pytest
import torch


@pytest.mark.parametrize(
    "name",
    [
        name if name == "opened" or name == "overlap" else pytest.param(name, marks=pytest.mark.long)
        for name in late_nodes.TABLES
    ],
)
def test_the_page_has_the_computed_table(name: str) -> None:
    page = late_nodes.PAGE.read_text()
    assert late_nodes.with_table(page, name, late_nodes.TABLES[name]()) == page


def test_where_the_last_answer_wanted_ends_a_round_one_person_moves_the_sum_by_twice_the_bound() -> None:
    """And by the bound where the deadline ends it."""
    bound, answers = 1.0, 2
    one_P, other_P = torch.tensor([bound, 0.0]), torch.tensor([-bound, 0.0])
    steady_P = torch.tensor([0.0, bound])

    def by_count(arrived: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(arrived[:answers]).sum(0)

    with_P, without_P = by_count([steady_P, one_P, other_P]), by_count([steady_P, other_P])
    assert torch.linalg.vector_norm(with_P - without_P) == 2 * bound
    deadline = torch.stack([steady_P, one_P, other_P]).sum(0) - torch.stack([steady_P, other_P]).sum(0)
    assert torch.linalg.vector_norm(deadline) == bound
