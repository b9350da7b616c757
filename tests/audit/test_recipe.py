"""A recipe's audit: its people beside the canaries, kept beside its run, told in its report."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.audit.planted import less_noise

from sottovoce.audit import recipe
from sottovoce.audit.canary_audit import AuditVerdict, Observer
from sottovoce.audit.recipe import AuditSettings, audit_path, audit_recipe
from sottovoce.base.errors import InputError
from sottovoce.cli import main
from sottovoce.config import load_recipe
from sottovoce.report.audit import audit_alarm, audit_section, kept_audit
from sottovoce.report.parts import Paragraph
from sottovoce.report.records import read_run
from sottovoce.training.run import run_recipe
from sottovoce.training.run_context import RunContext

FEW = ("--canaries", "60", "--rounds", "2")


def around(place: Path) -> RunContext:
    return RunContext(place / "runs", place / "stores", torch.device("cpu"))


def sottovoce(*arguments: object) -> int:
    """The exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["sottovoce", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
    code = ended.value.code or 0
    assert isinstance(code, int)
    return code


OVERRIDES: dict[str, tuple[str, ...]] = {
    "as it is": (),
    "a bound on each layer": ("federation.privacy.share=dim",),
    "LoRA": ("federation.trainable=lora(r=2)",),
    "adaptive": ("federation.privacy.adaptive={target_quantile: 0.5, count_noise_std: 10.0}",),
    "a time line": ("federation.local.time_line={}",),
    "speech alone": ("model={family: cpc, size: tiny, ahead: 6, candidates: 16}",),
    "a release": ("federation.privacy.mode=secure",),
}


@pytest.mark.parametrize("name", OVERRIDES)
def test_recipes_of_all_kinds_are_audited(name: str, place: Path) -> None:
    if name == "a release":
        pytest.importorskip("cryptography", reason="the secure mode draws from cryptography's AES")
    recipe = load_recipe(str(place / "tones.yaml"), OVERRIDES[name])
    done: list[tuple[int, int]] = []
    found = audit_recipe(
        recipe,
        AuditSettings(canaries=60, rounds=2, observer=Observer.FINAL if name == "LoRA" else Observer.RELEASES),
        context=around(place),
        on_round=lambda step, rounds: done.append((step, rounds)),
    )
    assert found.people == 18
    assert found.rounds == 2
    assert done == [(1, 2), (2, 2)]
    assert found.noise is not None
    assert not found.noise.is_missing


def test_an_audit_is_kept_beside_the_run_and_told_in_its_report(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, folder = place / "tones.yaml", place / "runs" / "tones"
    where = ("--runs", place / "runs", "--stores", place / "stores", "--out", folder)
    assert sottovoce("audit", recipe, *FEW, *where, "--json") == 0
    out, err = capsys.readouterr()
    assert "no ledger charges" not in err
    content = json.loads(out)
    assert content == json.loads(audit_path(folder).read_text())
    assert content["verdict"] == "consistent"
    assert content["accounted"] is False
    run_recipe(load_recipe(str(recipe)), out=folder, resume=False, context=around(place))
    run = read_run("mine", folder)
    assert kept_audit(run) == content
    section = audit_section([run])
    assert section is not None
    words = " ".join(part.text for part in section.parts if isinstance(part, Paragraph))
    assert "Nothing contradicts the promise." in words
    # Of another recipe nothing is told.
    assert sottovoce("audit", recipe, "federation.privacy.noise_multiplier=3", *FEW, *where) == 0
    assert "mine" not in capsys.readouterr().out
    assert kept_audit(run) is None
    assert audit_section([run]) is None
    for content in ("{", "[]", "{}"):
        audit_path(folder).write_text(content)
        torn = audit_section([run])
        assert torn is not None
        assert "its audit cannot be read" in str(torn.parts[0])
        assert audit_alarm(run) == ""


def test_of_a_release_nothing_is_told_that_no_ledger_charges(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("cryptography", reason="the secure mode draws from cryptography's AES")
    recipe, folder = place / "tones.yaml", place / "runs" / "tones"
    secure = "federation.privacy.mode=secure"
    where = ("--runs", place / "runs", "--stores", place / "stores", "--out", folder)
    sottovoce("audit", recipe, secure, *FEW, *where, "--json")  # other draws each time: any verdict
    out, err = capsys.readouterr()
    assert "tones.yaml is a release: these figures come from people's speech, in rounds that no ledger charges" in err
    assert json.loads(out)["accounted"] is False
    run_recipe(load_recipe(str(recipe), [secure]), out=folder, resume=False, context=around(place))
    run = read_run("mine", folder)
    assert run.is_release
    assert kept_audit(run) is None
    section = audit_section([run])
    assert section is not None
    (only,) = section.parts
    assert isinstance(only, Paragraph)
    assert "mine was made in secure mode: its audit made more rounds" in only.text
    audit_path(folder).unlink()
    assert audit_section([run]) is None


def test_a_broken_promise_is_an_exit_code(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    less_noise(4)(monkeypatch)
    where = ("--runs", place / "runs", "--stores", place / "stores")
    assert sottovoce("audit", place / "tones.yaml", *FEW, *where) == 1
    out = capsys.readouterr().out
    assert "broken: releases hold" in out
    assert "of the noise that is claimed" in out


def test_an_interrupted_audit_is_no_verdict(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(recipe, "audit_rounds", stopped)
    where = ("--runs", place / "runs", "--stores", place / "stores")
    assert sottovoce("audit", place / "tones.yaml", *FEW, *where) == 130
    assert "0 of 1 audits are kept" in capsys.readouterr().err


def test_a_suite_is_audited_where_it_promises_something(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    suite = place / "both.yaml"
    private = f"{{recipe: {place / 'tones.yaml'}}}"
    silent = f"{{recipe: {place / 'tones.yaml'}, overrides: [federation.privacy.noise_multiplier=0]}}"
    suite.write_text(f"about: both\nruns:\n  private: {private}\n  silent: {silent}\n")
    where = ("--runs", place / "runs", "--stores", place / "stores", "--json")
    assert sottovoce("audit", suite, *FEW, *where) == 0
    assert list(json.loads(capsys.readouterr().out)) == ["private"]
    assert sottovoce("audit", suite, *FEW, *where, "--only", "silent") == 2
    assert "none of its runs adds noise" in capsys.readouterr().err


REFUSED: dict[str, tuple[Any, ...]] = {
    "canaries=5": ("--canaries", 5),
    "rounds=0": ("--rounds", 0),
    "--observer everything": ("--observer", "everything"),
    "is one run": ("--only", "global"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refusals_in_one_line(message: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ("--runs", place / "runs", "--stores", place / "stores")
    assert sottovoce("audit", place / "tones.yaml", *where, *REFUSED[message]) == 2
    assert message in capsys.readouterr().err


def test_central_training_is_no_business_of_an_audit(place: Path) -> None:
    with pytest.raises(InputError, match="trains centrally"):
        audit_recipe(load_recipe("demo-clipping/seed"), AuditSettings(), context=around(place))


def test_verdicts_are_those_of_the_report() -> None:
    from sottovoce.report.audit import VERDICTS

    assert set(VERDICTS) == set(AuditVerdict)
