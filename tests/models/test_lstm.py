"""Our LSTMs are torch's: states, gradients, and lines that are read from their own end."""

import pytest
import torch
from torch import Tensor, nn

from sottovoce.base.seeds import torch_stream
from sottovoce.models import lstm

CLOSE = {"rtol": 1e-10, "atol": 1e-10}  # float64


def test_states_and_gradients_are_torchs() -> None:
    generator = torch_stream(1, "lstm")
    steps, count, width, size, inputs = 7, 3, 2, 5, 4
    x_TRWD = torch.randn(steps, count, width, inputs, generator=generator, dtype=torch.float64)
    cells = [nn.LSTM(inputs, size, dtype=torch.float64) for _ in range(count)]
    with torch.no_grad():
        for cell in cells:
            for own in cell.parameters():
                own.copy_(torch.randn(own.shape, generator=generator, dtype=torch.float64))
    weights = [torch.randn(steps, width, size, generator=generator, dtype=torch.float64) for _ in cells]
    theirs = [cell(x_TRWD[:, number])[0] for number, cell in enumerate(cells)]
    gates = torch.stack(
        [x_TRWD[:, n] @ cell.weight_ih_l0.mT + cell.bias_ih_l0 + cell.bias_hh_l0 for n, cell in enumerate(cells)], dim=1
    )
    ours = lstm.recur(gates, torch.stack([cell.weight_hh_l0 for cell in cells]))
    torch.testing.assert_close(ours, torch.stack(theirs, dim=1), **CLOSE)
    for number, cell in enumerate(cells):
        own = list(cell.parameters())
        expected = torch.autograd.grad((theirs[number] * weights[number]).sum(), own, retain_graph=True)
        found = torch.autograd.grad((ours[:, number] * weights[number]).sum(), own, retain_graph=True)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, **CLOSE)


def test_a_line_is_turned_within_its_own_length() -> None:
    assert lstm.turned_places(torch.tensor([3, 5, 1]), 5).tolist() == [
        [2, 1, 0, 3, 4],
        [4, 3, 2, 1, 0],
        [0, 1, 2, 3, 4],
    ]


@pytest.mark.parametrize("way", ["ours", "torch's"])
def test_a_layer_hears_each_line_alone(way: str) -> None:
    """Whatever stands behind its end."""
    generator = torch_stream(2, "lstm")

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    cells = [lstm.Cell(draw(12, 4), draw(12, 3), draw(12), draw(12)) for _ in range(2)]
    x, lengths = draw(2, 6, 4), torch.tensor([6, 4])
    both = nn.LSTM(4, 3, bidirectional=True, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        for own, weight in zip(both.parameters(), [*cells[0], *cells[1]], strict=True):
            own.copy_(weight)
    places = lstm.turned_places(lengths, 6)
    if way == "ours":
        found = lstm.bidirectional(x[None], places[None], lstm.stacked(cells))[0]
    else:
        found = lstm.bidirectional_by_torch(x, places, cells)
    for line, length in enumerate(lengths.tolist()):
        torch.testing.assert_close(found[line, :length], both(x[line : line + 1, :length])[0][0], **CLOSE)


def test_layers_that_hear_the_past_alone_are_torchs_and_go_on_where_they_were() -> None:
    theirs = torch.nn.LSTM(5, 4, num_layers=2, batch_first=True, dtype=torch.float64)
    x_WTI = torch.randn(3, 7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    kinds = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    cells = [lstm.Cell(*(theirs.get_parameter(f"{kind}_l{layer}") for kind in kinds)) for layer in range(2)]
    expected, (hidden, cell) = theirs(x_WTI)
    found, state = lstm.forwards(x_WTI, cells)
    first, between = lstm.forwards(x_WTI[:, :3], cells)
    second, end = lstm.forwards(x_WTI[:, 3:], cells, between)
    for ours in (found, torch.cat([first, second], dim=1)):
        torch.testing.assert_close(ours, expected)
    for remembered in (state, end):
        torch.testing.assert_close(remembered.hidden_LWD, hidden)
        torch.testing.assert_close(remembered.cell_LWD, cell)
