"""A node's personal part: in its home, for its owner alone, and in no answer."""

from pathlib import Path

from tests.network.conftest import MakeCluster
from tests.network.local_cluster import NAMES, LocalCluster, content

from sottovoce.federated.personal import PersonalTraining
from sottovoce.models.personal_part import apply_personal_part, load_personal_part
from sottovoce.models.recogniser import load_recogniser
from sottovoce.network.messages import AnswerCode, OrderKind

ANNA = NAMES[0]
OWN = PersonalTraining(part="output", steps=2, lr=0.05, folds=2)


def answers(cluster: LocalCluster, *, personal: PersonalTraining | None) -> list[bytes]:
    """What Anna answers in two rounds and to the end of the run."""
    cluster.welcome(ANNA, personal=personal)
    found = [cluster.ask(ANNA, cluster.train(ANNA, step=step)).payload for step in range(2)]
    cluster.ask(ANNA, cluster.order(ANNA, OrderKind.END, step=2))
    return found


def test_answers_are_the_same_with_and_without(make_cluster: MakeCluster) -> None:
    with_part, without = make_cluster(content(steps=2)), make_cluster(content(steps=2))
    sent = answers(with_part, personal=OWN)
    assert sent == answers(without, personal=None)
    assert all(any(update) for update in sent)
    homes = [cluster.place / ANNA / "home" for cluster in (with_part, without)]
    with_part.joined[ANNA].train_own_part()
    without.joined[ANNA].train_own_part()
    kinds = [{path.relative_to(home).parts[0] for path in home.rglob("*")} for home in homes]
    assert kinds[0] - kinds[1] == {"personal"}


def test_the_part_stays_in_the_home_and_belongs_to_the_model_there(make_cluster: MakeCluster, four_each: Path) -> None:
    cluster = make_cluster(content(steps=2), stores=four_each)
    answers(cluster, personal=OWN)
    participant, place = cluster.joined[ANNA], cluster.place / ANNA / "home" / "personal"
    assert {path.name for path in place.iterdir()} == {"received"}  # an answer waits for no training
    participant.train_own_part()
    assert {path.name for path in place.iterdir()} == {"received", "model", "part"}
    assert place.stat().st_mode & 0o777 == 0o700
    private = [place / "received", *(place / "part").iterdir()]
    assert {path.stat().st_mode & 0o777 for path in private} == {0o600}
    model = load_recogniser(place / "model")
    apply_personal_part(model, load_personal_part(place / "part"), where="part")
    assert any("errors by the public model" in line for line in cluster.said)
    assert any("sottovoce transcribe" in line for line in cluster.said)
    cluster.said.clear()
    participant.train_own_part()  # once for a run
    assert cluster.said == []


def test_a_run_that_sent_no_model_leaves_no_part(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(content(steps=2))
    participant = cluster.welcome(ANNA, personal=OWN)
    ended = cluster.ask(ANNA, cluster.order(ANNA, OrderKind.END, step=2))
    assert ended.code is AnswerCode.DONE
    participant.train_own_part()
    assert cluster.said == ["no model of this run has come to this node: there is no personal part"]


def test_a_home_that_cannot_keep_the_model_answers_all_the_same(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster(content(steps=2))
    participant = cluster.welcome(ANNA, personal=OWN)
    (cluster.place / ANNA / "home" / "personal").write_bytes(b"")  # a file where the folder would be
    assert cluster.ask(ANNA, cluster.train(ANNA)).code is AnswerCode.DONE
    assert any("this round's model cannot be kept" in line for line in cluster.said)
    assert participant.is_here()
