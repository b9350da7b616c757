"""Packed rows hold every frame once, give them back, and lead a model to the same outputs as padded batches do."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sottovoce.base.seeds import torch_stream
from sottovoce.models.transformer.network import ClientRows, forward
from sottovoce.models.transformer.rows import plan_packing
from sottovoce.models.transformer.settings import init, named_settings

CPU = torch.device("cpu")


@st.composite
def packings(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    """Lengths of utterances, the row of each, and the number of rows."""
    rows = draw(st.integers(1, 4))
    pairs = draw(st.lists(st.tuples(st.integers(0, 9), st.integers(0, rows - 1)), min_size=1, max_size=12))
    return [length for length, _ in pairs], [row for _, row in pairs], rows


@given(packings(), st.sampled_from([1, 4, 64]))
@settings(max_examples=60, deadline=None)
def test_packing_is_undone_by_unpacking_in_both_directions(
    case: tuple[list[int], list[int], int], multiple: int
) -> None:
    lengths, rows, count = case
    packing = plan_packing(lengths, padded_frames=10, device=CPU, rows=rows, row_count=count, row_multiple=multiple)
    inside = torch.arange(10) < torch.tensor(lengths)[:, None]
    batch = torch.randn(len(lengths), 10, 3, generator=torch_stream(1, "batch")).where(inside[..., None], 0)
    packed = packing.pack(batch.requires_grad_())
    assert packed.shape[1] % multiple == 0
    assert torch.equal(packing.unpack(packed), batch)
    weight = torch.randn(packed.shape, generator=torch_stream(1, "weight"))
    (gradient,) = torch.autograd.grad(packed, batch, weight)
    assert torch.equal(gradient, packing.unpack(weight))


@given(packings())
@settings(max_examples=60, deadline=None)
def test_every_utterance_is_one_segment_and_padding_never_shares_one(case: tuple[list[int], list[int], int]) -> None:
    lengths, rows, count = case
    packing = plan_packing(lengths, padded_frames=10, device=CPU, rows=rows, row_count=count)
    ends = packing.segment_ends.tolist()
    assert ends[0] == 0
    assert ends[-1] == packing.from_batch_NL.numel()
    assert ends == sorted(ends)
    frames = packing.from_batch_NL.flatten()
    owner = torch.where(frames < 0, -1, frames // 10)
    found = []
    for start, end in pairwise(ends):
        owners = set(owner[start:end].tolist())
        assert len(owners) <= 1, "two utterances, or an utterance and padding, in one segment"
        assert end - start <= packing.longest
        found += [o for o in owners if o >= 0]
    assert sorted(found) == [i for i, length in enumerate(lengths) if length]


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("positions", ["cape", "sinusoidal"])
def test_a_model_says_the_same_of_packed_and_padded_frames(norm: str, positions: str) -> None:
    model = named_settings("tiny", tokens=7, layers=2, width=16, dropout=0.0, norm=norm, positions=positions)
    parameters = {name: p.double() for name, p in init(model, generator=torch_stream(1, "init")).items()}
    features_BTF = torch.randn(4, 60, 80, dtype=torch.float64, generator=torch_stream(1, "features"))
    lengths_B = torch.tensor([60, 31, 3, 45])
    padded_BTV, out_B = forward(parameters, features_BTF, lengths_B, settings=model)
    # Two clients with the same weights, the utterances dealt out between them.
    stacked = {name: torch.stack([p, p]) for name, p in parameters.items()}
    packed_BTV, _ = forward(
        stacked, features_BTF, lengths_B, settings=model, stacking=ClientRows([1, 0, 0, 1], clients=2)
    )
    inside = torch.arange(padded_BTV.shape[1]) < out_B[:, None]
    torch.testing.assert_close(packed_BTV[inside], padded_BTV[inside], rtol=0, atol=1e-9)
