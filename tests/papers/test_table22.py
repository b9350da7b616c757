"""Table 22: as printed, consistent with itself, and of recipes that have its settings."""

import pytest
from tests.test_paper_tables import in_the_papers_words, recipes, transcript

from sottovoce.papers.table22 import ComputeRow, compute_rows


def test_the_rows_are_the_printed_ones() -> None:
    printed = transcript()["compute"]
    assert len(printed) == 17
    found = []
    for row in compute_rows():
        client = [f"{row.batch_seconds / 60:g}min", row.cohort_size, f"{row.local} {row.unit}", row.central_steps]
        found.append([row.seed, row.data, row.model, *client, row.gpus, row.hours, row.gpu_hours])
    assert found == printed


def test_hours_times_gpus_are_the_gpu_hours() -> None:
    assert [row.gpus * row.hours for row in compute_rows()] == [row.gpu_hours for row in compute_rows()]


@pytest.mark.parametrize("row", [row for row in compute_rows() if row.recipe is not None], ids=lambda row: row.recipe)
def test_recipes_have_the_settings_of_their_row(row: ComputeRow) -> None:
    assert row.recipe is not None
    found = in_the_papers_words(recipes()[row.recipe])
    assert found["seed"] == row.seed.replace("-train", "")
    assert found["data"] == row.data.replace("-train", "")
    assert (found["S"], found["batch seconds"]) == (row.cohort_size, row.batch_seconds)
    assert found[f"local {row.unit}"] == row.local
    assert (found["sigma"] > 0) == (row.model == "FL + DP")
    # The private tables count T in whole passes, 2,006 or 2,002, where Table 22 has 2,000.
    assert 2000 <= found["T"] < 2007 if found["sigma"] else found["T"] == row.central_steps


def test_the_cost_of_a_client_is_the_papers_own() -> None:
    """1,120 h of S = 1,024, T = 2,000: at most 610 seconds of audio a second; Table 2's mean client for epochs."""
    private = next(row for row in compute_rows() if row.gpu_hours == 1120)
    assert private.gpu_seconds_per_client == pytest.approx(1120 * 3600 / (1024 * 2000))
    assert private.audio_seconds_per_second == pytest.approx(1200 * 1024 * 2000 / (1120 * 3600))
    first = compute_rows()[0]
    assert first.audio_seconds_per_client == pytest.approx(10 * 961.1 * 3600 / 2338)
