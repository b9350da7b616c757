"""What a template may ask for between {{ and }}. Each macro's docstring shows how it is called."""

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from findings import figures
from findings.kept import Kept
from findings.numbers import (
    formatted,
    norm_ratio,
    number_at,
    over_seeds,
    per_cent,
    single,
    told_difference,
    told_epsilon,
    told_population,
    value_at,
)
from findings.rates import dev_wer, difference, scored, start_wer
from findings.tables import suite_grid, suite_table
from sottovoce.errors import InputError
from sottovoce.reporting.cells import slugs
from sottovoce.reporting.drawings import Drawing
from sottovoce.reporting.records import RunRecord

Options = Mapping[str, str]


@dataclass(frozen=True)
class Page:
    """What macros read from and draw to. `images` is the figures' folder as the document refers to it."""

    kept: Kept
    images: str
    drawn: dict[str, bytes] = field(default_factory=dict)


RATES: Mapping[str, Callable[[RunRecord], float]] = {
    "test": lambda run: float(scored(run)["wer"]),
    "dev": lambda run: number_at(run, "results.model.dev_wer"),
}
Macro = Callable[[Page, Sequence[str], Options], str]


def wer(page: Page, names: Sequence[str], options: Options) -> str:
    """{{wer clipping/dim [test=NAME]}}: test WER of one run with its 95 % interval over speakers."""
    (name,) = _expect(names, "suite/label")
    return single(page.kept, page.kept.run(name), options.get("test"))


def devwer(page: Page, names: Sequence[str], options: Options) -> str:
    """{{devwer clipping/dim}}: dev WER of the model that was tested, over seeds."""
    (name,) = _expect(names, "suite/label")
    return _over_seeds(page, name, dev_wer)


def startwer(page: Page, names: Sequence[str], options: Options) -> str:
    """{{startwer clipping/dim}}: test WER of the model that it started from, over seeds."""
    (name,) = _expect(names, "suite/label")
    return _over_seeds(page, name, lambda run: start_wer(run, options.get("test")))


def mean(page: Page, names: Sequence[str], options: Options) -> str:
    """{{mean clipping/dim [test=NAME]}}: mean test WER over seeds, the least and the largest."""
    (name,) = _expect(names, "suite/label")
    return _over_seeds(page, name, lambda run: scored(run, options.get("test"))["wer"])


def difference_(page: Page, names: Sequence[str], options: Options) -> str:
    """{{difference clipping/dim clipping/global [test=NAME]}}: the first's WER less the second's, over common seeds,
    paired over speakers."""
    first, second = _expect(names, "suite/label", "suite/label")
    runs, others = page.kept.repeats(first), page.kept.repeats(second)
    found = difference(runs, others, names=(first, second), test=options.get("test"))
    return told_difference(page.kept, found, runs, others)


def epsilon(page: Page, names: Sequence[str], options: Options) -> str:
    """{{epsilon clipping/dim}}: ε of the run as it was, by RDP and PLD at δ."""
    (name,) = _expect(names, "suite/label")
    run = _first(page, name)
    return page.kept.link(run, told_epsilon(run))


def population(page: Page, names: Sequence[str], options: Options) -> str:
    """{{population clipping/dim}}: people needed for ε ≤ 8 with the same recipe, by RDP and PLD."""
    (name,) = _expect(names, "suite/label")
    run = _first(page, name)
    return page.kept.link(run, told_population(run))


def run(page: Page, names: Sequence[str], options: Options) -> str:
    """{{run clipping/dim}}: nothing but the link."""
    (name,) = _expect(names, "suite/label")
    return page.kept.link(page.kept.run(name), name)


def value(page: Page, names: Sequence[str], options: Options) -> str:
    """{{value clipping/dim results.privacy.useful.cohort_size ,}}: what a file says, by a Python format."""
    name, path, *how = _expect(names, "suite/label", "file.path", optional="format")
    found = page.kept.run(name)
    return page.kept.link(found, formatted(value_at(found, path), how[0] if how else ""))


def ratio(page: Page, names: Sequence[str], options: Options) -> str:
    """{{ratio best/paper best/winner planned.rdp.population_size [.1f]}}: the first's number over the second's; two
    paths with a colon between them name a number of each."""
    first, second, path, *how = _expect(names, "suite/label", "suite/label", "file.path", optional="format")
    runs = [page.kept.run(name) for name in (first, second)]
    top, _, bottom = path.partition(":")
    above, below = number_at(runs[0], top), number_at(runs[1], bottom or top)
    if below == 0:
        raise InputError(f"ratio {path}: it is 0 in {runs[1].folder}")
    links = "/".join(page.kept.link(found, found.label.partition("/")[2]) for found in runs)
    return f"{formatted(above / below, how[0] if how else '.1f')}× ({links})"


def imbalance(page: Page, names: Sequence[str], options: Options) -> str:
    """{{imbalance clipping/global layer_norm attention}}: update norms of one kind over another's, before clipping."""
    name, first, second = _expect(names, "suite/label", "kind", "kind")
    found = _first(page, name)
    return page.kept.link(found, f"{norm_ratio(found, first, second):.2g}×")


def count(page: Page, names: Sequence[str], options: Options) -> str:
    """{{count clipping}}: how many runs of a suite are kept."""
    (suite,) = _expect(names, "suite")
    runs = [found for name in page.kept.settings(suite) for found in page.kept.repeats(name).values()]
    return page.kept.link_to(runs[0].folder.parent, f"{len(runs)} runs")


def table(page: Page, names: Sequence[str], options: Options) -> str:
    """{{table clipping [COLUMN…] [only=a,b]}}: a row for each setting, over seeds."""
    suite, *columns = _expect(names, "suite", optional="columns")
    return suite_table(page.kept, suite, columns, only=_listed(options))


def grid(page: Page, names: Sequence[str], options: Options) -> str:
    """{{grid clipping rows=share+normalise columns=schedule.lr}} or {{grid clipping label="(.+)-lr(.+)"}}: test WER
    over two settings; show=dev shows what a setting may be chosen by."""
    (suite,) = _expect(names, "suite")
    axes = {name: options.get(name) for name in ("rows", "columns", "label")}
    shown = options.get("show", "test")
    if shown not in RATES:
        raise InputError(f"show={shown}: expected one of {', '.join(RATES)}")
    return suite_grid(page.kept, suite, only=_listed(options), rate=RATES[shown], **axes)


def figure(page: Page, names: Sequence[str], options: Options) -> str:
    """{{figure wer clipping}}, {{figure curves clipping/dim clipping/global}}, {{figure norms clipping/global
    clipping/dim}}, {{figure against best x=sigma_dp [by=share or by=label]}}, {{figure gain clipping/dim
    clipping/uniform}}; name=… names the file, only=… picks."""
    kind, *what = names
    if kind not in ("wer", "curves", "norms", "against", "gain") or not what:
        raise InputError(f"figure {kind}: expected wer, curves, norms, against or gain, and suites or runs")
    name = slugs([options.get("name", "-".join(names))]).popitem()[1]
    if kind == "wer":
        drawing = figures.by_setting(page.kept, what, name=name, only=_listed(options))
    elif kind == "gain":
        drawing = figures.gain(page.kept, what, kinds=("layer_norm", "attention"), name=name)
    elif kind == "against":
        (suite,) = _expect(what, "suite")
        if "x" not in options:
            raise InputError("figure against: expected x=…, a number of the recipes or results")
        by = options.get("by")
        drawing = figures.against(page.kept, suite, x=options["x"], by=by, name=name, only=_listed(options))
    else:
        draw = figures.curves if kind == "curves" else figures.norms
        drawing = draw([page.kept.run(each) for each in what], name=name)
    return _shown(page, drawing, what)


MACROS: Mapping[str, Macro] = {
    made.__name__.removesuffix("_"): made
    for made in (
        *(wer, devwer, startwer, mean, difference_, epsilon, population),
        *(run, value, ratio, imbalance, count, table, grid, figure),
    )
}
SINGLE = ("wer", "run", "value", "ratio")  # these ask for one run, the others for a setting with all its seeds
OPTIONS = ("test", "only", "rows", "columns", "label", "x", "by", "name", "show")


def call(page: Page, words: Sequence[str]) -> str:
    """What the macro `words[0]` makes of the other words; those with a known name and = before them are options."""
    name, *rest = words
    if name not in MACROS:
        near = difflib.get_close_matches(name, MACROS, n=1, cutoff=0.5)
        raise InputError(f"unknown macro {name!r}, " + (f"did you mean {near[0]!r}?" if near else f"of {[*MACROS]}"))
    split = [word.partition("=") for word in rest]
    options = {key: content for key, equals, content in split if equals and key in OPTIONS}
    names = [word for word, (key, equals, _) in zip(rest, split, strict=True) if not (equals and key in OPTIONS)]
    return MACROS[name](page, names, options)


def _shown(page: Page, drawing: Drawing, what: Sequence[str]) -> str:
    if drawing.name in page.drawn:
        raise InputError(f"figure {drawing.name}: another one has this name, name=… gives it its own")
    page.drawn[drawing.name] = figures.svg(drawing)
    runs = [page.kept.link(page.kept.run(name), name) for name in what if "/" in name]
    from_ = f" From {', '.join(runs)}." if runs else ""
    return f"![{drawing.alt}]({page.images}/{drawing.name}.svg)\n\n*{drawing.title}. {drawing.caption}*{from_}"


def _expect(names: Sequence[str], *wanted: str, optional: str | None = None) -> Sequence[str]:
    enough = len(names) >= len(wanted) if optional else len(names) == len(wanted)
    if not enough:
        raise InputError(f"found {' '.join(names) or 'nothing'}, expected {' '.join(wanted)}")
    return names


def _listed(options: Options) -> list[str]:
    return [name for name in options.get("only", "").split(",") if name]


def _over_seeds(page: Page, name: str, rate: Callable[..., float | None]) -> str:
    runs = page.kept.repeats(name)
    rates = [rate(found) for found in runs.values()]
    known = [found for found in rates if found is not None]
    if len(known) < len(rates):
        raise InputError(f"{name}: expected a rate in each of its runs, found {[per_cent(found) for found in rates]}")
    return over_seeds(page.kept, runs, known)


def _first(page: Page, name: str) -> RunRecord:
    return next(iter(page.kept.repeats(name).values()))
