"""Partitions are disjoint and complete, nobody is in two places, and one seed gives one population everywhere."""

import json
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sottovoce.base.errors import InputError
from sottovoce.base.seeds import name_key
from sottovoce.data.population import PopulationSettings, build_population, check_disjoint
from sottovoce.data.speakers import Groups, SeedPart, Speakers, split_off_seed
from sottovoce.privacy.settings import PrivacySettings

SECOND = 16_000
ALL = ("a", "b")

lengths = st.lists(st.integers(1, 5 * SECOND), min_size=1, max_size=8)
people = st.tuples(st.sampled_from(ALL), st.sampled_from([f"speaker-{i}" for i in range(12)]))
crowds = st.dictionaries(people, lengths, min_size=2, max_size=16).filter(lambda crowd: {s for s, _ in crowd} == {*ALL})
seeds = st.integers(0, 2**62)
speaker_rules = st.sampled_from(
    [
        {"clients": "speaker"},
        {"clients": "device", "speakers_per_device": 2},
        {"clients": "device", "speakers_per_device": 3},
        {"clients": "silo", "silos": 1},
        {"clients": "silo", "silos": 3},
        {"clients": "silo", "silos": 3, "balance": "seconds"},
    ]
)
rules = speaker_rules | st.just({"clients": "iid"}) | st.just({"clients": "iid_uniform"})
seed_parts = st.one_of(
    st.builds(SeedPart, fraction=st.sampled_from([0.05, 0.1, 0.5])),
    st.builds(SeedPart, most_data_share=st.sampled_from([0.1, 0.5, 0.9])),
)


def build(store, *, seed=1, split=ALL, **settings):
    try:
        return build_population(store, PopulationSettings(split=split, **settings), seed=seed)
    except InputError as error:
        # Generated crowds can be too small for a rule; that refusal has tests of its own.
        assume("leaves none" not in str(error))
        raise


def names_of(population):
    return [{population.store.user(row).name for row in client.speakers} for client in population]


def samples_of(store, rows):
    return int((store.audio_offsets[rows + 1] - store.audio_offsets[rows]).sum())


@given(crowd=crowds, rule=rules, seed=seeds)
def test_every_utterance_is_in_exactly_one_client(index, crowd, rule, seed):
    store = index(crowd)
    population = build(store, seed=seed, **rule)
    rows = np.concatenate([client.utterances for client in population])
    assert np.array_equal(np.sort(rows), np.arange(store.user_utterances[-1]))
    assert not any(len(client.held_out) for client in population)
    empty = sum(not len(client.utterances) for client in population)
    assert empty == population.left_out.clients_without_speech
    assert not empty or rule["clients"] == "silo"
    assert population.seconds.sum() == pytest.approx(store.audio_offsets[-1] / SECOND)


@given(crowd=crowds, rule=speaker_rules, seed=seeds)
def test_no_speaker_is_in_two_clients_even_if_in_two_splits(index, crowd, rule, seed):
    clients = names_of(build(index(crowd), seed=seed, **rule))
    assert max(Counter(name for names in clients for name in names).values()) == 1


@given(crowd=crowds, rule=rules, part=seed_parts, seed=seeds)
def test_seed_and_federation_part_share_nobody_and_lose_nobody(index, crowd, rule, part, seed):
    store = index(crowd)
    seed_part, federation = (build(store, seed=seed, seed_part=part, part=p, **rule) for p in ("seed", "federation"))
    check_disjoint(seed_part, federation)
    sides = [set().union(*names_of(population)) for population in (seed_part, federation)]
    assert not sides[0] & sides[1]
    assert sides[0] | sides[1] == {name for _, name in crowd}


def test_one_person_in_the_splits_of_seed_and_federation_is_refused(index):
    store = index({("crowd", "ann"): [5], ("crowd", "bob"): [5], ("studio", "ann"): [5], ("studio", "eve"): [5]})
    studio, crowd = (build(store, split=split) for split in ("studio", "crowd"))
    with pytest.raises(InputError, match=r"1 speakers are in both .*speaker=ann"):
        check_disjoint(studio, crowd)


def anybody(count):
    """Speakers of one sample each, with keys as spread out as those of names."""
    keys = np.unique(np.random.Generator(np.random.Philox(5)).integers(0, 2**64, count, dtype=np.uint64))
    rows = Groups(members=np.arange(count), offsets=np.arange(count + 1))
    ones = np.ones(count, dtype=np.int64)
    return Speakers(keys=keys, rows=rows, samples=ones, utterances=ones)


@pytest.mark.parametrize(
    ("speakers", "fraction", "expected"),
    [
        # Table 2 of the flagship paper: Common Voice English (10 % and 5 %), French and German.
        (34_753, 0.1, 3_475),
        (34_753, 0.05, 1_737),
        (6_856, 0.1, 685),
        (7_127, 0.1, 712),
        # 0.29 * 100 is 28.999999999999996 in binary.
        (100, 0.29, 29),
    ],
)
def test_a_fraction_is_rounded_down_as_in_the_paper(speakers, fraction, expected):
    seed_part, federation = split_off_seed(anybody(speakers), rule=SeedPart(fraction=fraction), seed=3)
    assert (len(seed_part), len(federation)) == (expected, speakers - expected)


@given(count=st.integers(21, 200), leaver=st.integers(0, 19), fraction=st.sampled_from([0.05, 0.1, 0.5]), seed=seeds)
def test_when_somebody_leaves_at_most_one_other_changes_sides(count, leaver, fraction, seed):
    everybody = anybody(count)
    others = everybody.take(np.delete(np.arange(count), leaver))
    before, after = (
        {*split_off_seed(speakers, rule=SeedPart(fraction=fraction), seed=seed)[0].keys.tolist()}
        for speakers in (everybody, others)
    )
    assert len((before - {int(everybody.keys[leaver])}) ^ after) <= 1


@given(crowd=crowds, rule=rules, seed=seeds)
def test_clients_do_not_depend_on_rows(index, crowd, rule, seed):
    shifted = {("0 before", "somebody"): [7]} | crowd
    here, there = build(index(crowd), seed=seed, **rule), build(index(shifted), seed=seed, **rule)
    assert here.digest == there.digest
    assert [client.id for client in here] == [client.id for client in there]


@given(crowd=crowds, share=st.sampled_from([0.1, 0.5, 0.9]), seed=seeds)
def test_most_data_takes_the_largest_speakers(index, crowd, share, seed):
    store = index(crowd)
    rule = SeedPart(most_data_share=share)
    seed_part, federation = (build(store, seed=seed, seed_part=rule, part=p) for p in ("seed", "federation"))
    held = seed_part.seconds
    assert held.min() >= federation.seconds.max()
    total = store.audio_offsets[-1] / SECOND
    # As many as are needed, and not one more.
    assert held.sum() >= share * total * (1 - 1e-12)
    assert held.sum() - held.min() < share * total


@given(crowd=crowds, share=st.sampled_from([0.1, 0.5, 0.9]), seed=seeds)
def test_most_utterances_takes_those_who_said_most_often(index, crowd, share, seed):
    store = index(crowd)
    rule = SeedPart(most_utterances_share=share)
    seed_part, federation = (build(store, seed=seed, seed_part=rule, part=p) for p in ("seed", "federation"))
    said, rest = ([len(client.utterances) for client in part] for part in (seed_part, federation))
    assert min(said) >= max(rest)
    # As many as are needed, and not one more.
    assert sum(said) >= share * len(store.audio_offsets[1:]) > sum(said) - min(said)


@given(crowd=crowds, per_device=st.integers(2, 4), seed=seeds)
def test_devices_are_full_but_the_last_which_has_those_left_over(index, crowd, per_device, seed):
    population = build(index(crowd), seed=seed, clients="device", speakers_per_device=per_device)
    speakers = len({name for _, name in crowd})
    sizes = [len(names) for names in names_of(population)]
    assert sizes[:-1] == [per_device] * (speakers // per_device - (speakers % per_device == 0))
    assert sizes[-1] == (speakers % per_device or per_device)


def test_devices_made_up_of_a_queue_promise_nothing(index):
    # One who leaves, or joins, moves everybody behind them in the queue to another device.
    population = build(index(NINE), split="a", clients="device", speakers_per_device=2)
    assert population.privacy_unit is None
    assert "one who leaves moves others to other devices" in population.no_guarantee
    plan = {"population_size": 5, "cohort_size": 2, "clip_bound": 1.0, "noise_multiplier": 1.0, "delta": 1e-5}
    unit = {"privacy_unit": population.privacy_unit, "no_unit_reason": population.no_guarantee}
    assert PrivacySettings(**plan, **unit, root_seed=1).no_guarantee_reason == population.no_guarantee
    with pytest.raises(
        InputError, match=r"mode=secure is for releases with a guarantee.* moves others to other devices"
    ):
        PrivacySettings(**plan, **unit, mode="secure")


def held_by(population):
    """What each client trains and tests on: by names and places, since rows move when somebody comes or goes."""
    store = population.store

    def named(rows):
        owners = np.searchsorted(store.user_utterances, rows, side="right") - 1
        splits = [next(split for split, span in store.splits.items() if owner in span) for owner in owners]
        places = (rows - store.user_utterances[owners]).tolist()
        return [*zip(splits, (store.user(owner).name for owner in owners), places, strict=True)]

    return {client.id: (named(client.utterances), named(client.held_out)) for client in population}


some_limits = st.fixed_dictionaries(
    {}, optional={"max_seconds": st.floats(0.5, 12), "holdout": st.sampled_from([0.1, 0.5])}
)


@given(
    crowd=crowds,
    rule=st.sampled_from([{"clients": "speaker"}, *({"clients": "silo", "silos": n} for n in (1, 3, 8))]),
    limits=some_limits,
    whose=st.integers(0, 11),
    seed=seeds,
)
def test_who_leaves_or_says_more_changes_no_client_but_their_own(index, crowd, rule, limits, whose, seed):
    names = sorted({name for _, name in crowd})
    person = names[whose % len(names)]
    without = {key: said for key, said in crowd.items() if key[1] != person}
    assume({split for split, _ in without} == {*ALL})
    tripled = {key: [*said, *said, *said] if key[1] == person else said for key, said in crowd.items()}
    here = build(index(crowd), seed=seed, **rule, **limits)
    own = next(client.id for client, names in zip(here, names_of(here), strict=True) if person in names)
    others = {name: held for name, held in held_by(here).items() if name != own}
    for neighbour in (without, tripled):
        there = build(index(neighbour), seed=seed, **rule, **limits)
        assert {name: held for name, held in held_by(there).items() if name != own} == others
        if rule["clients"] == "silo":
            assert [client.id for client in there] == [f"silo-{number}" for number in range(rule["silos"])]


def test_silos_are_about_as_many_people_each(index):
    population = build(index({("train", f"{i}"): [1] for i in range(3000)}), split="train", clients="silo", silos=10)
    # 3000 fair draws: five standard deviations of Binomial(3000, 1/10) are 82.
    sizes = [len(client.speakers) for client in population]
    assert max(abs(size - 300) for size in sizes) < 5 * math.sqrt(3000 * 0.1 * 0.9)


def test_a_silo_that_nobody_falls_into_stays_a_client(index):
    population = build(index(NINE), split="a", clients="silo", silos=40, max_seconds=2.0, holdout=0.5)
    assert len(population) == population.describe()["population_size"] == 40
    empty = [client for client in population if not len(client.speakers)]
    assert len(empty) == population.left_out.clients_without_speech >= 31
    assert all(not len(client.utterances) and client.seconds == 0 for client in empty)
    assert population.privacy_unit == "silo with all its speakers"


@given(crowd=crowds, silos=st.integers(1, 8), seed=seeds)
def test_balanced_silos_differ_by_no_more_than_one_speaker_and_promise_nothing(index, crowd, silos, seed):
    store = index(crowd)
    population = build(store, seed=seed, clients="silo", silos=silos, balance="seconds")
    longest = build(store, seed=seed).seconds.max()
    assert len(population) == silos
    assert population.seconds.max() - population.seconds.min() <= longest * (1 + 1e-12)
    assert population.privacy_unit is None
    assert "clients.balance divides speakers by how much each has said" in population.no_guarantee


def test_balance_is_recorded_where_it_is_asked_for(index):
    found = [
        build(index(NINE), split="a", clients="silo", silos=3, **asked).describe()["settings"]
        for asked in ({}, {"balance": "seconds"})
    ]
    assert "balance" not in found[0]
    assert found[1] == found[0] | {"balance": "seconds"}


@given(crowd=crowds, seed=seeds)
def test_iid_keeps_amounts_and_promises_nothing(index, crowd, seed):
    store = index(crowd)
    own, iid = build(store, seed=seed), build(store, seed=seed, clients="iid")
    assert [len(client.utterances) for client in iid] == [len(client.utterances) for client in own]
    assert iid.privacy_unit is None
    assert iid.describe()["no_guarantee"]
    assert own.privacy_unit == "speaker"
    assert own.no_guarantee is None


@given(crowd=crowds, seed=seeds)
def test_iid_uniform_deals_everything_out_and_promises_nothing(index, crowd, seed):
    store = index(crowd)
    own, iid = build(store, seed=seed), build(store, seed=seed, clients="iid_uniform")
    assert np.array_equal(np.sort(iid.utterance_rows()), np.sort(own.utterance_rows()))
    assert 1 <= len(iid) <= len(own)
    assert min(len(client.utterances) for client in iid) >= 1
    assert iid.privacy_unit is None
    assert "iid_uniform" in iid.describe()["no_guarantee"]


def test_iid_uniform_draws_a_client_for_each_utterance(index):
    """One speaker has nearly everything; each of the clients gets about the same all the same."""
    crowd = {("a", "talkative"): [1] * 4000} | {("a", f"{i}"): [1] for i in range(9)}
    population = build(index(crowd), split="a", clients="iid_uniform")
    # 4,009 utterances on 10 clients: 401 each, with a standard deviation of √(4009·0.1·0.9) = 19; six of them are 114.
    assert len(population) == 10
    assert all(abs(len(client.utterances) - 401) < 114 for client in population)


def test_iid_mixes_speakers(index):
    population = build(index({(s, f"{i}"): [1] * 20 for s in ALL for i in range(20)}), clients="iid")
    # 20 speakers with 40 utterances each: 40 draws from 20 speakers miss a given one with probability 0.13.
    assert np.mean([len(names) for names in names_of(population)]) == pytest.approx(20 * (1 - 0.95**40), abs=1.5)


@given(crowd=crowds, rule=rules, cap=st.floats(0.01, 12), seed=seeds)
def test_caps_are_respected_and_counted(index, crowd, rule, cap, seed):
    store = index(crowd)
    whole, population = build(store, seed=seed, **rule), build(store, seed=seed, max_seconds=cap, **rule)
    for before, after in zip(whole, population, strict=True):
        assert {*after.utterances} <= {*before.utterances}
        held = samples_of(store, after.utterances)
        assert held / SECOND == after.seconds == population.seconds[after.index]
        if before.seconds <= cap:
            assert len(after.utterances) == len(before.utterances)
        elif held > cap * SECOND:
            # Only where nothing fits, and then it is the shortest one.
            shortest = min(samples_of(store, before.utterances[[i]]) for i in range(len(before.utterances)))
            assert (len(after.utterances), held) == (1, shortest)
    left_out = population.left_out
    assert left_out.clients_above_max_seconds == int((whole.seconds > cap).sum())
    assert left_out.clients_still_above_max_seconds == int((population.seconds > cap).sum())
    assert left_out.hours_above_max_seconds * 3600 == pytest.approx(whole.seconds.sum() - population.seconds.sum())


@given(crowd=crowds, rule=rules.filter(lambda rule: rule["clients"] != "silo"), floor=st.floats(0.01, 12), seed=seeds)
def test_floors_are_respected_and_counted(index, crowd, rule, floor, seed):
    whole = build(index(crowd), seed=seed, **rule)
    enough = whole.seconds >= floor
    assume(enough.any())
    population = build(index(crowd), seed=seed, min_seconds=floor, **rule)
    assert np.array_equal(population.seconds, whole.seconds[enough])
    assert population.left_out.clients_below_min_seconds == int((~enough).sum())
    lost = whole.seconds[~enough].sum()
    assert population.left_out.hours_below_min_seconds * 3600 == pytest.approx(lost, abs=1e-6)


@given(crowd=crowds, rule=rules, holdout=st.sampled_from([0.1, 0.3, 0.5]), cap=st.none() | st.floats(1, 12), seed=seeds)
def test_holdout_is_apart_from_training_and_at_least_two(index, crowd, rule, holdout, cap, seed):
    store = index(crowd)
    whole = build(store, seed=seed, max_seconds=cap, **rule)
    population = build(store, seed=seed, max_seconds=cap, holdout=holdout, **rule)
    for before, after in zip(whole, population, strict=True):
        assert sorted([*after.utterances, *after.held_out]) == before.utterances.tolist()
        count = len(before.utterances)
        expected = max(2, math.floor(holdout * count + 1e-9)) if count >= 4 else 0
        assert len(after.held_out) == expected <= len(after.utterances)
    without = sum(len(client.held_out) == 0 for client in population)
    assert population.left_out.clients_without_holdout == without


NINE = {("a", f"speaker-{i}"): [1000 * (i + 1) + j for j in range(i % 4 + 1)] for i in range(9)}
SEEDED = {
    "device": {"clients": "device", "speakers_per_device": 2},
    "silo": {"clients": "silo", "silos": 3},
    "silo, balanced": {"clients": "silo", "silos": 3, "balance": "seconds"},
    "iid": {"clients": "iid"},
    "iid, drawn": {"clients": "iid_uniform"},
    "seed part": {"seed_part": SeedPart(fraction=0.3)},
    "cap": {"max_seconds": 0.9},
    "hold-out": {"holdout": 0.1},
}


@pytest.mark.parametrize("name", SEEDED)
def test_another_seed_gives_another_population(index, name):
    store = index({("a", f"{i}"): [4000 + 100 * j for j in range(i % 7 + 1)] for i in range(40)})
    clients = [
        [(c.id, c.utterances.tolist(), c.held_out.tolist()) for c in build(store, seed=s, split="a", **SEEDED[name])]
        for s in (1, 1, 2)
    ]
    assert clients[0] == clients[1] != clients[2]


def test_a_record_is_json_and_ids_are_names(index):
    population = build(index(NINE), split="a", clients="device", speakers_per_device=2, min_seconds=0.1)
    record = json.loads(json.dumps(population.describe(), allow_nan=False))
    assert record["population_size"] == len(population) == 5
    assert record["settings"]["split"] == ["a"]
    assert record["digest"] == population.digest
    client = population.client(0)
    assert client.id == "+".join(sorted(population.store.user(row).name for row in client.speakers))
    assert client.key == name_key(client.id)
    for index_ in (-1, 5):
        with pytest.raises(IndexError, match="expected 0 to 4"):
            population.client(index_)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"split": "train"}, "split=train: store crowd has a"),
        ({"split": ()}, "split: expected at least one name"),
        ({"clients": "phone"}, "clients=phone: expected one of speaker, device, silo, iid"),
        (
            {"clients": "silo", "silos": 3, "min_seconds": 1},
            "min_seconds=1 with clients=silo: every silo stays a client",
        ),
        ({"clients": "silo", "silos": 0}, "silos=0: expected at least 1"),
        ({"clients": "silo"}, "silos=None: given exactly when clients=silo"),
        ({"silos": 3}, "silos=3: given exactly when clients=silo, but clients=speaker"),
        ({"balance": "seconds"}, "balance=seconds: only silos are balanced, but clients=speaker"),
        ({"clients": "device", "speakers_per_device": 1}, "speakers_per_device=1: expected at least 2"),
        ({"min_seconds": 1e6}, "min_seconds=1000000.0: no client has as much, the longest has 2.0 s"),
        ({"min_seconds": 3, "max_seconds": 2}, "min_seconds=3: expected no more than max_seconds=2"),
        ({"max_seconds": 0}, "max_seconds=0: expected a positive number"),
        ({"max_seconds": math.inf}, "max_seconds=inf: expected a positive number"),
        ({"holdout": 0.6}, "holdout=0.6: expected a share above 0 and at most 0.5"),
        ({"part": "seed"}, "part=seed: expected a seed_part"),
        ({"part": "rest"}, "part=rest: expected one of federation, seed"),
    ],
)
def test_impossible_settings_say_what_was_expected(index, settings, message):
    store = index(NINE)
    with pytest.raises(InputError, match=message):
        build_population(store, PopulationSettings(**{"split": "a"} | settings), seed=1)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({}, "expected exactly one of fraction, most_data_share, most_utterances_share, found none"),
        ({"fraction": 0.1, "most_data_share": 0.5}, "found fraction and most_data_share"),
        ({"fraction": 0}, "fraction=0: expected a number between 0 and 1"),
        ({"fraction": 1.0}, "fraction=1.0: expected a number between 0 and 1"),
        ({"fraction": math.nan}, "fraction=nan: expected"),
        ({"fraction": 0.1}, "fraction=0.1: of 9 speakers this leaves none for the seed part"),
        ({"most_utterances_share": 1}, "most_utterances_share=1: expected a number between 0 and 1"),
        ({"most_data_share": 0.999}, "most_data_share=0.999: of 9 speakers this leaves none for the federation part"),
    ],
)
def test_impossible_seed_parts_say_what_was_expected(index, part, message):
    store = index(NINE)
    with pytest.raises(InputError, match=message):
        build_population(store, PopulationSettings(split="a", seed_part=SeedPart(**part)), seed=1)
