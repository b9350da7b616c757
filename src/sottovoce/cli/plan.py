"""`sottovoce plan`: what a run would cost in privacy, and how large its population must be."""

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sottovoce.base.errors import InputError
from sottovoce.cli.console import print_json, print_line, print_wide, progress_bar, stdout
from sottovoce.cli.options import Json

if TYPE_CHECKING:
    from sottovoce.privacy.noise_planner import NoiseRequest
    from sottovoce.privacy.planner import PlannedRun


class AccountantName(StrEnum):
    PLD = "pld"
    RDP = "rdp"


class MechanismName(StrEnum):
    AUTO = "auto"
    INDEPENDENT = "independent"
    BANDED = "banded"
    BLT = "blt"


class PaperTableName(StrEnum):
    TABLE1 = "table1"
    TABLE17 = "table17"
    TABLE18 = "table18"
    TABLE20 = "table20"
    TABLE22 = "table22"


def plan(
    population: Annotated[int | None, typer.Option(help="K: users eligible.")] = None,
    cohort: Annotated[int | None, typer.Option(help="S: expected users per step; each joins with q = S/K.")] = None,
    over_select: Annotated[
        float | None,
        typer.Option(
            metavar="FACTOR", help="Draw so many times --cohort, of whom --cohort answer in time; see `serve`."
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="T: server updates.")] = None,
    delta: Annotated[float | None, typer.Option(help="δ, well below 1/K.")] = None,
    noise_multiplier: Annotated[float | None, typer.Option(help="z: noise std on the sum, over C.")] = None,
    sigma_dp: Annotated[float | None, typer.Option(help="σ_DP = z/S: noise std on the mean, over C.")] = None,
    target_epsilon: Annotated[
        float | None, typer.Option(help="Find the least noise for this ε; or what --smallest-population must reach.")
    ] = None,
    accountant: Annotated[
        AccountantName, typer.Option(help="Which ε a target means; `rdp` is what a run's budget is kept by.")
    ] = AccountantName.PLD,
    parameters: Annotated[
        int | None, typer.Option(help="D: size of the model, for the noise beside an update.")
    ] = None,
    client_wers: Annotated[
        int | None, typer.Option(metavar="N", help="Measure clients' WER so often besides; with --client-wer-noise.")
    ] = None,
    client_wer_noise: Annotated[
        float | None, typer.Option(metavar="Z", help="The noise multiplier of those, as in `federation.client_wer`.")
    ] = None,
    clip_bound: Annotated[float, typer.Option(help="C: bound on one user's update; ε does not depend on it.")] = 0.01,
    scale: Annotated[
        str | None, typer.Option(metavar="N,N,…", help="The same σ_DP, q and T with S and K this many times larger.")
    ] = None,
    smallest_population: Annotated[
        bool, typer.Option("--smallest-population", help="The smallest K at which this recipe has ε ≤ target.")
    ] = False,
    max_cohort: Annotated[
        int | None,
        typer.Option(help="There and in the plot: from this S on, only K grows. With --mechanism: largest S."),
    ] = None,
    mechanism: Annotated[
        MechanismName | None,
        typer.Option(
            help="Noise, cycle, cohort and rounds for --max-cohort, --steps, --delta and two of --population, "
            "--sigma-dp (effective) and --target-epsilon, or all three; `auto` picks the best noise."
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw ε against population for several noise levels: FILE.png, .svg, .pdf or .html."),
    ] = None,
    paper: Annotated[
        PaperTableName | None,
        typer.Option(help="A table of Pelikan et al. 2025 with our ε beside theirs; `table22` is of computing."),
    ] = None,
    json: Json = False,
) -> None:
    """ε before anything is trained, for Poisson sampling and adding or removing one user.

    Example: sottovoce plan --population 69506000 --cohort 204800 --sigma-dp 3e-6 --steps 2034 --delta 1e-9
    """
    from sottovoce.privacy import planner
    from sottovoce.privacy.events import Measured
    from sottovoce.privacy.plan_sampling import over_selected

    sizes: dict[str, object] = {"--population": population, "--cohort": cohort, "--steps": steps, "--delta": delta}
    for_one_plan: dict[str, object] = {
        "--scale": scale,
        "--plot": plot,
        "--smallest-population": smallest_population or None,
    }
    if mechanism is not None:
        others: dict[str, object] = {"--cohort": cohort, "--noise-multiplier": noise_multiplier}
        others |= {"--parameters": parameters, "--client-wers": client_wers, "--paper": paper, **for_one_plan}
        others |= {"--over-select": over_select}
        if given := _given(others):
            raise InputError(f"--mechanism {mechanism} with {given}: expected --max-cohort and what is wanted")
        if max_cohort is None or steps is None or delta is None:
            missing = _missing({"--max-cohort": max_cohort, "--steps": steps, "--delta": delta})
            raise InputError(f"--mechanism {mechanism}: {missing} is missing")
        from sottovoce.privacy.noise_planner import NoiseRequest

        asked = NoiseRequest(
            max_cohort=max_cohort,
            central_steps=steps,
            delta=delta,
            population_size=population,
            sigma_dp=sigma_dp,
            target_epsilon=target_epsilon,
        )
        _print_noise(asked, mechanism, accountant, json)
        return
    if paper is not None:
        if given := _given(sizes | for_one_plan | {"--over-select": over_select}):
            raise InputError(f"--paper {paper} with {given}: expected a table, or a plan of your own")
        _print_paper_table(paper, json)
        return
    if population is None or cohort is None or steps is None or delta is None:
        raise InputError(f"{_missing(sizes)} is missing: expected --population, --cohort, --steps and --delta")
    if max_cohort is not None and not smallest_population and plot is None:
        raise InputError(f"--max-cohort {max_cohort}: expected together with --smallest-population or --plot")
    if smallest_population and (target_epsilon is None or (noise_multiplier is None and sigma_dp is None)):
        raise InputError("--smallest-population: expected --target-epsilon, and --sigma-dp or --noise-multiplier")
    if plot is not None:
        from sottovoce.base.drawing import check_plot

        check_plot(plot)
    factors = _read_factors(scale)
    if (client_wers is None) != (client_wer_noise is None):
        raise InputError("--client-wers and --client-wer-noise: expected both or neither")
    measured = None
    if client_wers is not None and client_wer_noise is not None:
        measured = Measured(count=client_wers, noise_multiplier=client_wer_noise)

    if over_select is not None and (given := _given(for_one_plan)):
        raise InputError(f"--over-select {over_select:g} with {given}: expected one of them")
    planned = planner.plan_run(
        population,
        cohort_size=cohort if over_select is None else over_selected(cohort, factor=over_select),
        expected_answers=None if over_select is None else cohort,
        central_steps=steps,
        delta=delta,
        noise_multiplier=noise_multiplier,
        sigma_dp=sigma_dp,
        target_epsilon=None if smallest_population else target_epsilon,
        parameters=parameters,
        clip_bound=clip_bound,
        accountant=accountant.value,
        measured=measured,
    )
    scaled = planner.scale_plan(planned, factors=factors)
    needed = None
    if smallest_population and target_epsilon is not None:
        needed = planner.smallest_population(
            planned, target_epsilon=target_epsilon, max_cohort=max_cohort, accountant=accountant.value
        )

    if json:
        content: dict[str, Any] = planned.to_json()
        if scaled:
            content["scaled"] = [one.to_json() for one in scaled]
        if needed is not None:
            content["smallest_population"] = needed.to_json()
        print_json(content)
    else:
        from sottovoce.privacy.plan_tables import plan_table, plans_table

        print_wide(plan_table(planned))
        if scaled:
            print_wide(plans_table(scaled, title="The same σ_DP, q and T, extrapolated"))
        if needed is not None:
            title = f"The smallest population with ε ≤ {target_epsilon:g}, by {accountant.upper()}"
            print_wide(plans_table([needed], title=title))
    for warning in planned.warnings:
        print_line(f"warning: {warning}")
    if plot is not None:
        _draw(planned, plot, max_cohort)


def _print_noise(asked: "NoiseRequest", mechanism: MechanismName, accountant: AccountantName, json: bool) -> None:
    from sottovoce.privacy.mechanism_search import KINDS
    from sottovoce.privacy.noise_planner import plan_noise
    from sottovoce.privacy.plan_tables import noise_table, noise_words

    kinds = [kind for kind in KINDS if mechanism in (MechanismName.AUTO, kind)]
    with progress_bar("searching for the best noise") as bar:
        (task,) = bar.task_ids
        found = plan_noise(asked, kinds=kinds, accountant=accountant.value, on_look=lambda: bar.advance(task))
    if json:
        print_json(found.to_json())
        return
    print_wide(noise_table(found))
    for line in noise_words(found):
        print_line(line, to=stdout)


def _print_paper_table(name: PaperTableName, json: bool) -> None:
    if name is PaperTableName.TABLE22:
        from sottovoce.papers.table22 import compute_rows, compute_table_view

        rows = compute_rows()
        if json:
            print_json({"table": name.value, "rows": [row.to_json() for row in rows]})
        else:
            print_wide(compute_table_view(rows))
        return
    from sottovoce.papers.paper_tables import paper_table, paper_table_view

    table = paper_table(name.value)
    if json:
        print_json(table.to_json())
    else:
        print_wide(paper_table_view(table))


def _draw(planned: "PlannedRun", plot: Path, max_cohort: int | None) -> None:
    from sottovoce.report.populations import draw_population_curves, population_curves

    curves = population_curves(planned, max_cohort=max_cohort)
    draw_population_curves(curves, plot, plan=planned)
    print_line(f"wrote {plot}")


def _given(options: Mapping[str, object]) -> str:
    return ", ".join(name for name, value in options.items() if value is not None)


def _missing(options: Mapping[str, object]) -> str:
    return ", ".join(name for name, value in options.items() if value is None)


def _read_factors(scale: str | None) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in scale.split(",")) if scale is not None else ()
    except ValueError as problem:
        raise InputError(f"--scale {scale}: expected numbers with commas between, such as 10,100,1000") from problem
