"""The length of noise beside updates, and what shortens it."""

from hypothesis import given
from hypothesis import strategies as st

from sottovoce.privacy.noise_length import LEARNABLE, NoiseLength


def test_it_is_what_noise_on_every_number_adds_up_to() -> None:
    # 2.9 · √10,000 / 100 = 2.9; 2.9² = 8.41: 290 clients, ⌊20 / 8.41⌋ = 2 rounds, ⌊10,000 / 8.41⌋ = 1,189 numbers.
    noise = NoiseLength(noise_multiplier=2.9, cohort_size=100, parameters=10_000, rounds=20)
    assert noise.ratio == 2.9
    assert noise.describe() == (
        "the noise of a round is 2.9 times as long as the mean update can be (z·√P/S: z = 2.9, P = 10,000 numbers, "
        "S = 100 clients)"
    )
    clients, rounds, numbers, seed = noise.remedies()
    assert clients == "290 clients a round in place of 100"
    assert rounds == "2 rounds in place of 20 (federation.steps)"
    assert numbers == "at most 1,189 of the 10,000 numbers trained (federation.trainable)"
    assert "seed model" in seed


@given(
    z=st.floats(0.1, 100), clients=st.integers(1, 10_000), parameters=st.integers(1, 10**8), rounds=st.integers(1, 1000)
)
def test_each_remedy_alone_is_enough(z: float, clients: int, parameters: int, rounds: int) -> None:
    noise = NoiseLength(noise_multiplier=z, cohort_size=clients, parameters=parameters, rounds=rounds)
    if not noise.remedies():
        assert noise.ratio <= LEARNABLE
        return
    more = int(noise.remedies()[0].split()[0].replace(",", ""))
    again = NoiseLength(noise_multiplier=z, cohort_size=more, parameters=parameters, rounds=rounds)
    assert again.ratio <= 1 + 1e-9
    fewer = int(noise.remedies()[2].split()[2].replace(",", ""))
    part = NoiseLength(noise_multiplier=z, cohort_size=clients, parameters=fewer, rounds=rounds)
    assert part.ratio <= 1 + 1e-9 or fewer == 1
