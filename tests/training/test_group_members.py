"""A release with correlated noise goes on with the same clients in the same groups, or not at all."""

import json
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.tones import FEW_WORDS, identity, rename, speaker
from tests.training.running import run_here
from tests.training.test_correlated_runs import BANDED, SHORT

from sottovoce import InputError
from sottovoce.data.corpora.corpus import Corpus, ProblemLog, RenderedSpeaker
from sottovoce.data.population import PopulationSettings, build_population
from sottovoce.data.store import Store, pack_corpus
from sottovoce.privacy.ledger import verify
from sottovoce.privacy.sampling import CyclicSampler
from sottovoce.privacy.secret_files import SECRETS
from sottovoce.training import checkpoint
from sottovoce.training.federated_run import GROUPS, digest_groups

RELEASE = [*SHORT, BANDED, "federation.privacy.mode=secure"]
People = list[RenderedSpeaker]


def everybody() -> People:
    return [speaker(number, **FEW_WORDS) for number in range(15)]


def longer(rendered: RenderedSpeaker) -> RenderedSpeaker:
    return speaker(int(rendered.name[1:]), letters=(4, 5), utterances=2)


def packed(place: Path, people: People) -> Path:
    pack_corpus(Corpus("tones", "en", people, identity, ProblemLog()), place / "tones", workers=1)
    return place


def in_order(people: People) -> People:
    return sorted(people, key=lambda one: (one.split, one.name))


def broken_off(recipe: Path, stores: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A release that has charged four rounds, and saved two."""
    save = checkpoint.save_checkpoint

    def lost(folder: Path, saved: checkpoint.Checkpoint) -> Path:
        if saved.step == 4:
            raise InputError("killed")
        return save(folder, saved)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_checkpoint", lost)
        with pytest.raises(InputError, match="killed"):
            run_here(recipe, RELEASE, stores, out)
    assert verify(out / "ledger.jsonl").attempts == 4


def somebody_else(people: People) -> People:
    return [one if one.name != "s00" else replace(speaker(20, **FEW_WORDS), split="train") for one in people]


def renamed(people: People) -> People:
    return list(map(rename("s00", "somebody"), people))


def exchanged(people: People) -> People:
    """Two people have each other's names: one name that is spoken for longer goes to the other's voice."""
    names = {"s00": "s01", "s01": "s00"}
    return [replace(one, name=names.get(one.name, one.name)) for one in people]


def prepared_anew(people: People) -> People:
    """Everybody's utterances have other rows, in another order, behind people of a split that was not there."""
    turned = [replace(one, utterances=list(one.utterances)[::-1]) for one in people]
    return [replace(speaker(20, **FEW_WORDS), split="another"), *turned]


@pytest.mark.parametrize("change", [somebody_else, renamed, exchanged])
def test_a_release_does_not_go_on_with_others_in_its_groups(
    change: Callable[[People], People], federated_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as before: places keep their groups, and people would be in other ones."""
    people = [longer(one) if one.name == "s00" else one for one in everybody()]
    then, now = packed(tmp_path / "then", in_order(people)), packed(tmp_path / "now", in_order(change(people)))
    broken_off(federated_recipe, then, tmp_path / "run", monkeypatch)
    before = (tmp_path / "run/ledger.jsonl").read_bytes()
    with pytest.raises(InputError, match="no longer in the groups in which this release began") as refused:
        run_here(federated_recipe, RELEASE, now, tmp_path / "run", resume=True)
    assert "\n" not in str(refused.value)
    assert (tmp_path / "run/ledger.jsonl").read_bytes() == before  # nothing is charged for it
    ended = run_here(federated_recipe, RELEASE, then, tmp_path / "run", resume=True)
    assert ended.results is not None


def test_a_store_prepared_anew_in_another_order_is_the_same_people(
    federated_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    then = packed(tmp_path / "then", in_order(everybody()))
    now = packed(tmp_path / "now", in_order(prepared_anew(everybody())))
    assert Store(then / "tones").digest != Store(now / "tones").digest
    broken_off(federated_recipe, then, tmp_path / "run", monkeypatch)
    kept = tmp_path / "run" / SECRETS / GROUPS
    assert [stat.S_IMODE(path.stat().st_mode) for path in (kept.parent, kept)] == [0o700, 0o600]
    run_here(federated_recipe, RELEASE, now, tmp_path / "run", resume=True)
    assert not kept.parent.exists()  # nobody needs it any more


def test_where_it_is_not_known_who_was_in_which_group_a_release_does_not_go_on(
    federated_recipe: Path, short_stores: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken_off(federated_recipe, short_stores, tmp_path / "run", monkeypatch)
    kept = tmp_path / "run" / SECRETS / GROUPS
    content = json.loads(kept.read_text())
    for written, words in (
        (None, "is missing: nobody can say"),
        (json.dumps(content | {"members": "0" * 64}), "damaged"),
        ("{}", "damaged"),
        ('{"key": 5, "members": ""}', "damaged"),
    ):
        kept.unlink(missing_ok=True)
        if written is not None:
            kept.write_text(written)
        with pytest.raises(InputError, match=words):
            run_here(federated_recipe, RELEASE, short_stores, tmp_path / "run", resume=True)


def test_the_digest_is_of_people_in_groups_and_needs_its_key(short_stores: Path) -> None:
    store = Store(short_stores / "tones")
    silos = build_population(store, PopulationSettings(split="train", clients="silo", silos=4), seed=1)
    others = build_population(store, PopulationSettings(split="train", clients="silo", silos=4), seed=2)
    sampler, key = CyclicSampler(cycle=2, sampling_rate=1.0), bytes(32)
    known = digest_groups(silos, sampler, key=key)
    assert digest_groups(silos, CyclicSampler(cycle=2, sampling_rate=0.5), key=key) == known
    different = [
        digest_groups(others, sampler, key=key),  # somebody is in another silo
        digest_groups(silos, CyclicSampler(cycle=3, sampling_rate=1.0), key=key),
        digest_groups(silos, sampler, key=bytes(31) + b"1"),
    ]
    assert len({known, *different}) == 4
