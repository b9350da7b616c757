"""An invitation: one digest for all that a client computes and sends, and words for a person."""

import contextlib
import json
import re
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.network.conftest import MakeCluster
from tests.network.local_cluster import LocalCluster, content, recipe_of

import sottovoce
from sottovoce.base.errors import InputError
from sottovoce.config import DataSettings, FederationSettings, PrivacySection, Recipe
from sottovoce.network import client_recipe
from sottovoce.network import invitation as invitations
from sottovoce.network.invitation import Invitation, SecureSums, pack_invitation, unpack_invitation
from sottovoce.network.node.consent import describe_invitation
from sottovoce.privacy.noise_shares import NoiseShares
from sottovoce.privacy.planner import plan_run


@pytest.fixture
def local_cluster(make_cluster: MakeCluster) -> LocalCluster:
    return make_cluster()


def test_it_comes_back(local_cluster: LocalCluster) -> None:
    for sent in (local_cluster.invitation, local_cluster.invite(secure=SecureSums(least=4, neighbours=6), sum_bits=32)):
        found = Invitation.read(sent.content)
        assert found.digest == sent.digest
        assert found.plan(local_cluster.layout) == sent.plan(local_cluster.layout)
        certificate, content = unpack_invitation(pack_invitation(sent, b"certificate"))
        assert (certificate, content) == (b"certificate", sent.content)


def test_every_setting_is_a_clients_business_or_is_not() -> None:
    """Whoever adds a setting to recipes says here whether clients' updates hang on it."""
    for section, ours, others in (
        (Recipe, client_recipe.RECIPE, client_recipe.NOT_OF_RECIPE),
        (DataSettings, client_recipe.DATA, client_recipe.NOT_OF_DATA),
        (FederationSettings, client_recipe.FEDERATION, client_recipe.NOT_OF_FEDERATION),
    ):
        assert set(ours) | set(others) == set(section.model_fields)
        assert not set(ours) & set(others)
    assert set(client_recipe.NOT_OF_PRIVACY) <= {option.name for option in fields(PrivacySection)}


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 6},
        {"model": {"size": "tiny", "layers": 2, "width": 32}},
        {"model": {"size": "tiny", "features": {"normalise": "filter"}}},
        {"federation.local": {"batch_seconds": 2, "lr": 0.1, "local_steps": 2, "narrow_band": {"share": 0.5}}},
        {"federation.local": {"batch_seconds": 2, "lr": 0.1, "local_steps": 2, "speeds": [0.95, 1.05]}},
        {"federation.local": {"batch_seconds": 2, "lr": 0.1, "local_steps": 2, "dropped_chunks": {"most": 2}}},
        {"data": {"store": "tones", "people_seed": 3}},
        {"data": {"store": "tones", "longest_seconds": 5.0}},
        {"federation.steps": 13},
        {"federation.cohort_size": 5},
        {"federation.trainable": "output"},
        {"federation.clients": {"max_seconds": 3.0}},
        {"federation.clients": {"holdout": 0.2}},
        {"federation.local": {"batch_seconds": 2, "lr": 0.2, "local_steps": 2}},
        {"federation.local": {"batch_seconds": 2, "lr": 0.1, "local_steps": 2, "clip_gradients": ".inf"}},
        {"federation.local": {"batch_seconds": 2, "lr": 0.1, "local_epochs": 1}},
        {"federation.privacy": {"clip_bound": 0.1, "noise_multiplier": 8.0, "delta": 1e-3}},
        {"federation.privacy": {"clip_bound": 0.05, "noise_multiplier": 9.0, "delta": 1e-3}},
        {"federation.privacy": {"clip_bound": 0.05, "noise_multiplier": 8.0, "delta": 1e-4}},
        {"federation.privacy": {"clip_bound": 0.05, "noise_multiplier": 8.0, "delta": 1e-3, "share": "dim"}},
        {"federation.privacy": {"clip_bound": 0.05, "noise_multiplier": 8.0, "delta": 1e-3, "mode": "secure"}},
        {"federation.precision": "float32"},
        {"federation.model_bits": 16},
        {"federation.expected_answers": 3},
        {"federation.training_seconds": 30.0},
        {"federation.clients": {"holdout": 0.2}, "federation.client_wer": {"words": 9, "noise_multiplier": 8.0}},
    ],
    ids=str,
)
def test_what_changes_an_update_changes_the_digest(local_cluster: LocalCluster, change: dict[str, Any]) -> None:
    assert local_cluster.invite(changed(change)).digest != local_cluster.invitation.digest


@pytest.mark.parametrize(
    "change",
    [
        {"about": "other words"},
        {"data": {"store": "elsewhere", "dev": "test", "test": ["dev"]}},
        {"federation.server": {"optimiser": {"name": "sgd"}, "schedule": {"name": "constant", "lr": 1.0}}},
        {"federation.evaluate_every": 3},
        {"federation.engine": "sequential"},
        {"federation.patience": 3},
        {"federation.local": {"batch_seconds": 2.0, "lr": 1e-1, "local_steps": 2, "local_epochs": None}},
    ],
    ids=str,
)
def test_what_is_the_servers_business_does_not(local_cluster: LocalCluster, change: dict[str, Any]) -> None:
    assert local_cluster.invite(changed(change)).digest == local_cluster.invitation.digest


@pytest.mark.parametrize("option", ["start", "sum_bits", "secure", "layout", "people"])
def test_what_stands_beside_the_recipe_counts_too(local_cluster: LocalCluster, option: str) -> None:
    if option == "people":
        before = local_cluster.invitation.digest
        local_cluster.people = local_cluster.people[:-1]
        assert local_cluster.invite().digest != before
        return
    other = {
        "start": local_cluster.start_bytes + b"x",
        "sum_bits": 32,
        "secure": SecureSums(least=3),
        "layout": type(local_cluster.layout)(local_cluster.layout.names[::-1], local_cluster.layout.shapes[::-1]),
    }
    assert local_cluster.invite(**{option: other[option]}).digest != local_cluster.invitation.digest


def changed(change: dict[str, Any]) -> Recipe:
    given = content()
    for name, value in change.items():
        *path, last = name.split(".")
        section = given
        for part in path:
            section = section[part]
        section[last] = value
    if given["federation"]["local"].get("clip_gradients") == ".inf":
        given["federation"]["local"]["clip_gradients"] = float("inf")
    return recipe_of(given)


# What cannot be asked of people.


@pytest.mark.parametrize(
    ("federation", "problem"),
    [
        ({"privacy": {"clip_bound": float("inf"), "noise_multiplier": 0.0}}, "clip_bound=inf: over a network"),
        ({"privacy": {"adaptive": {"target_quantile": 0.5, "count_noise_std": 10.0}}}, "people accept one clip bound"),
        ({"privacy": {"noise_multiplier": 0.0, "weighting": "utterances"}}, "hangs on what others send"),
        ({"local": {"batch_seconds": 2, "lr": 0.1, "time_line": {}}}, "would learn who has how much left"),
        ({"clients": {"rule": "device", "speakers_per_device": 2}}, "rule=device: over a network"),
        ({"clients": {"rule": "iid"}}, "rule=iid: over a network"),
        ({"clients": {"rule": "silo", "silos": 4}}, "silos=4: the roster has 9"),
        (
            {"clients": {"rule": "silo", "silos": 9, "balance": "seconds"}, "privacy": {"noise_multiplier": None}},
            "clients.balance=seconds: over a network silos are as they are",
        ),
        ({"privacy": {"population_size": 8}}, "population_size=8: the roster has 9"),
        ({"cohort_size": 10}, "cohort_size=10"),
        ({"clients": {"min_seconds": 1}, "privacy": {"mode": "secure"}}, "min_seconds"),
    ],
)
def test_a_recipe_that_a_network_cannot_carry_is_refused(
    local_cluster: LocalCluster, federation: dict[str, Any], problem: str
) -> None:
    with pytest.raises(InputError, match=re.escape(problem)):
        local_cluster.invite(recipe_of(content(**federation)))


def test_central_training_invites_nobody(local_cluster: LocalCluster) -> None:
    given = content()
    del given["federation"]
    given["central"] = {
        "steps": 1,
        "batch_seconds": 4,
        "optimiser": {"name": "sgd"},
        "schedule": {"name": "constant", "lr": 0.5},
    }
    with pytest.raises(InputError, match="central training has no clients"):
        local_cluster.invite(recipe_of(given))


@pytest.mark.parametrize("least", [2, 10])
def test_sums_of_too_few_or_too_many_are_refused(local_cluster: LocalCluster, least: int) -> None:
    with pytest.raises(InputError, match=f"least={least}"):
        local_cluster.invite(secure=SecureSums(least=least))


# Reading one.


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=200))
def test_any_bytes_are_one_line(data: bytes) -> None:
    with pytest.raises(InputError) as raised:
        Invitation.read(data)
    assert "\n" not in str(raised.value)


@given(data=st.binary(max_size=40))
def test_a_letter_is_whole_or_cut_short(data: bytes) -> None:
    with contextlib.suppress(InputError):
        certificate, rest = unpack_invitation(data)
        assert len(certificate) + len(rest) + 4 == len(data)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something stands in a letter."""
    if path:
        yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, each in inside:
        yield from places(each, (*path, name))


ODD = st.sampled_from(
    [None, True, -1, 0, 2, 10**30, 1e300, 0.5, "", "inf", "nan", "x", "os:path", [], [1], {}, {"a": 1}]
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_changed_letter_is_one_line_or_says_what_it_says(local_cluster: LocalCluster, data: st.DataObject) -> None:
    found = json.loads(local_cluster.invitation.content)
    for _ in range(2):
        *path, last = data.draw(st.sampled_from(list(places(found))))
        section = found
        for part in path:
            section = section[part]
        section[last] = deepcopy(data.draw(ODD))  # what is drawn next may change what lies in it
    sent = json.dumps(found, sort_keys=True, separators=(",", ":")).encode()
    try:
        assert Invitation.read(sent).content == sent
    except InputError as error:
        problem = str(error)
    else:
        problem = ""
    assert "\n" not in problem


def test_a_letter_is_bounded_before_it_is_read() -> None:
    with pytest.raises(InputError, match="expected at most"):
        Invitation.read(bytes(invitations.LARGEST + 1))


def letter(local_cluster: LocalCluster, *path: str, value: object) -> bytes:
    """The cluster's invitation with one thing changed, in canonical form."""
    found = json.loads(local_cluster.invitation.content)
    section = found
    for part in path[:-1]:
        section = section[part]
    section[path[-1]] = value
    return json.dumps(found, sort_keys=True, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        (("recipe", "model", "family"), "antigravity:FLY", "expected one of ctc_transformer"),
        (("recipe", "federation", "local", "optimiser", "name"), "antigravity:Fly", "expected one of sgd"),
        (("recipe", "federation", "local", "optimiser"), "sgd", "expected one of sgd"),
        (("recipe", "tokens"), {"file": "/etc/passwd"}, "expected seed, data, model, federation, each once"),
        (("recipe", "data", "prepare"), {"manifests": ["/etc/passwd"]}, "expected train, people_seed"),
        (("recipe", "federation", "seed_model"), "/etc", "expected steps, cohort_size"),
        (("recipe", "federation"), None, "expected steps, cohort_size"),
        (("recipe", "federation", "steps"), 12.0, "not in its canonical form"),
        (("recipe", "federation", "steps"), 0, "federation.steps"),
        (("recipe", "federation", "privacy", "clip_bound"), "inf", "clip_bound is infinite"),
        (("nodes",), [], "population"),
        (("nodes",), ["00"], "expected a key of ECDSA P-384"),
        (("start",), "00", "of no model"),
        (("start",), "zz", "of no model"),
        (("length",), -1, "of no model"),
        (("sum_bits",), 16, "sum_bits"),
        (("secure",), {"least": 3, "neighbours": None, "trust": True}, "secure"),
        (("unknown",), 1, "unknown"),
        (("sottovoce",), "9.9", f"expected {sottovoce.__version__}, as it is here"),
    ],
    ids=str,
)
def test_a_letter_that_asks_for_something_else_is_refused(
    local_cluster: LocalCluster, path: tuple[str, ...], value: object, problem: str
) -> None:
    with pytest.raises(InputError, match=re.escape(problem)):
        Invitation.read(letter(local_cluster, *path, value=value))


def test_a_node_is_not_counted_twice(local_cluster: LocalCluster) -> None:
    found = json.loads(local_cluster.invitation.content)
    with pytest.raises(InputError, match="names a node twice"):
        Invitation.read(letter(local_cluster, "nodes", value=[*found["nodes"][1:], found["nodes"][1]]))


def test_another_spelling_is_refused(local_cluster: LocalCluster) -> None:
    spaced = json.dumps(json.loads(local_cluster.invitation.content), sort_keys=True).encode()
    with pytest.raises(InputError, match="canonical form"):
        Invitation.read(spaced)


# In words.


def test_words_say_what_is_asked(local_cluster: LocalCluster) -> None:
    said = "\n".join(describe_invitation(local_cluster.invitation))
    for found in (
        "family ctc_transformer, all of it",
        f"{local_cluster.layout.dimension:,} parameters",
        "2 local steps",
        "at most 2 s of speech",
        "never longer than 0.05 (the clip bound)",
        "the server sees your update by itself, before any noise",
        "8 times the clip bound",
        "nothing. This is a rehearsal",
        "12 rounds",
        "probability 0.444 (4 of 9 people): about 5.33 times",
    ):
        assert found in said


def test_words_of_a_release_have_its_epsilon(local_cluster: LocalCluster) -> None:
    release = recipe_of(content(privacy={"mode": "secure"}, trainable="lora(r=2)"))
    said = "\n".join(describe_invitation(local_cluster.invite(release)))
    planned = plan_run(9, cohort_size=4, central_steps=12, delta=1e-3, noise_multiplier=8.0)
    assert f"ε = {planned.epsilon.pld:,.4g} (PLD) / {planned.epsilon.rdp:,.4g} (RDP) at δ = 0.001" in said
    assert "for each speaker, for all rounds together" in said
    assert "lora(r=2)" in said
    assert "never more than 12" in said


def test_a_budget_that_no_node_can_hold_a_server_to_takes_nothing_from_epsilon(local_cluster: LocalCluster) -> None:
    private = {"mode": "secure"}
    free, bounded = (
        local_cluster.invite(recipe_of(content(privacy=private | one))).epsilon for one in ({}, {"epsilon_budget": 0.2})
    )
    assert free is not None
    assert free == bounded
    assert free.rdp > 0.2


def test_words_of_masks_say_who_sees_that_somebody_takes_part(local_cluster: LocalCluster) -> None:
    """Sampling hides nobody from those who are in the same sum: their keys are on one list."""
    private = {"mode": "secure", "sampling": "fixed_size"}
    said = "\n".join(
        describe_invitation(local_cluster.invite(recipe_of(content(privacy=private)), secure=SecureSums(least=4)))
    )
    assert "sums of at least 4 people" in said
    once = plan_run(9, cohort_size=9, central_steps=1, delta=1e-3, noise_multiplier=8.0).epsilon
    assert "people in the same sum see that you are in it" in said
    assert f"each one tells them ε = {once.pld:,.4g} (PLD)" in said
    everybody = local_cluster.invite(
        recipe_of(content(privacy={"mode": "secure"}, cohort_size=9)), secure=SecureSums(least=4)
    )
    assert "tells them" not in "\n".join(
        describe_invitation(everybody)
    )  # nothing is hidden by sampling there, nor promised


def test_words_of_few_neighbours_say_against_whom_they_hold(local_cluster: LocalCluster) -> None:
    said = "\n".join(describe_invitation(local_cluster.invite(secure=SecureSums(least=4, neighbours=6))))
    assert "sums of at least 4 people, as long as it does not lie about who takes part" in said


def test_words_of_a_rehearsal_do_not_bound_how_often(local_cluster: LocalCluster) -> None:
    """Lost rounds are made again there (`Participant`), as often as the server says they were lost."""
    said = "\n".join(describe_invitation(local_cluster.invitation))
    assert "never more than" not in said
    assert "once more for every round that the server repeats. In a simulation nothing limits its repeats." in said


def test_words_warn_of_a_delta_that_promises_nothing(local_cluster: LocalCluster) -> None:
    said = "\n".join(
        describe_invitation(local_cluster.invite(recipe_of(content(privacy={"mode": "secure", "delta": 0.5}))))
    )
    assert "delta=0.5 is not below 1/population_size" in said


def test_words_of_noise_by_clients(local_cluster: LocalCluster) -> None:
    release = recipe_of(content(privacy={"mode": "secure"}, cohort_size=9))
    shares = NoiseShares(most=9, least=5, colluding=1)
    said = "\n".join(
        describe_invitation(local_cluster.invite(release, secure=SecureSums(least=5), noise_shares=shares))
    )
    by_server = plan_run(9, cohort_size=9, central_steps=1, delta=1e-3, noise_multiplier=8.0 * (4 / 8) ** 0.5)
    assert f"tells it ε = {by_server.epsilon.pld:,.4g} (PLD)" in said
    assert "if no more than 1 others tell it their share" in said


@pytest.mark.parametrize("sampling", ["poisson", "fixed_size"])
def test_a_release_whose_sums_may_be_of_too_few_is_refused(local_cluster: LocalCluster, sampling: str) -> None:
    """Whether a sum was opened would tell who was drawn, which is what its ε counts on nobody knowing."""
    release = recipe_of(content(privacy={"mode": "secure", "sampling": sampling}))
    if sampling == "poisson":
        with pytest.raises(InputError, match="least=3: of 9 people, cohorts of about 4 are smaller"):
            local_cluster.invite(release, secure=SecureSums(least=3))
    else:
        assert local_cluster.invite(release, secure=SecureSums(least=4))
        with pytest.raises(InputError, match="least=5"):
            local_cluster.invite(release, secure=SecureSums(least=5))
    assert local_cluster.invite(release)
    everybody = recipe_of(content(privacy={"mode": "secure"}, cohort_size=9))
    assert local_cluster.invite(everybody, secure=SecureSums(least=9))


def test_noise_by_clients_needs_sums_of_as_many(local_cluster: LocalCluster) -> None:
    release = recipe_of(content(privacy={"mode": "secure"}, cohort_size=9))
    shares = NoiseShares(most=9, least=5, colluding=1)
    for secure in (None, SecureSums(least=4)):
        with pytest.raises(InputError, match="secure sums of as many people at least"):
            local_cluster.invite(release, secure=secure, noise_shares=shares)


def test_words_of_weights_and_no_noise(local_cluster: LocalCluster) -> None:
    private = {"noise_multiplier": 0.0, "weighting": "seconds", "weight_cap": 30.0}
    said = "\n".join(describe_invitation(local_cluster.invite(recipe_of(content(privacy=private)))))
    assert "Noise: none." in said
    assert "counts by your seconds, up to 30 of them" in said
