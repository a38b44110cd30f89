"""What follows products that were split, in Triton's interpreter, against plain torch."""

import pytest
import torch

pytest.importorskip("triton")
partial_sums = pytest.importorskip("flce_tune.kernels.triton.partial_sums")

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels run in tests/gpu"),
]


def parts_of(value):
    """Upper 16 bits and the next 8 of values that have no more."""
    bits = value.view(torch.int32)
    return (bits >> 16).to(torch.int16).view(torch.bfloat16), (bits >> 8 & 0xFF).to(torch.uint8)


def whole(high, low):
    """The value of two parts."""
    return (high.view(torch.int16).int() << 16 | low.int() << 8).view(torch.float32)


@pytest.mark.parametrize(("m", "n", "splits"), [(21, 264, 2), (8, 256, 3), (1, 8, 4)])
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize(("kept", "prior", "last"), [
    ("split24", False, False), ("split24", True, False), ("split24", True, True),
    ("rounded", True, False), ("rounded", False, True),
])  # fmt: skip
def test_totals_of_partial_sums(m, n, splits, joined, kept, prior, last):
    generator = torch.Generator().manual_seed(m + splits)

    def integers(*shape, largest=9):  # whose sums fit bfloat16, as the interpreter rounds to zero
        return torch.randint(-largest, largest + 1, shape, generator=generator)

    part_rows = m + 3
    partial = integers(splits, part_rows, n).float()
    partial[:, m:] = torch.nan
    expected = partial[:, :m].sum(0)
    high, low = parts_of(partial.view(-1, n))
    around = torch.full((m + 1, n + 8), torch.nan, dtype=torch.bfloat16)
    extra_around = torch.zeros((m + 1, n + 8), dtype=torch.uint8)
    out, extra = around[:m, :n], extra_around[:m, :n]
    factor = source = value = b = None
    if joined:
        factor, value = 2.0 ** integers(m, largest=1), integers(m, largest=3) / 2
        source, b = integers(m, largest=5).abs(), integers(7, n, largest=6).bfloat16()
        value[0], source[0], b[6] = 0.0, 6, torch.nan  # nobody may look there
        entries = value[:, None] * b[source].float()
        expected = expected * factor[:, None] + torch.where(value[:, None] == 0, 0.0, entries)
    if prior:
        before = integers(m, n).float() * (1 if last or kept == "rounded" else 1 + 2**-9)
        out[:], extra[:] = parts_of(before)
        expected += before
    partial_sums.launch_partial_sums(
        high, low, splits, out, extra if kept == "split24" else None, factor, source, value, b,
        prior, last,
    )  # fmt: skip
    got = out.float() if last or kept == "rounded" else whole(out, extra)
    torch.testing.assert_close(got, expected, rtol=0.0, atol=0.0)
    assert around[m:].isnan().all()
    assert around[:, n:].isnan().all()
