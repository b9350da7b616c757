"""What a served release leaves in its folder: no names or counts of its people, whoever sums and adds the noise."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.network.places import Place, Planned
from tests.published import (
    CLOCK,
    clocks,
    differences,
    machine,
    named,
    packed,
    people_of,
    person,
    same_sums,
    search,
    still_clock,
)

from sottovoce.base.seeds import name_key
from sottovoce.data.store import Store
from sottovoce.network.server.accounts import find_accounts, read_accounts
from sottovoce.network.server.setup import with_client_noise, with_word_sums
from sottovoce.privacy.plan import Plan
from sottovoce.report.summary import write_report

EVERYBODY = 6


def noise_by_clients(plan: Plan) -> Plan:
    return with_client_noise(plan, least=3, colluding=0)


# Whether sums are secure, how many are in a round, and who adds the noise. A new kind is a line here.
KINDS: dict[str, tuple[bool, int, Planned]] = {
    "open, everybody": (False, EVERYBODY, with_word_sums),
    "open, some": (False, 2, with_word_sums),
    "secure": (True, EVERYBODY, with_word_sums),
    "noise by clients": (True, EVERYBODY, noise_by_clients),
}
IN_CI = {"open, everybody", "secure"}


def stores_of(place: Path, numbers: Sequence[int], *, utterances: int) -> Path:
    """Everybody's own speech under their name, and under `tones` that of others, whom the model is judged on."""
    for number in numbers:
        one = person(number, utterances=utterances, of=0)
        packed(place / "of" / one.name, [one])
        (place / "of" / one.name / "tones").rename(place / one.name)
    return packed(place, [person(number) for number in (3, 8, 4, 9)])


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """As many people, with other names, texts and lengths."""
    first, other = tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("other")
    return stores_of(first, range(100, 106), utterances=2), stores_of(other, range(1000, 1006), utterances=3)


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("kind", [pytest.param(k, marks=() if k in IN_CI else pytest.mark.long) for k in KINDS])
def test_no_kind_of_served_release_tells_anything_but_its_noised_sums(
    kind: str, both: tuple[Path, Path], tmp_path: Path
) -> None:
    secure, cohort, planned = KINDS[kind]
    folders = []
    for stores in both:
        place = Place(
            tmp_path / stores.name, stores, sorted((path.name for path in stores.glob("corpus-*")), key=name_key)
        )
        place.folder.mkdir()
        place.write_files(steps=2, cohort_size=cohort, privacy={"mode": "secure"})
        with still_clock(), same_sums():
            folder = place.run_here("served", secure=secure, planned=planned).folder
            write_report({"served": folder}, folder, title="a release")
        people = named(place.people)
        for name in place.people:
            people |= people_of(Store(stores / name))
        assert search(folder, people | machine(place.folder, stores)) == []
        assert clocks(folder, begun=CLOCK, ended=CLOCK) == []
        folders.append(folder)
        kept = find_accounts(folder)
        assert (kept is not None) == (not secure and cohort == EVERYBODY)
        assert kept is None or read_accounts(kept).keys() == set(place.people)
    assert differences(*folders) == []
