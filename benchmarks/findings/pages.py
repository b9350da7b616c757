"""A page for each suite, where the document's links lead: what every run gave, and how to make it again."""

import re
from pathlib import Path
from typing import Any

from findings.kept import Kept
from findings.numbers import between, per_cent, told_epsilon
from findings.rates import dev_wer, start_wer
from findings.templates import fill
from sottovoce.reporting.cells import NOTHING
from sottovoce.reporting.records import RunRecord
from sottovoce.reporting.run_facts import FACTS
from sottovoce.training.run_folder import CONFIG

TEMPLATE = Path(__file__).with_name("suite.template.md")


def suite_pages(kept: Kept) -> dict[str, str]:
    """The pages of all suites that are kept, by suite."""
    return {suite: _page(kept, suite) for suite in kept.suites()}


def recipe_of(suite: str) -> str:
    """
    >>> recipe_of("clipping"), recipe_of("cpu-local"), recipe_of("gao-clients")
    ('benchmark/clipping', 'benchmark/cpu/local', 'benchmark/gao/clients')
    """
    return "benchmark/" + re.sub("^(cpu|gao)-", r"\1/", suite)


def _page(kept: Kept, suite: str) -> str:
    runs = [_told(kept.run(f"{suite}/{label}")) for label in kept.labels(suite)]
    document = "RESULTS-gao.md" if suite.startswith("gao-") else "RESULTS.md"
    return fill(TEMPLATE, {"suite": suite, "document": document, "runs": runs})


def _told(run: RunRecord) -> dict[str, Any]:
    suite, _, label = run.label.partition("/")
    recipe = (run.folder / CONFIG).read_text(encoding="utf-8").rstrip()
    return {"label": label, "about": run.config.get("about") or label, "facts": _facts(run, suite), "recipe": recipe}


def _facts(run: RunRecord, suite: str) -> dict[str, str]:
    label = run.label.partition("/")[2]
    rates = {}
    for name, test in run.tests.items():
        of = "" if len(run.tests) == 1 else f", {name}"
        interval = test.get("wer_interval")
        rates[f"test WER %{of}"] = f"{per_cent(test['wer'])} ({between(interval)})"
        rates[f"start WER %{of}"] = per_cent(start_wer(run, name))
    return {
        **rates,
        "dev WER %": per_cent(dev_wer(run)),
        "privacy": told_epsilon(run) if run.privacy else NOTHING,
        "ledger": _ledger(run),
        **{name: FACTS[name](run) for name in ("rounds or steps", "engine", "commit", "hardware")},
        "again": f"`sottovoce run {recipe_of(suite)} --only {label}`",
    }


def _ledger(run: RunRecord) -> str:
    """Its end, which whoever has a copy can hold against theirs."""
    if run.ledger is None or run.ledger.report is None:
        return "not kept"
    mark = run.ledger.report.mark
    return f"{mark.length} lines, the last with hash `{mark.head}`"
