"""The sections of ``bars.py``: each measures one promise beside the time-and-memory front."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from bar_host import host
from bar_rows import Bench, Row, as_dicts
from cases import Inputs, Shape
from comparison import Floor, forward_backward
from measure import peak_above, release
from torch import Tensor

from flce_tune import cross_entropy, linear_cross_entropy
from flce_tune.dispatch import default_dispatcher
from flce_tune.kernels.problem import Mode, Problem, describe_device


def chosen(bench: Bench, shape: Shape, mode: Mode = "train") -> str:
    """The config the dispatcher chooses."""
    problem = Problem(shape.tokens, shape.hidden, shape.vocab, mode=mode)
    return str(default_dispatcher().choose(problem, describe_device(bench.device)).config)


def loss(x: Tensor, weight: Tensor, target: Tensor, **options: object) -> Tensor:
    """The op's mean loss."""
    value = linear_cross_entropy(x, weight, target, **options)  # type: ignore[arg-type]
    assert isinstance(value, Tensor), "only the loss was asked for"
    return value


def evaluation(bench: Bench) -> Iterator[Row]:
    """No gradients: time against the bare product X·Wᵀ, and memory."""
    for shape in bench.default_shapes():
        inputs = bench.inputs(shape)
        x, weight = inputs.x.detach(), inputs.weight.detach()

        def ours(x: Tensor = x, weight: Tensor = weight, target: Tensor = inputs.target) -> None:
            with torch.no_grad():
                loss(x, weight, target)

        ours()
        extra = peak_above(ours, bench.device)
        logits = torch.empty(shape.tokens, shape.vocab, dtype=x.dtype, device=bench.device)

        def product(x: Tensor = x, weight: Tensor = weight, out: Tensor = logits) -> None:
            torch.mm(x, weight.t(), out=out)

        times = bench.race({"ours": ours, "X·Wᵀ": product})
        details = {"times": as_dicts(times), "config": chosen(bench, shape, "eval")}
        ratio = times["ours"].ratio(times["X·Wᵀ"])
        yield Row("eval", str(shape), ratio, "× X·Wᵀ", 1.0, details=details)
        mib = None if extra is None else extra / 2**20
        yield Row("eval", str(shape), mib, "MiB extra", 64.0)
        del inputs, x, weight, logits, ours, product
        release(bench.device)


def ragged(bench: Bench) -> Iterator[Row]:
    """Sizes that are no multiple of anything: time per FLOP against a round neighbour."""
    pairs = (
        (bench.shape(16384, 4096, 128256), (0, 1)),
        (bench.shape(16384, 4096, 50304), (0, -47)),
        (bench.shape(8192, 4096, 128256), (-1, 0)),
    )
    for even, (more_tokens, more_vocab) in pairs:
        odd = Shape(even.tokens + more_tokens, even.hidden, even.vocab + more_vocab)
        steps: dict[str, Callable[[], object]] = {}
        floors: dict[str, Callable[[], object]] = {}
        for name, shape in (("ragged", odd), ("neighbour", even)):
            inputs = bench.inputs(shape)
            steps[name] = lambda inputs=inputs: forward_backward(loss, inputs)
            floors[f"{name}'s floor"] = Floor(inputs)
        # Apart: cuBLAS needs many times as long for the ragged one, at little power, and who runs
        # after it finds a cool GPU.
        times = bench.race(steps) | bench.race(floors)
        per_flop = {
            name: times[name].median / shape.dense_flops
            for name, shape in (("ragged", odd), ("neighbour", even))
        }
        details = {
            "neighbour": str(even),
            "times": as_dicts(times),
            "configs": {str(shape): chosen(bench, shape) for shape in (odd, even)},
        }
        ratio = per_flop["ragged"] / per_flop["neighbour"]
        yield Row("ragged", str(odd), ratio, f"× {even} per FLOP", 1.05, details=details)
        del inputs, steps, floors
        release(bench.device)


def masked(bench: Bench) -> Iterator[Row]:
    """Prompts ignored: forward and backward of ``drop_ignored`` against all rows.

    ``counted`` waits for the number of rows, ``bounded`` is told it.
    """
    shape = bench.shape(16384, 4096, 128256)
    inputs = bench.inputs(shape)
    floor = Floor(inputs)
    for share, bar in ((0.6, 0.45), (0.9, 0.15)):
        prompt = Inputs(inputs.x, inputs.weight, _without_prompts(inputs.target, share))
        count = int((prompt.target != -100).sum())
        options: Mapping[str, Mapping[str, object]] = {
            "dense": {},
            "counted": {"drop_ignored": True},
            "bounded": {"drop_ignored": True, "max_counted": count},
        }
        steps: dict[str, Callable[[], object]] = {"floor of all rows": floor}
        for name, keywords in options.items():
            steps[name] = _step(prompt, keywords)
        times = bench.race(steps)
        for name in ("counted", "bounded"):
            ratio = times[name].median / times["dense"].median
            case = f"{shape}, {share:.0%} ignored, {name}"
            details = {"times": as_dicts(times), "counted_rows": count}
            yield Row("masked", case, ratio, "× all rows", bar, details=details)
    release(bench.device)


def _step(inputs: Inputs, keywords: Mapping[str, object]) -> Callable[[], object]:
    return lambda: forward_backward(lambda x, w, t: loss(x, w, t, **keywords), inputs)


def _without_prompts(target: Tensor, share: float) -> Tensor:
    """Ignore the first ``share`` of each of eight sequences."""
    labels = target.clone()
    for sequence in labels.chunk(8):
        sequence[: round(share * len(sequence))] = -100
    return labels


class _Computed(torch.autograd.Function):
    """Logits that are no leaf, without a copy."""

    @staticmethod
    def forward(ctx: object, logits: Tensor, anchor: Tensor) -> Tensor:
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> tuple[None, None]:
        return None, None


def given_logits(bench: Bench) -> Iterator[Row]:
    """``cross_entropy``: bytes per second against ``copy_``'s.

    6 bytes a bfloat16 logit: read forward, read and written backward; a copy moves 4.
    """
    anchor = torch.zeros((), device=bench.device, requires_grad=True)
    for rows, columns in ((4096, 128256), (8192, 50257), (16384, 32000), (2048, 256000)):
        shape = bench.shape(rows, 2, columns)
        logits = torch.randn(shape.tokens, shape.vocab, device=bench.device).bfloat16()
        target = torch.randint(0, shape.vocab, (shape.tokens,), device=bench.device)
        other = torch.empty_like(logits)

        def step(in_place: bool, logits: Tensor = logits, target: Tensor = target) -> None:
            given = _Computed.apply(logits, anchor)  # type: ignore[no-untyped-call]
            value = cross_entropy(given, target, in_place=in_place)
            assert isinstance(value, Tensor), "only the loss was asked for"
            torch.autograd.grad(value, given)

        times = bench.race(
            {
                "out of place": lambda step=step: step(False),
                "in place": lambda step=step: step(True),
                "copy": lambda a=other, b=logits: a.copy_(b),
            }
        )
        size = logits.numel()
        copied = 4 * size / times["copy"].median
        for name in ("out of place", "in place"):
            moved = 6 * size / times[name].median
            details = {
                "times": as_dicts(times),
                "gigabytes_per_second": moved / 1e6,
                "copy_gigabytes_per_second": copied / 1e6,
            }
            case = f"{shape.tokens}×{shape.vocab}, {name}"
            yield Row("given", case, moved / copied, "× copy bandwidth", 0.8, True, details)
        del logits, other, step
        release(bench.device)


SECTIONS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "eval": evaluation,
    "ragged": ragged,
    "masked": masked,
    "host": host,
    "given": given_logits,
}
