"""Entries added to a kept sum, through Triton's interpreter, against plain torch."""

import pytest
import torch

from flce_tune.kernels.numerators import Entries

entries_module = pytest.importorskip("flce_tune.kernels.triton.entries")
carried_module = pytest.importorskip("flce_tune.kernels.triton.carried")

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels run in tests/gpu"),
]
N, V = 45, 96
FIRST, M = 32, 40  # the rows of a group of columns


STRETCHES = {"few at a time": (4, N), "many": (64, N), "stretches": (4, 8), "short ones": (4, 2)}


@pytest.fixture(autouse=True, params=STRETCHES.values(), ids=STRETCHES)
def _many(request, monkeypatch):
    """The label of many tokens takes several steps, or one after the first, or has stretches."""
    many, stretch = request.param
    for module in (entries_module, carried_module):
        monkeypatch.setattr(module, "MANY", many)
        monkeypatch.setattr(module, "STRETCH", stretch)
    monkeypatch.setattr(carried_module, "FEW", stretch)


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


def added(value, target, x, m=M):
    """The entries' sum on a group's rows."""
    total = torch.zeros(m, x.shape[1])
    for weight, label, row in zip(value, target.tolist(), x, strict=True):
        if FIRST <= label < FIRST + m and weight:
            total[label - FIRST] += weight * row
    return total


def untouched(target, m=M):
    rows = torch.arange(FIRST, FIRST + m)
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


@pytest.mark.parametrize("columns", [40, 600])
@pytest.mark.parametrize("m", [M, V - FIRST], ids=["a row a column", "a row an entry"])
@pytest.mark.parametrize("programs", [3, 512])
def test_sums_by_themselves(monkeypatch, programs, m, columns):
    monkeypatch.setattr(entries_module, "PROGRAMS", programs)
    empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: poisoned(empty(*a, **k)))
    value, target, x = labelled(columns)
    value[7], target[7] = torch.nan, FIRST + 1
    entries = Entries.of_dw(value, target, x.bfloat16(), V, 8)
    place, has, sums = entries_module.launch_label_sums(entries, m, FIRST)
    assert sums.shape == (min(N, m), columns)
    found = has == 1
    assert torch.equal(found, ~untouched(target, m))
    assert torch.equal(place[found].unique(), place[found].sort().values)
    torch.testing.assert_close(
        sums[place[found]], added(value, target, x, m)[found], rtol=0.0, atol=0.0, equal_nan=True
    )
    assert (has[~found] == 0).all()


def poisoned(tensor):
    return tensor.fill_(torch.nan if tensor.is_floating_point() else -1)
