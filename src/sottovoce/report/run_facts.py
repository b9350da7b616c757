"""What was run, on what and with what, from the recipe and the surroundings that a run folder keeps."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sottovoce.report.cells import integer, text
from sottovoce.report.records import RunRecord
from sottovoce.report.titles import about_of
from sottovoce.tables import NOTHING, Table

RUN_FACTS: dict[str, Callable[[RunRecord], str]] = {
    "recipe": lambda run: text(about_of(run)),
    "kind": lambda run: _kind(run),
    "seed": lambda run: text(run.config.get("seed")),
    "data": lambda run: text((run.config.get("data") or {}).get("store")),
    "model": lambda run: text((run.config.get("model") or {}).get("size")),
    "rounds or steps": lambda run: _steps(run),
    "cohort": lambda run: integer(run.federation.get("cohort_size")),
    "local training": lambda run: _local(run),
    "server": lambda run: _server(run),
    "clipping": lambda run: _clipping(run),
    "noise": lambda run: _noise(run),
    "engine": lambda run: ": ".join(text(run.engine[k]) for k in ("engine", "why") if k in run.engine) or NOTHING,
    "commit": lambda run: text(short_commit(run)),
    "hardware": lambda run: _hardware(run),
    "software": lambda run: _software(run),
}


def settings_tables(runs: Sequence[RunRecord]) -> tuple[Table, Table]:
    """What tells several runs apart, and what they share; of one run, the second is all there is."""
    told = {name: [tell(run) for run in runs] for name, tell in RUN_FACTS.items()}
    shared = {name: cells[0] for name, cells in told.items() if len(set(cells)) == 1 and cells[0] != NOTHING}
    apart = {name: cells for name, cells in told.items() if len(set(cells)) > 1}
    rows = tuple((run.label, *(cells[n] for cells in apart.values())) for n, run in enumerate(runs)) if apart else ()
    title = "What they share" if len(runs) > 1 else "Recipe and surroundings"
    return (
        Table("differences", "What tells them apart", ("", *apart), rows, all_words=True),
        Table("settings", title, ("", "setting"), tuple(shared.items()), all_words=True),
    )


def short_commit(run: RunRecord) -> str | None:
    """The commit that a run was made from, and whether the sources were changed since; None where nobody knows."""
    commit, dirty, _ = (run.environment.get("commit") or "").partition("-dirty")
    return f"{commit[:7]}{', with changes' if dirty else ''}" if commit else None


def _kind(run: RunRecord) -> str:
    if not run.is_federated:
        return "central training"
    return "federated, in secure mode" if run.is_release else "federated, simulated (not a release)"


def _steps(run: RunRecord) -> str:
    wanted = (run.federation or run.config.get("central") or {}).get("steps")
    ended = run.results.get("ended") or {}
    done = ended.get("step", run.metrics[-1]["step"] if run.metrics else None)
    why = ended.get("words") or ("" if run.results else "not finished")
    told = integer(wanted) if done == wanted else f"{integer(done)} of {integer(wanted)}"
    return f"{told} ({why})" if why else told


def _local(run: RunRecord) -> str:
    local = run.federation.get("local") or {}
    if not local:
        return NOTHING
    unit = "steps" if local.get("local_steps") is not None else "epochs"
    name = (local.get("optimiser") or {}).get("name", "sgd")
    return f"{local.get(f'local_{unit}')} {unit} of {name}, lr {local.get('lr'):g}, {local.get('batch_seconds'):g} s"


def _server(run: RunRecord) -> str:
    settings = run.federation.get("server") or run.config.get("central") or {}
    optimiser, schedule = settings.get("optimiser") or {}, settings.get("schedule") or {}
    return f"{optimiser.get('name')}, lr {schedule.get('lr'):g}, {schedule.get('name')}" if schedule else NOTHING


def _clipping(run: RunRecord) -> str:
    settings: Mapping[str, Any] = run.federation.get("privacy") or {}
    bound = settings.get("clip_bound")
    if bound is None or math.isinf(float(bound)):
        return "none" if settings else NOTHING
    how = "" if settings.get("normalise") in (None, "never") else f", normalised {settings['normalise']}"
    return f"C = {float(bound):g}, {settings.get('share')}{how}" + (", adaptive" if settings.get("adaptive") else "")


def _noise(run: RunRecord) -> str:
    settings = run.federation.get("privacy") or {}
    mechanism = settings.get("mechanism")
    return _amount(run, settings) + ("" if mechanism is None else f", {mechanism['kind']} over rounds")


def _amount(run: RunRecord, settings: Mapping[str, Any]) -> str:
    if settings.get("target_epsilon"):
        z = run.header["plan"].get("noise_multiplier") if run.header else None
        followed = "" if z is None else f"z = {z:g}, for "
        return f"{followed}ε ≤ {settings['target_epsilon']:g} by {settings.get('accountant', 'pld').upper()}"
    if settings.get("sigma_dp"):
        return f"σ_DP = {settings['sigma_dp']:g}"
    return (
        f"z = {settings['noise_multiplier']:g}" if settings.get("noise_multiplier") else "none" if settings else NOTHING
    )


def _hardware(run: RunRecord) -> str:
    found = run.environment
    if not found:
        return NOTHING
    cpus = f"{found.get('cpus')} CPU cores"
    return f"{found['gpu']}, {cpus}" if found.get("gpu") else f"no GPU, {cpus}"


def _software(run: RunRecord) -> str:
    named = ("sottovoce", "torch", "python")
    return ", ".join(f"{name} {run.environment[name]}" for name in named if run.environment.get(name)) or NOTHING
