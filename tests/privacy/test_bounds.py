"""The convergence bounds against the special cases of Appendix E.7, written out by hand."""

import math
from dataclasses import replace

import pytest

from sottovoce.base.errors import InputError
from sottovoce.privacy.bounds import POWERS_OF_T, LayerMeasurement, RunMeasurement, corollary1, theorem2, theorem3

LAYERS = (
    LayerMeasurement("attention", 600, 0.5, 2.0, 0.3, 0.004, 0.01, 0.02),
    LayerMeasurement("mlp", 1400, 0.8, 1.5, 0.2, 0.009, 0.03, 0.01),
    LayerMeasurement("norm", 10, 0.1, 1.0, 0.1, 0.001, 0.005, 0.004),
)
RUN = RunMeasurement(
    loss_gap=3.0,
    smoothness=2.0,
    gradient_deviation_local=0.4,
    gradient_deviation_global=0.3,
    server_lr=0.01,
    local_lr=0.1,
    local_steps=10,
    central_steps=400,
    clip_bound=0.01,
    sigma_dp=1e-3,
    optimiser_eps=0.01,
    layers=LAYERS,
)
UNCLIPPED = tuple(replace(layer, clip_bound=math.inf) for layer in LAYERS)


def test_federated_averaging_is_equation_57() -> None:
    steps, h = RUN.central_steps, len(LAYERS)
    run = replace(
        RUN, layers=UNCLIPPED, clip_bound=math.inf, sigma_dp=0.0, server_lr=steps**-0.5, local_lr=steps**-0.5 / 10
    )
    expected = (
        2 * 3.0 / math.sqrt(steps)
        + 16 * h * 0.3**2 / steps
        + 32 * h * 0.4**2 / steps
        + 2 / steps * sum(x.gradient_bound**2 * (16 * 2.0**2 / steps + 4 * x.trust_deviation**2) for x in LAYERS)
    )
    bound = theorem2(run)
    assert bound.total == pytest.approx(expected)
    assert {name for name, value in bound.terms.items() if value == 0} == {
        "dp_noise",
        "clipping_bias",
        "intra_client",
        "inter_client",
    }


def test_adaptive_federated_optimisation_is_equation_60() -> None:
    steps, h = RUN.central_steps, len(LAYERS)
    run = replace(
        RUN, layers=UNCLIPPED, clip_bound=math.inf, sigma_dp=0.0, server_lr=steps**-0.5, local_lr=steps**-0.75 / 10
    )
    expected = (
        2 * 3.0 / math.sqrt(steps)
        + (16 * h * 0.3**2 + 32 * h * 0.4**2) / steps**1.5
        + 2 / steps**1.5 * sum(x.gradient_bound**2 * (64 * steps**-1.5 + 4 * x.trust_deviation**2) for x in LAYERS)
    )
    assert theorem2(run).total == pytest.approx(expected)


def test_private_sgd_with_equal_shares_is_equation_63() -> None:
    # R_h = 1, C_h = C/√H, η_glob = 1/√T, η_loc = 1/(√T·T_loc).
    steps, h, clip = RUN.central_steps, len(LAYERS), 0.01
    layers = tuple(replace(x, trust_ratio=1.0, clip_bound=clip / math.sqrt(h)) for x in LAYERS)
    run = replace(RUN, layers=layers, server_lr=steps**-0.5, local_lr=steps**-0.5 / 10)
    xi2 = 0.01**2
    expected = (
        2 * 3.0 / math.sqrt(steps)
        + (16 * h * 0.3**2 + 32 * h * 0.4**2) / steps
        + clip**2 * 1e-3**2 / xi2 * sum(x.dimension for x in LAYERS)
        + 2 / steps * sum(x.gradient_bound**2 * (64 / steps + h / clip**2 + 4 * x.trust_deviation**2) for x in LAYERS)
        + 4
        / (xi2 * steps)
        * sum(h * x.gradient_bound**2 / clip**2 * (x.intra_variance + x.inter_variance) for x in LAYERS)
    )
    assert theorem2(run).total == pytest.approx(expected)


def test_one_layer_is_its_own_sum() -> None:
    alone = theorem2(replace(RUN, layers=LAYERS[:1]))
    assert all(alone.terms[name] == by_layer["attention"] for name, by_layer in alone.layer_terms.items())
    whole = theorem2(RUN)
    for name, by_layer in whole.layer_terms.items():
        assert by_layer["attention"] == alone.layer_terms[name]["attention"]
        assert whole.terms[name] == pytest.approx(sum(by_layer.values()))


def test_sampling_costs_one_over_the_rate() -> None:
    # Eq. 68 splits Z_h into five parts where Theorem 2 has four: at q = 1 every such term is 5/4 of Theorem 2's.
    full, half = theorem3(RUN), theorem3(replace(RUN, sampling_rate=0.5))
    for name, value in theorem2(RUN).terms.items():
        factor = 1.0 if name in ("optimisation", "dp_noise") else 1.25
        assert full.terms[name] == pytest.approx(factor * value)
    assert full.terms["client_sampling"] == 0.0
    # (1 − q)/q = 1, η²T² = 1: five times the sum of M_h².
    assert half.terms["client_sampling"] == pytest.approx(5 * sum(x.gradient_bound**2 for x in LAYERS))
    for name in ("clipping_bias", "trust_ratio", "intra_client", "inter_client"):
        assert half.terms[name] == pytest.approx(2 * full.terms[name])
    for name in ("dp_noise", "local_drift", "optimisation", "global_update_noise", "local_update_noise"):
        assert half.terms[name] == full.terms[name]


def test_kappa_asks_for_local_travel_near_one() -> None:
    at_one = theorem2(RUN)
    assert at_one.kappa == pytest.approx(1.0)
    assert at_one.holds
    paper = theorem2(replace(RUN, local_lr=0.2))  # 0.2·10, the paper's own recipe
    assert paper.kappa == pytest.approx(-7.0)
    assert not paper.holds
    (broken,) = [a for a in paper.assumptions if a.name == "κ > 0"]
    assert not broken.holds
    assert "(0.646, 1.35)" in broken.detail


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"server_lr": 0.6}, "server_lr·L < 1"),
        ({"server_momentum": 0.9}, "no server momentum or weight decay"),
        ({"sampling_rate": 0.5}, "every client in every step"),
        ({"local_clip": 1.0, "largest_gradient": 1.2}, "local gradients are unbiased: none is clipped"),
        ({"local_clip": 1.0}, "local gradients are unbiased: none is clipped"),  # of which nothing is known
        ({"layers": (replace(LAYERS[0], gradient_bound=1.5),)}, "local_lr·local_steps·M_h ≤ 1 (or no clipping)"),
    ],
)
def test_broken_assumptions_are_named(change: dict[str, object], name: str) -> None:
    bound = theorem2(replace(RUN, **change))  # type: ignore[arg-type]
    assert [a.name for a in bound.assumptions if not a.holds] == [name]


def test_more_noise_makes_noise_dominant() -> None:
    loud = theorem2(replace(RUN, sigma_dp=1e3))
    assert max(loud.terms, key=lambda name: loud.terms[name]) == "dp_noise"
    assert theorem2(replace(RUN, sigma_dp=0.0)).terms["dp_noise"] == 0.0


def test_bad_measurements_are_refused() -> None:
    with pytest.raises(InputError, match="at least one layer"):
        replace(RUN, layers=())
    with pytest.raises(InputError, match="sampling_rate=0"):
        replace(RUN, sampling_rate=0.0)
    with pytest.raises(InputError, match="optimiser_eps=0"):
        replace(RUN, optimiser_eps=0.0)
    with pytest.raises(InputError, match="layer clip bounds"):
        replace(RUN, layers=(replace(LAYERS[0], clip_bound=0.0),))


def test_corollary_1_is_equation_54() -> None:
    """Its rates in the place of the run's: η_glob·T = √T and η_loc²·T_loc² = T_loc/T."""
    steps, local, h, xi2 = RUN.central_steps, RUN.local_steps, len(LAYERS), 0.01**2
    expected = {
        "optimisation": 2 * 3.0 / math.sqrt(steps),
        "global_update_noise": 16 * h * local / steps * 0.3**2,
        "local_update_noise": 32 * h * local / steps * 0.4**2,
        "dp_noise": 0.01**2 * 1e-3**2 / xi2 * sum(x.trust_ratio**2 * x.dimension for x in LAYERS),
        "local_drift": 2 * local / steps * sum(x.gradient_bound**2 * 16 * 2.0**2 * local / steps for x in LAYERS),
        "clipping_bias": 2 * local / steps * sum((x.gradient_bound / x.clip_bound) ** 2 for x in LAYERS),
        "trust_ratio": 8 * local / steps * sum((x.gradient_bound * x.trust_deviation) ** 2 for x in LAYERS),
    }
    weights = [(x.trust_ratio * x.gradient_bound / x.clip_bound) ** 2 for x in LAYERS]
    for name in ("intra", "inter"):
        spread = sum(w * getattr(x, f"{name}_variance") for w, x in zip(weights, LAYERS, strict=True))
        expected[f"{name}_client"] = 4 / xi2 * local / steps * spread  # Σ_t/T² is 1/T of the mean
    assert corollary1(RUN).terms == pytest.approx(expected)
    assert corollary1(replace(RUN, server_lr=0.7, local_lr=3.0)) == corollary1(RUN)


def test_the_terms_of_corollary_1_go_with_t_as_its_rates_say() -> None:
    once, later = corollary1(RUN), corollary1(replace(RUN, central_steps=4 * RUN.central_steps))
    assert POWERS_OF_T.keys() == once.terms.keys()
    for name, value in once.terms.items():
        assert later.terms[name] == pytest.approx(value * 4 ** POWERS_OF_T[name])


def test_the_rates_of_corollary_1_break_its_own_premise() -> None:
    """κ > 0 wants √(T_loc/T) within 1 ± 1/√8: T from 5.46 to 23.9 for T_loc = 10. The paper has 2,000."""
    positive = [steps for steps in range(1, 2001) if corollary1(replace(RUN, central_steps=steps)).kappa > 0]
    assert positive == [*range(6, 24)]
    assert corollary1(replace(RUN, central_steps=2000)).kappa == pytest.approx(1 - 8 * (1 - math.sqrt(0.005)) ** 2)
