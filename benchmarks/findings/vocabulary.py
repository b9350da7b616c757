"""What a template may ask for: `{{ wer("clipping/dim") }}`. Every function is handed names of runs, suite/label."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from findings import clients, figures, personal, terminal
from findings.kept import Kept, MissingRunsError, each
from findings.numbers import (
    Judge,
    formatted,
    norm_ratio,
    number_at,
    over_seeds,
    per_cent,
    single,
    told_audit,
    told_change,
    told_difference,
    told_epsilon,
    told_population,
    unless_converged,
    value_at,
)
from findings.rates import dev_wer, difference, gain, scored, start_wer
from findings.tables import number_cell, suite_grid, suite_table
from sottovoce.base.errors import InputError
from sottovoce.evaluation import compare as paired
from sottovoce.evaluation.measures import MeasureName
from sottovoce.evaluation.tables import format_interval, format_points
from sottovoce.report.audit import kept_audit
from sottovoce.report.drawings import Drawing
from sottovoce.report.records import RunRecord
from sottovoce.report.run_facts import has_converged, start_converged

# What of a run's files is an error rate or a loss, and which figures of a report show some.
RATE = re.compile(r"results\.(test|clients\.(before|after)|model\.dev_)")
RATES_DRAWN = ("cohorts", "loss", "dev-wer", "along-test")
RATES: Mapping[str, Callable[[RunRecord], float]] = {
    "test": lambda run: float(scored(run)["wer"]),
    "dev": lambda run: number_at(run, "results.model.dev_wer"),
}


@dataclass(frozen=True)
class Vocabulary:
    """What functions read from and draw to. `images` is the figures' folder as the document refers to it."""

    kept: Kept
    images: str
    drawn: dict[str, bytes] = field(default_factory=dict)

    def functions(self) -> dict[str, Callable[..., str]]:
        """By the names that a template has for them."""
        rates = (self.wer, self.startwer, self.mean, self.cer, self.dev, self.difference, self.gain)
        sentences = (*rates, self.epsilon, self.population, self.audit)
        of_encoders = (self.loss, self.probe)
        others = (self.value, self.ratio, self.imbalance, self.table, self.grid, self.compared, self.terminal)
        of_clients = (
            self.client_mean,
            self.client_gain,
            self.client_difference,
            self.client_table,
            self.client_amounts,
        )
        of_parts = (
            self.personal_groups,
            self.personal_recovered,
            self.personal_amounts,
            self.personal_gaps,
            self.personal_bounds,
            self.personal_worse,
        )
        drawings = (
            *(self.wer_figure, self.norms_figure, self.gain_figure, self.client_figure),
            *(self.spreads_figure, self.report_figure),
        )
        named = (*sentences, *of_encoders, *others, *of_clients, *of_parts, *drawings)
        return {function.__name__: function for function in named}

    def wer(self, run: str, *, test: str | None = None) -> str:
        """Test WER of one run with its 95 % interval over speakers."""
        return single(self.kept, self.kept.run(run), test)

    def startwer(self, setting: str, *, test: str | None = None) -> str:
        """Test WER of the model that it started from, over seeds."""
        return self._over_seeds(setting, lambda run: start_wer(run, test), judge=start_converged)

    def mean(self, setting: str, *, test: str | None = None) -> str:
        """Mean test WER over seeds, the least and the largest."""
        return self._over_seeds(setting, lambda run: scored(run, test)["wer"])

    def dev(self, setting: str, measure: MeasureName = "wer") -> str:
        """Mean dev WER over seeds of the models that were tested; `ctc_wer` where that is what they were chosen by."""
        return self._over_seeds(setting, lambda run: dev_wer(run, measure))

    def cer(self, setting: str, *, test: str | None = None) -> str:
        """Mean test CER over seeds: letters, where words are beyond a model."""
        return self._over_seeds(setting, lambda run: scored(run, test)["cer"])

    def difference(self, first: str, second: str, *, test: str | None = None) -> str:
        """The first's WER less the second's, over common seeds, paired over speakers."""
        runs, others = each(self.kept.repeats, (first, second))
        found = difference(runs, others, names=(first, second), test=test)
        return told_difference(self.kept, found, runs, others)

    def gain(self, setting: str, *, test: str | None = None) -> str:
        """Test WER less that of the models that it started from, over seeds, paired over speakers."""
        runs = self.kept.repeats(setting)
        return told_change(self.kept, gain(runs, name=setting, test=test), runs)

    def loss(self, setting: str) -> str:
        """Mean test loss over seeds, of models that write no text, the least and the largest."""
        runs = self.kept.repeats(setting)
        links = ", ".join(self.kept.link(run, str(seed)) for seed, run in runs.items())
        words = unless_converged(map(has_converged, runs.values()))
        return f"{number_cell([scored(run)['loss'] for run in runs.values()])} (seeds {links}{words})"

    def probe(self, setting: str, what: str, figure: str) -> str:
        """What a linear layer reads off an encoder, over seeds: `probe("suite/label", "speaker", "accuracy")`."""
        return self._over_seeds(setting, lambda run: number_at(run, f"probe.{what}.{figure}"))

    def epsilon(self, setting: str) -> str:
        """ε of the run as it was, by RDP and PLD at δ."""
        run = self._first(setting)
        return self.kept.link(run, told_epsilon(run))

    def population(self, setting: str) -> str:
        """People needed for ε ≤ 8 with the same recipe, by RDP and PLD."""
        run = self._first(setting)
        return self.kept.link(run, told_population(run))

    def audit(self, run: str) -> str:
        """What `sottovoce audit` found of one run: ε promised and estimated, the bound, and whether its alarm rang."""
        record = self.kept.run(run)
        if (found := kept_audit(record)) is None:
            raise MissingRunsError(f"the audit of {run}")
        return self.kept.link(record, told_audit(record, found))

    def value(self, run: str, path: str, how: str = "") -> str:
        """What a file says, such as `results.privacy.useful.cohort_size`, by a Python format."""
        found = self.kept.run(run)
        words = unless_converged([has_converged(found)]) if RATE.match(path) else ""
        return self.kept.link(found, formatted(value_at(found, path), how) + words)

    def ratio(self, first: str, second: str, path: str, below: str | None = None) -> str:
        """The first's number over the second's, such as `planned.rdp.population_size`; of the second, that `below`."""
        runs = each(self.kept.run, (first, second))
        top, bottom = number_at(runs[0], path), number_at(runs[1], below or path)
        if bottom == 0:
            raise InputError(f"{below or path} is 0 in {second}, expected a number to divide by")
        links = "/".join(self.kept.link(found, found.label.partition("/")[2]) for found in runs)
        return f"{top / bottom:.1f}× ({links})"

    def imbalance(self, setting: str, first: str, second: str) -> str:
        """Update norms of one kind of parameters (`layer_norm`) over another's, before clipping."""
        run = self._first(setting)
        return self.kept.link(run, f"{norm_ratio(run, first, second):.2g}×")

    def table(self, suite: str, *columns: str, only: Sequence[str] = ()) -> str:
        """A row for each setting, over seeds; columns are those of tables.COLUMNS, or settings of the recipes."""
        return suite_table(self.kept, suite, columns, only=only)

    def grid(self, suite: str, *, label: str, show: str = "test") -> str:
        """Test WER over the two groups of a pattern, `label="(.+)-lr(.+)"`; `show="dev"`: by which a rate is chosen."""
        if show not in RATES:
            raise InputError(f"show={show}: expected one of {', '.join(RATES)}")
        return suite_grid(self.kept, suite, label=label, rate=RATES[show])

    def compared(self, first: str, second: str) -> str:
        """The first's WER less the second's, as `sottovoce compare` says it."""
        run, other = each(self.kept.run, (first, second))
        found = paired.compute_difference(scored(run), scored(other))
        told = f"{format_points(found.difference)} points, {format_interval(found.interval)}"
        told += unless_converged([has_converged(run), has_converged(other)])
        return f"{told} ({self.kept.link(run, first)} and {self.kept.link(other, second)})"

    def terminal(self, *runs: str) -> str:
        """What `sottovoce run` shows of these when it is over; the others are compared with the first."""
        return terminal.shown(self.kept, runs)

    def client_mean(self, setting: str, when: str = "after") -> str:
        """Mean WER over clients on their own held-out speech, over seeds."""
        judge = start_converged if when == "before" else has_converged
        return self._over_seeds(setting, lambda run: clients.mean_rate(run, when), judge=judge)

    def client_gain(self, setting: str) -> str:
        """The mean over clients after federation less that before, with an interval over clients."""
        runs = self.kept.repeats(setting)
        found = clients.gain(runs, name=setting)
        return told_change(self.kept, found, runs)

    def client_difference(self, first: str, second: str) -> str:
        """The first's mean over clients less the second's, over common seeds, paired over clients."""
        runs, others = each(self.kept.repeats, (first, second))
        return told_difference(self.kept, clients.difference(runs, others, names=(first, second)), runs, others)

    def client_table(self, suite: str, *, only: Sequence[str] = ()) -> str:
        """A row for each setting: clients before and after, how many are above 50 % and 100 %, better and worse."""
        return clients.table(self.kept, suite, only=only)

    def client_amounts(self, run: str) -> str:
        """Quarters of the clients by how much speech they have, before and after."""
        found = self.kept.run(run)
        return f"{clients.by_amount(found)}\n\nFrom {self.kept.link(found, run)}."

    def personal_groups(self, setting: str, *, way: str = "personal") -> str:
        """Each group of people by the public model and with personal parts; `way="unguarded"` keeps all parts."""
        return personal.groups_table(self.kept, setting, way=way)

    def personal_recovered(self, private: str, quiet: str) -> str:
        """What noise costs each group, and how much of it personal parts give back."""
        return personal.recovered_table(self.kept, private, quiet)

    def personal_amounts(self, setting: str) -> str:
        """What a part does by how many utterances it is trained on."""
        return personal.amounts_table(self.kept, setting)

    def personal_gaps(self, setting: str) -> str:
        """The worst group by the public model and with personal parts, with its gap."""
        return personal.gaps_table(self.kept, setting)

    def personal_bounds(self, *settings: str) -> str:
        """What guards keep that are stricter and looser than today's."""
        return personal.bounds_table(self.kept, settings)

    def personal_worse(self, *settings: str) -> str:
        """In how many groups of these settings guarded parts are worse by more than the interval."""
        return personal.count_worse(self.kept, settings)

    def client_figure(self, *runs: str, name: str) -> str:
        """Sorted WER of the clients of some runs, before and after: Figure 4 of Gao et al."""
        found = dict(zip((run.partition("/")[2] for run in runs), each(self.kept.run, runs), strict=True))
        return self._shown(clients.drawing(found, name=name), runs, rated=found.values())

    def wer_figure(self, *suites: str, name: str, only: Sequence[str] = ()) -> str:
        """The test WER of every setting of some suites."""
        settings = [name for suite in suites for name in self.kept.settings(suite, only=only)]
        rated = [run for name in settings for run in self.kept.repeats(name).values()]
        return self._shown(figures.by_setting(self.kept, suites, name=name, only=only), rated=rated)

    def norms_figure(self, *runs: str, name: str) -> str:
        """Update norms per layer and kind before clipping, side by side: the paper's Figure 5."""
        return self._shown(figures.norms(each(self.kept.run, runs), name=name), runs)

    def gain_figure(self, *settings: str, name: str) -> str:
        """What per-layer clipping changes against global clipping, over how unbalanced updates are."""
        drawing = figures.gain(self.kept, settings, kinds=("layer_norm", "attention"), name=name)
        compared = dict.fromkeys([*settings, *map(figures.compared_with, settings)])
        rated = [run for setting in compared for run in self.kept.repeats(setting).values()]
        return self._shown(drawing, settings, rated=rated)

    def spreads_figure(self, *runs: str, name: str) -> str:
        """Update norms per layer, mean and deviation over clients, side by side."""
        return self._shown(figures.spreads(each(self.kept.run, runs), name=name), runs)

    def report_figure(self, *runs: str, drawing: str, name: str) -> str:
        """A figure of the report of these runs, by its name there: `drawing="updates-before"`."""
        found = each(self.kept.run, runs)
        shown = figures.reported(found, drawing=drawing, name=name)
        return self._shown(shown, runs, rated=found if drawing in RATES_DRAWN else ())

    def _shown(self, drawing: Drawing, names: Sequence[str] = (), *, rated: Iterable[RunRecord] = ()) -> str:
        """The figure with its caption, which says of error rates of `rated` runs whether these had converged."""
        if drawing.name in self.drawn:
            raise InputError(f"name={drawing.name}: another figure has this name, expected one of its own")
        self.drawn[drawing.name] = figures.svg(drawing)
        runs = ", ".join(self.kept.link(self.kept.run(name), name) for name in names)
        from_ = f" From {runs}." if runs else ""
        verdicts = [has_converged(run) for run in rated]
        yes = verdicts.count("yes")
        converged = f" Converged: {yes or 'none'} of {len(verdicts)} runs." if yes < len(verdicts) else ""
        said = f"*{drawing.title}. {drawing.caption}{converged}*{from_}"
        return f"![{drawing.alt}]({self.images}/{drawing.name}.svg)\n\n{said}"

    def _over_seeds(
        self, setting: str, rate: Callable[[RunRecord], float | None], *, judge: Judge = has_converged
    ) -> str:
        runs = self.kept.repeats(setting)
        rates = [rate(run) for run in runs.values()]
        known = [found for found in rates if found is not None]
        if len(known) < len(rates):
            told = ", ".join(map(per_cent, rates))
            raise InputError(f"{setting}: expected a rate in each of its runs, found {told}")
        return over_seeds(self.kept, runs, known, judge=judge)

    def _first(self, setting: str) -> RunRecord:
        return next(iter(self.kept.repeats(setting).values()))
