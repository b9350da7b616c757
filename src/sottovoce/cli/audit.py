"""`sottovoce audit`: what a recipe's rounds reveal of one user, beside the ε of its ledger."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sottovoce.base.errors import InputError
from sottovoce.cli.console import exit_interrupted, print_json, print_line, print_wide, stdout
from sottovoce.cli.options import Json
from sottovoce.cli.run import open_context

if TYPE_CHECKING:
    from rich.table import Table

    from sottovoce.audit.canary_audit import Audit
    from sottovoce.config import Recipe
    from sottovoce.training.run_context import RunContext

NOT_CHARGED = "these figures come from people's speech, in rounds that no ledger charges; publish none of them"


def audit(
    recipe: Annotated[str, typer.Argument(help="A recipe's name, a YAML file, or FILE.yaml/RUN; or a suite.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, such as federation.steps=20.")] = None,
    canaries: Annotated[int, typer.Option(help="How many; half of them are among the users.")] = 1000,
    observer: Annotated[
        str, typer.Option(help="What the attacker sees: all `releases`, or the `final` model alone.")
    ] = "releases",
    rounds: Annotated[int | None, typer.Option(help="Audit only so many of the recipe's rounds.")] = None,
    speech: Annotated[
        bool, typer.Option("--speech", help="Train once more with people who have a secret, and attack the model.")
    ] = False,
    secrets: Annotated[int, typer.Option(help="There: how many; half of them are among the clients.")] = 40,
    seed: Annotated[int, typer.Option(help="Decides the canaries, and which of them are in.")] = 1,
    out: Annotated[Path | None, typer.Option(help="The run's folder; the audit is kept beside it.")] = None,
    runs: Annotated[Path, typer.Option(help="Where runs lie: seed models are looked for and made here.")] = Path(
        "runs"
    ),
    stores: Annotated[Path, typer.Option(help="Where stores lie and are made.")] = Path("stores"),
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or cuda:N; a GPU where there is one by default.")
    ] = None,
    only: Annotated[
        str | None, typer.Option(metavar="LABEL,…", help="Of a suite only these runs; * and ? stand for others.")
    ] = None,
    json: Json = False,
) -> None:
    """Measure what a recipe's rounds reveal of a single user, beside the ε that they promise.

    Example: sottovoce audit demo/private

    Canaries, users with updates of their own making, take part in the recipe's rounds: drawn, clipped, noised and
    accounted like everybody. How well those who took part can be told from those who did not is what leaks.
    Rounds are made for this with the recipe's people, and no ledger charges for them: of a release, publish none of it.

    Exit code 0: nothing speaks against the promise; 1: something does (`verdict` in --json says what);
    130: it was interrupted.
    """
    from sottovoce.audit.canary_audit import AuditVerdict, Observer
    from sottovoce.audit.recipe import AuditSettings, attack_recipe, audit_recipe, save_audit
    from sottovoce.audit.speech_audit import SpeechAudit, format_attacks
    from sottovoce.privacy.settings import Mode
    from sottovoce.training.parent_model import default_run_folder

    if observer not in list(Observer):
        raise InputError(f"--observer {observer}: expected one of {', '.join(Observer)}")
    settings = AuditSettings(canaries=canaries, secrets=secrets, rounds=rounds, observer=Observer(observer), seed=seed)
    folder = out or default_run_folder(recipe, runs)
    wanted = _wanted(recipe, overrides or [], folder=folder, only=only)
    found: dict[str, Audit] = {}
    attacked: dict[str, SpeechAudit] = {}
    kept: dict[str, Mapping[str, Any]] = {}
    for label, (one, _) in wanted.items():
        if one.federation is not None and one.federation.privacy.mode is Mode.SECURE:
            print_line(f"{label} is a release: {NOT_CHARGED}")
    try:
        for label, (one, place) in wanted.items():
            with open_context(label, runs=runs, stores=stores, device=device) as around:
                show = partial(_show, around)
                around.on_stage(f"audit of {label}")
                found[label] = audit_recipe(one, settings, context=around, on_round=show)
                if speech:
                    around.on_stage(f"attacks on {label}")
                    attacked[label] = attack_recipe(one, settings, context=around, on_round=show)
            kept[label] = save_audit(place, one, found[label], attacked.get(label))
    except KeyboardInterrupt:  # no verdict, whose exit code it must not have
        exit_interrupted(f"stopped: {len(kept):,} of {len(wanted):,} audits are kept; the same command begins anew")
    if json:
        print_json(kept.get(recipe, kept))
    else:
        print_wide(_table(found))
        for label, one_audit in found.items():
            print_line(f"{label}: {one_audit.verdict}: {one_audit.why}", to=stdout)
            print_line(f"{label}: {one_audit.interval}", to=stdout)
        for label, attacks in attacked.items():
            for line in format_attacks(attacks.as_json()):
                print_line(f"{label}: {line}", to=stdout)
    if any(one_audit.verdict is not AuditVerdict.CONSISTENT for one_audit in found.values()):
        raise typer.Exit(1)


def _wanted(name: str, overrides: Sequence[str], *, folder: Path, only: str | None) -> "dict[str, tuple[Recipe, Path]]":
    """What is audited, and where each run lies: of a suite, the runs that promise something."""
    from sottovoce.config import Suite, load_experiment
    from sottovoce.training.suites import load_suite_recipes, select_runs

    experiment = load_experiment(name, overrides)
    if not isinstance(experiment, Suite):
        if only is not None:
            raise InputError(f"{name} is one run: --only is for suites")
        return {name: (experiment, folder)}
    recipes = load_suite_recipes(select_runs(experiment, only))
    found = {
        label: (one, folder / label)
        for label, one in recipes.items()
        if one.federation is not None and one.federation.privacy.adds_noise
    }
    if not found:
        raise InputError(f"{name}: none of its runs adds noise, and so none of them promises anything")
    return found


def _show(around: "RunContext", done: int, rounds: int) -> None:
    from sottovoce.training.loop import ProgressReport

    around.on_report(ProgressReport(unit="round", step=done, steps=rounds))


def _table(found: "Mapping[str, Audit]") -> "Table":
    from sottovoce.base.tables import NOTHING, plain_table
    from sottovoce.privacy.guarantee import format_epsilon

    table = plain_table()
    for heading in ("", "ε promised", "ε estimated", "interval", "ε at least", "noise found", "verdict"):
        table.add_column(heading, justify="left" if heading in ("", "verdict") else "right")
    for label, one in found.items():
        promised, estimated, low, high = map(format_epsilon, (one.promised, one.fit.epsilon, one.fit.low, one.fit.high))
        noise = NOTHING if one.noise is None else f"{one.noise.share:.1%}"
        interval, bound = f"{low} to {high}", f"{one.bound.epsilon:.2f}"
        table.add_row(label, promised, estimated, interval, bound, noise, str(one.verdict))
    return table
