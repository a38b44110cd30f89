"""Labels of all tokens, sorted chunk by chunk at once."""

import pytest
import torch

from flce_tune.kernels.strategies.labels import _sorted_by_chunk


@pytest.mark.parametrize(
    "sizes", [(), (700,), (256, 256, 188), (512, 188), (444, 128, 128), (1, 699), (600, 64, 36)]
)
@pytest.mark.parametrize("vocab", [37, 1 << 30], ids=["32 bits", "64 bits"])
def test_each_chunks_labels_are_sorted_by_themselves(sizes, vocab):
    target = torch.randint(0, 37, (700,), generator=torch.Generator().manual_seed(2))
    target[::5], target[7], target[650] = -100, vocab + 3, -(1 << 40)
    ascending, order = _sorted_by_chunk(target, vocab, sizes)
    assert ascending.dtype == (torch.int32 if vocab == 37 or len(sizes) < 2 else torch.int64)
    begin = 0
    for size in sizes or (700,):
        rows = slice(begin, begin + size)
        label, token = torch.sort(target[rows].clamp(-1, vocab), stable=True)
        assert torch.equal(ascending[rows].long(), label)
        assert torch.equal(order[rows], token + begin)
        begin += size
