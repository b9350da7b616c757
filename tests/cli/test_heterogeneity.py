"""`sottovoce stats --heterogeneity` as a user types it."""

import json

import pytest
from tests.tones import pack_tones


@pytest.fixture
def stores(tmp_path):
    for name, people in (("one", range(4)), ("two", range(5, 8))):
        pack_tones(tmp_path / name, people=people)
    return tmp_path


def test_two_stores_side_by_side(sottovoce, stores):
    options = ("--heterogeneity", "--embedding", "spectrum", "--against", stores / "two")
    done = sottovoce("stats", stores / "one", *options, "--json", "--plot", stores / "page.html")
    assert done.code == 0, done.err
    figures = json.loads(done.out)
    assert [store["store"] for store in figures["stores"]] == ["one", "two"]
    assert [store["clients"] for store in figures["stores"]] == [4, 3]
    assert figures["private"] is False
    assert "<svg" in (stores / "page.html").read_text()

    done = sottovoce("stats", stores / "one", *options, "--users", "2", "--utterances", "3", "--seed", "4")
    printed = " ".join(done.out.split())
    assert "6 utterances" in printed
    assert "2 of 4 clients (2 for purity), seed 4" in printed
    assert "permutation entropy: entropy of the orders" in printed
    assert "not differentially private" in printed


def test_what_is_not_installed_is_one_line(sottovoce, stores, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = sottovoce("stats", stores / "one", "--heterogeneity", "--plot", stores / "page.svg")
    assert done.code == 0, done.err
    assert "for a trained speaker encoder: pip install --no-deps resemblyzer\n" in done.err
    assert "for t-SNE: pip install 'sottovoce[analysis]'\n" in done.err
    assert "purity (spectrum)" in done.out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--users", "3"], "error: users=3: expected --heterogeneity with it"),
        (["--seed", "0"], "error: seed=0: expected --heterogeneity with it"),
        (["--heterogeneity", "--utterances", "0"], "error: utterances=0: expected at least 1"),
        (["--heterogeneity", "--embedding", "x"], "error: embedding=x: expected resemblyzer or spectrum"),
        (["--heterogeneity", "--against", "nowhere"], "error: no store at nowhere"),
    ],
)
def test_mistakes_are_one_line(sottovoce, stores, options, message):
    done = sottovoce("stats", stores / "one", *options)
    assert done.code == 2
    assert message in done.err
    assert len([line for line in done.err.splitlines() if "error" in line]) == 1
    assert done.out == ""
