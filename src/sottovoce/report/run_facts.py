"""What was run, on what and with what, from the recipe and the environment that a run folder keeps."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sottovoce.base.tables import NOTHING
from sottovoce.evaluation.converged import VERDICTS, Converged, judge_metrics
from sottovoce.privacy.stated import remove_epsilon
from sottovoce.report.parts import Fold, PagePart, PageSection, make_section, make_table, show_count, show_text
from sottovoce.report.records import RunRecord

SECURE_KEEPS_NOTHING = (
    "was made in secure mode: norms, losses and times are by-products of private data that no ε covers, so such a run "
    "never records them."
)
RUN_FACTS: dict[str, Callable[[RunRecord], str]] = {
    "recipe": lambda run: show_text(recipe_title(run)),
    "kind": lambda run: _kind(run),
    "seed": lambda run: show_text(run.config.get("seed")),
    "data": lambda run: show_text((run.config.get("data") or {}).get("store")),
    "model": lambda run: show_text((run.config.get("model") or {}).get("size")),
    "base model": lambda run: "; ".join(f"{name} {own}" for name, own in run.base_model.items()) or NOTHING,
    "rounds or steps": lambda run: _steps(run),
    "converged": lambda run: has_converged(run) if run.results else NOTHING,
    "cohort": lambda run: show_count(run.federation.get("cohort_size")),
    "local training": lambda run: _local(run),
    "server": lambda run: _server(run),
    "clipping": lambda run: _clipping(run),
    "noise": lambda run: _noise(run),
    "decoding of test sets": lambda run: show_text(run.results.get("decoding")),
    "engine": lambda run: ": ".join(show_text(run.engine[k]) for k in ("engine", "why") if k in run.engine) or NOTHING,
    "commit": lambda run: show_text(short_commit(run)),
    "hardware": lambda run: _hardware(run),
    "software": lambda run: _software(run),
}


def settings_section(runs: Sequence[RunRecord]) -> PageSection | None:
    """In what several runs differ, and what they share; of one run, the second is all there is."""
    facts = {name: [fact(run) for run in runs] for name, fact in RUN_FACTS.items()}
    common = [(name, cells[0]) for name, cells in facts.items() if len(set(cells)) == 1 and cells[0] != NOTHING]
    apart = {name: cells for name, cells in facts.items() if len(set(cells)) > 1}
    rows = [(run.label, *(cells[n] for cells in apart.values())) for n, run in enumerate(runs)] if apart else []
    title = "What they share" if len(runs) > 1 else "Recipe and environment"
    shared = make_table("settings", common, title=title)
    parts: list[PagePart] = [make_table("differences", rows, headings=("", *apart))]
    if common:
        parts.append(Fold(title, (shared,)) if apart else shared)
    return make_section("settings", parts)


def report_title(title: str, runs: Sequence[RunRecord]) -> str:
    """`title` for these runs. A simulation protects nobody, so that of one names no ε as if it held."""
    is_simulated = any(run.is_federated and not run.is_release for run in runs)
    return remove_epsilon(title) if is_simulated else title


def recipe_title(run: RunRecord) -> str | None:
    """The recipe's own title (`about`)."""
    about = run.config.get("about")
    return None if about is None else report_title(str(about), [run])


def short_commit(run: RunRecord) -> str | None:
    """The commit that a run was made from, and whether the sources were changed since; None where it is unknown."""
    commit, dirty, _ = (run.environment.get("commit") or "").partition("-dirty")
    return f"{commit[:7]}{', with changes' if dirty else ''}" if commit else None


def has_converged(run: RunRecord) -> Converged:
    """Whether its dev score had stopped improving, by its metrics."""
    return judge_metrics(run.metrics, run.results.get("model") or {}, last_step=_last_step(run) or 0)


def start_converged(run: RunRecord) -> Converged:
    """Whether the model that it started from had, by what the run found in that model's folder."""
    found = (run.results.get("start") or {}).get("converged")
    return next((known for known in VERDICTS if known == found), "not shown")


def _kind(run: RunRecord) -> str:
    if not run.is_federated:
        return "central training"
    return "federated, in secure mode" if run.is_release else "federated, simulated (not a release)"


def _steps(run: RunRecord) -> str:
    settings = run.federation or run.config.get("central") or {}
    planned = settings.get("steps", run.inputs.get("steps"))  # those of epochs follow from the data
    ended, done = run.results.get("ended") or {}, _last_step(run)
    why = ended.get("words") or ("" if run.results else "not finished")
    steps = show_count(planned) if done == planned else f"{show_count(done)} of {show_count(planned)}"
    return f"{steps} ({why})" if why else steps


def _last_step(run: RunRecord) -> int | None:
    step: int | None = run.metrics[-1]["step"] if run.metrics else None
    return (run.results.get("ended") or {}).get("step", step)


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
    settings = run.privacy_settings
    bound = settings.get("clip_bound")
    if bound is None or math.isinf(float(bound)):
        return "none" if settings else NOTHING
    how = "" if settings.get("normalise") in (None, "never") else f", normalised {settings['normalise']}"
    return f"C = {float(bound):g}, {settings.get('share')}{how}" + (", adaptive" if settings.get("adaptive") else "")


def _noise(run: RunRecord) -> str:
    mechanism = run.privacy_settings.get("mechanism")
    return _amount(run, run.privacy_settings) + ("" if mechanism is None else f", {mechanism['kind']} over rounds")


def _amount(run: RunRecord, settings: Mapping[str, Any]) -> str:
    if settings.get("target_epsilon"):
        z = run.header["plan"].get("noise_multiplier") if run.header else None
        followed = "" if z is None else f"z = {z:g}, for "
        return f"{followed}ε ≤ {settings['target_epsilon']:g} by {settings.get('accountant', 'pld').upper()}"
    if settings.get("sigma_dp"):
        return f"σ_DP = {settings['sigma_dp']:g}"
    if settings.get("noise_multiplier"):
        return f"z = {settings['noise_multiplier']:g}"
    return "none" if settings else NOTHING


def _hardware(run: RunRecord) -> str:
    found = run.environment
    if not found:
        return NOTHING
    cpus = f"{found.get('cpus')} CPU cores"
    return f"{found['gpu']}, {cpus}" if found.get("gpu") else f"no GPU, {cpus}"


def _software(run: RunRecord) -> str:
    named = ("sottovoce", "torch", "python")
    return ", ".join(f"{name} {run.environment[name]}" for name in named if run.environment.get(name)) or NOTHING
