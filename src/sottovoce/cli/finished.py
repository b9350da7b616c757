"""What a command prints of runs that are done: their tables, what they promise, and what to do with them."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from sottovoce.cli.console import fits_terminal, print_line, print_wide, stdout

if TYPE_CHECKING:
    from sottovoce.base.tables import Table
    from sottovoce.report.summary import Summary
    from sottovoce.training.run_context import Outcome

QUOTED = 3


def print_finished(
    finished: "Mapping[str, Outcome]",
    folder: Path,
    *,
    title: str,
    commands: Mapping[str, str] | None = None,
    quietly: bool = False,
) -> None:
    """Write the report of runs that are done, and print its tables unless `quietly`.

    `commands` run each of them again, where that can be done by one.
    """
    from sottovoce.report.summary import write_report

    report = write_report({label: outcome.folder for label, outcome in finished.items()}, folder, title=title)
    if quietly:
        return
    print_results(report)
    stdout.print(report.verdict, highlight=False, soft_wrap=True, style="bold")
    for table in report.tables_below:
        print_wide(table.for_terminal())
    for line in report.together:
        print_line(line, to=stdout)
    for note in report.notes:
        stdout.print(note, highlight=False, soft_wrap=True)
    label = choose_run_to_use(finished)
    for line in explain_useless_run(finished[label]):
        print_line(line, to=stdout)
    if (quoted := quote_transcripts(label, finished[label])) is not None:
        stdout.print(quoted.for_terminal(breaking=True))
    print_line(f"report: {report.path}", to=stdout)
    for line in list_next_commands(finished[label], again=(commands or {}).get(label)):
        print_line(line, to=stdout)


def print_results(report: "Summary") -> None:
    """The table of results; where it is too wide for the terminal, without what the report says besides."""
    table = report.for_terminal()
    stdout.print(table if fits_terminal(table) else report.for_terminal(brief=True))


def choose_run_to_use(finished: "Mapping[str, Outcome]") -> str:
    """The label of the first run with a guarantee; where none has one, of the last."""
    private = (label for label, outcome in finished.items() if has_guarantee(outcome))
    return next(private, [*finished][-1])


def has_guarantee(finished: "Outcome") -> bool:
    """Whether somebody is promised something: a run without noise promises nothing, nor does central training."""
    assert finished.results is not None
    return finished.results.get("privacy", {}).get("epsilon_rdp") is not None


def explain_useless_run(finished: "Outcome") -> list[str]:
    """What binds and what would help, where a run with noise is not shown to be better than what it started from."""
    from sottovoce.evaluation.compare import LESS_START, compute_difference, explain_incomparable
    from sottovoce.privacy.noise_length import NoiseLength
    from sottovoce.training.privacy_report import describe_noise

    assert finished.results is not None
    results, private = finished.results, finished.results.get("privacy", {})
    if not has_guarantee(finished) or "mechanism" in private:
        return []
    for name, test in results["test"].items():
        before = results["start"]["test"].get(name, {})
        interval = test.get(LESS_START, {}).get("difference_interval")
        if interval is None and not explain_incomparable(test, before):
            interval = compute_difference(test, before).interval
        if interval is not None and interval[1] < 0:
            return []
    found = NoiseLength(
        noise_multiplier=private["noise_multiplier"],
        cohort_size=private.get("expected_answers", private["cohort_size"]),
        parameters=results["communication"]["trained_parameters"],
        rounds=private["steps"],
    )
    return ["It is not shown to be better than the model it started from.", *describe_noise(found)]


def quote_transcripts(label: str, finished: "Outcome") -> "Table | None":
    """Some test recordings, transcribed before and after; None where the run quotes nobody, as with real voices.

    They are the first of those that the run has quoted, which are spread evenly over the test speakers.
    """
    from sottovoce.base.tables import NOTHING, Table
    from sottovoce.report.summary import START

    assert finished.results is not None
    before = finished.results.get("start", {}).get("test", {})
    for name, test in finished.results["test"].items():
        if "samples" in test and "samples" in before.get(name, {}):
            rows: list[tuple[str, str]] = []
            for old, new in list(zip(before[name]["samples"], test["samples"], strict=True))[:QUOTED]:
                said, first, last = (
                    text or NOTHING for text in (new["reference"], old["hypothesis"], new["hypothesis"])
                )
                rows += [("said", said), (START, first), (label, last)]
            groups = tuple(range(3, len(rows), 3))
            title = f"{len(rows) // 3} recordings of test speakers, transcribed"
            return Table("quoted", title, ("", "text"), tuple(rows), all_words=True, groups=groups)
    return None


def list_next_commands(finished: "Outcome", *, again: str | None = None) -> list[str]:
    """How to make a release of a simulation that `again` runs, to verify what a run promises, and to use its model."""
    assert finished.results is not None
    tests, folder = finished.results["test"].values(), finished.folder
    release, verify, exported = [], [], Path("models") / folder.name
    if has_guarantee(finished):
        if finished.results["privacy"]["simulated"] and again is not None:
            out, mode = folder.with_name(f"{folder.name}-release"), "federation.privacy.mode=secure"
            if "expected_answers" in finished.results["privacy"]:  # in one process nobody is late
                served = f"{again.replace(' run ', ' serve ', 1)} {mode} --roster ROSTER --keys KEYS --out {out}"
                release = [f"to make a release of it, over a network, where some may be late: {served}"]
            else:
                release = [f"to make a release of it, with noise that nobody can repeat: {again} {mode} --out {out}"]
        export = f"sottovoce export {folder} --out {exported} && sottovoce verify {exported}"
        verify = [f"to verify what it promises: {export}"]
    if tests and not any("wer" in test for test in tests):  # the model writes no text
        use = f"start_from={folder} in a recipe, or sottovoce probe {folder} --on STORE:SPLIT"
    else:
        use = f"sottovoce transcribe {folder} FILE"
    return [*release, *verify, f"to use it: {use}"]
