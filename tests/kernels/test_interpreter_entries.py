"""Entries added to a kept sum, through Triton's interpreter, against plain torch."""

import pytest
import torch

from flce_tune.kernels.numerators import Entries

entries_module = pytest.importorskip("flce_tune.kernels.triton.entries")

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels run in tests/gpu"),
]
N, V = 45, 96
FIRST, M = 32, 40  # the rows of a group of columns


def labelled(columns):
    """Label gradients, labels of which one has many tokens, and x; eighths, so sums are exact."""
    generator = torch.Generator().manual_seed(columns)

    def eighths(*shape):
        return torch.randint(-16, 17, shape, generator=generator) / 8

    target = torch.randint(0, V, (N,), generator=generator)
    target[::3] = FIRST + 5
    target[1], target[2], target[4], target[5] = -100, FIRST, FIRST + M - 1, FIRST + M
    value, x = eighths(N), eighths(N, columns)
    value[6], x[6] = 0.0, torch.nan  # an ignored token: nobody may look there
    return value, target, x


def added(value, target, x):
    """The entries' sum on a group's rows."""
    total = torch.zeros(M, x.shape[1])
    for weight, label, row in zip(value, target.tolist(), x, strict=True):
        if FIRST <= label < FIRST + M and weight:
            total[label - FIRST] += weight * row
    return total


def untouched(target):
    rows = torch.arange(FIRST, FIRST + M)
    return ~torch.isin(rows, target)


@pytest.mark.parametrize("columns", [40, 600])
def test_a_split24_sum(columns):
    value, target, x = labelled(columns)
    before = torch.randint(-99, 99, (M, columns)).float()
    bits = before.view(torch.int32)
    out = (bits >> 16).to(torch.int16).view(torch.bfloat16)
    extra = torch.full((M, columns + 8), 0xA5, dtype=torch.uint8)
    extra[:, :columns] = bits >> 8 & 0xFF
    entries = Entries.of_dw(value, target, x.bfloat16(), V, 16)
    entries_module.launch_entries(entries, out, extra, FIRST)
    joined = out.view(torch.int16).int() << 16 | extra[:, :columns].int() << 8
    expected = before + added(value, target, x)
    assert torch.equal(joined.view(torch.float32), expected)
    assert (extra[:, columns:] == 0xA5).all()


@pytest.mark.parametrize("columns", [40, 600])
def test_a_sum_in_the_outputs_dtype(columns):
    value, target, x = labelled(columns)
    out = torch.full((M, columns + 8), torch.nan, dtype=torch.float16)[:, :columns]
    out.copy_(torch.randn(M, columns))
    out[untouched(target)] = torch.nan
    expected = (out.float() + added(value, target, x)).half()
    entries_module.launch_entries(Entries.of_dw(value, target, x.half(), V, 16), out, None, FIRST)
    torch.testing.assert_close(out, expected, rtol=0.0, atol=0.0, equal_nan=True)
