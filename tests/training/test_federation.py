"""Federated runs from recipe to result: what they write, when they stop, and what they refuse."""

import errno
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tones import pack_tones

from sottovoce.base.errors import InputError
from sottovoce.config import load_recipe
from sottovoce.federated import client as client_module
from sottovoce.models.recogniser import load_recogniser
from sottovoce.models.recogniser import save_recogniser as save_model
from sottovoce.privacy.ledger import verify
from sottovoce.report.summary import write_report
from sottovoce.training import checkpoint, engines, federation
from sottovoce.training.run import run_recipe
from sottovoce.training.run_context import Outcome, RunContext
from sottovoce.training.run_folder import open_run

Run = Callable[..., Outcome]
FAST = ["federation.steps=2", "federation.evaluate_every=2", "federation.privacy.adaptive=null"]


@pytest.fixture
def run(federated_recipe: Path, short_stores: Path, tmp_path: Path) -> Run:
    """Runs the recipe in this process, with `key=value` changes, in the folder `out`."""

    def go(*changes: str, out: str = "run", resume: bool = False, stores: Path = short_stores) -> Outcome:
        said.clear()
        around = RunContext(runs=tmp_path / "runs", stores=stores, device=torch.device("cpu"), say=said.append)
        recipe = load_recipe(str(federated_recipe), [*FAST, *changes])
        return run_recipe(recipe, out=tmp_path / out, resume=resume, context=around)

    said: list[str] = []
    go.said = said  # type: ignore[attr-defined]
    return go


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


# What a run writes.


def test_a_release_keeps_to_itself_what_it_knows_of_people(run: Run, tmp_path: Path) -> None:
    outcome = run("federation.privacy.mode=secure")
    folder = outcome.folder
    assert not (folder / "diagnostics.jsonl").exists()
    public = {"step", "lr", "epsilon", "noise_std", "clip_bound", "server_norms", "trust_ratios", "dev_wer"}
    for record in lines(folder / "metrics.jsonl"):
        assert record.keys() <= public, "how long a round took tells how many came"
    described = json.loads((folder / "population.json").read_text())
    assert described.keys() == {"population_size", "privacy_unit", "settings"}
    header = lines(folder / "ledger.jsonl")[0]["record"]
    assert (header["mode"], header["inputs"]) == ("secure", "")
    assert not (folder / "tensorboard").exists(), "its events carry the time of each round"
    assert any("no TensorBoard" in line for line in run.said)  # type: ignore[attr-defined]
    assert outcome.results is not None
    assert outcome.results["privacy"]["simulated"] is False


def test_test_sets_are_scored_along_the_way_where_that_is_asked_for(run: Run) -> None:
    """And nothing else is different: not the model, not what is charged."""
    plain, along = run(out="plain"), run("federation.test_along=true", out="along")
    assert plain.results is not None
    assert along.results is not None
    assert not any("test_wer" in record for record in lines(plain.folder / "metrics.jsonl"))
    seen = {r["step"]: r["test_wer"] for r in lines(along.folder / "metrics.jsonl") if "dev_wer" in r}
    assert [*seen] == [0, 2]
    best = along.results["model"]["step"]
    assert seen[best] == {name: test["wer"] for name, test in along.results["test"].items()}
    assert along.results["test"] == plain.results["test"]
    rows = [[row["record"] for row in lines(outcome.folder / "ledger.jsonl")] for outcome in (plain, along)]
    results = [[row["result"] for row in found if row["kind"] == "commit"] for found in rows]
    assert results[0] == results[1] != []


def test_a_release_is_never_trained_in_stacks(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the run folder's `engine.json` says."""
    monkeypatch.setattr(engines, "_choose_engine", lambda *_, **__: {"engine": "stacked", "stack_size": 2})
    with pytest.raises(AssertionError, match="its clients are trained apart"):
        run("federation.privacy.mode=secure")


def test_a_release_protects_silos_of_a_public_number(run: Run) -> None:
    """Forty silos of nine people: those that nobody is in are clients like the others."""
    outcome = run("federation.privacy.mode=secure", "federation.clients={rule: silo, silos: 40}")
    described = json.loads((outcome.folder / "population.json").read_text())
    assert (described["population_size"], described["privacy_unit"]) == (40, "silo with all its speakers")
    assert outcome.results is not None
    assert "for each silo with all its speakers" in outcome.results["privacy"]["guarantee"]


def test_a_simulation_marks_its_by_products_as_unaccounted(run: Run) -> None:
    folder = run().folder
    diagnostics = lines(folder / "diagnostics.jsonl")
    assert [record["step"] for record in diagnostics] == [1, 2]
    assert all(record["accounted"] is False for record in diagnostics)
    assert {"cohort", "dropped", "loss", "clip_fraction", "signal_to_noise", "layers"} <= diagnostics[0].keys()
    assert json.loads((folder / "population.json").read_text())["accounted"] is False
    metrics = lines(folder / "metrics.jsonl")
    assert not any(key in record for record in metrics for key in ("loss", "cohort", "norm", "clip_fraction"))
    assert {"seconds", "audio_seconds_per_second", "memory_mib"} <= metrics[1].keys()


def test_the_privacy_report_is_read_back_from_the_ledger(run: Run) -> None:
    outcome = run("federation.privacy.extrapolate=[{population_size: 900, cohort_size: 20}]")
    assert outcome.results is not None
    privacy, ledger = outcome.results["privacy"], verify(outcome.folder / "ledger.jsonl")
    assert (privacy["steps"], privacy["attempts"]) == (ledger.steps, ledger.attempts) == (2, 2)
    assert privacy["epsilon_rdp"] == pytest.approx(ledger.epsilon.rdp)
    assert privacy["epsilon_pld"] <= privacy["epsilon_rdp"]
    assert "not the tuning before it" in privacy["covers"]
    # σ_DP = z/S = 8/2 is kept for the larger population, so z grows with its cohort: 4·20.
    (larger,) = privacy["extrapolated"]
    assert larger["noise_multiplier"] == pytest.approx(80)


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        (10, "9 clients, 1 fewer than in the paper (10; −10 %): q = S/K and ε are worked out for those there are"),
        (9, "9 clients, as many as in the paper"),
    ],
)
def test_a_papers_population_is_compared_with_and_not_asked_for(run: Run, theirs: int, words: str) -> None:
    outcome = run(f"paper={{source: A paper, place: Table 9, population_size: {theirs}}}")
    assert outcome.results is not None
    assert outcome.results["privacy"]["population_size"] == 9
    assert words in run.said  # type: ignore[attr-defined]


def test_a_finished_run_is_not_run_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run()
    monkeypatch.setattr("sottovoce.training.federated_run.FederatedLoop", None)
    assert run(resume=True).results == first.results


def test_the_result_of_a_run_with_an_average_is_the_average(run: Run) -> None:
    folder = run("federation.server.ema=0.5").folder
    found, _ = checkpoint.load_latest_checkpoint(folder / "checkpoints")
    assert found is not None
    average, last = found.recogniser.parameters, found.optimiser[checkpoint.PARAMETERS]
    assert not torch.equal(average["output.weight"].flatten()[:10], last[-10:])
    assert "ema" in found.optimiser


def test_patience_ends_a_run_that_gets_no_better(run: Run) -> None:
    outcome = run("federation.steps=9", "federation.evaluate_every=1", "federation.patience=2")
    assert outcome.results is not None
    # The untrained model writes nothing right, and noise teaches it nothing: only the first evaluation is a best one.
    assert outcome.results["ended"]["reason"] == "patience"
    assert outcome.results["ended"]["step"] == 3


def test_a_run_ends_where_it_has_converged(run: Run) -> None:
    """The first evaluation stays the best, and five are enough to say so. ε stays that of all rounds planned."""
    outcome = run("federation.steps=9", "federation.evaluate_every=1", "federation.patience={share: 0.2}")
    assert outcome.results is not None
    assert (outcome.results["ended"]["reason"], outcome.results["ended"]["step"]) == ("patience", 5)
    assert outcome.results["converged"] == "yes"
    assert (outcome.results["privacy"]["steps"], outcome.results["privacy"]["promised_steps"]) == (5, 9)
    state = json.loads((outcome.folder / "checkpoints/latest/state.json").read_text())
    assert [step for step, _ in state["scores"]] == [1, 2, 3, 4, 5]


# The budget.


def test_a_run_may_be_chosen_and_ended_by_its_loss(run: Run) -> None:
    outcome = run(
        "federation.steps=9", "federation.evaluate_every=1", "federation.patience=2", "federation.measure=loss"
    )
    assert outcome.results is not None
    assert outcome.results["ended"]["reason"] == "patience"
    records = lines(outcome.folder / "metrics.jsonl")
    assert not any("dev_wer" in record for record in records)
    losses = [record["dev_loss"] for record in records]
    assert len(losses) == outcome.results["ended"]["step"] + 1, "the start's is among them"
    assert outcome.results["model"]["dev_loss"] == min(losses[1:])
    state = json.loads((outcome.folder / "checkpoints/latest/state.json").read_text())
    assert (state["best_loss"], state["since_best"]) == (min(losses[1:]), 2)


def test_models_that_write_nothing_are_chosen_by_their_loss_and_reported(run: Run, tmp_path: Path) -> None:
    outcome = run("model.family=tests.training.mute:FAMILY", "model.size=tiny")
    assert outcome.results is not None
    assert "dev_loss" in outcome.results["model"]
    assert outcome.results["test"]["test"]["loss"] > 0
    assert outcome.results["start"]["test"]["test"]["utterances"] == outcome.results["test"]["test"]["utterances"]
    assert any("chosen by the loss on " in line for line in run.said)  # type: ignore[attr-defined]
    write_report({"mute": outcome.folder}, tmp_path, title="Mute")
    assert "Loss on speakers who are not trained on" in (tmp_path / "report.html").read_text()
    with pytest.raises(InputError, match=r"measure=wer: models of family=tests\.training\.mute:FAMILY write no text"):
        run("model.family=tests.training.mute:FAMILY", "model.size=tiny", "federation.measure=wer", out="other")


def test_the_state_of_a_run_chosen_by_its_errors_is_as_it_always_was(run: Run) -> None:
    outcome = run()
    state = json.loads((outcome.folder / "checkpoints/latest/state.json").read_text())
    known = ["ledger", "best_wer", "since_best", "evaluated", "clip_bound"]
    assert list(state) == ["step", "best", "files", *known, "seal"]
    assert list(load_recogniser(outcome.folder).about) == ["recipe", "step", "dev_wer", "guarantee"]
    assert list(lines(outcome.folder / "metrics.jsonl")[-1])[-1] == "dev_wer"


def test_a_run_ends_at_the_last_step_that_its_budget_allows(run: Run) -> None:
    free = run("federation.steps=5", "federation.evaluate_every=5", out="free")
    spent = [record["epsilon"] for record in lines(free.folder / "metrics.jsonl")[1:]]
    budget = (spent[2] + spent[3]) / 2
    outcome = run("federation.steps=5", "federation.evaluate_every=5", f"federation.privacy.epsilon_budget={budget}")
    assert outcome.results is not None
    ended = outcome.results["ended"]
    assert (ended["step"], ended["reason"]) == (3, "budget")
    assert "step 3 would bring epsilon" in ended["words"]
    report = verify(outcome.folder / "ledger.jsonl")
    assert (report.steps, report.committed_step) == (3, 2)
    assert report.epsilon.rdp <= budget
    found, _ = checkpoint.load_latest_checkpoint(outcome.folder / "checkpoints")
    assert found is not None
    assert found.step == 3, "what was paid for is kept"
    assert [record["step"] for record in lines(outcome.folder / "metrics.jsonl")] == [0, 1, 2, 3]
    with pytest.raises(InputError, match=r"belongs to another recipe \(- there, \+ now\): .*epsilon_budget"):
        run("federation.steps=5", "federation.evaluate_every=5", f"federation.privacy.epsilon_budget={2 * budget}")


def test_a_budget_too_small_for_one_step_is_one_clear_line(run: Run) -> None:
    with pytest.raises(InputError, match=r"not one round can be paid for: step 0 .* above epsilon_budget=1e-09"):
        run("federation.privacy.epsilon_budget=1e-9")


# Clients that fail.


def test_a_round_in_which_everybody_fails_is_one_clear_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(*_: Any, **__: Any) -> Any:
        raise InputError("utterance 7: its audio is damaged")

    monkeypatch.setattr(client_module, "read_speech", damaged)
    with pytest.raises(InputError, match=r"round \d+: every client of the cohort failed; .*its audio is damaged"):
        run()


def test_a_round_in_which_everybody_diverges_is_one_clear_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = client_module.step_loss
    monkeypatch.setattr(client_module, "step_loss", lambda *a, **o: whole(*a, **o) * math.nan)
    with pytest.raises(InputError, match=r"round \d+: every client of the cohort failed; .*not finite"):
        run()


# Bad input.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["federation.cohort_sise=3"], "unknown key 'federation.cohort_sise', did you mean 'cohort_size'?"),
        (["federation.local.local_step=3"], "unknown key 'federation.local.local_step', did you mean 'local_steps'?"),
        (["federation.privacy.clip_bond=1"], "unknown key 'federation.privacy.clip_bond', did you mean 'clip_bound'?"),
        (["federation.local.local_epochs=1"], "local_steps=1, local_epochs=1: expected exactly one"),
        (["federation.cohort_size=10"], "cohort_size=10: the population has only 9 clients"),
        (["federation.engine=stacked", "federation.privacy.mode=secure"], "engine=stacked with privacy.mode=secure"),
        (["federation.privacy.population_size=8"], "population_size=8: the store has 9 clients"),
        (["federation.privacy.population_size=10"], "population_size=10: the store has 9 clients"),
        (["federation.privacy.clip_bound=.inf"], "noise but clip_bound is infinite"),
        (["federation.privacy.weighting=loss"], "weighting=loss with noise_multiplier=8.0: such weights leak"),
        (["federation.privacy.weighting=seconds"], "weighting=seconds with privacy: expected a public weight_cap"),
        (
            [
                "federation.clients={rule: silo, silos: 10}",
                "federation.privacy={clip_bound: .inf, noise_multiplier: 0}",
            ],
            "federation.clients.silos=10: there are only 9 speakers to fill them",
        ),
        (["federation.seed_model=nowhere"], "no recipe 'nowhere'"),
        (["data.dev=train"], "data.dev: 9 of its speakers are clients too; evaluate on people who are not"),
        (["data.test=[dev, train]"], "data.test train: 9 of its speakers are clients too"),
        (
            [
                "tokens={kind: sentence_pieces, size: 8}",
                "federation.privacy={clip_bound: .inf, noise_multiplier: 0}",
            ],
            "would be made from the clients' texts, which stay with them; give tokens.file",
        ),
        (
            ["tokens={kind: sentence_pieces, size: 8}"],
            "would be made from the clients' texts, which stay with them; give tokens.file, or a seed model",
        ),
        (
            ["federation.privacy.mode=secure", "federation.privacy.noise_multiplier=0"],
            "mode=secure is for releases with a guarantee",
        ),
        (
            ["federation.privacy.mode=secure", "federation.clients={rule: device, speakers_per_device: 2}"],
            "this one has none: clients=device makes up devices from a queue of speakers",
        ),
    ],
)
def test_mistakes_are_one_line(changes: list[str], message: str, run: Run, tmp_path: Path) -> None:
    with pytest.raises(InputError) as raised:
        run(*changes)
    assert message in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1
    assert not (tmp_path / "run").exists(), "refused before anything is written"


def test_a_seed_model_of_another_language_is_refused(run: Run, tmp_path: Path) -> None:
    pack_tones(tmp_path / "stores/tones", language="de", letters=(2, 3), utterances=2)
    run(out="english")
    with pytest.raises(InputError, match="language"):
        run(f"federation.seed_model={tmp_path / 'english'}", out="german", stores=tmp_path / "stores")


def test_a_run_folder_of_another_recipe_or_in_use_is_refused(run: Run, tmp_path: Path) -> None:
    run()
    with pytest.raises(InputError, match=r"\(- there, \+ now\): - cohort_size: 2; \+ cohort_size: 3"):
        run("federation.cohort_size=3", resume=True)
    config, inputs = ((tmp_path / "run" / name).read_text() for name in ("config.yaml", "inputs.json"))
    with (
        open_run(tmp_path / "run", config=config, inputs=json.loads(inputs), resume=True),
        pytest.raises(InputError, match="in use by another process"),
    ):
        run(resume=True)


def test_other_speech_under_the_same_name_is_refused(run: Run, short_stores: Path, tmp_path: Path) -> None:
    """The same noise over other data could be subtracted."""
    (run().folder / "results.json").unlink()
    pack_tones(tmp_path / "stores/tones", people=range(5, 20), letters=(2, 3), utterances=2)
    with pytest.raises(InputError, match=r"digest was .* when the run began"):
        run(resume=True, stores=tmp_path / "stores")


def test_a_disk_that_fills_up_leaves_the_checkpoint_before_intact(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, count = checkpoint.save_file, 0

    def full(tensors: Any, path: Path) -> None:
        nonlocal count
        count += 1
        if count == 2:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        whole(tensors, path)

    changes = ["federation.steps=4", "federation.evaluate_every=2", "federation.checkpoint_every=2"]
    expected = run(*changes, out="whole").results
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", full)
        with pytest.raises(InputError, match=r"cannot be written .*No space left.*one before is untouched"):
            run(*changes)
    outcome = run(*changes, resume=True)
    assert outcome.results == expected


def test_resuming_moves_the_clip_bound_on_from_where_it_was(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    adaptive = "federation.privacy.adaptive={target_quantile: 0.5, count_noise_std: 10.0}"
    changes = [adaptive, "federation.steps=4", "federation.evaluate_every=4"]
    whole = run(*changes, out="whole")
    with monkeypatch.context() as patch:
        patch.setattr("sottovoce.training.loop.interruptible", _asked_at_once)
        assert run(*changes).stopped_at == 1
    broken = run(*changes, resume=True)
    bounds = [[record["clip_bound"] for record in lines(o.folder / "metrics.jsonl")[1:]] for o in (whole, broken)]
    assert bounds[0] == bounds[1]
    assert len(set(bounds[0])) == 4


@contextmanager
def _asked_at_once() -> Iterator[Callable[[], bool]]:
    """As if somebody had pressed Ctrl-C before the first round."""
    yield lambda: True


def test_a_model_folder_may_be_the_seed_and_is_said_to_be_unknown(run: Run, tmp_path: Path) -> None:
    seed = tmp_path / "bare"
    seed.mkdir()
    save_model(load_recogniser(run(out="first").folder), seed)
    outcome = run(f"federation.seed_model={seed}", "federation.privacy.noise_multiplier=0")
    assert any("it is not known whether it was trained on" in line for line in run.said)  # type: ignore[attr-defined]
    assert outcome.results is not None


class Killed(Exception):
    pass


def test_where_bits_do_not_repeat_lost_rounds_are_new_attempts(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As on a GPU: the lost rounds have other cohorts and other noise, and are paid for again."""
    monkeypatch.setattr(federation.FederatedLoop, "_repeatable", False)
    rounds = ["federation.steps=6", "federation.evaluate_every=6", "federation.checkpoint_every=2"]
    whole = federation.run_round
    made = []

    def killed_after(count: int) -> Callable[..., Any]:
        def go(*arguments: Any, **options: Any) -> Any:
            if len(made) == count:
                raise Killed
            done = whole(*arguments, **options)
            made.append(options["step"])
            return done

        return go

    monkeypatch.setattr(federation, "run_round", killed_after(3))
    with pytest.raises(Killed):
        run(*rounds)
    monkeypatch.setattr(federation, "run_round", killed_after(-1))
    outcome = run(*rounds, resume=True)
    assert made == [0, 1, 2, 2, 3, 4, 5], "round 3 was lost with the process, and made again"
    report = verify(outcome.folder / "ledger.jsonl")
    assert (report.steps, report.attempts) == (6, 7)
    intents = [r["record"] for r in lines(outcome.folder / "ledger.jsonl") if r["record"]["kind"] == "intent"]
    again = [intent for intent in intents if intent["step"] == 2]
    assert [intent["attempt"] for intent in again] == [1, 2]
    assert again[0]["parameters"] == again[1]["parameters"]
    first, second = (intents[2], intents[4])
    assert first["cohort"] != second["cohort"]
    assert outcome.results is not None
    assert outcome.results["privacy"]["simulated"] is True
