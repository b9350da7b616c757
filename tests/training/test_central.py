"""Central training ends with the same bits however often it is killed, and keeps what it must."""

import contextlib
import io
import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.points import SAVED, Gate, Point, Watch, hold
from tests.ranks import processes, result
from tests.training import forked
from tests.training.launched import launch, said

from sottovoce.cli import main
from sottovoce.models.recogniser import load_recogniser
from sottovoce.training import checkpoint

# Behind the first checkpoint, in the middle of the next one's files, and some steps behind that.
KILLS = (SAVED, replace(SAVED, at="call", later=20), Point("sottovoce.training.central:train_step", nth=5))


def run(recipe: Path, stores: Path, out: Path, *more: str, kill_at: Point | None = None) -> forked.Ended:
    return forked.run(["run", recipe, "--stores", stores, "--out", out, *more], kill_at=kill_at)


def finish(recipe: Path, stores: Path, out: Path, *more: str) -> forked.Ended:
    ended = run(recipe, stores, out, *more)
    assert ended.code == 0, ended.err
    return ended


def final_tensors(out: Path) -> dict[str, torch.Tensor]:
    found, complaints = checkpoint.load_latest_checkpoint(out / "checkpoints")
    assert found is not None
    assert not complaints
    assert found.step == 12
    return {**found.recogniser.parameters, **found.optimiser}


def metrics(out: Path) -> list[dict]:
    """All but what the clock decides."""
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in record.items() if k != "audio_seconds_per_second"} for record in records]


def test_killed_and_resumed_gives_the_same_bits(recipe_file: Path, stores: Path, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert "On unseen speakers" in finish(recipe_file, stores, whole).out
    for point in KILLS:
        assert run(recipe_file, stores, broken, "--resume", kill_at=point).code == -signal.SIGKILL, point
    finish(recipe_file, stores, broken, "--resume")

    expected, found = final_tensors(whole), final_tensors(broken)
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name
    assert metrics(broken) == metrics(whole)
    assert json.loads((broken / "results.json").read_text()) == json.loads((whole / "results.json").read_text())


def test_chosen_by_its_loss_it_is_resumed_and_told_by_its_loss(recipe_file: Path, stores: Path, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    told = finish(recipe_file, stores, whole, "central.measure=loss").err
    assert "chosen by the loss on " in told
    assert "dev loss " in told
    assert "dev WER" not in told
    assert run(recipe_file, stores, broken, "central.measure=loss", kill_at=KILLS[-1]).code == -signal.SIGKILL
    finish(recipe_file, stores, broken, "central.measure=loss", "--resume")
    assert metrics(broken) == metrics(whole)

    losses = {record["step"]: record["dev_loss"] for record in metrics(whole) if "dev_loss" in record}
    assert losses.keys() == {5, 10, 12}
    state = json.loads((whole / "checkpoints/latest/state.json").read_text())
    assert list(state) == ["step", "best", "files", "place", "best_loss", "log", "seal"]
    assert state["best_loss"] == min(losses.values())
    assert load_recogniser(whole).about == {"recipe": "tones", "step": min(losses, key=losses.__getitem__)} | {
        "dev_loss": state["best_loss"]
    }


def test_newbob_lowers_the_rate_and_goes_on_where_it_was_killed(
    recipe_file: Path, stores: Path, tmp_path: Path
) -> None:
    """Better by half is asked for, which no evaluation brings: the rate halves at each but the first."""
    asked = ["central.newbob={factor: 0.5, improvement: 0.5}", "central.measure=loss", "central.schedule.lr=0.01"]
    asked += ["central.batch_utterances=3", "central.order=ascending", "central.evaluate_every=3"]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    finish(recipe_file, stores, whole, *asked)
    assert run(recipe_file, stores, broken, *asked, "--resume", kill_at=KILLS[2]).code == -signal.SIGKILL
    assert run(recipe_file, stores, broken, *asked, "--resume", kill_at=KILLS[2]).code == -signal.SIGKILL
    finish(recipe_file, stores, broken, *asked, "--resume")
    assert metrics(broken) == metrics(whole)
    rates = {record["step"]: record["lr"] for record in metrics(whole)}
    assert {step: rates[step] for step in (2, 3, 6, 9, 12)} == {2: 0.01, 3: 0.01, 6: 0.01, 9: 0.005, 12: 0.0025}
    expected, found = final_tensors(whole), final_tensors(broken)
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())


def test_the_files_of_a_run_chosen_by_its_errors_are_as_they_always_were(
    recipe_file: Path, stores: Path, tmp_path: Path
) -> None:
    finish(recipe_file, stores, tmp_path / "run")
    state = json.loads((tmp_path / "run/checkpoints/latest/state.json").read_text())
    assert list(state) == ["step", "best", "files", "place", "best_wer", "log", "seal"]
    assert list(load_recogniser(tmp_path / "run").about) == ["recipe", "step", "dev_wer"]
    train = ["step", "loss", "gradient_norm", "lr", "epoch", "audio_seconds_per_second"]
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [list(line) for line in lines if line["step"] in (2, 12)] == [
        train,
        [*train, "dev_wer", "dev_cer", "gradient_norms", "gradient_deviations"],
    ]
    assert "measure" not in (tmp_path / "run/config.yaml").read_text()


def test_interrupt_saves_and_says_how_to_go_on(recipe_file: Path, stores: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    arguments = ["run", recipe_file, "--stores", stores, "--out", out, "--yes", "central.steps=100000"]
    with Gate() as gate, forked.start(arguments, hold_at=(SAVED, gate)) as running:
        held = gate.reached(running)
        os.kill(held.pid, signal.SIGINT)
        held.go()
        ended = running.end()
    assert ended.code == 130, ended.err
    assert "--resume" in ended.err
    found, _ = checkpoint.load_latest_checkpoint(out / "checkpoints")
    assert found is not None
    last = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == found.step


def test_damaged_checkpoint_falls_back_to_the_one_before(recipe_file: Path, stores: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    finish(recipe_file, stores, out)
    newest = out / "checkpoints/step-000012/model.safetensors"
    content = newest.read_bytes()
    newest.write_bytes(content[: len(content) // 2])
    (out / "results.json").unlink()  # with it the run would count as finished
    err = finish(recipe_file, stores, out, "--resume").err
    assert "step-000012 is damaged: model.safetensors not as written going on from the one before" in " ".join(
        err.split()
    )
    assert newest.read_bytes() == content, "the steps since were made again, with the same bits"


def test_two_processes_learn_as_one_team(recipe_file: Path, stores: Path, tmp_path: Path) -> None:
    """With one learning rate, too, though one of them alone evaluates."""
    arguments = ["run", recipe_file, "--stores", stores, "--out", tmp_path / "run", "--device", "cpu"]
    arguments += ["central.newbob={improvement: 0.5}", "central.evaluate_every=3"]
    launch(arguments, processes=2, log=tmp_path / "log")
    found, _ = checkpoint.load_latest_checkpoint(tmp_path / "run/checkpoints")
    assert found is not None
    assert found.step == 12
    assert said(tmp_path / "log").count("On unseen speakers") == 1


def test_an_interrupt_of_one_process_stops_all_at_the_same_step(
    recipe_file: Path, stores: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    arguments = [
        "run",
        recipe_file,
        "--stores",
        stores,
        "--out",
        out,
        "--device",
        "cpu",
        "--yes",
        "central.steps=100000",
    ]
    with Gate() as gate, processes(2, commanded, gate.address, [*map(str, arguments)]) as started:
        first, second = started
        held = gate.reached(first, second)
        os.kill(second.pid, signal.SIGINT)
        held.go()
        (first_code, first_err), (second_code, second_err) = map(result, started)
    assert (first_code, second_code) == (130, 0), first_err + second_err
    assert "--resume" in first_err
    assert "--resume" not in second_err
    found, _ = checkpoint.load_latest_checkpoint(out / "checkpoints")
    assert found is not None
    assert f"stopped after step {found.step:,}" in first_err


def commanded(address: str, arguments: list[str]) -> tuple[int, str]:
    """The command in one of two processes, held at its first checkpoint: its exit code and errors."""
    with contextlib.redirect_stderr(io.StringIO()) as err:
        code = forked.run_command(arguments, Watch(SAVED, lambda: hold(address)))
    return code, err.getvalue()


def test_a_kill_between_a_checkpoint_and_its_link_loses_no_best_model(
    recipe_file: Path, stores: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    finish(recipe_file, stores, out)
    best = (out / "model").readlink()
    wrong = next(path for path in (out / "checkpoints").glob("step-*") if path.name != best.name)
    checkpoint.point_link(out / "model", wrong)
    (out / "results.json").unlink()  # the kill came before the end
    finish(recipe_file, stores, out, "--resume")
    assert (out / "model").readlink() == best


def test_starts_from_another_run_and_renews_the_output_for_other_tokens(
    recipe_file: Path, stores: Path, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    finish(recipe_file, stores, first)
    changes = [f"central.start_from={first}", "central.steps=1", "central.schedule.lr=0.0"]
    changes += ["tokens.kind=sentence_pieces", "tokens.size=6"]
    finish(recipe_file, stores, second, *changes)
    old, new = load_recogniser(first), load_recogniser(second)
    assert new.parameters["output.weight"].shape[0] == 7
    assert torch.equal(old.parameters["blocks.00.mlp.hidden.weight"], new.parameters["blocks.00.mlp.hidden.weight"])
    # Pieces are made once: whoever goes on from there, on other people's texts too, has them and the output layer.
    third = tmp_path / "third"
    finish(recipe_file, stores, third, *changes, f"central.start_from={second}", "data.train=[dev]")
    last = load_recogniser(third)
    assert last.tokens.digest == new.tokens.digest
    assert torch.equal(last.parameters["output.weight"], new.parameters["output.weight"])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["central.step=3"], "unknown key 'central.step', did you mean 'steps'?"),
        (["model.droput=0.1"], "unknown key 'model.droput', did you mean 'dropout'?"),
        (["central.optimiser.name=larz"], "unknown optimiser 'larz', did you mean 'lars'?"),
        (["data.dev=nowhere"], "no split='nowhere' in store"),
        (["data.store=none"], "sottovoce prepare CORPUS FOLDER --out"),
        (["central.start_from=nowhere"], "no recipe 'nowhere'"),
        (["central.steps"], "expected key=value"),
        (["central.steps=["], "not readable as YAML"),
        (["central.augment.speeds=[0]"], "speeds has 0.0, expected numbers from 0.5 to 2.0"),
        (["central.batch_seconds=0.1"], "no utterance to train on (36 too long)"),
        (["central.optimiser.name=sgd", "central.schedule.lr=1e30"], "training diverged before step"),
    ],
)
def test_mistakes_are_one_line(
    more: list[str],
    message: str,
    recipe_file: Path,
    stores: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["sottovoce", "run", str(recipe_file), *more, "--stores", str(stores), "--out", str(tmp_path / "run")]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err.strip().splitlines()[-1]


def test_a_run_folder_of_another_recipe_is_refused(recipe_file: Path, stores: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    finish(recipe_file, stores, out, "central.steps=2")
    assert "On unseen speakers" in finish(recipe_file, stores, out, "central.steps=2").out, "it is shown again"
    (out / "results.json").unlink()
    ended = run(recipe_file, stores, out, "central.steps=2")
    assert (ended.code, "holds this run already: --resume" in ended.err) == (2, True), ended.err
    ended = run(recipe_file, stores, out, "central.steps=3", "--resume")
    assert ended.code == 2
    assert "belongs to another recipe (- there, + now): - steps: 2; + steps: 3" in ended.err


UNTIL_CONVERGED = ("central.evaluate_every=1", "central.checkpoint_every=2", "central.patience={share: 0.2}")


def test_it_trains_until_it_has_converged_and_says_so(recipe_file: Path, stores: Path, tmp_path: Path) -> None:
    """Nothing is learned in a few steps: the first score stays the best, and five evaluations are enough to say so."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    ended = finish(recipe_file, stores, whole, *UNTIL_CONVERGED)
    assert "no better model on the dev speakers in the last 20 % of the steps" in ended.err
    results = json.loads((whole / "results.json").read_text())
    assert (results["ended"]["reason"], results["ended"]["step"]) == ("patience", 5)
    assert results["converged"] == "yes"
    assert run(recipe_file, stores, broken, *UNTIL_CONVERGED, kill_at=KILLS[0]).code == -signal.SIGKILL
    finish(recipe_file, stores, broken, *UNTIL_CONVERGED, "--resume")
    assert json.loads((broken / "results.json").read_text()) == results
    assert metrics(broken) == metrics(whole)


def test_without_patience_nothing_of_it_is_written(recipe_file: Path, stores: Path, tmp_path: Path) -> None:
    finish(recipe_file, stores, tmp_path / "run")
    assert "patience" not in (tmp_path / "run/config.yaml").read_text()
    state = json.loads((tmp_path / "run/checkpoints/latest/state.json").read_text())
    assert not {"since_best", "evaluated", "scores"} & state.keys()
    results = json.loads((tmp_path / "run/results.json").read_text())
    assert results["ended"] == {"step": 12, "reason": "finished"}
    assert results["converged"] == "not shown", "three evaluations are too few"
