"""Central training ends with the same bits however often it is killed, and keeps what it must."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from sottovoce.cli import main
from sottovoce.models.saved import load
from sottovoce.training import checkpoint


def start(recipe: Path, stores: Path, out: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "sottovoce", "run", str(recipe), "--stores", str(stores), "--out", str(out), *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    with process:
        out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def final_tensors(out: Path) -> dict[str, torch.Tensor]:
    found, complaints = checkpoint.load_latest(out / "checkpoints")
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
    code, out, err = finish(start(recipe_file, stores, whole))
    assert code == 0, err
    assert "On unseen speakers" in out

    kills = 0
    for patience in (0.0, 0.15, 0.4):
        process = start(recipe_file, stores, broken, "--resume")
        deadline = time.monotonic() + 60
        # Let it get as far as a checkpoint more than last time, then a little further, and kill it.
        while process.poll() is None and time.monotonic() < deadline:
            if len(list((broken / "checkpoints").glob("step-*"))) >= 1:
                time.sleep(patience)
                process.send_signal(signal.SIGKILL)
                kills += 1
                break
            time.sleep(0.01)
        finish(process)
    assert kills >= 1
    code, _, err = finish(start(recipe_file, stores, broken, "--resume"))
    assert code == 0, err

    expected, found = final_tensors(whole), final_tensors(broken)
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name
    assert metrics(broken) == metrics(whole)
    assert json.loads((broken / "results.json").read_text()) == json.loads((whole / "results.json").read_text())


def test_interrupt_saves_and_says_how_to_go_on(recipe_file: Path, stores: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = start(recipe_file, stores, out, "central.steps=100000")
    while not (out / "checkpoints/latest").exists():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert code == 0, err
    assert "--resume" in err
    found, _ = checkpoint.load_latest(out / "checkpoints")
    assert found is not None
    last = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == found.step


def test_damaged_checkpoint_falls_back_to_the_one_before(recipe_file: Path, stores: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    code, _, err = finish(start(recipe_file, stores, out))
    assert code == 0, err
    newest = out / "checkpoints/step-000012/model.safetensors"
    content = newest.read_bytes()
    newest.write_bytes(content[: len(content) // 2])
    (out / "results.json").unlink()  # with it the run would count as finished
    code, _, err = finish(start(recipe_file, stores, out, "--resume"))
    assert code == 0, err
    assert "step-000012 is damaged: model.safetensors not as written going on from the one before" in " ".join(
        err.split()
    )
    assert newest.read_bytes() == content, "the steps since were made again, with the same bits"


def test_two_processes_learn_as_one_team(recipe_file: Path, stores: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29511"]
    command += ["-m", "sottovoce", "run", str(recipe_file), "--stores", str(stores), "--out", str(tmp_path / "run")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=180, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    )
    assert done.returncode == 0, done.stderr
    found, _ = checkpoint.load_latest(tmp_path / "run/checkpoints")
    assert found is not None
    assert found.step == 12
    assert done.stdout.count("On unseen speakers") == 1


def test_an_interrupt_of_one_process_stops_all_at_the_same_step(
    recipe_file: Path, stores: Path, tmp_path: Path
) -> None:
    out, where = tmp_path / "run", ["127.0.0.1", "29512"]
    processes = []
    for rank in ("0", "1"):
        told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": where[0], "MASTER_PORT": where[1]}
        command = [sys.executable, "-m", "sottovoce", "run", str(recipe_file), "--stores", str(stores)]
        command += ["--out", str(out), "central.steps=100000"]
        processes.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | told)
        )
    while not (out / "checkpoints/latest").exists():
        assert all(process.poll() is None for process in processes)
        time.sleep(0.02)
    processes[1].send_signal(signal.SIGINT)
    (first_code, _, first_err), (second_code, _, second_err) = map(finish, processes)
    assert (first_code, second_code) == (0, 0), first_err + second_err
    assert "--resume" in first_err
    assert "--resume" not in second_err
    found, _ = checkpoint.load_latest(out / "checkpoints")
    assert found is not None
    assert f"stopped after step {found.step:,}" in first_err


def test_a_kill_between_a_checkpoint_and_its_link_loses_no_best_model(
    recipe_file: Path, stores: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    code, _, err = finish(start(recipe_file, stores, out))
    assert code == 0, err
    best = (out / "model").readlink()
    wrong = next(path for path in (out / "checkpoints").glob("step-*") if path.name != best.name)
    checkpoint.point(out / "model", wrong)
    (out / "results.json").unlink()  # the kill came before the end
    code, _, err = finish(start(recipe_file, stores, out, "--resume"))
    assert code == 0, err
    assert (out / "model").readlink() == best


def test_starts_from_another_run_and_renews_the_output_for_other_tokens(
    recipe_file: Path, stores: Path, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    code, _, err = finish(start(recipe_file, stores, first))
    assert code == 0, err
    changes = [f"central.start_from={first}", "central.steps=1", "central.schedule.lr=0.0"]
    changes += ["tokens.kind=sentence_pieces", "tokens.size=6"]
    code, _, err = finish(start(recipe_file, stores, second, *changes))
    assert code == 0, err
    old, new = load(first), load(second)
    assert new.parameters["output.weight"].shape[0] == 7
    assert torch.equal(old.parameters["blocks.00.mlp.hidden.weight"], new.parameters["blocks.00.mlp.hidden.weight"])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["central.step=3"], "unknown key 'central.step', did you mean 'steps'?"),
        (["model.droput=0.1"], "unknown key 'model.droput', did you mean 'dropout'?"),
        (["central.optimiser.name=larz"], "unknown optimiser 'larz', did you mean 'lars'?"),
        (["data.dev=nowhere"], "no split='nowhere' in store"),
        (["data.store=none"], "no store at"),
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
    code, _, err = finish(start(recipe_file, stores, out, "central.steps=2"))
    assert code == 0, err
    code, shown, err = finish(start(recipe_file, stores, out, "central.steps=2"))
    assert (code, "On unseen speakers" in shown) == (0, True), "a finished run is shown again"
    (out / "results.json").unlink()
    code, _, err = finish(start(recipe_file, stores, out, "central.steps=2"))
    assert (code, "holds this run already: --resume" in err) == (2, True), err
    code, _, err = finish(start(recipe_file, stores, out, "central.steps=3", "--resume"))
    assert code == 2
    assert "belongs to another recipe (- there, + now): - steps: 2; + steps: 3" in err
