import math

import pytest
import torch

from sottovoce.base.errors import InputError
from sottovoce.models.transformer.positions import Cape, cape_positions, draw_positions, plain_positions, sinusoids

CPU = torch.device("cpu")


def test_sinusoids_are_sines_and_cosines_of_falling_frequency() -> None:
    embedding_D = sinusoids(torch.tensor([[3.0]]), width=4)[0, 0]
    slow = 3.0 * 10_000 ** (-2 / 4)
    expected_D = torch.tensor([math.sin(3.0), math.cos(3.0), math.sin(slow), math.cos(slow)])
    torch.testing.assert_close(embedding_D, expected_D)


def test_cape_without_draws_is_the_sinusoid_at_centred_seconds() -> None:
    lengths_B = torch.tensor([5, 2])
    positions_BT = cape_positions(lengths_B, frames=5, seconds_per_frame=0.03)
    # 30 rad/s at 0.03 s a frame: 0.9 rad a frame, zero in the middle of each utterance's own frames.
    torch.testing.assert_close(positions_BT[0], 0.9 * torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0]))
    torch.testing.assert_close(positions_BT[1, :2], 0.9 * torch.tensor([-0.5, 0.5]))
    shifted_BT = 0.9 * (plain_positions(5, device=CPU) - 2)
    torch.testing.assert_close(sinusoids(positions_BT, width=8)[:1], sinusoids(shifted_BT, width=8))


def test_draws_stay_within_their_limits_and_use_the_room() -> None:
    draws = draw_positions(Cape(30.0), batch_size=2000, generator=torch.Generator().manual_seed(3))
    assert -30 <= draws.shift_B.min() < -27
    assert 27 < draws.shift_B.max() <= 30


def test_a_shift_moves_an_utterance_as_one() -> None:
    lengths_B = torch.tensor([40, 40])
    draws = draw_positions(Cape(), batch_size=2, generator=torch.Generator().manual_seed(0))
    steps_BT = cape_positions(lengths_B, frames=40, seconds_per_frame=0.03, draws=draws).diff(dim=1)
    torch.testing.assert_close(steps_BT, torch.full((2, 39), 0.9), atol=1e-3, rtol=0)


@pytest.mark.parametrize("wrong", [-1.0, math.nan])
def test_impossible_limits_are_refused(wrong: float) -> None:
    with pytest.raises(InputError, match="global_shift_seconds"):
        Cape(global_shift_seconds=wrong)
