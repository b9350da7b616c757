"""Noise that is correlated over rounds: what is released is what was claimed, and no row is for two sums."""

import dataclasses
import math
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.privacy.test_plan import LAYOUT, large_update, plan_of, secure_plan, settings_of

from sottovoce.base.errors import InputError, InvariantError
from sottovoce.privacy.clipping import AdaptiveClipping
from sottovoce.privacy.events import CorrelatedRelease
from sottovoce.privacy.ledger import Charge, Ledger, verify
from sottovoce.privacy.mechanism import Correlated, MechanismSettings
from sottovoce.privacy.noise import NoiseScope
from sottovoce.privacy.noise_shares import NoiseShares
from sottovoce.privacy.plan import Plan
from sottovoce.privacy.round_noise import MEMORY, CorrelatedNoise, memory_rows, widening
from sottovoce.privacy.secret_files import delete_secrets
from sottovoce.privacy.settings import Sampling
from sottovoce.privacy.strategies import Banded, Blt, Strategy, first_column

BANDED = Banded(column=(1.0, 0.6, 0.4, 0.25))
BLT = Blt(decays=(0.9, 0.4), scales=(0.3, 0.25))
# 1,000 people in ten groups, of which cohorts of 20 are a fifth (banded), or in fifty that are cohorts (BLT).
MECHANISMS = [Correlated(cycle=10, strategy=BANDED), Correlated(cycle=50, strategy=BLT)]
ROWS = 9
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def matrix(strategy: Strategy, rows: int = ROWS) -> NDArray[np.float64]:
    """C: lower triangular, every diagonal one number."""
    column = first_column(strategy, rows)
    return np.array([[column[row - col] if row >= col else 0.0 for col in range(rows)] for row in range(rows)])


def paid(plan: Plan, row: int, *, step: int | None = None) -> Charge:
    return Charge(plan.event, step=row if step is None else step, clip_bound=plan.clip_bound, row=row)


def released(
    plan: Plan, *, rows: int = ROWS, secret_folder: Path | None = None, device: str = "cpu"
) -> NDArray[np.float64]:
    """The noise that `rows` sums of nothing get, [rows, parameters]."""
    correlated = plan.correlated_noise(device=device, secret_folder=secret_folder)
    empty = [plan.new_total(device=device) for _ in range(rows)]
    return parameters(
        [plan.add_noise(sum_P, paid(plan, row), correlated=correlated) for row, sum_P in enumerate(empty)]
    )


def independent(plan: Plan, rows: int = ROWS, *, device: str = "cpu") -> NDArray[np.float64]:
    """The noise of as many rounds of the same plan without a mechanism."""
    alone = dataclasses.replace(plan, settings=dataclasses.replace(plan.settings, mechanism=None))
    empty = [alone.new_total(device=device) for _ in range(rows)]
    return parameters([alone.add_noise(sum_P, paid(alone, row)) for row, sum_P in enumerate(empty)])


def parameters(rows: Sequence[torch.Tensor]) -> NDArray[np.float64]:
    return np.stack([torch.cat(LAYOUT.parts(row_P.cpu())).double().numpy() for row_P in rows])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_the_strategy_applied_to_what_is_released_gives_the_independent_draws_back(
    mechanism: Correlated, device: str
) -> None:
    """C·y = w, to the rounding of float32: each of `ROWS` products and sums loses at most half a last bit."""
    plan = plan_of(mechanism=mechanism)
    noise, fresh = released(plan, device=device), independent(plan, device=device)
    largest = np.abs(fresh).max()
    tolerance = 4 * ROWS * 2.0**-24 * largest * np.abs(np.linalg.inv(matrix(mechanism.strategy))).sum()
    np.testing.assert_allclose(matrix(mechanism.strategy) @ noise, fresh, rtol=0, atol=tolerance)
    assert np.abs(noise - fresh).max() > 100 * tolerance  # a strategy that does nothing would be seen
    assert np.array_equal(noise[0], fresh[0])


def test_one_band_is_independent_noise_to_the_bit() -> None:
    plan = plan_of(mechanism=Correlated(cycle=10, strategy=Banded(column=(1.0,))))
    assert np.array_equal(released(plan), independent(plan))


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("make", [plan_of, secure_plan])
def test_variance_and_covariance_over_rows_are_those_of_the_inverse(
    make: Any, mechanism: Correlated, tmp_path: Path
) -> None:
    """Cov(y) = C⁻¹C⁻ᵀ. A covariance s of D pairs has a standard error of √((s_ii·s_jj + s_ij²)/D); six are allowed."""
    plan = make(mechanism=mechanism)
    noise = released(plan, secret_folder=tmp_path / "secrets" if make is secure_plan else None) / plan.noise_std_sum
    inverse = np.linalg.inv(matrix(mechanism.strategy))
    claimed = inverse @ inverse.T
    found = noise @ noise.T / noise.shape[1]
    error = np.sqrt((np.outer(np.diag(claimed), np.diag(claimed)) + claimed**2) / noise.shape[1])
    assert (np.abs(found - claimed) < 6 * error).all()
    assert (np.abs(np.eye(ROWS) - claimed) > 6 * error).any()  # independent noise would be seen
    # What is said of a single round's noise is the most that any of them has.
    assert plan.released_std_sum / plan.noise_std_sum == pytest.approx(widening(mechanism.strategy))
    assert np.sqrt(np.diag(claimed)).max() <= widening(mechanism.strategy) * (1 + 1e-12)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_memory_is_all_that_later_rows_need(mechanism: Correlated) -> None:
    """A simulation that goes on from a checkpoint, after lost attempts, has the noise of one that never did."""
    plan = plan_of(mechanism=mechanism)
    whole, before, after = (plan.correlated_noise() for _ in range(3))
    assert whole is not None
    assert before is not None
    assert after is not None
    rows = [whole.row(row) for row in range(ROWS)]
    for row in range(4):
        before.row(row)
    after.restore(before.memory_MP.clone(), rows=before.rows)
    after.advance_to(6)  # rows 4 and 5 were charged, and their sums are lost
    assert torch.equal(after.row(6), rows[6])
    assert len(after.memory_MP) == memory_rows(mechanism.strategy)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_what_a_release_adds_is_its_memory_rounded_to_the_grid(mechanism: Correlated, tmp_path: Path) -> None:
    plan = secure_plan(mechanism=mechanism)
    assert plan.grid is not None
    total = plan.new_total()
    plan.accumulate(total, large_update())
    summed = total.clone()
    correlated = plan.correlated_noise(secret_folder=tmp_path / "secrets")
    assert correlated is not None
    noised = plan.add_noise(total, paid(plan, 0), correlated=correlated)
    # After the first row both kinds of memory begin with that row itself.
    row_P = correlated.memory_MP[0]
    assert row_P.dtype == torch.float64
    expected = summed + (row_P * plan.noise_std_sum / plan.grid).round() * plan.grid
    assert torch.equal(total, expected)
    assert torch.equal(noised, expected.float())
    cells = total / plan.grid
    assert torch.equal(cells, cells.round())


def test_padding_stays_empty(tmp_path: Path) -> None:
    for plan, secret_folder in ((plan_of, None), (secure_plan, tmp_path / "secrets")):
        made = plan(mechanism=MECHANISMS[1])
        correlated = made.correlated_noise(secret_folder=secret_folder)
        for row in range(3):
            noised = made.add_noise(made.new_total(), paid(made, row), correlated=correlated)
        cleared = noised.clone()
        LAYOUT.clear_padding(cleared)
        assert torch.equal(noised, cleared)


# What is accounted.


@pytest.mark.parametrize("make", [plan_of, secure_plan])
def test_cohorts_are_of_the_group_whose_turn_it_is_and_at_the_rate_that_is_accounted(make: Any) -> None:
    plan = make(mechanism=MECHANISMS[0])
    event = plan.event
    assert isinstance(event, CorrelatedRelease)
    assert (event.noise_multiplier, event.sampling_rate, event.cycle, event.strategy) == (0.8, 0.2, 10, BANDED)
    rounds = 2_000
    cohorts = [plan.sample(row) for row in range(rounds)]
    seen: dict[int, set[int]] = {}
    for row, cohort in enumerate(cohorts):
        seen.setdefault(row % 10, set()).update(cohort.tolist())
    # 200 draws at a rate of ⅕ leave nobody out (0.8²⁰⁰ = 4e-20), and nobody is in two groups.
    assert [len(group) for group in seen.values()] == [100] * 10
    assert sum(len(group) for group in seen.values()) == len(set().union(*seen.values())) == 1000
    sizes = [len(cohort) for cohort in cohorts]
    assert np.mean(sizes) == pytest.approx(20, abs=6 * math.sqrt(100 * 0.2 * 0.8 / rounds))
    # Where the order of a store means nothing, a group is no stretch of it.
    assert np.mean(np.diff(sorted(seen[0]))) > 5


def test_a_blt_takes_groups_whole() -> None:
    plan = plan_of(mechanism=Correlated(cycle=48, strategy=BLT), cohort_size=21)
    cohorts = [plan.sample(row) for row in range(96)]
    assert {len(cohort) for cohort in cohorts} == {20, 21}
    assert sorted(np.concatenate(cohorts[:48]).tolist()) == [*range(1000)]
    assert all(np.array_equal(first, again) for first, again in zip(cohorts[:48], cohorts[48:], strict=True))
    assert isinstance(plan.event, CorrelatedRelease)
    assert plan.event.sampling_rate == 1.0


def test_more_people_have_cohorts_of_their_own() -> None:
    """As where canaries come to the users of a plan."""
    banded, blt = MECHANISMS
    assert [banded.cohort_near(wanted, population_size=1003) for wanted in (20, 100, 101)] == [20, 100, 100]
    assert [blt.cohort_near(20, population_size=people) for people in (1000, 1003)] == [20, 21]
    for mechanism in MECHANISMS:
        settings_of(
            mechanism=mechanism,
            population_size=1003,
            cohort_size=mechanism.cohort_near(101, population_size=1003),
        )


def test_the_ledger_and_the_promise_have_the_strategys_numbers() -> None:
    plan = plan_of(mechanism=MECHANISMS[0])
    strategy = {"kind": "banded", "column": [1.0, 0.6, 0.4, 0.25]}
    assert plan.describe()["mechanism"] == {"cycle": 10, "strategy": strategy}
    assert plan.guarantee == (
        "δ=1e-06 for each speaker against adding or removing one: poisson q=0.2 of one of 10 groups in turn, banded "
        "noise, z=0.8 (simulated)"
    )


def test_without_a_mechanism_a_plan_says_what_it_always_did() -> None:
    """Ledgers of before go on, and new ones have the same bytes."""
    expected = {
        *("population_size", "privacy_unit", "no_unit_reason", "users_also_in_seed", "cohort_size", "sampling"),
        *("clip_bound", "share", "normalise", "layer_groups", "alpha", "adaptive", "noise_multiplier", "sigma_dp"),
        *("noise_scope", "weighting", "weight_cap", "denominator", "delta", "mode", "root_seed", "layout"),
    }
    assert {*plan_of().describe()} == expected
    assert plan_of().correlated_noise() is None


# Killed and gone on.


class Killed(BaseException):
    """In place of a kill: nothing of ours catches it, and everything in memory is forgotten."""


class Run:
    """Rounds of sums of nothing, of which what is released is kept by its row."""

    def __init__(self, plan: Plan, folder: Path, *, repeatable: bool = True) -> None:
        self.plan, self.folder = plan, folder
        self.header = plan.ledger_header(run="test", repeatable=repeatable, central_steps=20)
        self.sums: list[tuple[int, torch.Tensor]] = []  # what each noised sum had added to it

    def rounds(self, steps: int, *, killed_at: str | None = None) -> None:
        """A process that makes `steps` rounds from the first on, without a checkpoint, or dies in the last of them."""
        secure = self.plan.settings.root_seed is None
        ledger = Ledger(self.folder / "ledger.jsonl", header=self.header)
        try:
            correlated = self.plan.correlated_noise(secret_folder=self.folder / "secrets" if secure else None)
            assert correlated is not None
            for step in range(steps):
                dies = killed_at if step == steps - 1 else None
                self._round(ledger, correlated, step, dies)
        except Killed:
            pass
        finally:
            ledger.close()

    def _round(self, ledger: Ledger, correlated: CorrelatedNoise, step: int, killed_at: str | None) -> None:
        correlated.advance_to(ledger.next_row(step))
        cohort = self.plan.sample(step, attempt=ledger.next_attempt(step), row=ledger.next_row(step))
        told = str(cohort[:1].tolist()) if self.plan.settings.root_seed is None else "cohort"
        charge = self.plan.charge(ledger, step=step, parameters="same", cohort=told)
        if killed_at == "charged":
            raise Killed
        write = correlated._write
        if killed_at == "drawn":
            correlated._write = _die  # type: ignore[method-assign]
        noised = self.plan.add_noise(self.plan.new_total(), charge, correlated=correlated)
        correlated._write = write  # type: ignore[method-assign]
        self.sums.append((charge.row, noised))
        if killed_at == "added":
            raise Killed


def _die(_: Path) -> None:
    raise Killed


POINTS = ("charged", "drawn", "added")


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("point", POINTS)
def test_a_release_never_uses_a_row_for_two_sums_and_pays_for_all(
    point: str, mechanism: Correlated, tmp_path: Path
) -> None:
    plan = secure_plan(mechanism=mechanism)
    run = Run(plan, tmp_path)
    run.rounds(3, killed_at=point)
    charged = verify(tmp_path / "ledger.jsonl").attempts
    assert charged == 3
    known = plan.correlated_noise(secret_folder=tmp_path / "secrets")
    assert known is not None
    assert known.rows == (3 if point == "added" else 2)
    run.rounds(2, killed_at=point)
    run.rounds(4)
    report = verify(tmp_path / "ledger.jsonl")
    assert (report.steps, report.attempts) == (4, 3 + 2 + 4)
    assert report.spent.parts == ((plan.event, 9),)  # type: ignore[union-attr]
    rows = [row for row, _ in run.sums]
    assert rows == sorted(set(rows))
    assert rows[-4:] == [5, 6, 7, 8]
    assert len(rows) == (9 if point == "added" else 7)
    for number, (_, noised) in enumerate(run.sums):
        assert not any(torch.equal(noised, other) for _, other in run.sums[:number])


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_after_a_kill_noise_is_still_correlated_with_what_was_released_before(
    mechanism: Correlated, tmp_path: Path
) -> None:
    """Row 1's sum was lost, and C applied to rows 0 to 3 gives independent draws all the same."""
    plan = secure_plan(mechanism=mechanism)
    run = Run(plan, tmp_path)
    run.rounds(2, killed_at="added")
    run.rounds(2)
    noise = parameters([noised for _, noised in run.sums])
    assert [row for row, _ in run.sums] == [0, 1, 2, 3]
    fresh = matrix(mechanism.strategy, 4) @ noise / plan.noise_std_sum
    found, error = fresh @ fresh.T / fresh.shape[1], math.sqrt(2 / fresh.shape[1])
    assert (np.abs(found - np.eye(4)) < 6 * error).all()


@pytest.mark.parametrize("point", POINTS[::2])
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_simulation_makes_lost_rounds_again_with_the_same_rows(
    mechanism: Correlated, point: str, tmp_path: Path
) -> None:
    whole, broken = Run(plan_of(mechanism=mechanism), tmp_path / "a"), Run(plan_of(mechanism=mechanism), tmp_path / "b")
    for run in (whole, broken):
        run.folder.mkdir()
    whole.rounds(4)
    broken.rounds(3, killed_at=point)
    broken.sums.clear()
    broken.rounds(4)
    assert all(torch.equal(one, other) for (_, one), (_, other) in zip(whole.sums, broken.sums, strict=True))
    assert (broken.folder / "ledger.jsonl").read_bytes() == (whole.folder / "ledger.jsonl").read_bytes()
    assert verify(broken.folder / "ledger.jsonl").attempts == 4


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_where_bits_do_not_repeat_lost_rows_are_burned_as_in_a_release(mechanism: Correlated, tmp_path: Path) -> None:
    plan = plan_of(mechanism=mechanism)
    run = Run(plan, tmp_path, repeatable=False)
    run.rounds(3, killed_at="added")
    run.rounds(2)
    assert [row for row, _ in run.sums] == [0, 1, 2, 3, 4]
    assert verify(tmp_path / "ledger.jsonl").attempts == 5
    whole = released(plan, rows=5)
    assert np.array_equal(parameters([noised for _, noised in run.sums]), whole)


def test_a_row_is_given_out_once_and_in_its_turn() -> None:
    plan = plan_of(mechanism=MECHANISMS[0])
    correlated = plan.correlated_noise()
    assert correlated is not None
    correlated.row(0)
    for row in (0, 2):
        with pytest.raises(InvariantError, match="none is for two sums"):
            correlated.row(row)
    with pytest.raises(InvariantError, match="two sums"):
        correlated.advance_to(0)


def test_noise_of_another_kind_than_the_plans_is_refused() -> None:
    alone, plan = plan_of(), plan_of(mechanism=MECHANISMS[0])
    with pytest.raises(InvariantError, match="another kind"):
        plan.add_noise(plan.new_total(), paid(plan, 0))
    with pytest.raises(InvariantError, match="another kind"):
        alone.add_noise(alone.new_total(), paid(alone, 0), correlated=plan.correlated_noise())
    with pytest.raises(InvariantError, match="secret_folder"):
        secure_plan(mechanism=MECHANISMS[0]).correlated_noise()
    with pytest.raises(InvariantError, match="secret_folder"):
        plan.correlated_noise(secret_folder=Path("anywhere"))


# The secret.


def test_memory_of_a_release_is_its_owners_alone_and_goes(tmp_path: Path) -> None:
    plan, secret_folder = secure_plan(mechanism=MECHANISMS[0]), tmp_path / "secrets"
    released(plan, rows=2, secret_folder=secret_folder)
    assert [path.name for path in secret_folder.iterdir()] == [MEMORY]
    assert stat.S_IMODE((secret_folder / MEMORY).stat().st_mode) == 0o600
    assert stat.S_IMODE(secret_folder.stat().st_mode) == 0o700
    (secret_folder / "kept").touch()
    delete_secrets(secret_folder, MEMORY)
    assert [path.name for path in secret_folder.iterdir()] == ["kept"]  # another secret, which stays
    (secret_folder / "kept").unlink()
    delete_secrets(secret_folder, MEMORY)
    assert not secret_folder.exists()
    delete_secrets(secret_folder, MEMORY)  # which may have happened before


def test_memory_that_does_not_belong_to_the_ledger_is_refused(tmp_path: Path) -> None:
    plan, secret_folder = secure_plan(mechanism=MECHANISMS[0]), tmp_path / "secrets"
    released(plan, rows=3, secret_folder=secret_folder)
    for rows in (2, 5):  # the ledger was rolled back, or the memory was
        correlated = plan.correlated_noise(secret_folder=secret_folder)
        assert correlated is not None
        with pytest.raises(InputError, match=f"knows 3 rows of noise, the ledger has charged {rows}"):
            correlated.advance_to(rows)
    other = secure_plan(mechanism=MECHANISMS[1])
    with pytest.raises(InputError, match="another run's"):
        other.correlated_noise(secret_folder=secret_folder)
    content = (secret_folder / MEMORY).read_bytes()
    (secret_folder / MEMORY).write_bytes(content[:-9])
    with pytest.raises(InputError, match="cannot be read"):
        plan.correlated_noise(secret_folder=secret_folder)


def test_a_checkpoint_of_another_mechanism_is_refused() -> None:
    correlated = plan_of(mechanism=MECHANISMS[0]).correlated_noise()
    other = plan_of(mechanism=MECHANISMS[1]).correlated_noise()
    assert correlated is not None
    assert other is not None
    with pytest.raises(InputError, match="another mechanism"):
        correlated.restore(other.memory_MP, rows=1)


# What is refused.


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"adaptive": AdaptiveClipping(target_quantile=0.5)}, "adaptive clipping"),
        ({"sampling": Sampling.FIXED_SIZE}, "sampling=fixed_size"),
        ({"sampler": {"name": "tests.privacy.mine:Sampler"}}, "a plug-in sampler"),
        ({"noise_scope": NoiseScope(groups={"all": ["*"]}, factors={"all": 1.0})}, "noise_scope"),
        ({"time_line": "zero"}, "time_line"),
        ({"noise_multiplier": 0.0}, "no noise to correlate"),
        ({"cohort_size": 101}, "cycle of at most 9"),
        ({"mechanism": MECHANISMS[1], "cohort_size": 21}, "expected cohort_size=20"),
        ({"mechanism": Correlated(cycle=3, strategy=BANDED)}, "expected cohort_size=334"),
    ],
)
def test_settings_that_no_accountant_bounds_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words) as refused:
        settings_of(**{"mechanism": MECHANISMS[0], **changes})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("sum_bits", [None, 32, 64])
def test_noise_by_clients_is_refused(sum_bits: int | None) -> None:
    settings, shares = settings_of(mechanism=MECHANISMS[0]), NoiseShares(least=8, most=100, colluding=0)
    with pytest.raises(InputError, match=r"mechanism with noise by clients: .* expected noise by the server"):
        Plan(settings, LAYOUT, sum_bits=sum_bits, noise_shares=shares)


# Sums of words, as clients over a network send them.


@pytest.mark.parametrize("sum_bits", [32, 64])
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_the_noise_of_a_simulation_is_the_same_wherever_its_clients_are(mechanism: Correlated, sum_bits: int) -> None:
    plan = plan_of(mechanism=mechanism)
    assert np.array_equal(released(dataclasses.replace(plan, sum_bits=sum_bits)), released(plan))


@pytest.mark.parametrize("sum_bits", [32, 64])
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_release_on_words_has_the_noise_that_was_claimed(
    mechanism: Correlated, sum_bits: int, tmp_path: Path
) -> None:
    """On the grid, within words, and independent again once the strategy is applied; a cell is nothing beside it."""
    plan = dataclasses.replace(secure_plan(mechanism=mechanism), sum_bits=sum_bits)
    noise = released(plan, secret_folder=tmp_path / "secrets")
    grid = plan.grid
    assert grid is not None
    assert grid <= 1e-3 * plan.noise_std_sum
    assert (np.abs(noise) < math.ldexp(grid, plan.word_bits - 1)).all()
    fresh = matrix(mechanism.strategy) @ noise / plan.noise_std_sum
    found, error = fresh @ fresh.T / fresh.shape[1], math.sqrt(2 / fresh.shape[1])
    assert (np.abs(found - np.eye(ROWS)) < 6 * error).all()


def test_noise_on_words_wraps_around_as_theirs_do(tmp_path: Path) -> None:
    """A client nobody has clipped again brings a secure sum to the edge: nothing shows on which side it was."""
    plan = dataclasses.replace(secure_plan(mechanism=MECHANISMS[0]), sum_bits=32)
    assert plan.grid is not None
    half = math.ldexp(plan.grid, 31)
    for edge, drawn in ((half - plan.grid, 1.0), (-half, -1.0)):
        correlated = CorrelatedNoise(
            BANDED,
            layout=LAYOUT,
            draw=lambda row, drawn=drawn: torch.full((LAYOUT.flat_size,), drawn, dtype=torch.float64),  # type: ignore[misc]
            dtype=torch.float64,
            secret_folder=tmp_path / str(drawn),
        )
        total = plan.new_total()
        for part in LAYOUT.parts(total):
            part.fill_(edge)
        noised = parameters([plan.add_noise(total, paid(plan, 0), correlated=correlated)])
        cells = round(plan.noise_std_sum / plan.grid)
        expected = edge + math.copysign(cells * plan.grid, drawn) - math.copysign(2 * half, drawn)
        assert (noised == np.float32(expected)).all()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"kind": "banded"}, "expected bands, and no buffers"),
        ({"kind": "blt", "bands": 4}, "expected buffers, and no bands"),
        ({"kind": "banded", "bands": 4, "buffers": 1}, "expected bands, and no buffers"),
        ({"kind": "banded", "bands": 0}, "bands=0"),
        ({"kind": "blt", "buffers": 2, "cycle": 0}, "cycle=0"),
        ({"kind": "banded", "bands": 8, "cycle": 4}, "no more bands than the cycle"),
    ],
)
def test_a_recipe_that_says_too_little_or_too_much_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        MechanismSettings(**given)


def test_a_recipes_words_become_the_best_numbers_for_its_rounds() -> None:
    banded = MechanismSettings(kind="banded", bands=4).for_run(30, population_size=1000, cohort_size=20)
    assert (banded.cycle, len(banded.strategy.column)) == (4, 4)  # type: ignore[union-attr]
    assert (
        MechanismSettings(kind="banded", bands=4).for_run(2, population_size=9, cohort_size=2).strategy.column[2:] == ()
    )  # type: ignore[union-attr]
    blt = MechanismSettings(kind="blt", buffers=2).for_run(30, population_size=1000, cohort_size=20)
    assert (blt.cycle, len(blt.strategy.decays)) == (50, 2)  # type: ignore[union-attr]
    assert (
        MechanismSettings(kind="blt", buffers=2).memory == memory_rows(blt.strategy) == 2
    )  # one that wins nothing is left out
    assert MechanismSettings(kind="banded", bands=4).memory == memory_rows(banded.strategy) == 3
