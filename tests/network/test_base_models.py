"""Pretrained models over a network: the base model lies at every node, and what is trained travels alone."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("transformers", reason="transformers is not installed (the extra `hf`)")

from tests.models.huggingface.tiny_models import KINDS, write_tiny_model
from tests.network.conftest import MakeCluster
from tests.network.local_cluster import LocalCluster, content
from tests.network.places import ROUNDS, Place, check_same
from tests.network.test_same_as_simulated import compare
from tests.network.test_served import Settled, finished, settled, until
from tests.tones import pack_tones, speaker

from sottovoce.base.errors import InputError
from sottovoce.base.seeds import name_key
from sottovoce.cli.join import join
from sottovoce.data.text.pretrained_tokens import read_pretrained_tokens
from sottovoce.models.huggingface import folder as folders
from sottovoce.models.trainable import Frozen
from sottovoce.network.invitation import Invitation, SecureSums
from sottovoce.network.messages import AnswerCode, OrderKind, parse_order
from sottovoce.network.model_transfer import read_start_model, write_start_model
from sottovoce.network.node.consent import describe_invitation
from sottovoce.network.transport.link import AnswerFunction
from sottovoce.privacy.ledger import verify
from sottovoce.training.run_folder import LEDGER

__all__ = ["settled"]  # a fixture

NUMBERS = (0, 1, 2)
THREE = sorted((speaker(number).name for number in NUMBERS), key=name_key)
LORA = "lora(r=2)"
# Of which no part of a base model's weights may be found in anything that travels.
PIECE = 16


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model("moonshine", tmp_path_factory.mktemp("models") / "tiny-moonshine", seed=61)


@pytest.fixture(scope="module")
def three_stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three people's own stores, and all of them, with others to judge by, as `tones`."""
    folder = tmp_path_factory.mktemp("three")
    pack_tones(folder / "tones", people=[*NUMBERS, 3, 4], letters=(2, 3), utterances=2)
    for number in NUMBERS:
        pack_tones(folder / speaker(number).name, people=[number], letters=(2, 3), utterances=2)
    return folder


@pytest.fixture
def at_every_node(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(folders.MODELS, str(base.parent))


def model_of(base: Path, **options: Any) -> dict[str, Any]:
    return {"family": "huggingface", "from": str(base), "train": LORA} | options


def recipe_content(base: Path, *, model: dict[str, Any] | None = None, **federation: Any) -> dict[str, Any]:
    return content(**federation) | {"model": model_of(base, **(model or {}))}


# The model of a simulation.


@pytest.mark.usefixtures("at_every_node")
@pytest.mark.parametrize(
    "model",
    [
        {"train": LORA},
        {"train": "lora(r=2, factors=b)"},
        {"train": "norms"},
        {"train": "all"},
        {"train": "lora(r=2), output", "head": "ctc"},
    ],
    ids=str,
)
def test_every_part_makes_the_model_of_a_simulation(
    make_cluster: MakeCluster, tmp_path: Path, base: Path, model: dict[str, Any]
) -> None:
    local_cluster = make_cluster(recipe_content(base, model=model))
    compare(local_cluster, tmp_path)
    head = sum(p.numel() for name, p in local_cluster.start.parameters.items() if name.startswith("output."))
    assert (head > 0) == ("head" in model)
    assert len(local_cluster.start_bytes) <= 4 * head + 500  # names, shapes and the run's own tokens


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=pytest.mark.long) for kind in KINDS if kind != "moonshine"])
def test_every_class_makes_the_model_of_a_simulation(
    kind: str, make_cluster: MakeCluster, tmp_path: Path, three_stores: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = write_tiny_model(kind, tmp_path / "models" / kind)
    monkeypatch.setenv(folders.MODELS, str(base.parent))
    given = recipe_content(base, cohort_size=3)
    local_cluster = make_cluster(given, people=THREE, stores=three_stores, sum_bits=32, secure=SecureSums(least=3))
    assert len(local_cluster.start_bytes) < 100
    compare(local_cluster, tmp_path)


@pytest.mark.usefixtures("at_every_node")
@pytest.mark.parametrize("secure", [False, True], ids=["open", "secure"])
@pytest.mark.parametrize("mode", ["seeded", "secure"])
def test_nothing_of_the_base_travels(base: Path, three_stores: Path, tmp_path: Path, secure: bool, mode: str) -> None:
    """Whole runs: all orders and answers are looked through for pieces of the base model's tensors and files."""
    place = Place(tmp_path, three_stores, THREE)
    place.write_files(model=model_of(base), cohort_size=3, privacy={"mode": mode})
    passed: list[bytes] = []
    kinds: list[tuple[OrderKind, int]] = []

    def keeps(answer: AnswerFunction) -> AnswerFunction:
        def keeping(data: bytes) -> bytes | None:
            order = parse_order(data, limit=1 << 30)
            kinds.append((order.kind, len(order.payload)))
            given = answer(data)
            passed.extend([data, given or b""])
            return given

        return keeping

    outcome = place.run_here("served", secure=secure, meddle=dict.fromkeys(THREE, keeps))
    assert outcome.results is not None
    sent = outcome.results["communication"]
    assert {size for kind, size in kinds if kind is OrderKind.TRAIN} == {sent["bytes_down"]}
    assert sent["bytes_down_first"] == sent["bytes_down"]
    assert max(size for kind, size in kinds if kind is OrderKind.START) < 100
    everything = b"".join(passed)
    for file in base.iterdir():
        if file.suffix != ".safetensors":
            assert file.read_bytes() not in everything, file.name
    for name, tensor in load_file(base / "model.safetensors").items():
        values = tensor.float().contiguous().numpy().tobytes()
        if values.strip(values[:4]):  # a norm's ones may be anywhere
            assert values[: 4 * PIECE] not in everything, name
    if mode == "seeded":
        check_same(outcome.folder, place.simulate("simulated"))
    else:
        assert verify(outcome.folder / LEDGER).steps == ROUNDS


@pytest.mark.long
def test_three_processes_over_tls_make_the_model_of_a_simulation(
    settled: Settled, base: Path, three_stores: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two are told where it lies, one finds it. One more has none, and is told what to do."""
    monkeypatch.delenv(folders.MODELS, raising=False)
    three = settled(THREE, stores=three_stores, model=model_of(base), cohort_size=3)
    server = three.serve("--sums", "secure", "--least", "3")
    lost = three.join(THREE[0], server)
    line = until(lost, "model: ")
    assert "no folder with its files (sha256 " in line
    assert line.endswith("give `join` its --base FOLDER")
    lost.kill()
    lost.wait()
    nodes = [three.join(name, server, "--base", str(base)) for name in THREE[:2]]
    monkeypatch.setenv(folders.MODELS, str(base.parent))
    nodes.append(three.join(THREE[2], server))
    until(nodes[0], "round 2: ")
    server.process.kill()
    server.process.wait()
    again = three.serve("--sums", "secure", "--least", "3", "--resume", port=server.port)
    assert again.digest == server.digest
    finished(again.process)
    for node in nodes:
        finished(node)
    check_same(three.place.folder / "served", three.place.simulate("simulated"))


def test_a_folder_that_is_not_there_ends_join_in_one_line() -> None:
    nowhere = Path("nowhere")
    with pytest.raises(InputError, match="--base nowhere: no such folder"):
        join("https://127.0.0.1:1", data=nowhere, key=nowhere, ca=nowhere, base=nowhere)


# What a node refuses.


@pytest.fixture
def cluster(make_cluster: MakeCluster, base: Path, monkeypatch: pytest.MonkeyPatch) -> LocalCluster:
    monkeypatch.delenv(folders.MODELS, raising=False)
    return make_cluster(recipe_content(base, cohort_size=9), secure=SecureSums(least=3))


def test_nothing_is_asked_or_trained_without_the_base(cluster: LocalCluster) -> None:
    name = cluster.people[0]
    participant = cluster.join(name)
    assert cluster.ask(name, cluster.terms(name)).code is AnswerCode.NOT_ACCEPTED
    assert participant.invited is None
    (said,) = cluster.said
    assert "no folder with its files" in said
    assert "($SOTTOVOCE_MODELS is not set)" in said
    participant.accept(cluster.invitation.digest)
    assert cluster.ask(name, cluster.terms(name)).code is AnswerCode.UNABLE
    assert cluster.ask(name, cluster.order(name, OrderKind.START, cluster.start_bytes)).code is AnswerCode.UNEXPECTED
    assert cluster.ask(name, cluster.train(name)).code is AnswerCode.UNEXPECTED
    assert cluster.said == [said]  # once, however often it is asked


def test_other_files_are_refused_before_anybody_is_asked(cluster: LocalCluster, tmp_path: Path) -> None:
    name, other = cluster.people[0], write_tiny_model("moonshine", tmp_path / "tiny-moonshine", seed=62)
    participant = cluster.join(name, base=other)
    assert cluster.ask(name, cluster.terms(name)).code is AnswerCode.NOT_ACCEPTED
    assert participant.invited is None
    (said,) = cluster.said
    assert said.startswith(f"{other}: its files have sha256 ")
    assert said.endswith("another model, or another version of it")


def test_files_that_change_after_the_terms_are_refused(cluster: LocalCluster, base: Path, tmp_path: Path) -> None:
    name, own = cluster.people[0], shutil.copytree(base, tmp_path / "own")
    cluster.join(name, base=own).accept(cluster.invitation.digest)
    assert cluster.ask(name, cluster.terms(name)).code is AnswerCode.DONE
    (own / "tokenizer_config.json").write_text("{}")
    assert cluster.ask(name, cluster.order(name, OrderKind.START, cluster.start_bytes)).code is AnswerCode.UNABLE
    assert "no folder with its files" in cluster.said[-1]


def test_what_is_frozen_must_be_the_same_to_the_bit(cluster: LocalCluster, base: Path) -> None:
    """Where files are the same and something loads or draws them otherwise: here, a server that says so."""
    name, tensor = next(iter(cluster.frozen.tensors.items()))
    moved = tensor.clone()
    moved.view(-1)[0] = torch.nextafter(moved.view(-1)[0], torch.tensor(torch.inf))
    cluster.invitation = cluster.invite(frozen=Frozen({**cluster.frozen.tensors, name: moved}))
    one = cluster.people[0]
    cluster.join(one, base=base).accept(cluster.invitation.digest)
    assert cluster.ask(one, cluster.terms(one)).code is AnswerCode.DONE
    assert cluster.ask(one, cluster.order(one, OrderKind.START, cluster.start_bytes)).code is AnswerCode.UNABLE
    assert "what is not trained of the model is another here" in cluster.said[-1]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of all folders of pretrained models that are looked for."""
    names: list[str] = []
    honest: Callable[..., Path] = folders.find_folder

    def noted(name: str, **given: Any) -> Path:
        names.append(name)
        return honest(name, **given)

    monkeypatch.setattr(folders, "find_folder", noted)
    return names


@pytest.mark.parametrize(
    "changed",
    [
        *({"from": source} for source in ("/etc", "../x", "tiny-moonshine", "openai/whisper-tiny")),
        {"from": f"../x@sha256:{64 * 'a'}"},
        {"revision": "main"},
        {"from": 7},
        {"from": None},
        {"source": "/etc"},
    ],
    ids=str,
)
def test_an_invitation_that_names_a_folder_opens_nothing(
    cluster: LocalCluster, opened: list[str], changed: dict[str, Any]
) -> None:
    """Nor one with an option for which a recipe's check would look into the model."""
    for narrow in (False, True):
        found = json.loads(cluster.invitation.content)
        found["recipe"]["model"] |= changed
        if narrow:
            found["recipe"]["federation"]["local"]["narrow_band"] = {"share": 0.5}
        opened.clear()
        with pytest.raises(InputError, match=r"the invitation's model|a client opens no folder") as raised:
            Invitation.read(json.dumps(found, sort_keys=True, separators=(",", ":")).encode())
        assert "\n" not in str(raised.value)
        assert opened == []


def test_a_tokenizer_that_a_server_sends_is_not_opened(cluster: LocalCluster, base: Path) -> None:
    """The node's own are taken; sent ones are refused, also for models that would have none from files."""
    model, start = cluster.recipe.model, cluster.start
    found = read_start_model(write_start_model(start, model), model)
    assert found.tokens == start.tokens
    sent = json.dumps(start.tokens.as_json() | {"size": start.tokens.size, "digest": start.tokens.digest}).encode()
    whole = len(sent).to_bytes(8, "little") + (2).to_bytes(8, "little") + sent + b"en" + cluster.start_bytes[18:]
    for options in (model, cluster_of_letters(base)):
        with pytest.raises(InputError, match="those of a pretrained model are never sent"):
            read_start_model(whole, options)
    config = json.loads((base / "config.json").read_text())
    other = read_pretrained_tokens(base, config=config, language="de")
    with pytest.raises(InputError, match="those of a pretrained model are never sent"):
        write_start_model(type(start)(start.family, start.settings, other, start.parameters, "en"), model)


def cluster_of_letters(base: Path) -> Any:
    from sottovoce.models.huggingface.settings import Options

    return Options(source=str(base), head="ctc")


# What people read.


def test_words_say_what_it_is_made_from_and_what_travels(cluster: LocalCluster) -> None:
    said = describe_invitation(cluster.invitation)
    (line,) = [line for line in said if line.startswith("What it is made from: ")]
    found = re.search(r"the base model tiny-moonshine, .* \(sha256 ([0-9a-f]{64})\)", line)
    assert found is not None
    assert found[1] in cluster.invitation.content.decode()
    assert f"({4 * cluster.layout.dimension / 1e6:,.2f} MB)" in line
    assert f"family huggingface, {LORA} ({cluster.layout.dimension:,} parameters)" in said[0]
