"""A page for each suite, where the document's links lead: what every run gave, and how to make it again."""

import json
import re
from pathlib import Path
from typing import Any

from findings.kept import Kept, settings_of, varying
from findings.numbers import between, per_cent, told_audit, told_epsilon, unless_converged
from findings.rates import dev_wer, start_wer
from findings.templates import fill
from sottovoce.base.tables import NOTHING
from sottovoce.report.audit import kept_audit
from sottovoce.report.records import RunRecord
from sottovoce.report.run_facts import RUN_FACTS, recipe_title, start_converged
from sottovoce.training.run_folder import CONFIG

TEMPLATE = Path(__file__).with_name("suite.template.md")
# Suites behind guides, by name: the recipe, of the package or of the page, and the page.
OF_GUIDES = {
    "demo": ("demo", "guides/first-private-recogniser.md"),
    "demo-clipping": ("demo-clipping", "guides/first-private-recogniser.md"),
    "demo-real": ("demo-real", "guides/first-private-recogniser.md"),
    "demo-pretrained": ("demo-pretrained", "guides/first-private-recogniser.md"),
    "guide-corpus": ("private.yaml", "guides/your-own-corpus.md"),
    "guide-model": ("gru.yaml", "guides/your-own-model.md"),
    "guide-parts": ("parts.yaml", "guides/training-a-part.md"),
}
# Runs of a feature that was removed: what they are kept for stands on the page of results.
REMOVED = {"real-had": ("denoised", "federation.denoise")}
FEW = 12  # settings in which a run may differ from one above it whose recipe stands there whole


def suite_pages(kept: Kept) -> dict[str, str]:
    """The pages of all suites that are kept, by suite."""
    return {suite: _page(kept, suite) for suite in kept.suites()}


def recipe_of(suite: str) -> str:
    """
    >>> recipe_of("clipping"), recipe_of("cpu-local"), recipe_of("gao-clients"), recipe_of("demo")
    ('benchmark/clipping', 'benchmark/cpu/local', 'benchmark/gao/clients', 'demo')
    """
    if suite in OF_GUIDES:
        return OF_GUIDES[suite][0]
    return "benchmark/" + re.sub("^(cpu|gao|ramesh)-", r"\1/", suite)


def document_of(suite: str) -> str:
    """
    >>> document_of("clipping"), document_of("gao-clients")
    ('RESULTS.md', 'RESULTS-gao.md')
    """
    if suite in OF_GUIDES:
        return OF_GUIDES[suite][1]
    found = re.match("(gao|ramesh)-", suite)
    return f"RESULTS-{found[1]}.md" if found else "RESULTS.md"


def _page(kept: Kept, suite: str) -> str:
    shown: list[RunRecord] = []  # whole; runs of a suite are much the same, and mostly a seed apart
    told = []
    for run in (kept.run(f"{suite}/{label}") for label in kept.labels(suite)):
        near = min(shown, key=lambda other: len(_apart(run, other)), default=None)
        if near is None or len(_apart(run, near)) > FEW:
            shown.append(run)
            told.append(_told(run, suite, recipe=(run.folder / CONFIG).read_text(encoding="utf-8").rstrip()))
        else:
            told.append(_told(run, suite, near=_label(near), apart=_apart(run, near)))
    return fill(TEMPLATE, {"suite": suite, "document": document_of(suite), "runs": told})


def _told(run: RunRecord, suite: str, **recipe: Any) -> dict[str, Any]:
    label = _label(run)
    return {"label": label, "about": recipe_title(run) or label, "facts": _facts(run, suite), **recipe}


def _apart(run: RunRecord, other: RunRecord) -> dict[str, str]:
    """The settings of `run`, its seed among them, that are not those of `other`; what it does not have is null."""
    own, others = ({**settings_of(each), "seed": each.config.get("seed")} for each in (run, other))
    return {path: json.dumps(own.get(path)) for path in varying([own, others])}


def _label(run: RunRecord) -> str:
    return run.label.partition("/")[2]


def _facts(run: RunRecord, suite: str) -> dict[str, str]:
    rates: dict[str, str] = {}
    writes = all("wer" in test for test in run.tests.values())
    for name, test in run.tests.items():
        of = "" if len(run.tests) == 1 else f", {name}"
        if "wer" not in test:  # it writes no text
            rates |= {f"test loss{of}": f"{test['loss']:.2f}", f"found %{of}": per_cent(test["accuracy"])}
            continue
        interval = test.get("wer_interval")
        rates[f"test WER %{of}"] = f"{per_cent(test['wer'])} ({between(interval)})"
        start = start_wer(run, name)
        beside = "" if start is None else unless_converged([start_converged(run)])
        rates[f"start WER %{of}"] = f"{per_cent(start)}{beside}"
    return {
        **rates,
        "converged": RUN_FACTS["converged"](run),
        **({"dev WER %": per_cent(dev_wer(run))} if writes else {}),
        "privacy": told_epsilon(run) if run.privacy else NOTHING,
        **({} if (audit := kept_audit(run)) is None else {"audit": told_audit(run, audit)}),
        "ledger": _ledger(run),
        **{name: RUN_FACTS[name](run) for name in ("rounds or steps", "engine", "commit", "hardware")},
        "again": _again(suite, _label(run)),
    }


def _again(suite: str, label: str) -> str:
    """The command; a recipe that stands on a page may be a run by itself, of the same name."""
    prefix, key = REMOVED.get(suite, (None, None))
    if prefix is not None and label.startswith(prefix):
        return f"no longer: `{key}` was removed; the commit above has it"
    alone = suite in OF_GUIDES and recipe_of(suite).startswith(f"{label}.")
    return f"`sottovoce run {recipe_of(suite)}`" if alone else f"`sottovoce run {recipe_of(suite)} --only {label}`"


def _ledger(run: RunRecord) -> str:
    """Its end, which whoever has a copy can hold against theirs."""
    if run.ledger is None or run.ledger.report is None:
        return "not kept"
    mark = run.ledger.report.mark
    return f"{mark.length} lines, the last with hash `{mark.head}`"
