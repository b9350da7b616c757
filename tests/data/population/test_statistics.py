"""The rows of Table 2, and the drawing of Figure 1."""

import io
import json
import math
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from sottovoce.base import files
from sottovoce.base.errors import InputError
from sottovoce.base.seeds import derive
from sottovoce.data.population import PopulationSettings, build_population
from sottovoce.data.speakers import SeedPart
from sottovoce.data.statistics import (
    compute_statistics,
    device_statistics,
    format_devices,
    make_comparison_table,
    make_statistics_table,
)
from sottovoce.papers import speaker_figure as figure
from sottovoce.papers.speaker_figure import draw_speakers
from sottovoce.papers.table2 import subset_statistics

MINUTE = 60 * 16_000
# Ann has 1 + 2 minutes, Bob 1, and Ann half a minute more in another split.
CROWD = {("train", "ann"): [MINUTE, 2 * MINUTE], ("train", "bob"): [MINUTE], ("dev", "ann"): [MINUTE // 2]}


def test_statistics_by_hand(packed):
    found = compute_statistics(packed(CROWD))
    # train: 3 and 1 minutes: mean 2, population std 1. All: Ann 3.5, Bob 1: mean 2.25, std 1.25; two people, not three.
    assert found == {
        "hours": 4.5 / 60,
        "speakers": 2,
        "utterances": 4,
        "minutes_per_speaker": {"mean": 2.25, "std": 1.25, "min": 1.0, "max": 3.5},
        "splits": {
            "dev": {
                "hours": 0.5 / 60,
                "speakers": 1,
                "utterances": 1,
                "minutes_per_speaker": {"mean": 0.5, "std": 0.0, "min": 0.5, "max": 0.5},
            },
            "train": {
                "hours": 4 / 60,
                "speakers": 2,
                "utterances": 3,
                "minutes_per_speaker": {"mean": 2.0, "std": 1.0, "min": 1.0, "max": 3.0},
            },
        },
    }
    json.dumps(found, allow_nan=False)


class Spoken:
    """A store of some corpus and language, with these people."""

    def __init__(self, store, name, language):
        self._store, self.name, self.language = store, name, language

    def __getattr__(self, attribute):
        return getattr(self._store, attribute)


def test_the_subsets_of_table_2_are_unions_of_splits_and_parts_of_one(packed):
    clean = {("train-clean-360", f"c{i}"): [MINUTE * (i + 1)] for i in range(3)}
    other = {("train-other-500", f"o{i}"): [MINUTE] for i in range(2)}
    found = subset_statistics(Spoken(packed(clean | other), "librispeech", "en"), seed=1)
    counts = {name: row and row["speakers"] for name, row in found.items()}
    assert counts == {"LS-100": None, "LS-360": 3, "LS-500": 2, "LS-860": 5, "LS-960": None}
    assert found["LS-860"]["hours"] == pytest.approx(8 / 60)
    assert found["LS-860"]["paper"]["speakers"] == 2087
    text = io.StringIO()
    Console(file=text, width=100).print(make_comparison_table(found, title="Table 2"))
    assert re.search(r"LS-860 +0\.13 +5 +5 +1\.6", text.getvalue())
    assert re.search(r"in the paper +860\.5 +2,087 +24\.7", text.getvalue())
    assert re.search(r"LS-100 +not here", text.getvalue())


def test_the_parts_of_table_2_are_the_recipes_parts(packed):
    store = Spoken(packed({("train", f"{i}"): [MINUTE // 60 * (i + 1)] for i in range(45)}), "commonvoice", "en")
    found = subset_statistics(store, seed=3)
    assert [row["speakers"] for row in found.values()] == [45, 4, 41, 2, 43]
    settings = PopulationSettings(split="train", seed_part=SeedPart(fraction=0.1), part="seed")
    seed_part = build_population(store, settings, seed=derive(3, "seed part"))
    assert found["CV-en-train-10"]["hours"] == pytest.approx(seed_part.seconds.sum() / 3600)
    few = subset_statistics(Spoken(packed({("train", "ann"): [MINUTE]}), "commonvoice", "fr"), seed=1)
    assert [name for name, row in few.items() if row is None] == ["CV-fr-train-10", "CV-fr-train-90"]
    with pytest.raises(InputError, match="store of mls"):
        subset_statistics(Spoken(packed(CROWD), "mls", "fr"), seed=1)


def test_devices_by_hand(packed):
    """Three people in pairs: one device has two of them, whoever that is, and the third has one alone."""
    crowd = {("train", name): [MINUTE] * count for name, count in (("ann", 1), ("bob", 2), ("cay", 4))}
    found = device_statistics(packed(crowd), speakers_per_device=2, seed=1)
    row = found["splits"]["train"]
    assert (row["devices"], row["utterances"]) == (2, 7)
    assert row["utterances_per_device"] == row["minutes_per_device"]  # a minute each
    assert {row["utterances_per_device"]["min"], row["utterances_per_device"]["max"]} in ({3, 4}, {5, 2}, {6, 1})
    assert row["utterances_per_device"]["mean"] == row["utterances_per_device"]["median"] == 3.5
    (line,) = format_devices(found)
    assert line.startswith("train, 2 speakers a device: 2 devices, ")
    json.dumps(found, allow_nan=False)


people = st.tuples(st.sampled_from(["dev", "test", "train"]), st.sampled_from("abcdefgh"))


@given(crowd=st.dictionaries(people, st.lists(st.integers(1, 10**9), min_size=1, max_size=4), min_size=1))
def test_statistics_agree_with_plain_sums(index, crowd):
    found = compute_statistics(index(crowd))
    minutes = {}
    for (_, name), lengths in crowd.items():
        minutes[name] = minutes.get(name, 0) + sum(lengths) / MINUTE
    assert found["speakers"] == len(minutes)
    assert found["utterances"] == sum(map(len, crowd.values()))
    assert found["minutes_per_speaker"]["max"] == pytest.approx(max(minutes.values()))
    mean = found["minutes_per_speaker"]["mean"]
    assert mean * len(minutes) == pytest.approx(found["hours"] * 60)
    spread = math.sqrt(sum((m - mean) ** 2 for m in minutes.values()) / len(minutes))
    assert found["minutes_per_speaker"]["std"] == pytest.approx(spread, abs=1e-9)
    assert sum(split["hours"] for split in found["splits"].values()) == pytest.approx(found["hours"])


def test_the_table_fits_a_terminal_and_prints_numbers_as_the_paper_does(index):
    # 30 hours of one person, and 1.2 seconds (0.02 minutes) of another.
    store = index({("train[clean]-100", "ann"): [1800 * MINUTE], ("train[clean]-100", "bob"): [MINUTE // 50]})
    screen = Console(file=io.StringIO(), width=80)
    screen.print(make_statistics_table(compute_statistics(store), title="crowd (en)"))
    row = next(line for line in screen.file.getvalue().splitlines() if "train[clean]-100" in line)
    assert row.split() == ["train[clean]-100", "30.0", "2", "2", "900.0", "900.0", "0.02", "1,800.0"]


def crowd_of(splits):
    """Heavy-tailed amounts, in splits of any name."""
    numbers = np.random.Generator(np.random.Philox(3))
    return {
        (split, f"{split}-{i}"): numbers.integers(8_000, 160_000, min(int(n) + 1, 200)).tolist()
        for split in splits
        for i, n in enumerate(numbers.lognormal(1, 1.5, 60))
    }


def test_the_bitmap_is_a_bitmap(index, tmp_path):
    draw_speakers(index(crowd_of(["train", "dev"])), tmp_path / "a.PNG")
    assert (tmp_path / "a.PNG").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


# Matplotlib would read the first as a formula and leave the second out of the legend; the third is markup in HTML.
AWKWARD = ["$x_{", "_hidden", "<b>&"]


def test_the_drawing_is_well_formed_and_the_same_every_time(index, tmp_path):
    store = index(crowd_of(AWKWARD))
    for name in ("a.svg", "b.svg"):
        draw_speakers(store, tmp_path / name)
    assert ElementTree.parse(tmp_path / "a.svg").getroot().tag == "{http://www.w3.org/2000/svg}svg"
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    comments = (tmp_path / "a.svg").read_text()
    # Both panels list all three splits, with their number of speakers.
    assert [comments.count(f"<!--  {split}") for split in ("$x_{ (60)", "_hidden (60)")] == [2, 2]


class Reader(HTMLParser):
    """Collects the cells of the table and whatever a browser would fetch."""

    def __init__(self):
        super().__init__()
        self.rows, self.fetched, self.in_cell = [], [], False

    def handle_starttag(self, tag, attributes):
        if tag == "tr":
            self.rows.append([])
        self.in_cell = tag in ("td", "th")
        self.fetched += [value for name, value in attributes if name in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag):
        self.in_cell = False

    def handle_data(self, data):
        if self.in_cell:
            self.rows[-1].append(data)


def test_the_page_stands_alone_and_knows_light_and_dark(index, tmp_path):
    draw_speakers(index(crowd_of(AWKWARD)), tmp_path / "a.html")
    text = (tmp_path / "a.html").read_text()
    page = Reader()
    page.feed(text)
    assert [row[0] for row in page.rows[2:]] == [*sorted(AWKWARD), "total"]
    assert all(row[2] == "60" for row in page.rows[2:-1])
    assert all(address.startswith("#") for address in page.fetched)
    assert "@import" not in text
    assert not re.search(r"url\((?!#)", text)
    assert "prefers-color-scheme: dark" in text
    # No colour is fixed in the drawing, so all of it follows the theme.
    assert not re.search("#[0-9a-f]{6}", text[text.index("<svg") :])


@pytest.mark.parametrize("lengths", [[1], [MINUTE] * 3])
def test_a_single_speaker_can_be_drawn(index, tmp_path, lengths):
    draw_speakers(index({("train", "ann"): lengths}), tmp_path / "a.png")


@given(values=st.lists(st.integers(1, 10**6), min_size=1, max_size=50))
def test_bins_hold_every_value_and_no_bin_of_whole_numbers_is_empty_by_construction(values):
    curve = figure._Curve("train", np.array(values, dtype=np.float64), "", "")
    for edges in (figure._edges([curve]), figure._whole_edges([curve])):
        assert np.histogram(curve.values, bins=edges)[0].sum() == len(values)
    # Widths are whole and never shrink: otherwise a smooth distribution would look jagged.
    widths = np.diff(figure._whole_edges([curve]))
    assert np.array_equal(widths, np.round(widths))
    assert widths.min() >= 1
    assert (np.diff(widths) >= 0).all()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a.jpeg", r"expected a file name that ends in \.png, \.svg, \.html"),
        ("no/where.png", "does not exist"),
        ("folder.svg", "it is a folder"),
    ],
)
def test_a_wrong_file_name_says_what_was_expected(index, tmp_path, name, message):
    (tmp_path / "folder.svg").mkdir()
    with pytest.raises(InputError, match=message):
        draw_speakers(index(CROWD), tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["folder.svg"]


def test_a_failed_drawing_leaves_the_old_one(index, tmp_path, monkeypatch):
    (tmp_path / "a.png").write_text("old")

    def full(file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "sync_file", full)
    with pytest.raises(InputError, match=r"cannot be written \(No space"):
        draw_speakers(index(CROWD), tmp_path / "a.png")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]
