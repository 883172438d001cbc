"""The elements that a sample takes."""

import pytest
import torch

from torchpisa.diagnostics.sampling import sampled_runs

# Noise and unequal data, where it is right to warn.
pytestmark = pytest.mark.filterwarnings("ignore:the . batches hardly agree:UserWarning")


@pytest.mark.parametrize(
    "sizes",
    [
        [10],
        [0, 5, 2**16],
        [2**16 + 1],
        [2**20, 7, 31, 32, 33, 0],
        [50257 * 768, 768, 768 * 3072, 2304 * 768, 1],
        [100] * 3000,
        [2**22] * 5000,
    ],
    ids=lambda sizes: f"{len(sizes)} tensors",
)
def test_sample(sizes: list[int]) -> None:
    budget = 2**16
    pieces = sampled_runs(sizes, budget)
    taken = sum(piece.samples for piece in pieces)
    assert taken == sum(sizes) if sum(sizes) <= budget else 0.9 * budget <= taken <= 2 * budget
    for size, piece in zip(sizes, pieces, strict=True):
        assert piece.size == size
        assert piece.samples >= min(size, 1)
        if piece.complete:
            continue
        assert piece.distance >= piece.length
        end = piece.start + (piece.runs - 1) * piece.distance + piece.length
        assert 0 <= piece.start <= end <= size
        if piece.runs > 100 and size > 2 * piece.samples:
            # The rest at the ends is small, and columns are all alike to the runs.
            assert end - piece.start > 0.98 * size
            columns = torch.arange(piece.runs) * piece.distance % 768
            assert columns.unique().numel() > 0.9 * min(768, piece.runs)


def test_sample_is_a_view_in_the_order_of_memory() -> None:
    tensor = torch.arange(3.0 * 4 * 50 * 60).view(3, 4, 50, 60)
    (piece,) = sampled_runs([tensor.numel()], 1000)
    rows = piece.view_of(tensor)
    assert rows.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    assert torch.equal(rows[:, 1:] - rows[:, :-1], torch.ones(rows.size(0), rows.size(1) - 1))
    for other in (tensor.permute(2, 0, 3, 1), tensor.transpose(0, 1)):
        assert torch.equal(piece.view_of(other), rows)
    with_gaps = tensor.repeat_interleave(2, dim=3)[..., ::2]
    assert torch.equal(piece.view_of(with_gaps), rows)
